"""``raw``: the row as it is, in the model's dtype."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas.codecs.declare import F32, CodecFamily, Pieces, Stream, bfloat16_to_float32, float_stream
from schemas.native.loops import loops_for

_NUMBERS_A_PIECE: Final = 256  # of them NumPy takes as much longer than machine code as Python does of one hash


def streams(width: int, dtype: str) -> tuple[Stream, ...]:
    """One stream ``x`` of the row's own numbers."""
    return (float_stream("x", dtype, (width,)),)


def decode(pieces: Pieces, width: int, dtype: str) -> F32:
    """Widen to float32, exactly."""
    x = pieces["x"]
    if dtype == "bfloat16":
        return bfloat16_to_float32(x)
    if dtype == "float16" and (loop := loops_for(x.size // _NUMBERS_A_PIECE)) is not None:
        flat, wide = np.ascontiguousarray(x).reshape(-1).view(np.float16), np.empty(x.shape, np.float32)
        numbers = wide.reshape(-1)
        loop.widened(flat.view(np.uint16), numbers)
        return wide
    return x.astype(np.float32)


def decode_as(pieces: Pieces, width: int, dtype: str, wanted: str) -> npt.NDArray[Any] | None:
    """The stored rows themselves, not a copy, where their dtype is wanted."""
    return pieces["x"] if wanted == dtype else None


FAMILY: Final = CodecFamily("raw", streams, decode, "the model's own dtype, bit for bit", "exact", "x",
                            decode_as=decode_as)
