"""Checksums of single rows: a sealed block has one for each (row, layer), so that a read hashes what it read alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from schemas.errors import CorruptError
from schemas.native.loops import loops_for
from schemas.store.block import Block

__all__ = ["BlockChecksums", "digests", "piece_bytes_min", "piece_digests", "side_digests"]

piece_bytes_min: Final = 128  # of smaller ones checksums that are not stored yet would be a large part of memory

Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


def piece_digests(main: Bytes, sides: Sequence[Bytes], which: I64 | None = None) -> U64:
    """The xxh3 of each piece's main bytes, seeded with that of its side streams' bytes one after the other
    (0 where the codec has none). All are ``[pieces, piece bytes]``; ``which`` of them in what order, None: all.

    Seeded, because the main bytes are then hashed where they lie: joining them first would cost more than hashing.
    """
    return digests(main, side_digests(sides, which), which)


def side_digests(sides: Sequence[Bytes], which: I64 | None = None) -> U64 | None:
    """The seeds of ``piece_digests``."""
    if not sides:
        return None
    if len(sides) == 1:
        return digests(sides[0], None, which)
    return digests(np.concatenate(sides if which is None else [side[which] for side in sides], axis=1), None)


def digests(pieces: Bytes, seeds: U64 | None, which: I64 | None = None) -> U64:
    """xxh3 of pieces, of ``which`` in what order; seeds by result, None: 0."""
    loop = loops_for(len(pieces) if which is None else len(which))
    if loop is not None:
        return loop.digests(pieces, which, seeds)
    digest: Callable[..., bytes] = xxhash.xxh3_64_digest
    rows = pieces if which is None else map(pieces.__getitem__, which.tolist())
    found = map(digest, rows) if seeds is None else map(digest, rows, seeds.tolist())
    return np.frombuffer(b"".join(found), ">u8").astype(np.uint64)


@dataclass(frozen=True, slots=True)
class BlockChecksums:
    """Checksums of a block's rows; ``checksum`` is a map of the file: rows are erased while it is open."""

    layers: npt.NDArray[np.int64]
    frames: npt.NDArray[np.uint64]  # byte offset of each frame
    first: npt.NDArray[np.uint64]  # its first row
    checksum: np.ndarray[Any, np.dtype[np.uint64]]  # [R, L]

    @classmethod
    def open(cls, folder: Path) -> BlockChecksums | None:
        """Open a block's; None where it was made before frames' first rows were stored."""
        block = Block(folder)
        try:
            first = block.column("frame_row", "<u8")
        except FileNotFoundError:
            return None
        return cls(np.asarray(block.layers, np.int64), block.frames, first, block.mapped_checksum())

    def of(self, offset: int, layers: Sequence[int], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Checksums ``[layers, rows]`` of rows of the frame at ``offset``; CorruptError where the block lacks it."""
        return self.of_rows(self.start(offset) + rows, layers)

    def start(self, offset: int) -> int:
        """The first row of the frame at ``offset``; CorruptError where the block left the frame out."""
        at = int(np.searchsorted(self.frames, offset))
        if at == len(self.frames) or self.frames[at] != offset:
            raise CorruptError("read rows", f"frame at byte {offset}", "it was damaged when its segment was sealed")
        return min(int(self.first[at]), len(self.checksum))  # beyond them where it was damaged

    def of_rows(self, rows: npt.NDArray[np.int64], layers: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Checksums ``[layers, rows]`` of rows of the block; CorruptError where it has no such rows."""
        columns = np.searchsorted(self.layers, layers)[:, None]
        try:
            found: npt.NDArray[np.uint64] = self.checksum[rows, columns]
        except IndexError:
            raise CorruptError("read rows", f"row {int(rows.max())}", "the block says less of its rows") from None
        return found
