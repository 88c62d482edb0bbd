"""uint8 with a scale and a zero point a row: what ``full8``, ``topk8`` and ``rp8`` make of their numbers.

Encoding of numbers y: s = bfloat16(max((max y − min y) / 253, max|y| / 32000)), rounded up; z = −round(min y / s);
q = clip(round(y / s) + z, 0, 254), round half to even. The zero point lies anywhere in int16, not in 0..255 alone, so
that numbers far from 0 keep their precision. 255 is the fill of a missing row. Numbers with a NaN or an infinity among
them have the scale NaN and decode to NaN. A row of zeros has scale, zero point and codes 0.
Decoding: y = (q − z) * s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.codecs.declare import Stream, bfloat16_to_float32, float_stream

SPAN: Final = 253
ZERO_MAX: Final = 32000
FILL: Final = 255


def scale_and_zero() -> tuple[Stream, Stream]:
    """``scale`` bfloat16 and ``zero`` int16 of the row."""
    return float_stream("scale", "bfloat16", (1,)), Stream("zero", "int16", (1,), -(1 << 15))


def numbers(pieces: Mapping[str, npt.NDArray[np.generic]]) -> npt.NDArray[np.float32]:
    """float32 of the codes ``q``, in their shape."""
    y = pieces["q"].astype(np.float32)
    y -= pieces["zero"].astype(np.float32)
    y *= bfloat16_to_float32(pieces["scale"].view(np.uint16))
    return y
