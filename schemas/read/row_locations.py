"""Where the rows of a capture lie, down to the byte: found out once, then any of them are copied together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from schemas.catalog.records import Extent, Segment
from schemas.codecs import Stream
from schemas.errors import CorruptError, StoreError
from schemas.native.loops import Loops, loops_for
from schemas.read.coverage import Rows
from schemas.read.location_columns import FLAGS, I64, KIND, OFFSET, PARTS, SEGMENT, TOKEN, Bytes
from schemas.read.segment_maps import SegmentMaps, beyond, pieces_of
from schemas.store.paths import block_name, open_name
from schemas.store.row_checksums import piece_digests, side_digests
from schemas.wire.row_table import FLAG_ERASED

Name = TypeVar("Name")
U64 = npt.NDArray[np.uint64]

__all__ = ["Located", "UnsettledError", "copy_rows", "joined", "locate"]


class UnsettledError(Exception):
    """A read that may have met the writer moving or erasing rows of a segment."""

    def __init__(self, segment: int, cause: StoreError) -> None:
        super().__init__(str(cause))
        self.segment, self.cause = segment, cause


@dataclass(frozen=True, slots=True)
class Located:
    """Rows in the order of ``positions`` int64 ``[n]``; ``table`` is location_columns', ``[columns, n]``.

    ``segments`` are the numbers of those that the rows are in, ``kinds`` the layers of their frames: what the table's
    columns SEGMENT and KIND count in.
    """

    positions: I64
    segments: tuple[int, ...]
    kinds: tuple[tuple[int, ...], ...]
    table: I64

    def __getitem__(self, which: slice | I64) -> Located:
        table = self.table[:, which] if isinstance(which, slice) else self.table.take(which, axis=1)
        return Located(self.positions[which], self.segments, self.kinds, table)

    @property
    def token_ids(self) -> npt.NDArray[np.uint32]:
        """As the rows' frames have them."""
        found: npt.NDArray[np.uint32] = self.table[TOKEN].astype(np.uint32)
        return found

    @property
    def flags(self) -> npt.NDArray[np.uint32]:
        """As the rows' frames have them (schemas.wire.row_table)."""
        found: npt.NDArray[np.uint32] = self.table[FLAGS].astype(np.uint32)
        return found


def locate(maps: SegmentMaps, segments: Mapping[int, Segment | None], extents: Sequence[Extent], rows: Rows,
           declared: tuple[Stream, ...]) -> Located:
    """The rows' places; UnsettledError where a segment does not bear out what the catalog says."""
    table = np.zeros((PARTS + len(declared), len(rows.positions)), np.int64)
    numbers: dict[int, int] = {}
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
        table[SEGMENT, at] = numbers.setdefault(segment.number, len(numbers))
        table[KIND, at] = kinds.setdefault(tuple(view.frame.layers), len(kinds))
    return Located(rows.positions, tuple(numbers), tuple(kinds), table)


def known(segments: Mapping[int, Segment | None], number: int) -> Segment:
    """The segment of a number; StoreError where the catalog has none."""
    if (found := segments[number]) is None:
        raise StoreError("read slice", open_name(number), f"segment {number} is not in the catalog",
                         "start the writer once: it repairs the catalog")
    return found


def joined(parts: Sequence[Located]) -> Located:
    """Rows of several captures, one after the other."""
    table = np.concatenate([part.table for part in parts], axis=1)
    counts = [len(part.positions) for part in parts]
    segments = _renumbered(table[SEGMENT], [part.segments for part in parts], counts)
    kinds = _renumbered(table[KIND], [part.kinds for part in parts], counts)
    return Located(np.concatenate([part.positions for part in parts]), segments, kinds, table)


def _renumbered(column: I64, names: Sequence[tuple[Name, ...]], counts: Sequence[int]) -> tuple[Name, ...]:
    """Each name once; ``column``, which counts in the names of each part, then counts in these."""
    number: dict[Name, int] = {}
    new = np.array([number.setdefault(name, len(number)) for part in names for name in part], np.int64)
    first = np.cumsum([0, *map(len, names)])[:-1]
    column[:] = new[column + np.repeat(first, counts)]
    return tuple(number)


def copy_rows(maps: SegmentMaps, segments: Mapping[int, Segment | None], located: Located,
              declared: tuple[Stream, ...], layers: Sequence[int]) -> list[Bytes]:
    """The rows' pieces by stream, uint8 ``[layers, n, piece bytes]``, each held against its checksum.

    UnsettledError where they do not match: rows beside them, or these, may be gone since.
    """
    table, which = located.table, located.table[SEGMENT]
    if len(erased := np.flatnonzero(table[FLAGS] & FLAG_ERASED)):
        number = located.segments[which[erased[0]]]
        raise UnsettledError(number, StoreError("read slice", block_name(number), "rows in it were erased",
                                                "start the writer once: it repairs the catalog"))
    count = len(located.positions)
    found = [np.empty((len(layers), count, stream.nbytes), np.uint8) for stream in declared]
    expected = np.empty((len(layers), count), np.uint64)
    columns = np.array([np.searchsorted(kind, layers) for kind in located.kinds], np.int64)
    columns = columns.reshape(-1, len(layers)).T  # also of no rows at all
    used = np.flatnonzero(np.bincount(which, minlength=len(located.segments))).tolist()
    groups = [(number, known(segments, located.segments[number]), np.flatnonzero(which == number)) for number in used]
    loop = None if any(segment.cold for _, segment, _ in groups) else loops_for(0)
    digests = None if loop is None else _copy_together(loop, maps, groups, table, columns, found)
    for _, segment, at in groups:
        try:
            if loop is None:
                maps.copy(segment, table[:, at], layers, columns, found, at)
            maps.expect(segment, table[:, at], layers, columns, found, expected, at)
        except StoreError as error:
            raise UnsettledError(segment.number, error) from None
    if digests is None:
        main, *sides = map(_flat, found)
        digests = piece_digests(main, sides)
    wrong = np.flatnonzero((digests.reshape(expected.shape) != expected).any(0))
    if len(wrong):
        segment = known(segments, located.segments[which[wrong[0]]])
        raise UnsettledError(segment.number, maps.mismatch(segment, int(table[OFFSET, wrong[0]])))
    return found


def _flat(pieces: Bytes) -> Bytes:
    return pieces.reshape(-1, pieces.shape[2])


def _copy_together(loop: Loops, maps: SegmentMaps, groups: Sequence[tuple[int, Segment, I64]], table: I64, columns: I64,
                   found: list[Bytes]) -> U64:
    """``SegmentMaps.copy`` of rows of several segments, none of them cold, in one call a stream; ``piece_digests`` of
    what was copied.
    """
    held = []  # the maps, while they are read
    start, room = np.empty((2, table.shape[1]), np.int64)
    for _, segment, at in groups:
        try:
            path, data = maps.data(segment)
        except StoreError as error:
            raise UnsettledError(segment.number, error) from None
        held.append((path, data))
        start[at], room[at] = np.frombuffer(data, np.uint8).ctypes.data, len(data)
    pieces, parts = pieces_of(table, columns), table[PARTS:]
    nbytes = np.array([[out.shape[2]] for out in found])
    outside = (parts + pieces.min(0) * nbytes < 0) | (parts + (pieces.max(0) + 1) * nbytes > room)
    if outside.any():
        for (_, segment, at), (path, data) in zip(groups, held, strict=True):
            if outside[:, at].any():
                raise UnsettledError(segment.number, beyond(path, len(data)))
    at_of = [(begin + pieces * out.shape[2]).reshape(-1) for begin, out in zip(parts + start, found, strict=True)]
    main, *sides = map(_flat, found)
    for at, side in zip(at_of[1:], sides, strict=True):
        loop.copy(at, side)
    return loop.copy_hashed(at_of[0], main, side_digests(sides))
