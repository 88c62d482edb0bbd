"""``kv8``: int8 with one bfloat16 scale a head, for keys and values. ``qk8`` stores the same for queries and keys.

Encoding of each head's ``head`` columns: s = bfloat16(max|x| / 127), rounded up; q = round(x / s), half to even,
−127 to 127. −128 is the fill of a missing row. A head with a NaN or an infinity has the scale NaN.
Decoding: x = q * s of the column's head.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from schemas.codecs.declare import F32, CodecFamily, Parameter, Pieces, Stream, bfloat16_to_float32, float_stream
from schemas.errors import SpecError


def streams(width: int, dtype: str, head: int) -> tuple[Stream, ...]:
    """``q`` codes and ``scale`` a head; SpecError where the width is not a number of heads."""
    if width % head:
        raise SpecError("codec", f"head={head}", f"valid at width {width}: a size of a head that divides it")
    return Stream("q", "int8", (width,), -128), float_stream("scale", "bfloat16", (width // head,))


def decode(pieces: Pieces, width: int, dtype: str, head: int) -> F32:
    """Rows of float32 ``[..., width]``."""
    x: F32 = pieces["q"].astype(np.float32)
    x *= np.repeat(bfloat16_to_float32(pieces["scale"]), head, axis=-1)
    return x


FAMILY: Final = CodecFamily(
    "kv8", streams, decode, "int8 with a bfloat16 scale a head, for keys and values",
    "at most 0.51 of a head's scale a column", "x[c] = q[c] * scale[c // head]",
    (Parameter("head", int, 1, 1 << 14, None, "columns of a head; the engine fills it in"),), sites=("k", "k_rot", "v"))
