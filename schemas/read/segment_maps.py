"""Mapped segments, and the frames that were parsed in them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from schemas.catalog.records import Segment
from schemas.errors import CorruptError, StoreError
from schemas.read.segment_cache import FrameRows, SegmentCache, View
from schemas.store.block import Block
from schemas.store.block_files import MappedFolder, is_stub
from schemas.store.cold_block import ColdBlock, open_cold
from schemas.store.frame_hashes import prove_frame
from schemas.store.map_file import map_file
from schemas.store.paths import block_name, main_chunk, open_name, segment_places
from schemas.store.row_checksums import piece_bytes_min, piece_digests
from schemas.store.segment import FrameView, parse_frame, verify_payload

__all__ = ["FrameRows", "SegmentMaps", "View", "opened"]

_TIDY_S: Final = 1.0  # between two looks for what was removed, while files are opened
Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
T = TypeVar("T")
_EVICTED: Final = "open the bucket's URL, or vllm-tap recall brings them back"
_GONE: Final = "the block was compacted or taken away since, or the store is not complete"


class SegmentMaps:
    """Frames of a store by (segment, byte offset); thread-safe.

    A frame's head is parsed once and kept as a copy. Copied payload is held against the checksums of the rows after
    every read: a map shows the file as it is now, and hashing costs less than a wrong row. A block has the checksums.
    Those of a frame in an open segment are made once, when the whole frame has been proved, and kept.
    """

    def __init__(self, store: Path, uuid: bytes) -> None:
        self._store, self._uuid = store, uuid
        self._cache = SegmentCache()
        self._tidied_s = time.monotonic()

    def frame(self, segment: Segment, offset: int) -> View:
        """The frame at ``offset``, its head held against its hash; CorruptError names the block and the offset where
        bytes do not match.
        """
        if (view := self._cache.frame(segment.number, offset)) is None:
            view = self._parse(segment, offset)
            self._cache.put_frame(segment.number, offset, view)
        return view

    def rows_of(self, segment: Segment, offset: int) -> FrameRows:
        """The description of the rows of the frame at ``offset``; as ``frame``."""
        return self.frame(segment, offset)

    def _parse(self, segment: Segment, offset: int) -> View:
        if segment.cold:
            return self.cold(segment).frame(offset)
        path, data = self.data(segment)
        try:
            return parse_frame(data, offset, self._uuid, segment.number, path)
        except CorruptError:
            # The map may be older than the frame: the file has grown since.
            path, data = self.data(segment, fresh=True)
            return parse_frame(data, offset, self._uuid, segment.number, path)

    def verify(self, segment: Segment, view: View, layers: list[int], rows: I64, copied: list[Bytes]) -> None:
        """CorruptError where what was copied of a frame from ``frame`` is not what was stored.

        ``copied`` are rows of layers by stream, ``[layers, rows, piece bytes]``.
        """
        block = self.block(segment)
        if block is None:
            columns = np.searchsorted(view.frame.layers, layers)
            expected = self.expected(segment, view, view.pieces(columns, rows), copied, slice(None))
        else:
            expected = block.checksums_of(block.start(view.offset) + rows, layers)
        main, *sides = (array.reshape(-1, array.shape[2]) for array in copied)
        if (piece_digests(main, sides).reshape(expected.shape) != expected).any():
            raise self.mismatch(segment, view.offset)

    def mismatch(self, segment: Segment, offset: int) -> CorruptError:
        """The error where a row of the frame at ``offset`` does not match its checksum."""
        cached = self._cache.get(segment.number)
        places = segment_places(self._store, segment.number, segment.main)
        path = cached.mapped[0] if cached and cached.mapped else places[0]
        return CorruptError("read rows", f"{path} at byte {offset}", "a row does not match its checksum",
                            "vllm-tap fsck names all that do not")

    def expected(self, segment: Segment, view: View, pieces: I64, copied: list[Bytes], which: slice | I64) -> U64:
        """Checksums of ``which`` rows of ``copied``, ``[layers, rows, piece bytes]`` by stream, from a frame in a
        segment that has no checksums itself.

        They are made once, of the frame as it was proved, and stay right. An open segment is only appended to, and rows
        that are erased once it is a block do not match. Small pieces may be millions, so there the whole frame is
        proved at every read instead.
        """
        assert isinstance(view, FrameView)  # a cold block has checksums
        if view.declared[0].nbytes >= piece_bytes_min:
            if (found := self._cache.proof(segment.number, view.offset)) is None:
                found = prove_frame(view, self.data(segment)[0])
                self._cache.put_proof(segment.number, view.offset, found)
            return found[pieces]
        verify_payload(view, self.data(segment)[0])
        main, *sides = (array[:, which].reshape(-1, array.shape[2]) for array in copied)
        return piece_digests(main, sides).reshape(pieces.shape)

    def data(self, segment: Segment, fresh: bool = False) -> tuple[Path, memoryview]:
        """The file of a segment that is not cold, and its bytes; ``fresh``: as they are now, not when it was mapped."""
        cached = self._cache.get(segment.number)
        if not fresh and cached is not None and cached.mapped is not None:
            return cached.mapped
        self._look()
        mapped = opened(self._store, segment, map_file)
        self._cache.put_map(segment.number, mapped)
        return mapped

    def block(self, segment: Segment) -> Block | None:
        """The block of a segment, with its rows' checksums; None where it is not sealed, or its block of an early
        version. StoreError where it is not there or not whole.
        """
        if not segment.sealed:
            return None
        cached = self._cache.get(segment.number)
        if cached is not None and cached.block_known:
            return cached.block
        self._look()
        found = self._open(segment)
        self._cache.put_block(segment.number, found)
        return found

    def _open(self, segment: Segment) -> Block | None:
        folder = self._store / block_name(segment.number)
        if segment.cold:
            try:
                main = folder / main_chunk(segment.main)
                if is_stub(main):
                    raise StoreError("open segment", main, "its rows were evicted to a bucket", _EVICTED)
                return open_cold(folder)
            except FileNotFoundError as error:
                raise StoreError("open segment", error.filename, "no such file", _GONE) from None
        try:
            block = Block(MappedFolder(folder))
            if block.first is None:
                return None
            _ = block.frames, block.checksum_now
        except (OSError, ValueError, KeyError) as error:
            raise StoreError("read checksums", folder, repr(error)) from None
        return block

    def cold(self, segment: Segment) -> ColdBlock:
        """The block of a cold segment."""
        block = self.block(segment)
        assert isinstance(block, ColdBlock)
        return block

    def forget(self, number: int) -> None:
        """Look at a segment's files anew: they were erased from, or moved."""
        self._cache.forget(number)

    def tidy(self) -> None:
        """Let go of segments that were removed: until then their bytes stay on the disk."""
        self._tidied_s = time.monotonic()
        self._cache.tidy(lambda number: any((self._store / name(number)).exists() for name in (block_name, open_name)))

    def close(self) -> None:
        """Forget all maps; they are unmapped when no array views them any more."""
        self._cache.clear()

    def _look(self) -> None:
        """``tidy``, now and then: who reads on has no bytes for long that others took away."""
        if time.monotonic() > self._tidied_s + _TIDY_S:
            self.tidy()


def opened(store: Path, segment: Segment, how: Callable[[Path], T]) -> tuple[Path, T]:
    """Open a segment's file: its path and what ``how`` makes of it; StoreError where there is none."""
    places = segment_places(store, segment.number, segment.main)
    # A segment moves once, from the last place to the first, while it is sealed. Looking from the last to the
    # first and then once more finds it wherever it is at that moment.
    for path in (*places[::-1], *places):
        try:
            if segment.sealed and is_stub(path):
                raise StoreError("open segment", path, "its rows were evicted to a bucket", _EVICTED)
            return path, how(path)
        except FileNotFoundError:
            continue
    raise StoreError("open segment", places[0], "no such file", _GONE)
