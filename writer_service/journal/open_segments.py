"""The open segments: journal files for each (site, codec, width, dtype, fingerprint) in use.

One file takes one write at a time, however many threads there are. So when frames come faster than a thread writes
them, a key has several files side by side, one of each lane; at a low rate it has one.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from schemas.store.paths import open_name
from schemas.store.segment import FrameHeader, align, encode_head
from schemas.wire.messages import Frame
from writer_service import fs
from writer_service.catalog.changes import SegmentMade

open_max: Final = 64
lane_bytes: Final = 4 * 1024 * 1024  # a frame goes to another lane when this one has so much to write
# Main streams from this size on go from the ring to the disk where both allow it; a smaller write waits for the disk
# longer than the processor takes to copy it.
direct_bytes_min: Final = 1024 * 1024
Key = tuple[str, str, int, str, str]


@dataclass(slots=True, eq=False)
class OpenSegment:
    """A journal file; frames are appended at ``end``, those below ``tail`` are known to the main loop, everything below
    ``good`` is on the disk.
    """

    made: SegmentMade
    path: Path
    fd: int
    lane: int = 0  # the number of the thread that writes to it
    tail: int = 0
    good: int = 0
    end: int = 0  # beyond ``tail`` while its lane is writing
    given: int = 0  # frames that its lane was given, and that are not below ``tail`` yet
    given_bytes: int = 0  # of their payload
    last_append: float = 0.0
    poisoned: bool = False

    @property
    def number(self) -> int:
        """The segment's number."""
        return self.made.number

    @property
    def key(self) -> Key:
        """Values that all its frames share."""
        made = self.made
        return made.site, made.codec, made.width, made.dtype, made.fingerprint

    def append(self, store: bytes, header: FrameHeader, table: bytes, streams: Sequence[Sequence[memoryview]]) -> int:
        """Append a frame from wherever its bytes lie; its offset. OSError leaves ``end`` where it was."""
        head, layout = encode_head(store, self.number, header, table)
        buffers: list[bytes | memoryview] = [head]
        for side in streams[1:]:
            buffers += side
        buffers.append(bytes(align(layout.side_end) - layout.side_end))
        nbytes, offset = header.frame.streams[0].nbytes, self.end
        main: list[bytes | memoryview] = [*streams[0], bytes(layout.total - layout.parts[0] - nbytes)]
        if nbytes < direct_bytes_min:
            self.end = fs.write_at(self.fd, [*buffers, *main], offset)
        else:
            self.end = fs.write_direct(self.fd, main, fs.write_at(self.fd, buffers, offset))
        return offset

    def cut(self) -> None:
        """Take back what was appended from ``tail`` on. What cannot be cut off is overwritten by the next frame."""
        self.end, self.given, self.given_bytes = self.tail, 0, 0
        with contextlib.suppress(OSError):
            fs.truncate(self.fd, self.tail)


class SegmentSet:
    """The segments that frames go to now, and those that wait to be sealed."""

    def __init__(self, store: Path, next_number: int, segment_bytes: int, lanes: int) -> None:
        self._store, self._segment_bytes, self._lanes = store, segment_bytes, lanes
        self._numbers = itertools.count(next_number)
        self._open: list[OpenSegment] = []
        self.retired: list[OpenSegment] = []

    def all(self) -> list[OpenSegment]:
        """Every segment that still has a descriptor here."""
        return [*self._open, *self.retired]

    def take_number(self) -> int:
        """A number that nothing else gets, also where the file then fails; any thread may ask."""
        return next(self._numbers)

    def for_frame(self, frame: Frame) -> tuple[OpenSegment, bool]:
        """The segment of a frame and whether it was just made: of the lane that has least to write. OSError where none
        can be made.
        """
        key = (frame.site, frame.codec, frame.width, frame.dtype, frame.fingerprint)
        mine = [segment for segment in self._open if segment.key == key and not self._full(segment)]
        load = [0] * self._lanes
        for segment in self.all():
            load[segment.lane] += segment.given_bytes
        if mine:
            least = min(mine, key=lambda segment: load[segment.lane])
            spread = len(mine) < self._lanes and len(self._open) < open_max // 2
            if not spread or load[least.lane] < lane_bytes:
                return least, False
        if len(self._open) >= open_max:
            oldest = min(self._open, key=lambda segment: segment.last_append)
            self._open.remove(oldest)
            self.retired.append(oldest)
        made = SegmentMade.of(frame, self.take_number())
        path = self._store / open_name(made.number)
        fd = fs.open_new(path)
        try:
            fs.sync_dir(path.parent)
        except OSError:
            fs.close(fd)
            raise
        taken = [segment.lane for segment in mine]
        lane = min(range(self._lanes), key=lambda number: (taken.count(number), load[number]))
        segment = OpenSegment(made, path, fd, lane, last_append=time.monotonic())
        self._open.append(segment)
        return segment, True

    def _full(self, segment: OpenSegment) -> bool:
        return segment.tail + segment.given_bytes >= self._segment_bytes

    def retire(self, now: float, idle_s: float) -> None:
        """Take no more frames into segments that are full, idle or poisoned."""
        for segment in list(self._open):
            if segment.poisoned or self._full(segment) or now - segment.last_append >= idle_s:
                self._open.remove(segment)
                self.retired.append(segment)

    def retire_numbers(self, numbers: Collection[int]) -> None:
        """Take no more frames into these segments."""
        self.retired += [segment for segment in self._open if segment.number in numbers]
        self._open = [segment for segment in self._open if segment.number not in numbers]

    def take_sealable(self) -> list[int]:
        """The numbers of retired segments that are wholly on the disk. They are closed; the caller seals them."""
        ready = [segment for segment in self.retired
                 if segment.good == segment.tail and not segment.given and not segment.poisoned]
        self.retired = [segment for segment in self.retired if segment not in ready]
        for segment in ready:
            fs.close(segment.fd)
        return [segment.number for segment in ready]

    def drop_poisoned(self) -> list[OpenSegment]:
        """Close segments whose sync failed; what was good before stays readable, and can be sealed where the rest could
        be cut off (``tail`` is ``good``), else at the next start.
        """
        bad = [segment for segment in self.retired if segment.poisoned]
        self.retired = [segment for segment in self.retired if not segment.poisoned]
        for segment in bad:
            fs.close(segment.fd)
        return bad
