"""Locations of a capture's rows, down to the byte. They are found out once; then any of the rows are copied together.

They are a table of int64 ``[columns, n]``: n rows, with the constants below as numbers of the columns. For a layer and
a stream s, a row's piece begins ``(FIRST + index of the layer × STEP) × piece bytes`` after the byte offset in
``PARTS + s``. Some rows are found by their numbers in a block, cold or in a bucket. The places of these follow from ROW
alone, also where the block moves since; FIRST, STEP and the columns from PARTS on are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from schemas.catalog.records import Extent, Segment
from schemas.codecs import Stream
from schemas.errors import CorruptError, StoreError
from schemas.read.coverage import Rows
from schemas.read.segment_maps import FrameRows, SegmentMaps
from schemas.store.paths import open_name
from schemas.store.segment import FrameView

__all__ = ["RowLocations", "UnsettledError", "in_blocks", "joined", "locate"]

SEGMENT: Final = 0  # which of those that the rows are in
OFFSET: Final = 1  # of the frame in it
ROW: Final = 2  # of the block, for its checksum; -1 where it has none
LAYERS: Final = 3  # index of the set of layers that the frame has
FIRST: Final = 4  # number of the first layer's piece in each of the frame's streams
STEP: Final = 5  # pieces from a layer to the next
TOKEN: Final = 6
FLAGS: Final = 7
PARTS: Final = 8  # byte offset of each of the frame's streams, from here on

Name = TypeVar("Name")
I64 = npt.NDArray[np.int64]


class UnsettledError(Exception):
    """A read that may have met the writer moving or erasing rows of a segment."""

    def __init__(self, segment: int, cause: StoreError) -> None:
        super().__init__(str(cause))
        self.segment, self.cause = segment, cause


@dataclass(frozen=True, slots=True)
class RowLocations:
    """Rows in the order of ``positions`` int64 ``[n]``; ``table`` as above, ``[columns, n]``.

    ``segments`` are the numbers of those that the rows are in, ``layer_sets`` the layers of their frames: the table's
    columns SEGMENT and LAYERS are indexes into these.
    """

    positions: I64
    segments: tuple[int, ...]
    layer_sets: tuple[tuple[int, ...], ...]
    table: I64

    def __getitem__(self, which: slice | I64) -> RowLocations:
        table = self.table[:, which] if isinstance(which, slice) else self.table.take(which, axis=1)
        return RowLocations(self.positions[which], self.segments, self.layer_sets, table)

    @property
    def token_ids(self) -> npt.NDArray[np.uint32]:
        """Token ids in the rows' frames."""
        found: npt.NDArray[np.uint32] = self.table[TOKEN].astype(np.uint32)
        return found

    @property
    def by_block(self) -> bool:
        """Whether some are found by their numbers in a block, and not by the places that their frames say."""
        return not self.table[PARTS].all()

    @property
    def flags(self) -> npt.NDArray[np.uint32]:
        """Flags in the rows' frames (schemas.wire.row_table)."""
        found: npt.NDArray[np.uint32] = self.table[FLAGS].astype(np.uint32)
        return found


def locate(maps: SegmentMaps, segments: Mapping[int, Segment | None], extents: Sequence[Extent], rows: Rows,
           declared: tuple[Stream, ...]) -> RowLocations:
    """The rows' places; UnsettledError where a segment does not bear out what the catalog says."""
    table = np.zeros((PARTS + len(declared), len(rows.positions)), np.int64)
    numbers: dict[int, int] = {}
    layer_sets: dict[tuple[int, ...], int] = {}
    order = np.argsort(rows.extent, kind="stable")
    bounds = np.flatnonzero(np.diff(rows.extent[order], prepend=-1, append=-1)).tolist()
    for begin, end in pairwise(bounds):
        at = order[begin:end]
        extent = extents[rows.extent[at[0]]]
        segment = known(segments, extent.segment)
        try:
            view = maps.rows_of(segment, extent.offset)
            if view.declared != declared:
                has = f"rows in {view.frame.codec} of width {view.frame.width}, the capture says otherwise"
                raise CorruptError("read slice", f"{open_name(segment.number)} at byte {extent.offset}", has)
            table[:, at] = _table_of(maps, segment, view, rows.row[at])
        except StoreError as error:
            raise UnsettledError(segment.number, error) from None
        table[SEGMENT, at] = numbers.setdefault(segment.number, len(numbers))
        table[LAYERS, at] = layer_sets.setdefault(tuple(view.frame.layers), len(layer_sets))
    return RowLocations(rows.positions, tuple(numbers), tuple(layer_sets), table)


def _table_of(maps: SegmentMaps, segment: Segment, view: FrameRows, rows: I64) -> I64:
    """The table of rows of a frame; SEGMENT and LAYERS are left 0."""
    table = np.zeros((PARTS + len(view.declared), len(rows)), np.int64)
    table[OFFSET] = view.offset
    table[TOKEN], table[FLAGS] = view.table.token_id[rows], view.table.flags[rows]
    block = maps.block(segment)
    table[ROW] = -1 if block is None else block.start(view.offset) + rows
    if isinstance(view, FrameView):
        table[FIRST], table[STEP] = view.runs_of(rows)
        table[PARTS:] = np.asarray(view.layout.parts, np.int64)[:, None] + view.offset
    return table


def in_blocks(maps: SegmentMaps, segments: Mapping[int, Segment], frames: I64, rows: I64, streams: int) -> RowLocations:
    """The places of rows of sealed blocks, by their numbers in these, for a layer that all of them have.

    ``frames`` int64 ``[n, 2]`` are the segment and offset of each row's frame, ``rows`` ``[n]`` count in it.
    UnsettledError where a block does not bear that out.
    """
    table = np.zeros((PARTS + streams, len(rows)), np.int64)
    numbers, table[SEGMENT] = np.unique(frames[:, 0], return_inverse=True)
    table[OFFSET] = frames[:, 1]
    order = np.lexsort((frames[:, 1], frames[:, 0]))
    cuts = np.flatnonzero(np.diff(frames[order], axis=0).any(1)) + 1
    for at in np.split(order, cuts) if len(rows) else ():
        number, offset = frames[at[0]].tolist()
        try:
            if (block := maps.block(known(segments, number))) is None:
                raise StoreError("read rows", open_name(number), "its block has no first rows of frames",
                                 "vllm-tap compact makes it anew")
            table[ROW, at] = found = block.start(offset) + rows[at]
            table[TOKEN, at], table[FLAGS, at] = block.row["token_id"][found], block.row["flags"][found]
        except StoreError as error:
            raise UnsettledError(number, error) from None
    return RowLocations(rows, tuple(numbers.tolist()), ((),), table)


def known(segments: Mapping[int, Segment | None], number: int) -> Segment:
    """The segment of a number; StoreError where the catalog has none."""
    if (found := segments[number]) is None:
        raise StoreError("read slice", open_name(number), f"segment {number} is not in the catalog",
                         "start the writer once: it repairs the catalog")
    return found


def joined(parts: Sequence[RowLocations]) -> RowLocations:
    """Rows of several captures, one after the other."""
    table = np.concatenate([part.table for part in parts], axis=1)
    counts = [len(part.positions) for part in parts]
    segments = _renumbered(table[SEGMENT], [part.segments for part in parts], counts)
    layer_sets = _renumbered(table[LAYERS], [part.layer_sets for part in parts], counts)
    return RowLocations(np.concatenate([part.positions for part in parts]), segments, layer_sets, table)


def _renumbered(column: I64, names: Sequence[tuple[Name, ...]], counts: Sequence[int]) -> tuple[Name, ...]:
    """Each name once; ``column``, which counts in the names of each part, then counts in these."""
    number: dict[Name, int] = {}
    new = np.array([number.setdefault(name, len(number)) for part in names for name in part], np.int64)
    first = np.cumsum([0, *map(len, names)])[:-1]
    column[:] = new[column + np.repeat(first, counts)]
    return tuple(number)
