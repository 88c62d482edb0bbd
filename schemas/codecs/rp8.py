"""``rp8``: a Gaussian projection to k numbers, then uint8 with a scale and a zero point (full8). A legacy codec.

y = x @ P with P = projection.gaussian(width, k, seed) in float32. What decodes is y, not x: k numbers whose dot
products are those of the rows up to an error of about |x||x'|/√k (0.044 at k = 512). It cannot be undone.
"""

from __future__ import annotations

from typing import Final

from schemas.codecs import full8
from schemas.codecs.declare import F32, CodecFamily, Pieces, Stream
from schemas.codecs.projection import NUMBERS, SEED, columns, gaussian


def streams(width: int, dtype: str, k: int, seed: int) -> tuple[Stream, ...]:
    """``q`` codes of the k projected numbers, their ``scale`` and ``zero``."""
    return full8.coded(columns(width, k, "rp8"))


def decode(pieces: Pieces, width: int, dtype: str, k: int, seed: int) -> F32:
    """The projected numbers, float32 ``[..., k]``."""
    return full8.numbers(pieces)


FAMILY: Final = CodecFamily(
    "rp8", streams, decode, "a Gaussian projection to k numbers, as uint8 with scale and zero point",
    "cosines between rows: ±1/√k (0.044 at k = 512); the k numbers: at most 0.51 of the row's scale",
    f"y = {full8.FORMULA}", (NUMBERS, SEED), legacy=True,
    decoded="x @ projection.gaussian(width, k, seed): it cannot be undone", matrix=gaussian)
