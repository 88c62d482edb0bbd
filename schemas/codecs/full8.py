"""``full8``: the row as uint8 with a scale and a zero point (schemas.codecs.row8). A legacy codec.

One column a thousand times larger than the rest takes the whole range: the others are lost in its scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from schemas.codecs import row8
from schemas.codecs.declare import Stream


def streams(width: int, dtype: str) -> tuple[Stream, ...]:
    """``q`` codes, ``scale`` and ``zero`` of the row; the same for every model dtype."""
    return Stream("q", "uint8", (width,), row8.FILL), *row8.scale_and_zero()


def decode(pieces: Mapping[str, npt.NDArray[np.generic]], width: int, dtype: str) -> npt.NDArray[np.float32]:
    """Rows of float32 ``[..., width]``."""
    return row8.numbers(pieces)
