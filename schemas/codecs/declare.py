"""Declaration of a codec: its streams, parameters and texts, and how bfloat16 lives in arrays that know no bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Pieces = Mapping[str, npt.NDArray[np.generic]]  # by stream: [..., *shape of its pieces]
F32 = npt.NDArray[np.float32]

MODEL_DTYPES: Final = ("float32", "float16", "bfloat16")
BFLOAT16_ERROR: Final = "rounding to bfloat16 (relative 2^-9)"


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of a codec: ``shape`` of a row's piece in ``dtype`` as stored.

    bfloat16 is stored as uint16 with ``view="bfloat16"`` because Zarr readers have no such dtype. ``fill`` is the value
    that a Zarr reader sees where a row is missing. No encoder emits it in a codec's first stream, with one exception:
    ``raw`` stores a NaN that the model itself made.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: float | int | str
    view: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one row's piece."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def about(self) -> dict[str, Any]:
        """The stream as manifests and blocks describe it."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "view": self.view, "fill": self.fill}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that is part of a codec's name: ``low`` to ``high``; ``default`` None: absent unless given."""

    name: str
    kind: type[int] | type[float]
    low: float
    high: float
    default: float | None
    meaning: str


@dataclass(frozen=True, slots=True)
class CodecFamily:
    """A codec without values for its parameters: the one thing that a codec's file declares.

    ``streams(width, dtype)`` and ``decode(pieces, width, dtype)`` take its parameters by name; ``decode_as``, where
    there is one, decodes straight to a dtype, or gives None. ``error`` is the bound that manifests carry; ``formula``
    decodes a row without this project's code; ``decoded`` says which numbers the decoded ones are.

    Of ``either`` parameters one is given. ``sites``, where not empty, are the only ones with heads to encode. A codec
    with a ``matrix(width, k, seed)`` projects rows by it, and has the parameters k and seed. ``legacy`` codecs are
    offered for their earlier users. One that ``selects`` keeps entries that it chooses among all of a row.
    ``encoder`` is the encoder's module, where it is not engine_side.codecs.NAME.
    """

    name: str
    streams: Callable[..., tuple[Stream, ...]]
    decode: Callable[..., Any]
    meaning: str
    error: str
    formula: str
    parameters: tuple[Parameter, ...] = ()
    either: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    decoded: str = "the row's own coordinates"
    legacy: bool = False
    decode_as: Callable[..., Any] | None = None
    matrix: Callable[[int, int, int], npt.NDArray[np.float32]] | None = None
    encoder: str = ""
    selects: bool = False

    @property
    def whole_rows(self) -> bool:
        """Whether it says something of whole rows alone, which its numbers of shares of them do not add up to."""
        return self.selects or self.projected

    @property
    def projected(self) -> bool:
        """Whether what decodes are other numbers than the row's own."""
        return self.matrix is not None


def index_dtype(width: int) -> str:
    """The dtype of column numbers of a row; its largest value stays free for the fill."""
    return "uint16" if width <= 0xFFFF else "uint32"


def float_stream(name: str, dtype: str, shape: tuple[int, ...]) -> Stream:
    """A stream of a model dtype; fill NaN (0x7fc0 is bfloat16's quiet NaN)."""
    if dtype == "bfloat16":
        return Stream(name, "uint16", shape, 0x7FC0, view="bfloat16")
    return Stream(name, dtype, shape, "NaN")


def bfloat16_to_float32(bits: npt.NDArray[np.generic]) -> F32:
    """float32 of bfloat16's bits, in any dtype of 16: they are the upper half of a float32, so that this is exact."""
    wide: npt.NDArray[np.uint32] = np.left_shift(bits.view(np.uint16), 16, dtype=np.uint32)  # in one pass
    return wide.view(np.float32)
