"""Mapped segments: a bounded cache of memory maps and of the frames that were parsed in them."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final

from schemas.catalog import Segment
from schemas.errors import CorruptError, StoreError
from schemas.segment import FrameView, parse_frame, verify_payload
from schemas.zarr_layout import segment_places

__all__ = ["SegmentMaps", "map_file"]

maps_max: Final = 64
frames_max: Final = 4096


def map_file(path: Path) -> memoryview:
    """The file, mapped read-only; an empty file is an empty view."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)) if size else memoryview(b"")
    finally:
        os.close(fd)


class SegmentMaps:
    """Frames of a store by (segment, byte offset); thread-safe.

    A frame's head is parsed once and kept as a copy. Its payload is held against its checksums after every read
    (``verify``): a map shows the file as it is now, and hashing (20 GB/s) costs less than a wrong row. After, because
    rows may be erased at any time: bytes that are still there when they are hashed were there when they were copied.
    """

    def __init__(self, store: Path, uuid: bytes) -> None:
        self._store, self._uuid = store, uuid
        self._lock = threading.Lock()
        self._maps: OrderedDict[int, tuple[Path, memoryview]] = OrderedDict()
        self._frames: OrderedDict[tuple[int, int], tuple[Path, FrameView]] = OrderedDict()

    def frame(self, segment: Segment, offset: int, verify: bool = True) -> FrameView:
        """The frame at ``offset``; CorruptError names the block and the offset where bytes do not match.

        Without ``verify`` only its head is held against its hash: who reads one layer of many touches no other.
        """
        key = (segment.number, offset)
        with self._lock:
            known = self._frames.get(key)
            if known is not None:
                self._frames.move_to_end(key)
        if known is not None:
            if verify:
                verify_payload(known[1], known[0])
            return known[1]
        path, data = self._map(segment, fresh=False)
        try:
            view = parse_frame(data, offset, self._uuid, segment.number, path)
        except CorruptError:
            # The map may be older than the frame: the file has grown since.
            path, data = self._map(segment, fresh=True)
            view = parse_frame(data, offset, self._uuid, segment.number, path)
        if verify:
            verify_payload(view, path)
        with self._lock:
            self._frames[key] = path, view
            while len(self._frames) > frames_max:
                self._frames.popitem(last=False)
        return view

    def verify(self, segment: Segment, view: FrameView) -> None:
        """CorruptError where the payload of a frame from ``frame`` does not match its checksums now."""
        with self._lock:
            known = self._frames.get((segment.number, view.offset))
        path = known[0] if known else segment_places(self._store, segment.number, segment.main)[0]
        verify_payload(view, path)

    def forget(self, number: int) -> None:
        """Look at a segment's files anew: they were erased from, or moved."""
        with self._lock:
            self._maps.pop(number, None)
            for key in [key for key in self._frames if key[0] == number]:
                del self._frames[key]

    def close(self) -> None:
        """Forget all maps; they are unmapped when no array views them any more."""
        with self._lock:
            self._frames.clear()
            self._maps.clear()

    def _map(self, segment: Segment, fresh: bool) -> tuple[Path, memoryview]:
        with self._lock:
            if not fresh and segment.number in self._maps:
                self._maps.move_to_end(segment.number)
                return self._maps[segment.number]
        places = segment_places(self._store, segment.number, segment.main)
        # A segment moves once, from the last place to the first, while it is sealed. Looking from the last to the
        # first and then once more finds it wherever it is at that moment.
        for path in (*places[::-1], *places):
            try:
                mapped = (path, map_file(path))
            except FileNotFoundError:
                continue
            with self._lock:
                self._maps[segment.number] = mapped
                while len(self._maps) > maps_max:
                    self._maps.popitem(last=False)
            return mapped
        raise StoreError("open segment", places[0], "no such file", "the store was changed by hand, or is not complete")
