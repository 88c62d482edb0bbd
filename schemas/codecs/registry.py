"""Codecs by name: one of each file of this folder that declares one, and those that other packages bring.

Another package names the module with its declaration in the entry-point group ``vllm_tap.codecs``, by the codec's name:

    [project.entry-points."vllm_tap.codecs"]
    toy8 = "toy_codec.declared"
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from itertools import groupby
from pathlib import Path
from pkgutil import iter_modules
from typing import Final

from schemas.codecs.declare import CodecFamily, Parameter
from schemas.errors import StartError

GROUP: Final = "vllm_tap.codecs"
STREAM_DTYPES: Final = ("int8", "int16", "uint8", "uint16", "uint32", "float16", "float32")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)
# Arrays of a sealed block beside those of streams.
_TAKEN: Final = {"capture", "position", "token_id", "flags", "present", "checksum", "frame", "frame_row", "frame_seq",
                 "frame_stream", "frame_xxh3", "step"}


def _of_this_folder() -> list[CodecFamily]:
    """Exact codecs first, then those for every site, for heads, projections; legacy ones last."""
    names = [found.name for found in iter_modules([str(Path(__file__).parent)]) if found.name != "registry"]
    modules = [import_module(f"schemas.codecs.{name}") for name in names]
    return sorted((module.FAMILY for module in modules if hasattr(module, "FAMILY")), key=lambda family: (
        family.legacy, family.projected, bool(family.sites), not family.error.startswith("exact"), family.name))


def _installed(own: Iterable[str], points: Iterable[EntryPoint]) -> tuple[dict[str, CodecFamily], dict[str, str]]:
    """The codecs of other packages by name, and why others are refused; an ``own`` name keeps its codec."""
    taken: dict[str, CodecFamily] = {}
    refused: dict[str, str] = {}
    for name, group in groupby(sorted(points, key=lambda point: point.name), key=lambda point: point.name):
        given = list(group)
        try:
            if len(given) > 1 or name in own:
                packages = " and ".join(_package(point) for point in given)
                raise ValueError(f"{packages} bring a codec of a name that is taken; uninstall one, or rename it"
                                 if len(given) > 1 else f"{packages} brings a codec of a name that is taken; rename it")
            taken[name] = checked(name, given[0].load())
        except Exception as error:  # whatever a module of somebody else's raises costs its codec alone
            refused[name] = f"{GROUP}: {name} = {given[0].value!r}: {error}"
    return taken, refused


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def checked(name: str, module: object) -> CodecFamily:
    """The codec that another package's module declares; ValueError naming what is not as it has to be."""
    family = getattr(module, "FAMILY", None)
    if not isinstance(family, CodecFamily):
        raise ValueError("the module has no FAMILY = schemas.codecs.declare.CodecFamily(…)")
    if family.name != name or _NAME.fullmatch(name) is None:
        raise ValueError(f"FAMILY.name = {family.name!r}: valid: the entry point's name, at most 32 of a-z 0-9 _")
    for field in ("streams", "decode", "decode_as", "matrix"):
        function = getattr(family, field)
        if not callable(function) and (function is not None or field in ("streams", "decode")):
            raise ValueError(f"FAMILY.{field} = {function!r}: valid: a function")
    if not family.encoder:
        raise ValueError("FAMILY.encoder = '': valid: the module whose encode(rows) the engine calls")
    if family.projected and not {"k", "seed"} <= {parameter.name for parameter in family.parameters}:
        raise ValueError("FAMILY.matrix: a codec that projects has the parameters k and seed")
    declared = family.streams(64, "bfloat16", **example(family))
    names = [stream.name for stream in declared]
    if not names or len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)) or _TAKEN & set(names):
        raise ValueError(f"FAMILY.streams: names {names}: valid: one or more that differ, of a-z 0-9 _, none of "
                         f"{', '.join(sorted(_TAKEN))}")
    if wrong := [stream.dtype for stream in declared if stream.dtype not in STREAM_DTYPES]:
        raise ValueError(f"FAMILY.streams: dtype {wrong[0]!r}: valid: {', '.join(STREAM_DTYPES)}")
    return family


def example(family: CodecFamily) -> dict[str, int | float]:
    """Values for its parameters: the defaults, or 64."""
    shown: list[Parameter] = [p for p in family.parameters if p.name not in family.either[1:]]
    return {p.name: 64 if p.default is None else p.kind(p.default) for p in shown}


_OWN: Final = {family.name: family for family in _of_this_folder()}
_OTHERS, REFUSED = _installed(_OWN, entry_points(group=GROUP))
CODECS: Final[dict[str, CodecFamily]] = {**_OWN, **_OTHERS}


def check_installed() -> None:
    """StartError where a codec of another package cannot be taken: a process that stores or serves rows asks."""
    if REFUSED:
        raise StartError("; ".join(REFUSED.values()))
