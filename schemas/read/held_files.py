"""What a reader has open of a store's segments: bounded, the least used goes first, and all of a segment together.

What was parsed of a segment keeps its maps, and every map keeps a descriptor: so nothing of one is kept alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.store.cold_block import ColdBlock, ColdFrame
from schemas.store.row_checksums import BlockChecksums
from schemas.store.segment import FrameView

__all__ = ["Held", "Holdings", "View"]

files_max: Final = 512  # that are mapped, each by a descriptor: half of what a process may have where nobody raised it
frames_max: Final = 4096
proved_bytes_max: Final = 16 * 1024 * 1024  # of checksums of frames in open segments, eight a row and layer
_PROOF_BYTES: Final = 256  # that an array takes beside its numbers

View = FrameView | ColdFrame
U64 = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Held:
    """Of one segment; ``files`` is how many of it are mapped. Frames and proofs by byte offset, least used first."""

    files: int = 0
    mapped: tuple[Path, memoryview] | None = None
    checksums: BlockChecksums | None = None
    looked: bool = False  # for checksums; blocks of an early version have none
    cold: ColdBlock | None = None
    frames: OrderedDict[int, View] = field(default_factory=OrderedDict)
    proved: OrderedDict[int, U64] = field(default_factory=OrderedDict)


class Holdings:
    """Segments by their numbers; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Held] = OrderedDict()
        self.files = self.frames = self.proved_bytes = 0

    def of(self, number: int) -> Held | None:
        """What is held of a segment, which is being used."""
        with self._lock:
            return self._used(number)

    def frame(self, number: int, offset: int) -> View | None:
        """A frame that is held."""
        with self._lock:
            held = self._used(number)
            if held is None or offset not in held.frames:
                return None
            held.frames.move_to_end(offset)
            return held.frames[offset]

    def proof(self, number: int, offset: int) -> U64 | None:
        """The checksums of a frame's pieces, where they are held."""
        with self._lock:
            held = self._used(number)
            if held is None or offset not in held.proved:
                return None
            held.proved.move_to_end(offset)
            return held.proved[offset]

    def _used(self, number: int) -> Held | None:
        if number in self._held:
            self._held.move_to_end(number)
        return self._held.get(number)

    def _begun(self, number: int) -> Held:
        return self._used(number) or self._held.setdefault(number, Held())

    def hold_map(self, number: int, mapped: tuple[Path, memoryview]) -> None:
        """The segment's file; frames that were parsed in a map of before, when it was shorter, let go of that one."""
        with self._lock:
            held = self._begun(number)
            self._count(held, held.mapped is None)
            held.mapped = mapped
            for view in held.frames.values():
                _in_map(view, held)

    def hold_checksums(self, number: int, found: BlockChecksums | None) -> None:
        """A block's; None where it has none. It was sealed: what was proved of its frames is not needed any more."""
        with self._lock:
            held = self._begun(number)
            self._count(held, held.checksums is None and found is not None)
            held.checksums, held.looked = found, True
            if found is not None:
                self._drop_proofs(held)

    def hold_cold(self, number: int, block: ColdBlock) -> None:
        """A cold block, whose streams are a file each."""
        with self._lock:
            held = self._begun(number)
            self._count(held, 0 if held.cold else len(block.declared))
            held.cold = block

    def hold_frame(self, number: int, offset: int, view: View) -> None:
        """A frame; not where its segment was let go of meanwhile, since its map would be kept, and not counted."""
        with self._lock:
            if (held := self._used(number)) is None:
                return
            _in_map(view, held)
            self.frames += offset not in held.frames
            held.frames[offset] = view
            for oldest in self._held.values():
                while self.frames > frames_max and oldest.frames:
                    oldest.frames.popitem(last=False)
                    self.frames -= 1

    def hold_proof(self, number: int, offset: int, found: U64) -> None:
        """The checksums of a frame's pieces, of an open segment."""
        with self._lock:
            if (held := self._used(number)) is None or held.checksums is not None or offset in held.proved:
                return
            held.proved[offset] = found
            self.proved_bytes += _nbytes(found)
            for oldest in self._held.values():
                while self.proved_bytes > proved_bytes_max and oldest.proved:
                    self.proved_bytes -= _nbytes(oldest.proved.popitem(last=False)[1])

    def forget(self, number: int) -> None:
        """Let go of a segment; its files are closed when no array views them any more."""
        with self._lock:
            self._forget(number)

    def tidy(self, there: Callable[[int], bool]) -> None:
        """Let go of segments that are no longer ``there``: a map keeps the bytes of a file that was removed."""
        with self._lock:
            numbers = list(self._held)
        for number in numbers:
            if not there(number):
                self.forget(number)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            for number in list(self._held):
                self._forget(number)

    def _count(self, held: Held, files: int) -> None:
        """So many files more of a segment, which is the last that goes for it."""
        held.files += files
        self.files += files
        while self.files > files_max and len(self._held) > 1:
            self._forget(next(iter(self._held)))

    def _forget(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is not None:
            self.files -= held.files
            self.frames -= len(held.frames)
            self._drop_proofs(held)

    def _drop_proofs(self, held: Held) -> None:
        self.proved_bytes -= sum(map(_nbytes, held.proved.values()))
        held.proved.clear()


def _in_map(view: View, held: Held) -> None:
    """See to it that a frame keeps no other map of its file than the one that is held."""
    if isinstance(view, FrameView) and held.mapped is not None and view.end <= len(held.mapped[1]):
        view.move_to(held.mapped[1])


def _nbytes(proof: U64) -> int:
    return proof.nbytes + _PROOF_BYTES
