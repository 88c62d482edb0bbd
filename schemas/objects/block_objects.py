"""The files of a block in a bucket: small ones out of its index, read once; rows by ranges, through a cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas import limits
from schemas.errors import BucketError, CorruptError
from schemas.objects.chunk_cache import ChunkCache
from schemas.objects.layout import END, INDEX, Stored, digest, unpack_index
from schemas.objects.objects import Objects
from schemas.store.block_files import Batch

__all__ = ["BlockObjects"]

CHUNK: Final = limits.bucket_chunk_bytes
_GAP_CHUNKS: Final = 2  # that nobody asked for are read with those around them: it takes no longer than another request
_GONE: Final = "a later push deletes what had rows of deleted captures: refresh() the store, or open it anew"
I64 = npt.NDArray[np.int64]


class BlockObjects:
    """A block's files as schemas.store.block_files.BlockFiles; ``key`` is its folder, ``index`` what its index must be.

    BucketError where the bucket has not what it must have; CorruptError where rows are said to lie beyond an object.
    """

    def __init__(self, objects: Objects, cache: ChunkCache, key: str, index: Stored) -> None:
        self._objects, self._cache, self._key = objects, cache, key
        self._files, self._sizes = unpack_index(self._index(index), f"{self.where()}/{INDEX}")

    def _index(self, wanted: Stored) -> bytes:
        """The index, out of the cache or the bucket."""
        name = f"{self._key}/{INDEX}"
        if not 0 < wanted.nbytes <= limits.bucket_index_bytes_max:
            raise BucketError("read", self.where(INDEX), f"an index of {wanted.nbytes:,} bytes")
        kept = bytearray(wanted.nbytes)
        if self._cache.read(name, memoryview(kept)) and digest(kept) == wanted.xxh3:
            return bytes(kept)
        try:
            data, _ = self._objects.get(name, wanted.nbytes)
        except FileNotFoundError:
            raise BucketError("read", self.where(INDEX), "it is not there", _GONE) from None
        if Stored(len(data), digest(data)) != wanted:
            raise BucketError("read", self.where(INDEX), "it does not match its checksum")
        self._cache.put(name, data)
        return data

    def where(self, name: str = "") -> str:
        """The URL."""
        return f"{self._objects.url}/{self._key}" + (f"/{name}" if name else "")

    def has(self, name: str) -> bool:
        """Whether there is such an object."""
        return name in self._sizes

    def weight(self, mapped: int) -> int:
        """Its index is in memory: each of its MiB is as a file."""
        return 1 + (sum(map(len, self._files.values())) >> 20)

    def there(self) -> bool:
        """Blocks in a bucket stay."""
        return True

    def array(self, name: str, dtype: np.dtype[Any] | str, count: int = -1) -> npt.NDArray[Any]:
        """A small file; it cannot be written to."""
        return np.frombuffer(self.view(name), dtype, count)

    def view(self, name: str) -> memoryview:
        """A small file whole; BucketError of one with rows."""
        if name in self._files:
            return memoryview(self._files[name])
        if name in self._sizes:
            raise BucketError("read", self.where(name), "rows are read by ranges, not whole")
        raise FileNotFoundError(self.where(name))

    def end(self, name: str, nbytes: int) -> memoryview:
        """The shard index at the end of the main object."""
        return memoryview(self._files[END + name])[-nbytes:]

    def forget(self) -> None:
        """Drop all of the block from the cache: something in it was not what was stored."""
        for name, stored in self._sizes.items():
            if name not in self._files:
                for chunk in range(-(-stored.nbytes // CHUNK)):
                    self._cache.drop(self._chunk(name, chunk))

    def batches(self, name: str, starts: I64, nbytes: I64 | int) -> Iterator[Batch]:
        """Pieces in the order of their starts, at most ``limits.bucket_batch_bytes`` of chunks at a time."""
        if not len(starts):
            return
        if name in self._files:
            yield slice(None), memoryview(self._files[name]), starts
            return
        size, ends = self._sizes[name].nbytes, starts + nbytes
        if starts.min() < 0 or ends.max() > size:
            raise CorruptError("read rows", self.where(name), f"it has {size} bytes, rows lie beyond")
        order = np.argsort(starts, kind="stable")
        first, last = starts[order] // CHUNK, np.maximum(ends[order] - 1, starts[order]) // CHUNK
        reach = np.maximum.accumulate(last)
        new = np.maximum(reach - np.maximum(np.append(-1, reach[:-1]), first - 1), 0)  # chunks that none before needs
        batch = np.cumsum(new) // (limits.bucket_batch_bytes // CHUNK)
        cuts = (np.flatnonzero(np.diff(batch)) + 1).tolist()
        for begin, stop in pairwise([0, *cuts, len(order)]):
            which = order[begin:stop]
            needed = _expanded(first[begin:stop], last[begin:stop])
            yield which, self._gathered(name, needed), np.searchsorted(needed, first[begin:stop]) * CHUNK + (
                starts[which] % CHUNK)

    def _gathered(self, name: str, needed: I64) -> memoryview:
        """Chunks, ascending, one after the other; out of the cache, or the bucket."""
        out = memoryview(bytearray(len(needed) * CHUNK))
        size = self._sizes[name].nbytes
        missing = []
        for number, chunk in enumerate(needed.tolist()):
            nbytes = min(CHUNK, size - chunk * CHUNK)
            if not self._cache.read(self._chunk(name, chunk), out[number * CHUNK:number * CHUNK + nbytes]):
                missing.append(chunk)
        place = dict(zip(needed.tolist(), range(len(needed)), strict=True))
        runs = list(_runs(missing))
        spans = [(first * CHUNK, min((last + 1) * CHUNK, size)) for first, last in runs]
        try:
            read = self._objects.ranges(f"{self._key}/{name}", spans) if runs else []
        except FileNotFoundError:
            raise BucketError("read", self.where(name), "it is not there", _GONE) from None
        for (first, last), data in zip(runs, read, strict=True):
            for chunk in range(first, last + 1):
                part = data[(chunk - first) * CHUNK:(chunk - first + 1) * CHUNK]
                self._cache.put(self._chunk(name, chunk), part)
                if (at := place.get(chunk)) is not None:
                    out[at * CHUNK:at * CHUNK + len(part)] = part
        return out

    def _chunk(self, name: str, chunk: int) -> str:
        return f"{self._key}/{name}:{chunk}"


def _expanded(first: I64, last: I64) -> I64:
    """Every number that is in one of the ranges ``[first, last]``, once, ascending."""
    counts = last - first + 1
    begins = np.repeat(first - np.append(0, np.cumsum(counts)[:-1]), counts)
    return np.unique(begins + np.arange(len(begins)))


def _runs(chunks: list[int]) -> Iterator[tuple[int, int]]:
    """First and last chunk of each request: those near each other together, at most ``bucket_request_bytes_max``."""
    most = limits.bucket_request_bytes_max // CHUNK
    begin = 0
    for at in range(1, len(chunks) + 1):
        if at == len(chunks) or chunks[at] - chunks[at - 1] > 1 + _GAP_CHUNKS or chunks[at] - chunks[begin] >= most:
            yield chunks[begin], chunks[at - 1]
            begin = at
