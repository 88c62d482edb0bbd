"""Stored rows as tensors of a dtype to train in: fast where a codec allows it, exact wherever ``schemas.codecs`` is.

What is fast is bit for bit what decoding to float32 and rounding once gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from schemas import codecs
from schemas.codecs import raw16
from schemas.codecs.int8b64 import BLOCK
from schemas.read.slices import RowFormat

__all__ = ["decode", "fresh", "is_as_stored"]

_CACHED_ROWS: Final = 64
Bytes = npt.NDArray[np.uint8]
_TORCH: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def is_as_stored(kind: RowFormat, dtype: torch.dtype) -> bool:
    """Whether the stored bytes are the numbers wanted."""
    return _stored_dtype(kind) is dtype


def _stored_dtype(kind: RowFormat) -> torch.dtype | None:
    """The dtype of rows that are stored as they are."""
    return {"raw": _TORCH[kind.dtype], "raw16": _TORCH[raw16.stored(kind.dtype)]}.get(kind.codec)


def fresh(rows: int, nbytes: int) -> Bytes:
    """Memory uint8 ``[rows, nbytes]``: NumPy asks the system for huge pages, torch for thousands of small ones."""
    return np.empty((rows, nbytes), np.uint8)


def decode(kind: RowFormat, stored: Mapping[str, Bytes], dtype: torch.dtype, memory: Callable[[int, int], Bytes] = fresh
           ) -> torch.Tensor:
    """Rows ``[n, decoded width]`` of ``dtype`` from the bytes of their pieces, uint8 ``[n, piece bytes]`` by stream.

    They are a view of ``stored`` where that is what is wanted, or may be in memory asked for as from ``fresh``.
    """
    if (plain := _stored_dtype(kind)) is not None:
        return torch.from_numpy(stored["x"]).view(plain).to(dtype)
    if kind.codec == "int8b64":
        return _int8b64(kind, stored, dtype, memory)
    pieces = {stream.name: stored[stream.name].view(stream.dtype).reshape(-1, *stream.shape) for stream in kind.streams}
    return torch.from_numpy(codecs.decode(kind.codec, pieces, kind.width, kind.dtype)).to(dtype)


def _int8b64(kind: RowFormat, stored: Mapping[str, Bytes], dtype: torch.dtype, memory: Callable[[int, int], Bytes]
             ) -> torch.Tensor:
    """A code times its scale is exact in float32; bfloat16 products of the two are rounded once, as from there."""
    working = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    q = torch.from_numpy(stored["q"]).view(torch.int8)
    scale = torch.from_numpy(stored["scale"]).view(torch.bfloat16)
    wide = stored["outlier_index"].view(np.uint16 if kind.width <= 0xFFFF else np.uint32)
    columns, values = torch.from_numpy(wide.astype(np.int64)), torch.from_numpy(stored["outlier_value"])
    x = torch.from_numpy(memory(len(q), kind.width * working.itemsize)).view(working)
    inside = kind.width // BLOCK * BLOCK
    for begin in range(0, len(q), _CACHED_ROWS):  # few enough that every pass finds them in the cache
        rows = slice(begin, begin + _CACHED_ROWS)
        part, steps = x[rows], scale[rows].to(working)
        part.copy_(q[rows])
        part[:, :inside].unflatten(1, (-1, BLOCK)).mul_(steps[:, :inside // BLOCK, None])
        part[:, inside:].mul_(steps[:, inside // BLOCK:])
        part[torch.arange(len(part))[:, None], columns[rows]] = values[rows].view(torch.bfloat16).to(working)
    return x.to(dtype)
