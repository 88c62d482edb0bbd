"""Where the rows of a capture lie, down to the byte: found out once, then any of them are copied together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from schemas.catalog import Extent, Segment
from schemas.codecs import Stream
from schemas.coverage import Rows
from schemas.errors import CorruptError, StoreError
from schemas.frame import FLAG_ERASED
from schemas.mapping import SegmentMaps, beyond, pieces_of
from schemas.native_loops import Loops, loops_for
from schemas.placement import FLAGS, I64, KIND, OFFSET, PARTS, SEGMENT, TOKEN, Bytes
from schemas.row_checksums import piece_digests
from schemas.zarr_layout import block_name, open_name

__all__ = ["Located", "UnsettledError", "copy_rows", "joined", "locate"]


class UnsettledError(Exception):
    """A read that may have met the writer moving or erasing rows of a segment."""

    def __init__(self, segment: int, cause: StoreError) -> None:
        super().__init__(str(cause))
        self.segment, self.cause = segment, cause


@dataclass(frozen=True, slots=True)
class Located:
    """Rows in the order of ``positions`` int64 ``[n]``; ``table`` is that of schemas.placement, ``[columns, n]``.

    ``kinds`` are the layers of the frames that the rows are in, which the table's column KIND counts in.
    """

    positions: I64
    kinds: tuple[tuple[int, ...], ...]
    table: I64

    def __getitem__(self, which: slice | I64) -> Located:
        table = self.table[:, which] if isinstance(which, slice) else self.table.take(which, axis=1)
        return Located(self.positions[which], self.kinds, table)

    @property
    def token_ids(self) -> npt.NDArray[np.uint32]:
        """As the rows' frames have them."""
        found: npt.NDArray[np.uint32] = self.table[TOKEN].astype(np.uint32)
        return found

    @property
    def flags(self) -> npt.NDArray[np.uint32]:
        """As the rows' frames have them (schemas.frame)."""
        found: npt.NDArray[np.uint32] = self.table[FLAGS].astype(np.uint32)
        return found


def locate(maps: SegmentMaps, segments: Mapping[int, Segment | None], extents: Sequence[Extent], rows: Rows,
           declared: tuple[Stream, ...]) -> Located:
    """The rows' places; UnsettledError where a segment does not bear out what the catalog says."""
    table = np.zeros((PARTS + len(declared), len(rows.positions)), np.int64)
    kinds: dict[tuple[int, ...], int] = {}
    order = np.argsort(rows.extent, kind="stable")
    bounds = np.flatnonzero(np.diff(rows.extent[order], prepend=-1, append=-1)).tolist()
    for begin, end in pairwise(bounds):
        at = order[begin:end]
        extent = extents[rows.extent[at[0]]]
        segment = known(segments, extent.segment)
        try:
            view = maps.frame(segment, extent.offset)
            if view.declared != declared:
                has = f"rows in {view.frame.codec} of width {view.frame.width}, the capture says otherwise"
                raise CorruptError("read slice", f"{open_name(segment.number)} at byte {extent.offset}", has)
            table[:, at] = maps.place(segment, view, rows.row[at])
        except StoreError as error:
            raise UnsettledError(segment.number, error) from None
        table[KIND, at] = kinds.setdefault(tuple(view.frame.layers), len(kinds))
    return Located(rows.positions, tuple(kinds), table)


def known(segments: Mapping[int, Segment | None], number: int) -> Segment:
    """The segment of a number; StoreError where the catalog has none."""
    if (found := segments[number]) is None:
        raise StoreError("read slice", open_name(number), f"segment {number} is not in the catalog",
                         "start the writer once: it repairs the catalog")
    return found


def joined(parts: Sequence[Located]) -> Located:
    """Rows of several captures, one after the other."""
    kinds: dict[tuple[int, ...], int] = {}
    tables = []
    for part in parts:
        numbers = [kinds.setdefault(kind, len(kinds)) for kind in part.kinds]
        if numbers == list(range(len(numbers))):
            tables.append(part.table)
        else:
            table = part.table.copy()
            table[KIND] = np.asarray(numbers, np.int64)[table[KIND]]
            tables.append(table)
    return Located(np.concatenate([part.positions for part in parts]), tuple(kinds), np.concatenate(tables, axis=1))


def copy_rows(maps: SegmentMaps, segments: Mapping[int, Segment | None], located: Located,
              declared: tuple[Stream, ...], layers: Sequence[int]) -> list[Bytes]:
    """The rows' pieces by stream, uint8 ``[layers, n, piece bytes]``, each held against its checksum.

    UnsettledError where they do not match: rows beside them, or these, may be gone since.
    """
    found = [np.empty((len(layers), len(located.positions), stream.nbytes), np.uint8) for stream in declared]
    expected = np.empty((len(layers), len(located.positions)), np.uint64)
    columns = np.array([np.searchsorted(kind, layers) for kind in located.kinds], np.int64)
    columns = columns.reshape(-1, len(layers)).T  # also of no rows at all
    table, numbers = located.table, located.table[SEGMENT]
    erased = np.flatnonzero(table[FLAGS] & FLAG_ERASED)
    if len(erased):
        number = int(numbers[erased[0]])
        raise UnsettledError(number, StoreError("read slice", block_name(number), "rows in it were erased",
                                                "start the writer once: it repairs the catalog"))
    order = np.argsort(numbers, kind="stable")
    groups = [(known(segments, int(numbers[order[begin]])), order[begin:end])
              for begin, end in pairwise(np.flatnonzero(np.diff(numbers[order], prepend=-1, append=-1)).tolist())]
    loop = None if any(segment.cold for segment, _ in groups) else loops_for(0)
    if loop is not None:
        _copy_together(loop, maps, groups, table, columns, found)
    for segment, at in groups:
        try:
            if loop is None:
                maps.copy(segment, table[:, at], layers, columns, found, at)
            maps.expect(segment, table[:, at], layers, columns, found, expected, at)
        except StoreError as error:
            raise UnsettledError(segment.number, error) from None
    main, *sides = (array.reshape(-1, array.shape[2]) for array in found)
    wrong = np.flatnonzero((piece_digests(main, sides).reshape(expected.shape) != expected).any(0))
    if len(wrong):
        segment = known(segments, int(numbers[wrong[0]]))
        raise UnsettledError(segment.number, maps.mismatch(segment, int(located.table[OFFSET, wrong[0]])))
    return found


def _copy_together(loop: Loops, maps: SegmentMaps, groups: Sequence[tuple[Segment, I64]], table: I64, columns: I64,
                   found: list[Bytes]) -> None:
    """``SegmentMaps.copy`` of rows of several segments, none of them cold, in one call a stream."""
    held = []  # the maps, while they are read
    start, room = np.empty((2, table.shape[1]), np.int64)
    for segment, at in groups:
        try:
            path, data = maps.data(segment)
        except StoreError as error:
            raise UnsettledError(segment.number, error) from None
        held.append((path, data))
        start[at], room[at] = np.frombuffer(data, np.uint8).ctypes.data, len(data)
    pieces = pieces_of(table, columns)
    for out, parts in zip(found, table[PARTS:], strict=True):
        nbytes = out.shape[2]
        places = parts + pieces * nbytes
        outside = (places.min(0) < 0) | (places.max(0) > room - nbytes)
        for (segment, at), (path, data) in zip(groups, held, strict=True) if outside.any() else ():
            if outside[at].any():
                raise UnsettledError(segment.number, beyond(path, len(data)))
        places += start
        loop.copy(places.reshape(-1), out.reshape(-1, nbytes))
