"""Cache of row checksums, made when their frames came, until the segments that these went to are sealed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.store.segment import FrameView, verify_payload
from schemas.wire.messages import Frame

__all__ = ["ChecksumCache", "FrameChecksums"]

cache_bytes_max: Final = 32 * 1024 * 1024  # of all segments: eight a row and layer. Frames beyond are read at sealing
_ENTRY_BYTES: Final = 512  # of Python's objects

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class FrameChecksums:
    """Checksums of a frame's rows, in the order of its pieces, and the xxh3 of the streams hashed with them."""

    streams: tuple[int, ...]
    checksums: U64

    def matches(self, frame: Frame) -> bool:
        """Whether these are the rows of ``frame``."""
        return self.streams == tuple(part.xxh3 for part in frame.streams)

    def prove(self, view: FrameView, path: object) -> U64:
        """The checksums; CorruptError where side streams, which sealing copies, do not match theirs."""
        verify_payload(view, path, first=1)
        return self.checksums


class ChecksumCache:
    """Row checksums by segment that this process appended to; the main loop alone puts and forgets."""

    def __init__(self) -> None:
        self._segments: dict[int, dict[int, FrameChecksums]] = {}
        self._nbytes = 0

    @property
    def full(self) -> bool:
        """Whether there is no room for more."""
        return self._nbytes >= cache_bytes_max

    def put(self, number: int, offset: int, frame: Frame, checksums: U64) -> bool:
        """Remember a frame's checksums by its segment and offset; whether there was room for them."""
        nbytes = checksums.nbytes + _ENTRY_BYTES
        if self._nbytes + nbytes > cache_bytes_max:
            return False
        self._nbytes += nbytes
        hashed = FrameChecksums(tuple(part.xxh3 for part in frame.streams), checksums)
        self._segments.setdefault(number, {})[offset] = hashed
        return True

    def get(self, number: int) -> Mapping[int, FrameChecksums]:
        """Checksums of a segment that is not appended to any more, by offset of the frame."""
        return self._segments.get(number, {})

    def forget(self, number: int) -> None:
        """A segment is sealed, or given up."""
        for cached in self._segments.pop(number, {}).values():
            self._nbytes -= cached.checksums.nbytes + _ENTRY_BYTES
