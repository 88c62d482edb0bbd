"""Append of received frames to segments: checked and written side by side, one thread a segment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
        self.nbytes = self.segment.tail - self.offset
        self.segment.last_append = time.monotonic()


class ParallelAppend:
    """Writer to several segments at once. Hashing and writing leave the interpreter to others."""

    def __init__(self, store: bytes, threads: int) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="lane")

    def write(self, appends: Sequence[PendingAppend]) -> None:
        """Write all of them, in order within a segment. OSError: nothing was appended to any segment."""
        lanes: dict[int, list[PendingAppend]] = {}
        for item in appends:
            lanes.setdefault(item.segment.number, []).append(item)
        first, *others = lanes.values()
        tails = [(lane[0].segment, lane[0].segment.tail) for lane in lanes.values()]
        running = [self._pool.submit(self._lane, lane) for lane in others]
        errors = [self._lane(first), *(future.result() for future in running)]
        for error in errors:
            if error is not None:
                for segment, tail in tails:
                    segment.cut(tail)
                raise error

    def _lane(self, lane: list[PendingAppend]) -> OSError | None:
        try:
            for item in lane:
                item.write(self._store)
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
