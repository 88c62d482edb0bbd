"""``nf4b64``: 4-bit normal-floats in blocks of 64 columns, the 8 largest entries kept apart.

Encoding of a row x of width W: the 8 entries of largest magnitude are stored as (index, bfloat16 value) and taken as 0
in the blocks. Each block b of 64 columns has the scale s_b = bfloat16(max|x|), rounded up. Each x / s_b becomes the
number of the nearest of 15 LEVELS, or of the smaller one halfway between two. A byte holds two numbers, the first
column's in its lower half. An odd last column has 7 (the level 0) beside it. No level has the number 15, so the byte
255 is the fill of a missing row.
Decoding: x = LEVELS[number] * s_b, then the outliers put back.

LEVELS are quantiles of a normal distribution, largest 1, as in QLoRA (Dettmers et al. 2023, section 3), whose 16 levels
have one more on the positive side.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Final

import numpy as np

from schemas.codecs.declare import BFLOAT16_ERROR, F32, CodecFamily, Pieces, Stream, bfloat16_to_float32, float_stream
from schemas.codecs.int8b64 import BLOCK, outlier_streams, put_back, times_scale


def _levels() -> F32:
    quantiles = np.array([NormalDist().inv_cdf(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]])
    half = quantiles / quantiles[0]
    levels: F32 = np.concatenate([-half, [0.0], half[::-1]]).astype(np.float32)
    return levels


LEVELS: Final = _levels()
BETWEEN: Final = ((LEVELS[1:] + LEVELS[:-1]) / 2).astype(np.float32)


def streams(width: int, dtype: str) -> tuple[Stream, ...]:
    """``q`` two numbers a byte, ``scale`` a block, and the outliers; the same for every model dtype."""
    return (
        Stream("q", "uint8", (-(-width // 2),), 255),
        float_stream("scale", "bfloat16", (-(-width // BLOCK),)),
        *outlier_streams(width),
    )


def decode(pieces: Pieces, width: int, dtype: str) -> F32:
    """Rows of float32 ``[..., width]``."""
    q = pieces["q"].view(np.uint8)
    numbers = np.stack([q & 15, q >> 4], axis=-1).reshape(*q.shape[:-1], -1)[..., :width]
    x = LEVELS[np.minimum(numbers, 14)]
    times_scale(x, bfloat16_to_float32(pieces["scale"]))
    return put_back(x, pieces)


FAMILY: Final = CodecFamily(
    "nf4b64", streams, decode,
    "4-bit normal-floats in blocks of 64 columns with a bfloat16 scale, 8 largest entries kept apart",
    f"at most 0.153 of a block's scale a column, outliers {BFLOAT16_ERROR}",
    "x[c] = level[(q[c // 2] >> 4 * (c % 2)) & 15] * scale[c // 64]; then x[outlier_index] = outlier_value; "
    f"level = {[round(float(level), 7) for level in LEVELS]}")
