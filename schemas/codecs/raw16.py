"""``raw16``: 16-bit rows as they are; float32 is rounded to bfloat16, to nearest, ties to even."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.codecs import raw
from schemas.codecs.declare import Stream


def streams(width: int, dtype: str) -> tuple[Stream, ...]:
    """As ``raw`` of the dtype that is kept."""
    return raw.streams(width, kept(dtype))


def decode(pieces: Mapping[str, npt.NDArray[np.generic]], width: int, dtype: str) -> npt.NDArray[np.float32]:
    """Widen to float32, exactly."""
    return raw.decode(pieces, width, kept(dtype))


def decode_as(pieces: Mapping[str, npt.NDArray[np.generic]], width: int, dtype: str, wanted: str
              ) -> npt.NDArray[Any] | None:
    """As ``raw`` of the dtype that is kept."""
    return raw.decode_as(pieces, width, kept(dtype), wanted)


def kept(dtype: str) -> str:
    """The dtype that is stored of a model dtype."""
    return "bfloat16" if dtype == "float32" else dtype
