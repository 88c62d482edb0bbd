"""``raw16``: 16-bit rows as they are; float32 is rounded to bfloat16, to nearest, ties to even."""

from __future__ import annotations

from typing import Any, Final

import numpy.typing as npt

from schemas.codecs import raw
from schemas.codecs.declare import BFLOAT16_ERROR, F32, CodecFamily, Pieces, Stream


def streams(width: int, dtype: str) -> tuple[Stream, ...]:
    """The stream of ``raw`` for the dtype that is stored."""
    return raw.streams(width, stored(dtype))


def decode(pieces: Pieces, width: int, dtype: str) -> F32:
    """Widen to float32, exactly."""
    return raw.decode(pieces, width, stored(dtype))


def decode_as(pieces: Pieces, width: int, dtype: str, wanted: str) -> npt.NDArray[Any] | None:
    """The stored rows themselves, where their dtype is wanted."""
    return raw.decode_as(pieces, width, stored(dtype), wanted)


def stored(dtype: str) -> str:
    """The dtype that is stored of a model dtype."""
    return "bfloat16" if dtype == "float32" else dtype


FAMILY: Final = CodecFamily(
    "raw16", streams, decode, "16-bit rows: bit for bit on 16-bit models, float32 rounded to bfloat16",
    f"exact on 16-bit models; else {BFLOAT16_ERROR}", "x", decode_as=decode_as)
