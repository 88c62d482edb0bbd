"""``full8``: the row as uint8 with a scale and a zero point, as ``topk8`` and ``rp8`` code numbers. A legacy codec.

Encoding of numbers y: the scale is s = bfloat16(max((max y − min y) / 253, max|y| / 32000)), rounded up. The zero point
is z = −round(min y / s). The codes are q = clip(round(y / s) + z, 0, 254), round half to even. The zero point lies
anywhere in int16, not in 0..255 alone, so that numbers far from 0 keep their precision. 255 is the fill of a missing
row. Numbers with a NaN or an infinity among them have the scale NaN and decode to NaN. A row of zeros has scale, zero
point and codes 0.
Decoding: y = (q − z) * s.

One column a thousand times larger than the rest takes the whole range: the others are lost in its scale.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from schemas.codecs.declare import F32, CodecFamily, Pieces, Stream, bfloat16_to_float32, float_stream

SPAN: Final = 253
ZERO_MAX: Final = 32000
FORMULA: Final = "(q - zero) * scale"


def coded(count: int) -> tuple[Stream, Stream, Stream]:
    """``q`` codes of ``count`` numbers, their ``scale`` bfloat16 and ``zero`` int16."""
    return (Stream("q", "uint8", (count,), 255), float_stream("scale", "bfloat16", (1,)),
            Stream("zero", "int16", (1,), -(1 << 15)))


def numbers(pieces: Pieces) -> F32:
    """float32 of the codes ``q``, in their shape."""
    y = pieces["q"].astype(np.float32)
    y -= pieces["zero"].astype(np.float32)
    y *= bfloat16_to_float32(pieces["scale"])
    return y


def streams(width: int, dtype: str) -> tuple[Stream, ...]:
    """``q``, ``scale`` and ``zero`` of the row; the same for every model dtype."""
    return coded(width)


def decode(pieces: Pieces, width: int, dtype: str) -> F32:
    """Rows of float32 ``[..., width]``."""
    return numbers(pieces)


FAMILY: Final = CodecFamily(
    "full8", streams, decode, "uint8 with a scale and a zero point a row",
    "at most 0.51 of the row's scale (its range / 253): one massive column hides the others", f"x = {FORMULA}",
    legacy=True)
