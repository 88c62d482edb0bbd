"""Codecs: each declares its streams once; frame layout, Zarr layout and docs follow from the declaration.

A codec turns one row (a vector of ``width`` numbers) into fixed-size pieces of one or more *streams*. The first
stream is the main one. Encoders live beside the engine (torch); decoding is NumPy alone, so readers need no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from schemas.codecs import int8b64, raw
from schemas.codecs.declare import MODEL_DTYPES, Stream
from schemas.errors import SpecError

__all__ = ["CODECS", "DEFAULT_CODEC", "MODEL_DTYPES", "Codec", "Stream", "check_codec", "decode", "streams"]

Array = npt.NDArray[np.generic]


class _Module(Protocol):
    """What a codec module offers."""

    def streams(self, width: int, dtype: str) -> tuple[Stream, ...]: ...

    def decode(self, pieces: Mapping[str, Array], width: int, dtype: str) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec as it is named in specs; ``error`` is the bound that manifests carry."""

    name: str
    module: _Module
    meaning: str
    error: str
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")


DEFAULT_CODEC: Final = "int8b64"
CODECS: Final[dict[str, Codec]] = {
    codec.name: codec
    for codec in (
        Codec("raw", raw, "the model's own dtype, bit for bit", "exact"),
        Codec("raw16", raw, "16-bit rows: bit for bit on 16-bit models, float32 rounded to bfloat16",
              "exact on 16-bit models; else rounding to bfloat16 (relative 2^-9)"),
        Codec("int8b64", int8b64, "int8 in blocks of 64 columns with a bfloat16 scale, 8 largest entries kept apart",
              "at most 0.51 of a block's scale a column, outliers rounded to bfloat16 (relative 2^-9)"),
    )
}


def check_codec(name: str, field: str = "codec") -> str:
    """``name`` if there is such a codec, else a SpecError naming the valid ones."""
    if name not in CODECS:
        raise SpecError(field, name, f"unknown codec; valid: {', '.join(CODECS)}")
    return name


def stored_dtype(codec: str, dtype: str) -> str:
    """The dtype that a codec's main stream keeps of a model dtype (only ``raw16`` narrows float32)."""
    return "bfloat16" if codec == "raw16" and dtype == "float32" else dtype


def streams(codec: str, width: int, dtype: str) -> tuple[Stream, ...]:
    """The streams of one row; ``width`` in numbers, ``dtype`` the model's."""
    return CODECS[codec].module.streams(width, stored_dtype(codec, dtype))


def decode(codec: str, pieces: Mapping[str, Array], width: int, dtype: str) -> npt.NDArray[np.float32]:
    """Rows of float32 ``[..., width]`` from stored pieces ``{stream: [..., *stream.shape]}``."""
    return CODECS[codec].module.decode(pieces, width, stored_dtype(codec, dtype))
