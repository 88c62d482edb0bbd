"""Frames that the writer has appended but not yet told the catalog of: visible to whoever reads the page cache.

They survive a crash of the writer, not a loss of power, and may be given up and come again. Only ``StoreReader`` reads
them, for who follows a capture while it is made.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from schemas.catalog.records import Segment
from schemas.errors import CorruptError
from schemas.store.paths import WRITER, open_name
from schemas.store.segment import FrameView, read_frame, verify_payload

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
    """Frames that were appended to the open segments, by capture; thread-safe.

    ``durable_end`` gives the offset up to which the catalog has the frames of a segment.
    """

    def __init__(self, store: Path, uuid: bytes, durable_end: Callable[[int], int]) -> None:
        self._store, self._folder = store, store / "writers" / WRITER / "journal"
        self._uuid, self._durable_end = uuid, durable_end
        self._lock = threading.Lock()
        self._files: dict[int, _File] = {}
        self._looked_s = float("-inf")

    def look(self) -> set[str]:
        """The captures that have got frames since the last look."""
        with self._lock:
            now = time.monotonic()
            idle, self._looked_s = now - self._looked_s > _IDLE_S, now
            there = self._open_files()
            # What is sealed is in the catalog.
            self._files = {number: file for number, file in self._files.items() if number in there and not idle}
            fresh: set[str] = set()
            for number, path in there.items():
                if number not in self._files:
                    self._files[number] = _File(path, self._durable_end(number))
                fresh |= self._read(number, self._files[number])
            return fresh

    def _open_files(self) -> dict[int, Path]:
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            names += [entry.name for entry in entries if entry.name.endswith(".open")]  # beside many control logs
        return {int(name[:-5]): self._folder / name for name in names if name[:-5].isdecimal()}

    def frames(self, capture: str, site: str) -> list[FrameAt]:
        """The frames of a capture that were found so far."""
        with self._lock:
            return [frame for file in self._files.values() for frame in file.frames.get((capture, site), ())]

    def read(self, frame: FrameAt) -> FrameView:
        """A copy of a frame; CorruptError where it is not whole, or is no longer there."""
        path = self._store / open_name(frame.segment.number)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CorruptError("read frame", path, "no such file: it was sealed, or given up") from None
        try:
            view = read_frame(fd, frame.offset, self._uuid, frame.segment.number, path, payload=True)
        finally:
            os.close(fd)
        verify_payload(view, path)
        if view.frame.seq != frame.seq:
            raise CorruptError("read frame", f"{path} at byte {frame.offset}", "another took its place")
        return view

    def _read(self, number: int, file: _File) -> set[str]:
        fresh: set[str] = set()
        try:
            size = file.path.stat().st_size
            if size < file.offset:  # it was cut, and other frames may come in the place of those
                file.frames.clear()
                file.offset = self._durable_end(number)
            if size <= file.offset:
                return fresh
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # sealed at this moment
            return fresh
        try:
            while True:
                view = read_frame(fd, file.offset, self._uuid, number, file.path, payload=False)
                frame = view.frame
                segment = Segment(number, False, frame.site, frame.codec, frame.dtype, frame.width,
                                  view.declared[0].name)
                at = FrameAt(frame.seq, segment, file.offset, False)
                for capture in frame.captures:
                    file.frames.setdefault((capture, frame.site), []).append(at)
                fresh.update(frame.captures)
                file.offset += view.layout.total
        except CorruptError:  # there is no more, or not whole yet
            return fresh
        finally:
            os.close(fd)
