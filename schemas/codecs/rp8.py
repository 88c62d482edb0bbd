"""``rp8``: a Gaussian projection to k numbers, then uint8 with a scale and a zero point (row8). A legacy codec.

y = x @ P with P = projection.gaussian(width, k, seed) in float32. What decodes is y, not x: k numbers whose dot
products are those of the rows up to an error of about |x||x'|/√k (0.044 at k = 512). It cannot be undone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from schemas.codecs import row8
from schemas.codecs.declare import Stream
from schemas.codecs.projection import columns


def streams(width: int, dtype: str, k: int, seed: int) -> tuple[Stream, ...]:
    """``q`` codes of the k projected numbers, their ``scale`` and ``zero``."""
    return Stream("q", "uint8", (columns(width, k, "rp8"),), row8.FILL), *row8.scale_and_zero()


def decode(pieces: Mapping[str, npt.NDArray[np.generic]], width: int, dtype: str, k: int,
           seed: int) -> npt.NDArray[np.float32]:
    """The projected numbers, float32 ``[..., k]``."""
    return row8.numbers(pieces)
