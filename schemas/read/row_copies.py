"""Rows copied out of a store's files to where they are asked for, each held against its checksum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.catalog.records import Segment
from schemas.codecs import Stream
from schemas.errors import CorruptError, StoreError
from schemas.native.loops import Loops, loops_for
from schemas.read.row_locations import (
    FIRST,
    FLAGS,
    LAYERS,
    OFFSET,
    PARTS,
    ROW,
    SEGMENT,
    STEP,
    RowLocations,
    UnsettledError,
    known,
)
from schemas.read.segment_maps import SegmentMaps
from schemas.store.block import Block
from schemas.store.cold_block import ColdBlock
from schemas.store.paths import block_name
from schemas.store.row_checksums import piece_digests, side_digests
from schemas.wire.row_table import FLAG_ERASED

__all__ = ["copy_rows", "pieces_of"]

_GATHERED_BYTES: Final = 1 << 17
_NATIVE_BYTES: Final = 512  # smaller pieces are copied as fast by NumPy
Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


def copy_rows(maps: SegmentMaps, segments: Mapping[int, Segment | None], located: RowLocations,
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
    columns = np.array([np.searchsorted(each, layers) for each in located.layer_sets], np.int64)
    columns = columns.reshape(-1, len(layers)).T  # also of no rows at all
    used = np.flatnonzero(np.bincount(which, minlength=len(located.segments))).tolist()
    groups = [(number, known(segments, located.segments[number]), np.flatnonzero(which == number)) for number in used]
    loop = None if located.by_block else loops_for(0)
    digests = None if loop is None else _copy_together(loop, maps, groups, table, columns, found)
    for _, segment, at in groups:
        try:
            if loop is None:
                _copy_of(maps, segment, table[:, at], layers, columns, found, at)
            _expect(maps, segment, table[:, at], layers, columns, found, expected, at)
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
    """``_copy_of`` for rows of several segments, none found ``by_block``, in one call a stream; ``piece_digests`` of
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


def _copy_of(maps: SegmentMaps, segment: Segment, table: I64, layers: Sequence[int], columns: I64, found: list[Bytes],
             at: I64) -> None:
    """Copy rows of ``table``, all of one segment, to places ``at`` of the arrays ``found``.

    These are uint8 ``[layers, n, piece bytes]`` by stream; ``columns`` are those of ``layers`` in frames,
    ``[layers, layer_sets]``. CorruptError where rows cannot be there.
    """
    target = (np.arange(len(layers))[:, None] * found[0].shape[1] + at).reshape(-1)
    flat = [array.reshape(-1, array.shape[2]) for array in found]
    if not table[PARTS].all():
        block = maps.block(segment)
        assert block is not None, segment
        _copy_of_block(block, table[ROW], block.columns(layers), flat, target)
        return
    path, data = maps.data(segment)
    pieces = pieces_of(table, columns).reshape(-1)
    parts = np.tile(table[PARTS:], len(layers))
    # Rows of a prompt lie side by side in their one frame: then they are copied in one piece.
    take = _copy if _step_by(1, pieces, target) and (table[OFFSET] == table[OFFSET, 0]).all() else _gather
    for number, out in enumerate(flat):
        take(data, parts[number] + pieces * out.shape[1], out, target, path)


def _copy_of_block(block: Block, rows: I64, columns: I64, flat: list[Bytes], target: I64) -> None:
    """Copy a block's ``rows`` in ``columns`` of its layers to ``target`` of ``flat``, ``[n, piece bytes]`` each."""
    if isinstance(block, ColdBlock) and block.compressed is not None:
        flat[0][target] = block.compressed[block.pieces_at(rows, columns).reshape(-1)]
        return
    places = [(name, starts.reshape(-1)) for name, starts in block.places(rows, columns)]
    # As the main pieces lie in a cold block, so do all others.
    take = _copy if block.alike and _step_by(flat[0].shape[1], places[0][1]) and _step_by(1, target) else _gather
    for (name, starts), out in zip(places, flat, strict=True):
        for which, data, at in block.files.batches(name, starts, out.shape[1]):
            take(data, at, out, target[which], block.files.where(name))


def _expect(maps: SegmentMaps, segment: Segment, table: I64, layers: Sequence[int], columns: I64, found: list[Bytes],
            expected: U64, at: I64) -> None:
    """Write the checksums that rows of ``table`` must have, those at ``at`` of ``found`` as in ``_copy_of``, to
    ``expected`` ``[layers, n]``.
    """
    block = maps.block(segment)
    if block is not None and (table[ROW] >= 0).all():
        expected[:, at] = block.checksums_of(table[ROW], layers)
        return
    of_frame = pieces_of(table, columns)
    for offset in np.unique(table[OFFSET]).tolist():
        mine = table[OFFSET] == offset
        expected[:, at[mine]] = maps.expected(segment, maps.frame(segment, offset), of_frame[:, mine], found,
                                               at[mine])


def pieces_of(table: I64, columns: I64) -> I64:
    """Numbers of rows' pieces in the streams of their frames, ``[layers, rows]``; ``columns`` as in ``_copy_of``."""
    found: I64 = table[FIRST] + columns[:, table[LAYERS]] * table[STEP]
    return found


def beyond(path: Path | str, nbytes: int) -> CorruptError:
    """The error where a file is too short for rows that are said to be in it."""
    return CorruptError("read rows", path, f"it has {nbytes} bytes, rows lie beyond")


def _copy(data: memoryview, starts: I64, out: Bytes, target: I64, path: Path | str) -> None:
    """``_gather`` where one begins as another ends, here and there: in one piece."""
    rows = out[target[0]:target[0] + len(target)]
    piece = data[max(starts[0], 0):max(starts[0] + rows.nbytes, 0)]
    if len(piece) < rows.nbytes:
        raise beyond(path, len(data))
    rows[:] = np.frombuffer(piece, np.uint8).reshape(rows.shape)


def _step_by(step: int, *numbers: I64) -> bool:
    return all(len(each) > 0 and bool((np.diff(each) == step).all()) for each in numbers)


def _gather(data: memoryview, starts: I64, out: Bytes, target: I64, path: Path | str) -> None:
    """Copy the bytes that begin at each of ``starts`` to those rows of ``out``, uint8 ``[rows, piece bytes]``.

    Little by little: what is copied on the way stays in the processor's cache, and in memory that is there already.
    """
    nbytes = out.shape[1]
    if nbytes >= _NATIVE_BYTES and (loop := loops_for(0)) is not None:
        try:
            loop.gather(data, starts, out, target)
        except IndexError:
            raise beyond(path, len(data)) from None
        return
    if starts.min(initial=0) < 0:  # NumPy would count from the end
        raise beyond(path, len(data))
    pieces: npt.NDArray[np.void] = np.ndarray((max(len(data) - nbytes + 1, 0),), f"V{nbytes}", data, strides=(1,))
    whole, few = out.view(f"V{nbytes}")[:, 0], max(1, _GATHERED_BYTES // nbytes)
    try:
        for begin in range(0, len(starts), few):
            whole[target[begin:begin + few]] = pieces[starts[begin:begin + few]]
    except IndexError:
        raise beyond(path, len(data)) from None
