"""The files of a block in a bucket: small ones out of its index, read once; rows by ranges, through a cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas import limits
from schemas.errors import BucketError, CorruptError
from schemas.objects.chunk_cache import ChunkCache, Sparing
from schemas.objects.layout import END, INDEX, Stored, digest, unpack_index
from schemas.objects.objects import Objects
from schemas.store.block_files import Batch

__all__ = ["BlockObjects"]

CHUNK: Final = limits.bucket_chunk_bytes
_GAP_CHUNKS: Final = 2  # that nobody asked for are read with those around them: it takes no longer than another request
_GAP_SHARE: Final = 32  # of a request past the cache, what lies between pieces is at most such a part
_GONE: Final = "a later push deletes what had rows of deleted captures: refresh() the store, or open it anew"
I64 = npt.NDArray[np.int64]


class BlockObjects:
    """A block's files as schemas.store.block_files.BlockFiles; ``key`` is its folder, ``index`` what its index must be.

    With ``sparing``, as a reader has that goes over many rows, what the cache may not take is read by its bytes alone.
    BucketError where the bucket has not what it must have; CorruptError where rows are said to lie beyond an object.
    """

    def __init__(self, objects: Objects, cache: ChunkCache, key: str, index: Stored, sparing: Sparing | None = None
                 ) -> None:
        self._objects, self._cache, self._key, self._sparing = objects, cache, key, sparing
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
            yield which, self._gathered(name, needed, starts[which], ends[which]), np.searchsorted(
                needed, first[begin:stop]) * CHUNK + starts[which] % CHUNK

    def _gathered(self, name: str, needed: I64, starts: I64, ends: I64) -> memoryview:
        """Chunks, ascending, one after the other, with the pieces at least that begin at ``starts``, ascending; out of
        the cache, or the bucket.
        """
        out = memoryview(bytearray(len(needed) * CHUNK))
        size = self._sizes[name].nbytes
        missing, past = list[int](), list[int]()
        for number, chunk in enumerate(needed.tolist()):
            nbytes = min(CHUNK, size - chunk * CHUNK)
            if not self._cache.read(self._chunk(name, chunk), out[number * CHUNK:number * CHUNK + nbytes]):
                (missing if self._sparing is None or self._sparing.take(nbytes) else past).append(chunk)
        place = dict(zip(needed.tolist(), range(len(needed)), strict=True))
        runs = list(_runs(missing, _GAP_CHUNKS if self._sparing is None else 0))
        spans = [(first * CHUNK, min((last + 1) * CHUNK, size)) for first, last in runs]
        pieces = list(_spans(past, starts, np.maximum.accumulate(ends)))
        try:
            read = self._objects.ranges(f"{self._key}/{name}", spans + pieces) if runs or pieces else []
        except FileNotFoundError:
            raise BucketError("read", self.where(name), "it is not there", _GONE) from None
        for (first, last), data in zip(runs, read, strict=False):
            for chunk in range(first, last + 1):
                part = data[(chunk - first) * CHUNK:(chunk - first + 1) * CHUNK]
                self._cache.put(self._chunk(name, chunk), part)
                if (at := place.get(chunk)) is not None:
                    out[at * CHUNK:at * CHUNK + len(part)] = part
        for (start, _), data in zip(pieces, read[len(runs):], strict=True):
            begin = place[start // CHUNK] * CHUNK + start % CHUNK
            out[begin:begin + len(data)] = data
            if self._sparing is not None:
                self._sparing.past(len(data))
        return out

    def _chunk(self, name: str, chunk: int) -> str:
        return f"{self._key}/{name}:{chunk}"


def _expanded(first: I64, last: I64) -> I64:
    """Every number that is in one of the ranges ``[first, last]``, once, ascending."""
    counts = last - first + 1
    begins = np.repeat(first - np.append(0, np.cumsum(counts)[:-1]), counts)
    return np.unique(begins + np.arange(len(begins)))


def _runs(chunks: list[int], gap: int) -> Iterator[tuple[int, int]]:
    """First and last chunk of each request: those with ``gap`` others at most between them together, of at most
    ``bucket_request_bytes_max``.
    """
    most = limits.bucket_request_bytes_max // CHUNK
    begin = 0
    for at in range(1, len(chunks) + 1):
        if at == len(chunks) or chunks[at] - chunks[at - 1] > 1 + gap or chunks[at] - chunks[begin] >= most:
            yield chunks[begin], chunks[at - 1]
            begin = at


def _spans(chunks: list[int], starts: I64, ends: I64) -> Iterator[tuple[int, int]]:
    """Bytes of each request for the parts of pieces in some chunks, both ascending: hardly more than these."""
    for first, last in _runs(chunks, 0):
        low, high = first * CHUNK, (last + 1) * CHUNK
        among = slice(ends.searchsorted(low, "right"), starts.searchsorted(high))
        begins, stops = starts[among].clip(low), ends[among].clip(max=high)
        apart = np.flatnonzero(begins[1:] > stops[:-1])
        start, wanted, stop = low, 0, low
        for begin, end in zip(begins[[0, *apart + 1]].tolist(), stops[[*apart, -1]].tolist(), strict=True):
            if (end - start - wanted - (end - begin)) * _GAP_SHARE > end - start:
                if wanted:
                    yield start, stop
                start, wanted = begin, 0
            wanted, stop = wanted + end - begin, end
        if wanted:
            yield start, stop
