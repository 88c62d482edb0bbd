"""Append of received frames to segments: checked and written side by side, a thread each, beside the main loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

    def write(self, store: bytes) -> None:
        """Check the payload and append the frame; OSError where the disk does not take it."""
        try:
            self.checksums = check_payload(self.received.frame, self.received.payload, self.keep)
        except ProtocolError as error:
            self.fault = error
            return
        self.offset = self.segment.append(store, self.header, self.received.table_bytes, self.received.payload)
        self.nbytes = self.segment.end - self.offset


class ParallelAppend:
    """Writer to several segments at once, in threads that hash and write without the interpreter. ``wake`` is called
    when one of them is done.
    """

    def __init__(self, store: bytes, threads: int, wake: Callable[[], None] = lambda: None) -> None:
        self._store, self._wake = store, wake
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lane")
        self._running: list[Future[OSError | None]] = []
        self._segments: list[OpenSegment] = []
        self.began = self._over = 0.0  # of the lanes that were started last, time.monotonic()
        self.seconds = 0.0  # in which any lane wrote, of what was finished

    @property
    def done(self) -> bool:
        """Whether all that was started has been written, or there is nothing."""
        return all(future.done() for future in self._running)

    def start(self, appends: Sequence[PendingAppend]) -> None:
        """Write all of them, in order within a segment; what was started before has been finished."""
        lanes: dict[int, list[PendingAppend]] = {}
        for item in appends:
            lanes.setdefault(item.segment.number, []).append(item)
        self._begin(lane[0].segment for lane in lanes.values())
        self._running = [self._pool.submit(self._lane, lane) for lane in lanes.values()]
        for future in self._running:
            future.add_done_callback(lambda _: self._wake())

    def write(self, appends: Sequence[PendingAppend]) -> None:
        """``start`` and ``finish`` of what is not worth a thread."""
        self._begin({id(item.segment): item.segment for item in appends}.values())
        self._settle(self._lane(appends))

    def finish(self) -> None:
        """Wait for what was started. OSError: nothing was appended to any segment."""
        running, self._running = self._running, []
        errors = [future.result() for future in running]
        self._settle(next((error for error in errors if error is not None), None))

    def give_up(self) -> None:
        """Wait for what was started, and take it back."""
        running, self._running = self._running, []
        for future in running:
            future.exception()
        self._take_back()

    def _begin(self, segments: Iterable[OpenSegment]) -> None:
        """Keep these from being closed by others: their descriptors may be another file's by the time they are used."""
        self._segments = list(segments)
        self.began = time.monotonic()
        for segment in self._segments:
            segment.writing, segment.last_append = True, self.began

    def _settle(self, error: OSError | None) -> None:
        if self._segments:
            self.seconds += max(0.0, self._over - self.began)
        if error is not None:
            self._take_back()
            raise error
        for segment in self._segments:
            segment.tail, segment.writing = segment.end, False
        self._segments = []

    def _take_back(self) -> None:
        for segment in self._segments:
            segment.cut()
            segment.writing = False
        self._segments = []

    def _lane(self, lane: Sequence[PendingAppend]) -> OSError | None:
        try:
            for item in lane:
                item.write(self._store)
        except OSError as error:
            return error
        finally:
            self._over = time.monotonic()  # the last lane's stays
        return None

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
