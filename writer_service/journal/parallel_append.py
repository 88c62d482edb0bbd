"""Append of received frames to segments: checked and written side by side, beside the main loop.

Each lane is a thread that writes what it is given, in order. The main loop takes note of frames in the order in which
it gave them to lanes; no lane waits for another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas.errors import ProtocolError
from schemas.store.segment import FrameHeader
from schemas.wire.messages import Frame
from schemas.wire.row_table import RowTable
from writer_service.journal.open_segments import OpenSegment
from writer_service.journal.payload import check_payload
from writer_service.sender_state import SenderState


@dataclass(slots=True)
class ReceivedFrame:
    """A frame whose header and table are good, and where its bytes lie: buffers by stream."""

    state: SenderState
    frame: Frame
    table_bytes: bytes
    table: RowTable
    payload: list[list[memoryview]]

    @property
    def seq(self) -> int:
        """Its number in its stream."""
        return self.frame.seq

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return sum(part.nbytes for part in self.frame.streams)


@dataclass(slots=True)
class PendingAppend:
    """A received frame and the segment that it goes to; afterwards where it lies, or why it was not stored."""

    received: ReceivedFrame
    segment: OpenSegment
    header: FrameHeader
    keep: bool  # whether there is room for the rows' checksums
    checksums: npt.NDArray[np.uint64] | None = None
    offset: int = 0
    nbytes: int = 0
    fault: ProtocolError | None = None
    began: float = 0.0  # when it was begun to be written, and when that was over; time.monotonic()
    over: float = 0.0

    def write(self, store: bytes) -> None:
        """Check the payload and append the frame; OSError where the disk does not take it."""
        self.began = time.monotonic()
        try:
            self.checksums = check_payload(self.received.frame, self.received.payload, self.keep)
        except ProtocolError as error:
            self.fault = error
        else:
            self.offset = self.segment.append(store, self.header, self.received.table_bytes, self.received.payload)
            self.nbytes = self.segment.end - self.offset
        self.over = time.monotonic()


class ParallelAppend:
    """Lanes that hash and write without the interpreter. ``wake`` is called when a frame was written."""

    def __init__(self, store: bytes, lanes: int, wake: Callable[[], None] = lambda: None) -> None:
        self._store, self._wake = store, wake
        self._lanes = [ThreadPoolExecutor(1, thread_name_prefix=f"lane{number}") for number in range(lanes)]
        self._given: deque[tuple[PendingAppend, Future[None]]] = deque()
        self.nbytes = 0  # of payload that was given and not taken
        self.seconds = 0.0  # in which any lane wrote, of what was taken
        self._until = 0.0  # up to when they are counted

    def __bool__(self) -> bool:
        """Whether something was given and not taken."""
        return bool(self._given)

    @property
    def done(self) -> bool:
        """Whether the first of what was given has been written, or there is nothing."""
        return not self._given or self._given[0][1].done()

    def give(self, item: PendingAppend) -> None:
        """Let the lane of its segment write a frame, behind what that lane was given before.

        Until it is taken nobody else may close the segment: its descriptor may be another file's by then.
        """
        item.segment.given += 1
        item.segment.given_bytes += item.received.nbytes
        self.nbytes += item.received.nbytes
        future = self._lanes[item.segment.lane].submit(item.write, self._store)
        self._given.append((item, future))
        future.add_done_callback(lambda _: self._wake())

    def take(self) -> PendingAppend:
        """Wait for the first of what was given. OSError where it could not be written: all that was given and not taken
        has been taken back.
        """
        item, future = self._given[0]
        if (error := future.exception()) is not None:
            self.give_up()
            raise error
        self._given.popleft()
        self.nbytes -= item.received.nbytes
        item.segment.given -= 1
        item.segment.given_bytes -= item.received.nbytes
        self._settle(item)
        return item

    def write(self, item: PendingAppend) -> None:
        """Write here and now, where nothing was given, what is not worth a thread. OSError: it was not appended."""
        try:
            item.write(self._store)
        except OSError:
            item.segment.cut()
            raise
        self._settle(item)

    def give_up(self) -> None:
        """Take back all that was given and not taken, once no lane is writing."""
        given, self._given = list(self._given), deque()
        for _, future in given:
            future.cancel()
        wait([future for _, future in given])
        for segment in {id(item.segment): item.segment for item, _ in given}.values():
            segment.cut()
        self.nbytes = 0

    def _settle(self, item: PendingAppend) -> None:
        segment = item.segment
        if item.fault is None:
            segment.tail = item.offset + item.nbytes
        segment.last_append = item.over
        self.seconds += max(0.0, item.over - max(item.began, self._until))
        self._until = max(self._until, item.over)

    def close(self) -> None:
        """End the threads."""
        for lane in self._lanes:
            lane.shutdown()
