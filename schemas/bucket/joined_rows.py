"""Rows out of several stores as one answer, in the order asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from schemas.errors import ArgumentError
from schemas.read.slices import RowFormat, RowsAt

__all__ = ["join_rows"]


def join_rows(parts: Sequence[tuple[Sequence[int], RowsAt]], count: int) -> RowsAt:
    """``count`` rows; of each part the numbers that its rows have among them.

    ArgumentError where they are not of one kind, LimitError where they are together more than a slice may have.
    """
    formats = {RowFormat(part.codec, part.dtype, part.width) for _, part in parts}
    if len(formats) != 1:
        ways = "; ".join(sorted(f"{each.codec}, {each.dtype}, {each.width}" for each in formats))
        raise ArgumentError("rows", count, f"name rows that are stored in one way, not {ways}")
    first = parts[0][1]
    formats.pop().check_bytes(len(first.layers) * count)
    made = replace(first, token_ids=np.empty(count, np.uint32), flags=np.empty(count, np.uint32), pieces={
        name: np.empty((len(first.layers), count, *piece.shape[2:]), piece.dtype)
        for name, piece in first.pieces.items()})
    for numbers, part in parts:
        made.token_ids[numbers], made.flags[numbers] = part.token_ids, part.flags
        for name, piece in part.pieces.items():
            made.pieces[name][:, numbers] = piece
    return made
