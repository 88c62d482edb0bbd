"""``toy8``: int8 with one float32 scale a row, codes from −top to top.

Encoding of a row x: s = max|x| / top; q = round(x / s), half to even. −128 is the fill of a missing row.
Decoding: x = q * s.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from schemas.codecs.declare import CodecFamily, Parameter, Stream


def streams(width: int, dtype: str, top: int) -> tuple[Stream, ...]:
    """``q`` codes and ``scale`` of the row; the same for every model dtype."""
    return Stream("q", "int8", (width,), -128), Stream("scale", "float32", (1,), "NaN")


def decode(pieces: Mapping[str, npt.NDArray[np.generic]], width: int, dtype: str, top: int) -> npt.NDArray[np.float32]:
    """Rows of float32 ``[..., width]``."""
    x: npt.NDArray[np.float32] = pieces["q"].astype(np.float32) * pieces["scale"].astype(np.float32)
    return x


FAMILY = CodecFamily("toy8", streams, decode, "int8 with a scale a row", "at most 0.51 of the row's scale a column",
                "x = q * scale", (Parameter("top", int, 1, 127, 127, "largest code"),), encoder="toy_codec.encoder")
