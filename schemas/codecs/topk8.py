"""``topk8``: as ``topk``, the kept values as uint8 with a scale and a zero point a row (row8). A legacy codec."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from schemas.codecs import row8
from schemas.codecs.declare import Stream
from schemas.codecs.topk import entries, in_place, index_and_kept


def streams(width: int, dtype: str, k: int | None = None, density: float | None = None) -> tuple[Stream, ...]:
    """``index``, the codes ``q`` of the values, their ``scale`` and ``zero``, and ``kept``."""
    kept = entries(width, k, density)
    index, energy = index_and_kept(width, kept)
    return index, Stream("q", "uint8", (kept,), row8.FILL), *row8.scale_and_zero(), energy


def decode(pieces: Mapping[str, npt.NDArray[np.generic]], width: int, dtype: str, k: int | None = None,
           density: float | None = None) -> npt.NDArray[np.float32]:
    """Rows of float32 ``[..., width]``, zero where nothing was kept."""
    return in_place(pieces["index"], row8.numbers(pieces), width)
