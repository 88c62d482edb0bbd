"""Mapped segments, and the frames that were parsed in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from schemas.catalog.records import Segment
from schemas.errors import CorruptError, StoreError
from schemas.native.loops import loops_for
from schemas.read.held_files import Holdings, View
from schemas.read.location_columns import FIRST, FLAGS, I64, KIND, OFFSET, PARTS, ROW, STEP, TOKEN, Bytes
from schemas.store.cold_block import ColdBlock
from schemas.store.compressed import Packed
from schemas.store.frame_hashes import prove_frame
from schemas.store.map_file import map_file
from schemas.store.paths import block_name, open_name, segment_places
from schemas.store.row_checksums import BlockChecksums, piece_bytes_min, piece_digests
from schemas.store.segment import FrameView, parse_frame, verify_payload

__all__ = ["SegmentMaps", "View", "beyond", "map_file", "opened", "pieces_of"]

_TIDY_S: Final = 1.0  # between two looks for what was removed, while files are opened
_GATHERED_BYTES: Final = 1 << 17
_NATIVE_BYTES: Final = 512  # smaller pieces are copied as fast by NumPy
U64 = npt.NDArray[np.uint64]
T = TypeVar("T")
_GONE: Final = "the block was compacted or taken away since, or the store is not complete"


def _count_up(*numbers: I64) -> bool:
    return all(len(each) > 0 and (np.diff(each) == 1).all() for each in numbers)


def _copy(data: memoryview, starts: I64, out: Bytes, target: I64, path: Path) -> None:
    """``_gather`` where one begins as another ends, here and there: in one piece."""
    rows = out[target[0]:target[0] + len(target)]
    piece = data[starts[0]:starts[0] + rows.nbytes]
    if len(piece) < rows.nbytes:
        raise beyond(path, len(data))
    rows[:] = np.frombuffer(piece, np.uint8).reshape(rows.shape)


def _gather(data: memoryview, starts: I64, out: Bytes, target: I64, path: Path) -> None:
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


def pieces_of(table: I64, columns: I64) -> I64:
    """Numbers of the pieces of rows in the streams of their frames, ``[layers, rows]``; see ``SegmentMaps.copy``."""
    found: I64 = table[FIRST] + columns[:, table[KIND]] * table[STEP]
    return found


def beyond(path: Path, nbytes: int) -> CorruptError:
    """The error where a file is too short for rows that are said to be in it."""
    return CorruptError("read rows", path, f"it has {nbytes} bytes, rows lie beyond")


class SegmentMaps:
    """Frames of a store by (segment, byte offset); thread-safe.

    A frame's head is parsed once and kept as a copy. What is copied of its payload is held against the checksums of the
    rows after every read: a map shows the file as it is now, and hashing costs less than a wrong row. A block has the
    checksums; those of a frame in an open segment are made when the whole frame has been proved, once, and kept.
    """

    def __init__(self, store: Path, uuid: bytes) -> None:
        self._store, self._uuid = store, uuid
        self._held = Holdings()
        self._tidied_s = time.monotonic()

    def frame(self, segment: Segment, offset: int) -> View:
        """The frame at ``offset``, its head held against its hash; CorruptError names the block and the offset where
        bytes do not match.
        """
        if (view := self._held.frame(segment.number, offset)) is None:
            view = self.cold(segment.number).frame(offset) if segment.cold else self._parse(segment, offset)
            self._held.hold_frame(segment.number, offset, view)
        return view

    def _parse(self, segment: Segment, offset: int) -> FrameView:
        path, data = self._map(segment, fresh=False)
        try:
            return parse_frame(data, offset, self._uuid, segment.number, path)
        except CorruptError:
            # The map may be older than the frame: the file has grown since.
            path, data = self._map(segment, fresh=True)
            return parse_frame(data, offset, self._uuid, segment.number, path)

    def verify(self, segment: Segment, view: View, layers: list[int], rows: I64, copied: list[Bytes]) -> None:
        """CorruptError where what was copied of a frame from ``frame`` is not what was stored.

        ``copied`` are rows of layers by stream, ``[layers, rows, piece bytes]``.
        """
        checksums = self.checksums(segment)
        if checksums is None:
            columns = np.searchsorted(view.frame.layers, layers)
            expected = self._expected(segment, view, view.pieces(columns, rows), copied, slice(None))
        else:
            expected = checksums.of_rows(checksums.start(view.offset) + rows, layers)
        main, *sides = (array.reshape(-1, array.shape[2]) for array in copied)
        if (piece_digests(main, sides).reshape(expected.shape) != expected).any():
            raise self.mismatch(segment, view.offset)

    def mismatch(self, segment: Segment, offset: int) -> CorruptError:
        """The error where a row of the frame at ``offset`` does not match its checksum."""
        held = self._held.of(segment.number)
        path = held.mapped[0] if held and held.mapped else segment_places(self._store, segment.number, segment.main)[0]
        return CorruptError("read rows", f"{path} at byte {offset}", "a row does not match its checksum",
                            "vllm-tap fsck names all that do not")

    def _expected(self, segment: Segment, view: View, pieces: I64, copied: list[Bytes], which: slice | I64) -> U64:
        """What checksums pieces must have that are ``which`` rows of ``copied``, ``[layers, rows, piece bytes]`` by
        stream, of a frame in a segment that has none itself. Where they are small, and may be millions, the whole frame
        is proved instead.
        """
        assert isinstance(view, FrameView)  # a cold block has checksums
        if view.declared[0].nbytes >= piece_bytes_min:
            return self._checksums_of(segment, view)[pieces]
        verify_payload(view, self._map(segment, fresh=False)[0])
        main, *sides = (array[:, which].reshape(-1, array.shape[2]) for array in copied)
        return piece_digests(main, sides).reshape(pieces.shape)

    def _checksums_of(self, segment: Segment, view: FrameView) -> U64:
        """Of each piece of such a frame: made once, of the frame as it was proved.

        They stay right: an open segment is only appended to, and rows that are erased once it is a block do not match.
        """
        if (found := self._held.proof(segment.number, view.offset)) is None:
            found = prove_frame(view, self._map(segment, fresh=False)[0])
            self._held.hold_proof(segment.number, view.offset, found)
        return found

    def place(self, segment: Segment, view: View, rows: I64) -> I64:
        """The location_columns of rows of a frame, ``[columns, rows]``; SEGMENT and KIND are left 0."""
        table = np.zeros((PARTS + len(view.declared), len(rows)), np.int64)
        table[OFFSET] = view.offset
        table[TOKEN], table[FLAGS] = view.table.token_id[rows], view.table.flags[rows]
        checksums = self.checksums(segment)
        table[ROW] = -1 if checksums is None else checksums.start(view.offset) + rows
        if isinstance(view, FrameView):
            table[FIRST], table[STEP] = view.runs_of(rows)
            table[PARTS:] = np.asarray(view.layout.parts, np.int64)[:, None] + view.offset
        return table

    def data(self, segment: Segment) -> tuple[Path, memoryview]:
        """The bytes of a segment that is not cold, and where they are from."""
        return self._map(segment, fresh=False)

    def copy(self, segment: Segment, table: I64, layers: Sequence[int], columns: I64, found: list[Bytes], at: I64
             ) -> None:
        """Copy rows of ``table``, all of one segment, to places ``at`` of the arrays ``found``.

        These are uint8 ``[layers, n, piece bytes]`` by stream; ``columns`` are those of ``layers`` in frames,
        ``[layers, kinds]``. CorruptError where rows cannot be there.
        """
        target = (np.arange(len(layers))[:, None] * found[0].shape[1] + at).reshape(-1)
        flat = [array.reshape(-1, array.shape[2]) for array in found]
        if segment.cold:
            block = self.cold(segment.number)
            path, pieces = block.main, block.pieces(table[ROW], layers).reshape(-1)
            take = _copy if _count_up(pieces, target) else _gather
            for number, out in enumerate(flat):
                section = block.section(number)
                if isinstance(section, Packed):
                    out[target] = section[pieces]
                else:
                    take(section.reshape(-1).data, pieces * out.shape[1], out, target, path)
        else:
            path, data = self.data(segment)
            pieces = pieces_of(table, columns).reshape(-1)
            parts = np.tile(table[PARTS:], len(layers))
            # Rows of a prompt lie side by side in their one frame.
            take = _copy if _count_up(pieces, target) and (table[OFFSET] == table[OFFSET, 0]).all() else _gather
            for number, out in enumerate(flat):
                take(data, parts[number] + pieces * out.shape[1], out, target, path)

    def expect(self, segment: Segment, table: I64, layers: Sequence[int], columns: I64, found: list[Bytes],
               expected: U64, at: I64) -> None:
        """What checksums rows of ``table`` must have that are places ``at`` of ``found``, as of ``copy``: written to
        ``expected``, ``[layers, n]``.
        """
        checksums = self.checksums(segment)
        if checksums is not None and (table[ROW] >= 0).all():
            expected[:, at] = checksums.of_rows(table[ROW], layers)
            return
        of_frame = pieces_of(table, columns)
        for offset in np.unique(table[OFFSET]).tolist():
            mine = table[OFFSET] == offset
            expected[:, at[mine]] = self._expected(segment, self.frame(segment, offset), of_frame[:, mine], found,
                                                   at[mine])

    def checksums(self, segment: Segment) -> BlockChecksums | None:
        """Those of a block's rows; None where a segment has none, because it is not sealed or of an early version."""
        if not segment.sealed:
            return None
        if segment.cold:
            return self.cold(segment.number).checksums
        held = self._held.of(segment.number)
        if held is not None and held.looked:
            return held.checksums
        self._look()
        try:
            found = BlockChecksums.open(self._store / block_name(segment.number))
        except (OSError, ValueError, KeyError) as error:
            raise StoreError("read checksums", self._store / block_name(segment.number), repr(error)) from None
        self._held.hold_checksums(segment.number, found)
        return found

    def cold(self, number: int) -> ColdBlock:
        """A cold block; StoreError where it is not there or not whole."""
        held = self._held.of(number)
        if held is not None and held.cold is not None:
            return held.cold
        self._look()
        folder = self._store / block_name(number)
        try:
            found = ColdBlock.open(folder)
        except FileNotFoundError as error:
            raise StoreError("open segment", error.filename, "no such file", _GONE) from None
        self._held.hold_cold(number, found)
        return found

    def forget(self, number: int) -> None:
        """Look at a segment's files anew: they were erased from, or moved."""
        self._held.forget(number)

    def tidy(self) -> None:
        """Let go of segments that were removed: until then their bytes stay on the disk."""
        self._tidied_s = time.monotonic()
        self._held.tidy(lambda number: any((self._store / name(number)).exists() for name in (block_name, open_name)))

    def close(self) -> None:
        """Forget all maps; they are unmapped when no array views them any more."""
        self._held.clear()

    def _look(self) -> None:
        """``tidy``, now and then: who reads on has no bytes for long that others took away."""
        if time.monotonic() > self._tidied_s + _TIDY_S:
            self.tidy()

    def _map(self, segment: Segment, fresh: bool) -> tuple[Path, memoryview]:
        held = self._held.of(segment.number)
        if not fresh and held is not None and held.mapped is not None:
            return held.mapped
        self._look()
        mapped = opened(self._store, segment, map_file)
        self._held.hold_map(segment.number, mapped)
        return mapped


def opened(store: Path, segment: Segment, how: Callable[[Path], T]) -> tuple[Path, T]:
    """Where a segment lies, and what ``how`` makes of it; StoreError where it is nowhere."""
    places = segment_places(store, segment.number, segment.main)
    # A segment moves once, from the last place to the first, while it is sealed. Looking from the last to the
    # first and then once more finds it wherever it is at that moment.
    for path in (*places[::-1], *places):
        try:
            return path, how(path)
        except FileNotFoundError:
            continue
    raise StoreError("open segment", places[0], "no such file", _GONE)
