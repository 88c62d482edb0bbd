"""Segments of a store's folder, some of whose blocks were evicted: the rows of these come out of the bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas import limits
from schemas.catalog.records import Segment
from schemas.errors import BucketError, CorruptError, StoreError, TapError
from schemas.objects.block_objects import BlockObjects
from schemas.objects.chunk_cache import ChunkCache, Sparing, default_cache, make_private
from schemas.objects.evicted import Evicted, EvictedWatch, evicted_numbers, read_away, read_evicted
from schemas.objects.layout import Stored
from schemas.objects.objects import Objects
from schemas.read.evicted.blocks import object_mismatch, open_objects, sealed_rows
from schemas.read.segment_maps import FrameRows, SegmentMaps
from schemas.store.block import Block
from schemas.store.block_files import Batch

__all__ = ["LocalSegments"]

I64 = npt.NDArray[np.int64]
_LOST: Final = "its rows were evicted from this disk: vllm-tap fsck says what the bucket has lost"


class EvictedObjects(BlockObjects):
    """Same as BlockObjects; StoreError where the bucket has lost what it must have: the block may be on the disk again.
    """

    def __init__(self, objects: Objects, cache: ChunkCache, key: str, index: Stored, sparing: Sparing | None) -> None:
        with _told():
            super().__init__(objects, cache, key, index, sparing)

    def batches(self, name: str, starts: I64, nbytes: I64 | int) -> Iterator[Batch]:
        """Pieces in the order of their starts."""
        with _told():
            yield from super().batches(name, starts, nbytes)


class LocalSegments(SegmentMaps):
    """Segments by their numbers. Rows that are evicted are kept in ``cache``, at most ``cache_bytes`` of them.

    ``answer_s`` and ``sweepers`` are as of a reader of a bucket.
    """

    def __init__(self, store: Path, uuid: bytes, cache: Path | None = None, cache_bytes: int | None = None,
                 answer_s: float | None = None, sweepers: int = 0) -> None:
        super().__init__(store, uuid)
        self._answer_s, self._sweepers = answer_s, sweepers
        self._sparing: Sparing | None = None
        self._cache_folder = cache
        self._cache_bytes = limits.bucket_cache_bytes if cache_bytes is None else cache_bytes
        self._chunks: ChunkCache | None = None
        self._objects: dict[str, Objects] = {}
        self._watch = EvictedWatch(store)
        self._away: dict[int, Evicted | None] = {}  # of sealed segments that were looked at

    def rows_of(self, segment: Segment, offset: int) -> FrameRows:
        """The description of the rows of the frame at ``offset``."""
        if segment.cold or self._of(segment) is None:
            return super().rows_of(segment, offset)
        block = self.block(segment)
        assert block is not None
        return sealed_rows(block, offset)

    def data(self, segment: Segment, fresh: bool = False) -> tuple[Path, memoryview]:
        """Same as for any segment; StoreError where its rows are evicted: its frames are not read from a bucket."""
        if (found := self._of(segment)) is not None:
            raise StoreError("read frames", f"{found.url}/{found.key}", "its rows were evicted from this disk",
                             "ask for slices or rows")
        return super().data(segment, fresh)

    def mismatch(self, segment: Segment, offset: int) -> CorruptError:
        """Same as for any segment; what the cache has of an evicted block is read from the bucket again."""
        if (block := self.block(segment)) is not None and isinstance(block.files, BlockObjects):
            return object_mismatch(block, offset)
        return super().mismatch(segment, offset)

    def forget(self, number: int) -> None:
        """Look at a segment's files anew: they were erased from, moved, evicted, or brought back."""
        self._away.pop(number, None)
        super().forget(number)

    def tidy(self) -> None:
        """Let go of what was removed or evicted since: until then its bytes stay on the disk."""
        super().tidy()
        if not self._watch.has_moved():
            return
        now = evicted_numbers(self._store)
        for number, known in list(self._away.items()):
            try:
                found = read_evicted(self._store, number) if number in now else None
            except StoreError:  # a read of that block says what is wrong with its record
                self.forget(number)
                continue
            if found != known:
                self.forget(number)
        if self._chunks is not None or (self._folder() / "evicted").exists():  # what an earlier process has kept too
            self._keep(self._cached())

    def close(self) -> None:
        """Forget all maps, and release the connections."""
        super().close()
        for objects in self._objects.values():
            objects.close()
        self._objects.clear()

    def _of(self, segment: Segment) -> Evicted | None:
        """The record of a block whose rows are away."""
        if not segment.sealed:
            return None
        try:
            return self._away[segment.number]
        except KeyError:
            found = self._away[segment.number] = read_away(self._store, segment.number)
            return found

    def _open(self, segment: Segment) -> Block | None:
        if (found := self._of(segment)) is None:
            return super()._open(segment)
        try:
            if found.url not in self._objects:
                self._objects[found.url] = Objects(found.url, answer_s=self._answer_s)
            cache = self._cached()
        except BucketError:
            raise
        except TapError as error:  # no client of buckets is installed, or there is no place for the cache
            raise StoreError("read evicted rows", f"{found.url}/{found.key}", error) from None
        with _told():
            return open_objects(EvictedObjects(self._objects[found.url], cache, found.key, found.index, self._sparing),
                                segment.cold)

    def _cached(self) -> ChunkCache:
        if self._chunks is None:
            folder = self._folder()
            try:
                make_private(folder)
                self._chunks = ChunkCache(folder / "evicted", self._cache_bytes)
                self._keep(self._chunks)
                self._sparing = Sparing(self._chunks.room // self._sweepers) if self._sweepers else None
            except OSError as error:
                raise TapError(f"cache = {str(folder)!r}: {error}; name another one") from None
        return self._chunks

    def _folder(self) -> Path:
        return (default_cache() if self._cache_folder is None else self._cache_folder) / self._uuid.hex()

    def _keep(self, chunks: ChunkCache) -> None:
        """Drop what is of no evicted block: it may be rows that were deleted since."""
        try:
            known = [read_evicted(self._store, number) for number in evicted_numbers(self._store)]
        except StoreError:  # of one that cannot be read it is not known what it keeps
            return
        chunks.keep(found.key for found in known if found is not None)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BucketError as error:
        if error.passing:
            raise
        raise StoreError(error.op, error.url, error.reason, _LOST) from None
