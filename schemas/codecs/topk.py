"""``topk``: the k entries of largest magnitude as (index, bfloat16 value), and the share of energy that they hold.

k is a parameter, or follows from the density: ⌈density · width⌉. Indices ascend. Decoding: a row of zeros with the
values in their places. ``kept`` is Σ kept x² / Σ x², of the row before rounding. It is 1 for a row of zeros, and NaN
where the row has a NaN or an infinity. Such entries are kept before any number.
"""

from __future__ import annotations

from math import ceil
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.codecs.declare import (
    BFLOAT16_ERROR,
    F32,
    CodecFamily,
    Parameter,
    Pieces,
    Stream,
    bfloat16_to_float32,
    float_stream,
    index_dtype,
)


def entries(width: int, k: int | None, density: float | None) -> int:
    """The count of entries of a row that are kept; at least one, at most all."""
    # Rounded first: 0.07 * 100 is a little more than 7.
    wanted = k if k is not None else ceil(round((density or 0.0) * width, 6))
    return max(1, min(wanted, width))


def index_and_kept(width: int, kept: int) -> tuple[Stream, Stream]:
    """``index`` of the entries and ``kept``, their share of the energy."""
    dtype = index_dtype(width)
    return Stream("index", dtype, (kept,), int(np.iinfo(dtype).max)), float_stream("kept", "float32", (1,))


def streams(width: int, dtype: str, k: int | None = None, density: float | None = None) -> tuple[Stream, ...]:
    """``index``, ``value`` and ``kept``; the same for every model dtype."""
    kept = entries(width, k, density)
    index, energy = index_and_kept(width, kept)
    return index, float_stream("value", "bfloat16", (kept,)), energy


def decode(pieces: Pieces, width: int, dtype: str, k: int | None = None, density: float | None = None) -> F32:
    """Rows of float32 ``[..., width]``, zero where nothing was kept."""
    return in_place(pieces["index"], bfloat16_to_float32(pieces["value"]), width)


def in_place(index: npt.NDArray[np.generic], values: F32, width: int) -> F32:
    """Rows of zeros with ``values`` at ``index``."""
    x = np.zeros((*index.shape[:-1], width), np.float32)
    np.put_along_axis(x, index.astype(np.int64), values, axis=-1)
    return x


PARAMETERS: Final = (Parameter("k", int, 1, 1 << 20, None, "entries kept of a row"),
                     Parameter("density", float, 1e-6, 1, 0.04, "share of a row's entries that is kept"))
FAMILY: Final = CodecFamily(
    "topk", streams, decode, "the entries of largest magnitude, the others 0",
    f"kept entries: {BFLOAT16_ERROR}; the share of the row's energy that they hold is in the stream kept",
    "x = 0; then x[index] = value", PARAMETERS, either=("k", "density"), selects=True)
