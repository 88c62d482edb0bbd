"""``int8b64``: int8 in blocks of 64 columns, a bfloat16 scale a block, the 8 largest entries kept apart.

Encoding of a row x of width W: the OUTLIERS entries of largest magnitude are stored as (index, bfloat16 value) and
taken as 0 in the blocks. Each block b of 64 columns has the scale s_b = bfloat16(max|x| / 127) and the codes q =
clip(round(x / s_b), -127, 127), round half to even. -128 is never emitted: it is the fill of a missing row.
Decoding: x = q * s_b, then the outliers put back.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas.codecs.declare import (
    BFLOAT16_ERROR,
    F32,
    CodecFamily,
    Pieces,
    Stream,
    bfloat16_to_float32,
    float_stream,
    index_dtype,
)
from schemas.native.loops import loops_for

BLOCK: Final = 64
OUTLIERS: Final = 8
_CACHED_NUMBERS: Final = 1 << 16


def outlier_count(width: int) -> int:
    """The count of entries that a row keeps apart: OUTLIERS, or fewer in a very narrow row."""
    return min(OUTLIERS, width)


def outlier_streams(width: int) -> tuple[Stream, Stream]:
    """``outlier_index`` and ``outlier_value`` of the entries kept apart."""
    count, index = outlier_count(width), index_dtype(width)
    return (
        Stream("outlier_index", index, (count,), int(np.iinfo(index).max)),
        float_stream("outlier_value", "bfloat16", (count,)),
    )


def times_scale(x: F32, scale: F32) -> None:
    """Every block of ``x`` by its scale, in place."""
    if x.shape[-1] % BLOCK == 0 and x.flags.c_contiguous:  # four times as fast as with the scales spread out
        blocks = x.reshape(*scale.shape, BLOCK)
        blocks *= scale[..., None]
    else:
        x *= np.repeat(scale, BLOCK, axis=-1)[..., : x.shape[-1]]


def put_back(x: F32, pieces: Pieces) -> F32:
    """``x`` with the entries kept apart in their places."""
    values = bfloat16_to_float32(pieces["outlier_value"])
    np.put_along_axis(x, pieces["outlier_index"].astype(np.int64), values, axis=-1)
    return x


def streams(width: int, dtype: str) -> tuple[Stream, ...]:
    """``q`` codes, ``scale`` a block, and the outliers; the same for every model dtype."""
    return (
        Stream("q", "int8", (width,), -128),
        float_stream("scale", "bfloat16", (-(-width // BLOCK),)),
        *outlier_streams(width),
    )


def decode(pieces: Pieces, width: int, dtype: str) -> F32:
    """Rows of float32 ``[..., width]``."""
    found: F32 | None = decode_as(pieces, width, dtype, "float32")
    if found is not None:
        return found
    q, scale = pieces["q"], bfloat16_to_float32(pieces["scale"])
    x = np.empty(q.shape, np.float32)
    flat, codes, scales = x.reshape(-1, width), q.reshape(-1, width), scale.reshape(-1, scale.shape[-1])
    few = max(1, _CACHED_NUMBERS // width)
    with np.errstate(invalid="ignore"):  # a block of more infinities than outliers decodes to NaN, in silence
        for begin in range(0, len(flat), few):  # few enough that every pass finds them in the cache
            rows = slice(begin, begin + few)
            flat[rows] = codes[rows]
            times_scale(flat[rows], scales[rows])
    return put_back(x, pieces)


def decode_as(pieces: Pieces, width: int, dtype: str, wanted: str) -> npt.NDArray[Any] | None:
    """Rows of float32, float16 or bfloat16 (its bits) in one pass of machine code, two to three times as fast; None
    where there is none for it.
    """
    if width % BLOCK or (loop := loops_for(0)) is None:
        return None
    scale, values = (bfloat16_to_float32(pieces[name]) for name in ("scale", "outlier_value"))
    return loop.decoded(pieces["q"], scale, pieces["outlier_index"].astype(np.int64), values, wanted)


FAMILY: Final = CodecFamily(
    "int8b64", streams, decode, "int8 in blocks of 64 columns with a bfloat16 scale, 8 largest entries kept apart",
    f"at most 0.51 of a block's scale a column, outliers {BFLOAT16_ERROR}",
    "x[c] = q[c] * scale[c // 64]; then x[outlier_index] = outlier_value", decode_as=decode_as)
