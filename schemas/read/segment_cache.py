"""Files and parsed frames of segments, cached: bounded, the least used goes first, and all of a segment together.

What was parsed of a segment keeps its maps, and every map keeps a descriptor: so nothing of one is cached alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from schemas.codecs import Stream
from schemas.lru import Lru
from schemas.store.block import Block
from schemas.store.cold_block import ColdFrame
from schemas.store.segment import FrameView
from schemas.wire.messages import Frame
from schemas.wire.row_table import RowTable

__all__ = ["CachedSegment", "FrameRows", "SegmentCache", "View"]

files_max: Final = 512  # that are mapped, each by a descriptor: half of what a process may have where nobody raised it
frames_max: Final = 4096
proved_bytes_max: Final = 16 * 1024 * 1024  # of checksums of frames in open segments, eight a row and layer
_PROOF_BYTES: Final = 256  # that an array takes beside its numbers

View = FrameView | ColdFrame


class FrameRows(Protocol):
    """The description of a frame's rows."""

    @property
    def offset(self) -> int:
        """The number by which the catalog calls the frame."""

    @property
    def frame(self) -> Frame:
        """Its message."""

    @property
    def table(self) -> RowTable:
        """Its rows."""

    @property
    def declared(self) -> tuple[Stream, ...]:
        """The streams that they are stored in."""


U64 = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class CachedSegment:
    """One segment's open files, and the offsets of its cached frames and proofs."""

    mapped: tuple[Path, memoryview] | None = None
    block: Block | None = None
    block_known: bool = False  # blocks of an early version are none that rows can be told of
    frames: set[int] = field(default_factory=set)
    proofs: set[int] = field(default_factory=set)

    @property
    def files(self) -> int:
        """Number of mapped files; a cold block has one a stream."""
        return int(self.mapped is not None) + (0 if self.block is None else self.block.weight)


class SegmentCache:
    """Segments by number, their frames and the frames' proved checksums by (number, offset); thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments = Lru[int, CachedSegment](files_max, lambda segment: segment.files)
        self._frames = Lru[tuple[int, int], tuple[CachedSegment, View]](frames_max)
        self.proofs = Lru[tuple[int, int], tuple[CachedSegment, U64]](
            proved_bytes_max, lambda proof: proof[1].nbytes + _PROOF_BYTES)

    def get(self, number: int) -> CachedSegment | None:
        """The segment, where something of it is cached."""
        return self._segments.get(number)

    def frame(self, number: int, offset: int) -> View | None:
        """A cached frame; its segment is used with its file or its block."""
        found = self._frames.get((number, offset))
        return None if found is None else found[1]

    def proof(self, number: int, offset: int) -> U64 | None:
        """The cached checksums of a frame's rows."""
        found = self.proofs.get((number, offset))
        return None if found is None else found[1]

    def put_map(self, number: int, mapped: tuple[Path, memoryview]) -> None:
        """The segment's file; frames that were parsed in a map of before, when it was shorter, let go of that one."""
        with self._lock:
            segment = self._taken_out(number)
            segment.mapped = mapped
            for offset in segment.frames:
                if (found := self._frames.get((number, offset))) is not None:
                    _in_map(found[1], segment)
            self._put(number, segment)

    def put_block(self, number: int, found: Block | None) -> None:
        """A segment's block; None where its rows have no checksums. It was sealed: what was proved of its frames is not
        needed any more.
        """
        with self._lock:
            segment = self._taken_out(number)
            segment.block, segment.block_known = found, True
            if found is not None:
                self._drop_proofs(number, segment)
            self._put(number, segment)

    def put_frame(self, number: int, offset: int, view: View) -> None:
        """A frame; not where its segment was let go of meanwhile, since its map would be kept, and not counted."""
        with self._lock:
            if (segment := self._segments.get(number)) is not None:
                _in_map(view, segment)
                segment.frames.add(offset)
                for (_, dropped), (owner, _) in self._frames.put((number, offset), (segment, view)):
                    owner.frames.discard(dropped)

    def put_proof(self, number: int, offset: int, found: U64) -> None:
        """The checksums of a frame's rows, of an open segment."""
        with self._lock:
            segment = self._segments.get(number)
            if segment is not None and segment.block is None:
                segment.proofs.add(offset)
                for (_, dropped), (owner, _) in self.proofs.put((number, offset), (segment, found)):
                    owner.proofs.discard(dropped)

    def forget(self, number: int) -> None:
        """Let go of a segment; its files are closed when no array views them any more."""
        with self._lock:
            self._forget(number, self._segments.pop(number))

    def tidy(self, there: Callable[[int], bool]) -> None:
        """Let go of segments that are no longer ``there``: a map keeps the bytes of a file that was removed."""
        for number, _ in self._segments.items():
            if not there(number):
                self.forget(number)

    def clear(self) -> None:
        """Let go of everything."""
        self.tidy(lambda _: False)

    def _taken_out(self, number: int) -> CachedSegment:
        """A segment to be changed and put back: what it weighs is another afterwards."""
        return self._segments.pop(number) or CachedSegment()

    def _put(self, number: int, segment: CachedSegment) -> None:
        for other, gone in self._segments.put(number, segment):
            self._forget(other, gone)

    def _forget(self, number: int, segment: CachedSegment | None) -> None:
        if segment is not None:
            for offset in segment.frames:
                self._frames.pop((number, offset))
            self._drop_proofs(number, segment)

    def _drop_proofs(self, number: int, segment: CachedSegment) -> None:
        for offset in segment.proofs:
            self.proofs.pop((number, offset))
        segment.proofs.clear()


def _in_map(view: View, segment: CachedSegment) -> None:
    """See to it that a frame keeps no other map of its file than the one that is cached."""
    if isinstance(view, FrameView) and segment.mapped is not None and view.end <= len(segment.mapped[1]):
        view.move_to(segment.mapped[1])
