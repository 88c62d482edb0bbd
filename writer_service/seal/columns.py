"""Columns of a segment's frames, as a block's arrays hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.codecs import Stream
from schemas.store.block import MISSING, ROW_COLUMNS
from schemas.store.segment import FLAG_REDACTED, FrameView
from schemas.wire.row_table import FLAG_ERASED, joined_steps, steps_of
from writer_service import fs

Array = npt.NDArray[Any]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Columns:
    """Arrays of a segment's frames; R rows, L layers (sorted union)."""

    layers: list[int]
    captures: list[str]
    row: dict[str, npt.NDArray[np.uint32]]  # by ROW_COLUMNS, [R]
    step: npt.NDArray[np.uint64] | None  # that computed each, [R], where a sender told it
    present: npt.NDArray[np.bool_]  # [R, L]
    index: npt.NDArray[np.uint64]  # [R, L, 2]: offset and bytes of the main piece
    checksum: npt.NDArray[np.uint64]  # [R, L]: see schemas.store.row_checksums
    sides: dict[str, Array]  # [L, R, *shape]: a layer lies together, as its chunk will
    frames: npt.NDArray[np.uint64]  # byte offset of each frame
    first_rows: npt.NDArray[np.uint64]  # and its first row


def fill_of(stream: Stream) -> Any:
    """A stream's fill value as NumPy takes it."""
    return float("nan") if stream.fill == "NaN" else stream.fill


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An empty array that lies as direct writes want it."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.empty(nbytes + fs.direct_align, np.uint8)
    start = -room.ctypes.data % fs.direct_align
    return room[start : start + nbytes].view(dtype).reshape(shape)


def gather(
    frames: Sequence[FrameView], checksums: Sequence[U64], declared: tuple[Stream, ...],
    layers: list[int] | None = None,
) -> Columns:
    """Columns of a segment's frames and their pieces' checksums (schemas.store.frame_hashes), in the order of the file;
    ``layers`` where they are not all of the frames'.
    """
    layers = layers or sorted({layer for view in frames for layer in view.frame.layers})
    rows, width = sum(view.rows for view in frames), len(layers)
    captures: dict[str, int] = {}
    row = {name: np.empty(rows, np.uint32) for name in ROW_COLUMNS}
    present = np.zeros((rows, width), bool)
    index = _aligned((rows, width, 2), np.dtype(np.uint64))
    index[:] = MISSING
    checksum = np.zeros((rows, width), np.uint64)
    # A piece is one element, copied at once.
    sides = {s.name: _aligned((width, rows), np.dtype(f"V{s.nbytes}")) for s in declared[1:]}
    start = 0
    for view, digests in zip(frames, checksums, strict=True):
        stop = start + view.rows
        has = view.frame.layers
        at = slice(None) if has == layers else np.searchsorted(layers, has)  # a slice is cheaper by far
        known = np.array([captures.setdefault(name, len(captures)) for name in view.frame.captures], np.uint32)
        row["capture"][start:stop] = known[view.table.capture]
        row["position"][start:stop] = view.table.position
        row["token_id"][start:stop] = view.table.token_id
        row["flags"][start:stop] = view.table.flags
        present[start:stop, at] = True
        pieces = view.pieces(np.arange(len(has)), np.arange(view.rows))  # [layers, rows]
        index[start:stop, at, 0] = (view.offset + view.layout.parts[0] + pieces * declared[0].nbytes).T
        index[start:stop, at, 1] = declared[0].nbytes
        checksum[start:stop, at] = digests[pieces.T]
        for number, side in enumerate(declared[1:], 1):
            stored = view.section(number).view(f"V{side.nbytes}")[:, 0]
            in_order = len(view.frame.runs) == 1  # then what indexing would copy first lies as it is wanted
            sides[side.name][at, start:stop] = stored.reshape(pieces.shape) if in_order else stored[pieces]
        if view.flags & FLAG_REDACTED:
            erased = start + np.flatnonzero(view.table.flags & FLAG_ERASED)
            present[erased], index[erased], checksum[erased] = False, MISSING, 0
        start = stop
    typed = {s.name: sides[s.name].view(s.dtype).reshape(width, rows, *s.shape) for s in declared[1:]}
    if not present.all():
        for side in declared[1:]:
            typed[side.name][~present.T] = fill_of(side)
    offsets = np.array([view.offset for view in frames], np.uint64)
    counts = np.array([view.rows for view in frames], np.uint64)
    step = joined_steps([steps_of(view.frame) for view in frames], [view.rows for view in frames])
    first_rows = np.cumsum(counts) - counts
    return Columns(layers, list(captures), row, step, present, index, checksum, typed, offsets, first_rows)
