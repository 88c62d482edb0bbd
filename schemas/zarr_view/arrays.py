"""Arrays of a Zarr view: their metadata, and chunks that are made when they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from schemas.store.paths import array_document

__all__ = ["Value", "ViewArray", "chunk_of", "document_value", "is_chunk"]

Array = npt.NDArray[Any]
Spans = tuple[slice, ...]
_FILLS: Final[dict[str, Any]] = {"float32": "NaN", "bool": False}
_CHUNK: Final = re.compile(r"([A-Za-z0-9_./-]{1,255})/c((?:/(?:0|[1-9][0-9]{0,11})){1,3})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a key: its bytes, made by ``read``, their number and their entity tag."""

    size: int
    tag: str
    read: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class ViewArray:
    """An array of a view, in chunks of the shape ``chunk``.

    ``make`` gives the numbers within the spans of one chunk, cut off where the array ends; ``state``, where they take
    long to make, something that differs whenever they do.
    """

    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    names: tuple[str, ...]
    make: Callable[..., Array]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    state: Callable[[Spans], object] | None = None

    @property
    def chunks(self) -> tuple[int, ...]:
        """Number of chunks by axis."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))

    def document(self) -> dict[str, Any]:
        """Its ``zarr.json``."""
        return array_document(self.shape, self.dtype, _FILLS.get(self.dtype, 0), None, self.attributes, self.names,
                              self.chunk)

    def value(self, at: tuple[int, ...]) -> Value | None:
        """The chunk at these numbers; None where there is none."""
        if len(at) != len(self.shape) or any(number >= count for number, count in zip(at, self.chunks, strict=True)):
            return None
        spans = tuple(slice(number * step, min((number + 1) * step, size))
                      for number, step, size in zip(at, self.chunk, self.shape, strict=True))
        nbytes = int(np.prod(self.chunk)) * np.dtype(self.dtype).itemsize
        if self.state is None:
            made = self._bytes(spans)
            return Value(nbytes, _tag(made), lambda: made)
        return Value(nbytes, _tag(repr((at, self.chunk, self.state(spans))).encode()),
                     lambda: self._bytes(spans))

    def _bytes(self, spans: Spans) -> bytes:
        """A chunk, whole: past the end of the array it is filled up."""
        made = self.make(*spans)
        dtype = np.dtype(self.dtype).newbyteorder("<")
        if made.shape == self.chunk:
            return np.ascontiguousarray(made, dtype).tobytes()
        whole = np.full(self.chunk, np.nan if dtype.kind == "f" else 0, dtype)
        whole[tuple(slice(size) for size in made.shape)] = made
        return whole.tobytes()


def _tag(content: bytes) -> str:
    return f'"{xxhash.xxh3_128_hexdigest(content)}"'


def document_value(document: bytes) -> Value:
    """Metadata as the value of a key."""
    return Value(len(document), _tag(document), lambda: document)


def is_chunk(key: str) -> bool:
    """Whether a key is one of a chunk. A reader of Zarr takes a chunk that is not found for one of fill values: that a
    capture is gone must not be told in that way.
    """
    return _CHUNK.fullmatch(key) is not None


def chunk_of(key: str) -> tuple[str, tuple[int, ...]] | None:
    """The path of an array and the numbers of one of its chunks; None where the key is none of a chunk."""
    match = _CHUNK.fullmatch(key)
    return None if match is None else (match[1], tuple(map(int, match[2][1:].split("/"))))
