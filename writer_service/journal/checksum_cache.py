"""Checksums of rows, made when their frames came, and kept until the segments that these went to are sealed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.store.segment import FrameView, verify_payload
from schemas.wire.messages import Frame

__all__ = ["Kept", "KeptChecksums"]

kept_bytes_max: Final = 32 * 1024 * 1024  # of all segments: eight a row and layer. Frames beyond are read at sealing
_ENTRY_BYTES: Final = 512  # of Python's objects

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Kept:
    """Of a frame's rows, in the order of its pieces, and the xxh3 of the streams that were hashed with them."""

    streams: tuple[int, ...]
    checksums: U64

    def is_of(self, frame: Frame) -> bool:
        """Whether these are the rows of ``frame``."""
        return self.streams == tuple(part.xxh3 for part in frame.streams)

    def prove(self, view: FrameView, path: object) -> U64:
        """The checksums; CorruptError where side streams, which sealing copies, do not match theirs."""
        verify_payload(view, path, first=1)
        return self.checksums


class KeptChecksums:
    """Of all segments that this process appended to; the main loop alone keeps and forgets."""

    def __init__(self) -> None:
        self._segments: dict[int, dict[int, Kept]] = {}
        self._nbytes = 0

    @property
    def full(self) -> bool:
        """Whether no more are kept."""
        return self._nbytes >= kept_bytes_max

    def keep(self, number: int, offset: int, frame: Frame, checksums: U64) -> bool:
        """Those of a frame at ``offset`` of a segment; whether there was room for them."""
        nbytes = checksums.nbytes + _ENTRY_BYTES
        if self._nbytes + nbytes > kept_bytes_max:
            return False
        self._nbytes += nbytes
        self._segments.setdefault(number, {})[offset] = Kept(tuple(part.xxh3 for part in frame.streams), checksums)
        return True

    def of(self, number: int) -> Mapping[int, Kept]:
        """Those of a segment that is not appended to any more, by offset of the frame."""
        return self._segments.get(number, {})

    def forget(self, number: int) -> None:
        """A segment is sealed, or given up."""
        for kept in self._segments.pop(number, {}).values():
            self._nbytes -= kept.checksums.nbytes + _ENTRY_BYTES
