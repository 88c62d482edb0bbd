"""Codecs: each declares its streams once; frame layout, Zarr layout and docs follow from the declaration.

A codec turns one row (a vector of ``width`` numbers) into fixed-size pieces of one or more *streams*. The first
stream is the main one. Encoders live beside the engine (torch); decoding is NumPy alone, so readers need no GPU.

A codec is named ``name`` or ``name:key=value,…``. With every parameter that it has, in the declared order, that text is
the codec's *identity*: it stands in resolved specs, frames, segments, the catalog, blocks and manifests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas.codecs.declare import MODEL_DTYPES, CodecFamily, Parameter, Stream
from schemas.codecs.registry import CODECS, GROUP, REFUSED, check_installed, example
from schemas.errors import CorruptError, SpecError, StoreError

__all__ = ["CODECS", "DEFAULT_CODEC", "MODEL_DTYPES", "Codec", "Stream", "check_installed", "decode", "identified",
           "is_identity", "kept_energy", "parse_codec", "row_bytes", "streams"]

Array = npt.NDArray[np.generic]

DEFAULT_CODEC: Final = "int8b64"
_TEXT_MAX: Final = 128
_NUMBER: Final = re.compile(r"[0-9]{1,10}", re.ASCII)
_DECIMAL: Final = re.compile(r"[0-9]{0,4}(\.[0-9]{1,9})?(e-[0-9]{1,2})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Codec:
    """A family with its parameters.

    >>> parse_codec("rp8:k=256").identity
    'rp8:k=256,seed=0'
    """

    family: CodecFamily
    values: tuple[tuple[str, int | float], ...]

    @property
    def identity(self) -> str:
        """The one spelling of this codec."""
        text = _text(self.values)
        return f"{self.family.name}:{text}" if text else self.family.name

    @property
    def parameters(self) -> dict[str, int | float]:
        """The parameters by name."""
        return dict(self.values)

    @property
    def complete(self) -> bool:
        """Whether no parameter is left to be filled in."""
        lacking = [p.name for p in self.family.parameters if p.name not in self.parameters]
        return set(lacking) <= set(self.family.either)

    def streams(self, width: int, dtype: str) -> tuple[Stream, ...]:
        """The streams of one row; SpecError where a parameter does not fit the width."""
        return self.family.streams(width, dtype, **self.parameters)

    def decode(self, pieces: Mapping[str, Array], width: int, dtype: str) -> npt.NDArray[np.float32]:
        """Rows of float32 ``[..., decoded_width]``; CorruptError where an index points past the row."""
        try:
            rows: npt.NDArray[np.float32] = self.family.decode(pieces, width, dtype, **self.parameters)
        except IndexError as error:
            raise CorruptError("decode", self.identity, error) from None
        return rows

    def decode_as(self, pieces: Mapping[str, Array], width: int, dtype: str, wanted: str) -> npt.NDArray[Any] | None:
        """Rows of float32, float16 or bfloat16 (its bits), at once or as they are stored; None where ``decode`` must go
        before.
        """
        if self.family.decode_as is None:
            return None
        try:
            rows: npt.NDArray[Any] | None = self.family.decode_as(pieces, width, dtype, wanted, **self.parameters)
        except IndexError as error:
            raise CorruptError("decode", self.identity, error) from None
        return rows

    def decoded_width(self, width: int) -> int:
        """The count of numbers that a row of ``width`` decodes to."""
        return min(int(self.parameters["k"]), width) if self.family.projected else width

    def about(self) -> dict[str, Any]:
        """The codec as manifests and blocks describe it."""
        family = self.family
        return {"name": self.identity, "family": family.name, "parameters": self.parameters, "meaning": family.meaning,
                "error_bound": family.error, "formula": family.formula, "decoded": family.decoded}


@lru_cache(maxsize=1024)
def parse_codec(text: str, field: str = "codec") -> Codec:
    """The codec of a text, defaults filled in; SpecError naming what is wrong in it and what would be valid.

    Only ``head`` may be left open: what resolves a spec on an engine fills it in.
    """
    name, colon, rest = text[:_TEXT_MAX].partition(":")
    family = CODECS.get(name)
    if family is None or len(text) > _TEXT_MAX:
        raise SpecError(field, text, REFUSED.get(name) or f"unknown codec; valid: {', '.join(CODECS)}")
    known = {parameter.name: parameter for parameter in family.parameters}
    given: dict[str, int | float] = {}
    for part in rest.split(",") if colon else ():
        key, _, value = part.partition("=")
        if key not in known or key in given:
            raise SpecError(field, text, f"{part!r}: {name} has "
                            + (f"{', '.join(known)}, each once, as in {name}:{_text(example(family).items())}" if known
                               else "no parameters"))
        given[key] = _value(known[key], value, text, field)
    if len(set(given) & set(family.either)) > 1:
        raise SpecError(field, text, f"name one of {' and '.join(family.either)}, not both")
    for parameter in family.parameters:
        settled = parameter.name in family.either and set(given) & set(family.either)
        if parameter.default is not None and not settled:
            given.setdefault(parameter.name, parameter.kind(parameter.default))
    return Codec(family, tuple((key, given[key]) for key in known if key in given))


def _value(parameter: Parameter, text: str, whole: str, field: str) -> int | float:
    pattern = _NUMBER if parameter.kind is int else _DECIMAL
    value = parameter.kind(text) if text and pattern.fullmatch(text) and text[0] != "e" else None
    if value is None or not parameter.low <= value <= parameter.high:
        kind = "a whole number" if parameter.kind is int else "a number"
        raise SpecError(field, whole, f"{parameter.name} = {text[:32]!r}: valid: {kind} from {parameter.low:g} to "
                                      f"{parameter.high:.10g} ({parameter.meaning})")
    return float(f"{value:.6g}") if parameter.kind is float else value


def _text(values: Iterable[tuple[str, int | float]]) -> str:
    return ",".join(f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in values)


@lru_cache(maxsize=1024)
def identified(identity: str) -> Codec:
    """The codec of an identity, such as stands beside stored rows.

    SpecError for any other spelling, or where a parameter is left open; StoreError where no codec of that name is here.
    """
    name = identity[:_TEXT_MAX].partition(":")[0]
    if name not in CODECS:
        raise StoreError("look up codec", name, REFUSED.get(name) or "no codec of that name is installed here",
                         f"codecs of other packages are found by their entry points {GROUP}: install it here too")
    codec = parse_codec(identity)
    if codec.identity != identity or not codec.complete:
        raise SpecError("codec", identity, f"not an identity; it would be {codec.identity}")
    return codec


def is_identity(text: str) -> bool:
    """Whether the text is the one spelling of a codec."""
    try:
        identified(text)
    except (SpecError, StoreError):
        return False
    return True


@lru_cache(maxsize=1024)
def streams(identity: str, width: int, dtype: str) -> tuple[Stream, ...]:
    """The streams of one row; ``width`` in numbers, ``dtype`` the model's."""
    return identified(identity).streams(width, dtype)


def row_bytes(identity: str, width: int, dtype: str) -> int:
    """Bytes of one encoded row of a layer, all its streams together."""
    return sum(stream.nbytes for stream in streams(identity, width, dtype))


def decode(identity: str, pieces: Mapping[str, Array], width: int, dtype: str) -> npt.NDArray[np.float32]:
    """Rows of float32 ``[..., decoded width]`` from stored pieces ``{stream: [..., *stream.shape]}``."""
    return identified(identity).decode(pieces, width, dtype)


def kept_energy(pieces: Mapping[str, Array]) -> npt.NDArray[np.float32] | None:
    """The share of each row's energy that was kept ``[...]``; None where the codec keeps every column."""
    kept = pieces.get("kept")
    return None if kept is None else kept[..., 0].astype(np.float32)
