"""``fp8row``: 8-bit floats (e4m3) with one bfloat16 scale a row.

Encoding of a row x: s = bfloat16(max|x| / 448), rounded up; q = e4m3(x / s), round half to even. No code is NaN
(0x7f, 0xff): 0x7f is the fill of a missing row. A row with a NaN or an infinity has the scale NaN and decodes to NaN.
Decoding: x = e4m3(q) * s. e4m3 is sign, 4 bits of exponent (bias 7), 3 of mantissa, without infinities
(OCP 8-bit floating point specification, E4M3).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from schemas.codecs.declare import F32, CodecFamily, Pieces, Stream, bfloat16_to_float32, float_stream

LARGEST: Final = 448.0


def streams(width: int, dtype: str) -> tuple[Stream, ...]:
    """``q`` e4m3 bits and ``scale`` of the row; the same for every model dtype."""
    return Stream("q", "uint8", (width,), 0x7F, view="float8_e4m3fn"), float_stream("scale", "bfloat16", (1,))


def decode(pieces: Pieces, width: int, dtype: str) -> F32:
    """Rows of float32 ``[..., width]``."""
    x = _VALUES[pieces["q"].view(np.uint8)]
    x *= bfloat16_to_float32(pieces["scale"])
    return x


def _values() -> F32:
    """The number that each of the 256 codes stands for."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    size[code & 127 == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


_VALUES: Final = _values()


FAMILY: Final = CodecFamily(
    "fp8row", streams, decode, "8-bit floats (e4m3) with a bfloat16 scale a row",
    "at most 2^-4 of a number's size, or 2^-10 of the row's scale where that is more", "x = float8_e4m3fn(q) * scale")
