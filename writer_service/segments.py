"""The open segments: one journal file for each (site, codec, width, dtype, fingerprint) in use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from schemas.control import Frame
from schemas.segment import FrameHeader, align, encode_head
from schemas.zarr_layout import open_name
from writer_service import fs
from writer_service.catalog import SegmentMade

open_max: Final = 64
Key = tuple[str, str, int, str, str]


@dataclass(slots=True)
class OpenSegment:
    """A journal file; frames are appended at ``tail``, everything below ``good`` is on the disk."""

    made: SegmentMade
    path: Path
    fd: int
    tail: int = 0
    good: int = 0
    last_append: float = 0.0
    poisoned: bool = False

    @property
    def number(self) -> int:
        """The segment's number."""
        return self.made.number

    def append(self, store: bytes, header: FrameHeader, table: bytes, streams: Sequence[Sequence[memoryview]]) -> int:
        """Append a frame from wherever its bytes lie; its offset. OSError leaves ``tail`` where it was."""
        head, layout = encode_head(store, self.number, header, table)
        buffers: list[bytes | memoryview] = [head]
        for side in streams[1:]:
            buffers += side
        buffers.append(bytes(align(layout.side_end) - layout.side_end))
        buffers += streams[0]
        buffers.append(bytes(layout.total - layout.parts[0] - header.frame.streams[0].nbytes))
        offset = self.tail
        self.tail = fs.write_at(self.fd, buffers, offset)
        return offset


class SegmentSet:
    """The segments that frames go to now, and those that wait to be sealed."""

    def __init__(self, store: Path, next_number: int, segment_bytes: int) -> None:
        self._store, self._next, self._segment_bytes = store, next_number, segment_bytes
        self._open: dict[Key, OpenSegment] = {}
        self.retired: list[OpenSegment] = []

    def all(self) -> list[OpenSegment]:
        """Every segment that still has a descriptor here."""
        return [*self._open.values(), *self.retired]

    def for_frame(self, frame: Frame) -> tuple[OpenSegment, bool]:
        """The segment of a frame and whether it was just made. OSError where none can be made."""
        key = (frame.site, frame.codec, frame.width, frame.dtype, frame.fingerprint)
        segment = self._open.get(key)
        if segment is not None:
            return segment, False
        if len(self._open) >= open_max:
            oldest = min(self._open, key=lambda other: self._open[other].last_append)
            self.retired.append(self._open.pop(oldest))
        made = SegmentMade(self._next, frame.site, frame.codec, frame.dtype, frame.width, frame.fingerprint)
        path = self._store / open_name(made.number)
        self._next += 1  # a number whose file failed is not used again
        fd = fs.open_new(path)
        try:
            fs.sync_dir(path.parent)
        except OSError:
            fs.close(fd)
            raise
        segment = self._open[key] = OpenSegment(made, path, fd)
        return segment, True

    def retire(self, now: float, idle_s: float) -> None:
        """Take no more frames into segments that are full, idle or poisoned."""
        for key, segment in list(self._open.items()):
            if segment.poisoned or segment.tail >= self._segment_bytes or now - segment.last_append >= idle_s:
                self.retired.append(self._open.pop(key))

    def retire_numbers(self, numbers: Collection[int]) -> None:
        """Take no more frames into these segments."""
        for key, segment in list(self._open.items()):
            if segment.number in numbers:
                self.retired.append(self._open.pop(key))

    def take_sealable(self) -> list[OpenSegment]:
        """Retired segments that are wholly on the disk; the caller seals and closes them."""
        ready = [segment for segment in self.retired if segment.good == segment.tail and not segment.poisoned]
        self.retired = [segment for segment in self.retired if segment not in ready]
        return ready

    def drop_poisoned(self) -> list[OpenSegment]:
        """Close segments whose sync failed; what was good before stays readable and is sealed at the next start."""
        bad = [segment for segment in self.retired if segment.poisoned]
        self.retired = [segment for segment in self.retired if not segment.poisoned]
        for segment in bad:
            fs.close(segment.fd)
        return bad
