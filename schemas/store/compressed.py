"""Compressed chunks of a cold block: bytes shuffled by significance, then Zstandard, as Zarr's codec ``blosc`` has it.

It is worth it for rows that are stored as they are; the codes of the other codecs hardly become smaller.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas.codecs import Stream
from schemas.errors import CorruptError, StoreError
from schemas.store.block_files import BlockFiles

__all__ = ["CompressedChunks", "compressor", "library", "pack"]

_LEVEL: Final = 3
_SHUFFLE_BYTES: Final = 1  # blosc's number for it
_SIZES: Final = struct.Struct("<4xI4xI")  # of a blosc buffer's head: bytes before and after
Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]


def library(path: object) -> ModuleType:
    """The library that compresses; StoreError, with what to install, where it is not there."""
    try:
        from numcodecs import blosc
    except ImportError:
        raise StoreError("open compressed rows", path, "numcodecs is not installed",
                         "pip install 'vllm-tap[zstd]'") from None
    found: ModuleType = blosc
    return found


def compressor(stream: Stream) -> Mapping[str, Any]:
    """The compressor as a Zarr array names it among its codecs."""
    return {"name": "blosc", "configuration": {"cname": "zstd", "clevel": _LEVEL, "shuffle": "shuffle",
                                               "typesize": np.dtype(stream.dtype).itemsize, "blocksize": 0}}


def pack(chunk: memoryview, stream: Stream, path: Path) -> bytes:
    """A chunk, compressed; StoreError where the library is not installed."""
    made: bytes = library(path).compress(chunk, b"zstd", _LEVEL, _SHUFFLE_BYTES, 0, np.dtype(stream.dtype).itemsize)
    return made


@dataclass(frozen=True, slots=True)
class CompressedChunks:
    """Pieces of a stream, ``[pieces, nbytes]``, indexed as an array of them; chunks are unpacked as they are asked for.

    Chunk c has ``rows`` pieces, in the ``sizes[c]`` bytes from ``starts[c]`` on. A damaged one is a CorruptError; where
    not ``strict`` its rows are zeros, for who holds them against their checksums row by row.
    """

    files: BlockFiles
    name: str
    starts: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    rows: int
    nbytes: int
    strict: bool = True

    def lenient(self) -> CompressedChunks:
        """The same, not strict."""
        return replace(self, strict=False)

    def __getitem__(self, which: slice | Index) -> Bytes:
        pieces = np.arange(len(self.starts) * self.rows)[which] if isinstance(which, slice) else which
        flat = pieces.reshape(-1)
        out = np.empty((len(flat), self.nbytes), np.uint8)
        order = np.argsort(flat // self.rows, kind="stable")
        chunks = flat[order] // self.rows
        bounds = np.flatnonzero(np.diff(chunks, prepend=-2, append=-2))
        needed = chunks[bounds[:-1]]
        known = (needed >= 0) & (needed < len(self.starts))
        if self.strict and not known.all():
            raise self._broken(int(needed[~known][0]), "there is no such chunk")
        out[order[~np.repeat(known, np.diff(bounds))]] = 0
        spans = np.stack([bounds[:-1], bounds[1:]], axis=1)[known]
        for chunk, packed, (begin, end) in zip(needed[known].tolist(), self._packed(needed[known]), spans.tolist(),
                                               strict=True):
            at = order[begin:end]
            try:
                out[at] = self._unpacked(chunk, packed)[flat[at] % self.rows]
            except CorruptError:
                if self.strict:
                    raise
                out[at] = 0
        return out.reshape(*pieces.shape, self.nbytes)

    def _packed(self, chunks: Index) -> Iterator[memoryview]:
        """The bytes of chunks; fewer where the file is too short."""
        starts, sizes = (each[chunks].astype(np.int64) for each in (self.starts, self.sizes))
        for which, data, at in self.files.batches(self.name, starts, sizes):
            for begin, size in zip(at.tolist(), sizes[which].tolist(), strict=True):
                yield data[max(begin, 0):max(begin + size, 0)]

    def _broken(self, chunk: int, why: object) -> CorruptError:
        return CorruptError("read compressed rows", f"{self.files.where(self.name)}, chunk {chunk}", why)

    def _unpacked(self, chunk: int, source: memoryview) -> Bytes:
        wanted, size = self.rows * self.nbytes, int(self.sizes[chunk])
        if len(source) != size or size < 16 or _SIZES.unpack_from(source) != (wanted, size):
            raise self._broken(chunk, "its bytes do not say what they must of their size")
        try:
            unpacked = library(self.files.where(self.name)).decompress(source)
        except (RuntimeError, ValueError) as error:
            raise self._broken(chunk, error) from None
        return np.frombuffer(unpacked, np.uint8).reshape(self.rows, self.nbytes)
