"""Checksums of single rows: a block has one for each (row, layer), so that a read hashes what it read alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from schemas.native.loops import loops_for

__all__ = ["digests", "piece_bytes_min", "piece_digests", "side_digests"]

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
