"""Frames that the writer has appended but not yet told the catalog of: visible to whoever reads the page cache.

They survive a crash of the writer, not a loss of power, and may be given up and come again. Only ``StoreReader`` reads
them, for who follows a capture while it is made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from schemas.catalog import Segment
from schemas.errors import CorruptError
from schemas.map_file import map_file
from schemas.segment import parse_frame
from schemas.zarr_layout import WRITER

__all__ = ["FrameAt", "JournalTail"]

_IDLE_S: Final = 1.0  # after this long without a look, what became durable meanwhile is skipped


@dataclass(frozen=True, slots=True)
class FrameAt:
    """A frame of a capture: its number in its stream, and where it lies."""

    seq: int
    segment: Segment
    offset: int
    durable: bool


@dataclass(slots=True)
class _File:
    """An open segment: its frames below ``offset`` are known."""

    path: Path
    offset: int
    frames: dict[tuple[str, str], list[FrameAt]] = field(default_factory=dict)  # by capture and site


class JournalTail:
    """What was appended to the open segments, by capture; thread-safe.

    ``durable_end`` gives the offset up to which the catalog has the frames of a segment.
    """

    def __init__(self, store: Path, uuid: bytes, durable_end: Callable[[int], int]) -> None:
        self._folder = store / "writers" / WRITER / "journal"
        self._uuid, self._durable_end = uuid, durable_end
        self._lock = threading.Lock()
        self._files: dict[int, _File] = {}
        self._looked_s = float("-inf")

    def look(self) -> set[str]:
        """The captures that have got frames since the last look."""
        with self._lock:
            now = time.monotonic()
            idle, self._looked_s = now - self._looked_s > _IDLE_S, now
            there = {int(path.stem): path for path in self._folder.glob("*.open") if path.stem.isdecimal()}
            # What is sealed is in the catalog.
            self._files = {number: file for number, file in self._files.items() if number in there and not idle}
            fresh: set[str] = set()
            for number, path in there.items():
                if number not in self._files:
                    self._files[number] = _File(path, self._durable_end(number))
                fresh |= self._read(number, self._files[number])
            return fresh

    def frames(self, capture: str, site: str) -> list[FrameAt]:
        """The frames of a capture that were found so far."""
        with self._lock:
            return [frame for file in self._files.values() for frame in file.frames.get((capture, site), ())]

    def _read(self, number: int, file: _File) -> set[str]:
        fresh: set[str] = set()
        try:
            if file.path.stat().st_size <= file.offset:
                return fresh
            data = map_file(file.path)
        except FileNotFoundError:  # sealed at this moment
            return fresh
        while file.offset < len(data):
            try:
                view = parse_frame(data, file.offset, self._uuid, number, file.path)
            except CorruptError:  # not whole yet
                break
            frame = view.frame
            segment = Segment(number, False, frame.site, frame.codec, frame.dtype, frame.width, view.declared[0].name)
            at = FrameAt(frame.seq, segment, file.offset, False)
            for capture in frame.captures:
                file.frames.setdefault((capture, frame.site), []).append(at)
            fresh.update(frame.captures)
            file.offset = view.end
        return fresh
