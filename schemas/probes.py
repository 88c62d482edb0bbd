"""Probes: directions whose scores on a site's rows are computed where the rows are, on the model's own device.

A probe is registered under a name when an engine starts, at one site and layer of its model. ``probe.NAME`` is then a
site of its own. Its row is the float32 vector of the probe's k scores ::

    scores = f(directions @ (x - mean) + bias)        f: the identity, or the sigmoid.

Such a row is chosen, stored, streamed and read as any other is.

The file is safetensors, in float16, float32 or float64. It has ``directions`` [k, width] or [width], and optionally
``bias`` [k] and ``mean`` [width]. Its metadata hold ``site`` and ``layer``. Optional are ``names`` (of the scores: a
JSON list, or text with commas) and ``activation`` (``none``, ``sigmoid``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from schemas import limits
from schemas.checks import is_name
from schemas.errors import SpecError, StartError
from schemas.sites import SITES, parse_site

__all__ = ["LoadedProbe", "Probe", "Registered", "load_probe", "numbers_of", "opened", "parse_probes", "place_of",
           "probes_text", "refusal", "shape_of"]

_TENSORS: Final = ("directions", "bias", "mean")
_DTYPES: Final = ("F16", "F32", "F64")
_ACTIVATIONS: Final = ("none", "sigmoid")

F32 = npt.NDArray[np.float32]


class Probe(msgspec.Struct, frozen=True):
    """A registered probe as an engine tells of it; ``fingerprint`` is the xxh3 of its numbers."""

    site: str
    layer: int
    names: list[str]
    activation: str
    fingerprint: str

    @property
    def meaning(self) -> str:
        """The formula of its scores."""
        shown = "sigmoid(directions @ (x - mean) + bias)" if self.activation == "sigmoid" else (
            "directions @ (x - mean) + bias")
        return f"scores {shown} of the rows x of {self.site}.{self.layer}"


@dataclass(frozen=True, slots=True)
class Registered:
    """A probe as it was named at the start; ``place``: a site's name that fixes a layer, "" where the file says it."""

    name: str
    path: Path
    place: str = ""
    kind: str = "probe"  # or "vector"

    def __str__(self) -> str:
        return f"{self.name}={self.path}" + (f"@{self.place}" if self.place else "")


@dataclass(frozen=True, slots=True)
class LoadedProbe:
    """A probe with its numbers, float32: ``directions`` [k, width]; ``bias`` [k], less what the mean would score."""

    about: Probe
    directions: F32
    bias: F32


def parse_probes(texts: Iterable[str], what: str = "probes", kind: str = "probe") -> tuple[Registered, ...]:
    """``NAME=FILE`` or ``NAME=FILE@resid_post.12`` each; StartError, beginning with ``what``, where one is no good.

    A ``vector`` (of edits) is named like a probe.
    """
    found: dict[str, Registered] = {}
    for text in filter(None, map(str.strip, texts)):
        name, equals, rest = text.partition("=")
        if not equals or not rest:
            raise StartError(f"{what}: {text!r}: valid: NAME=FILE"
                             + (", or NAME=FILE@resid_post.12" if kind == "probe" else ""))
        if not is_name(name):
            raise StartError(f"{what}: {name!r}: a {kind}'s name is 1 to {limits.probe_name_chars_max} of "
                             "A-Z a-z 0-9 _ -, and does not begin with _ or -")
        if name in found:
            raise StartError(f"{what}: {name!r} is named twice")
        path, place = rest, ""
        if kind == "probe" and "@" in rest and _is_place(rest.rpartition("@")[2]):
            path, _, place = rest.rpartition("@")
        absolute = Path(path).absolute()  # which is how an engine is told of it
        if "," in str(absolute):
            raise StartError(f"{what}: {str(absolute)!r}: the path of a {kind} must have no comma, because commas "
                             f"separate {kind}s; nor may the working folder of a relative path")
        found[name] = Registered(name, Path(path), place, kind)
    if len(found) > limits.probes_max:
        raise StartError(f"{what}: {len(found)} {kind}s, limit {limits.probes_max}")
    return tuple(found.values())


def probes_text(probes: Iterable[Registered]) -> str:
    """The text of ``VLLM_TAP_PROBES`` that names these probes; paths are made absolute."""
    return ",".join(str(Registered(probe.name, probe.path.absolute(), probe.place)) for probe in probes)


def _is_place(text: str) -> bool:
    try:
        parse_site(text)
    except SpecError:
        return False
    return True


def place_of(registered: Registered) -> tuple[str, int]:
    """Site and layer of a probe, of its file the head alone; StartError where they cannot be had."""
    with opened(registered) as file:
        return _place(registered, dict(file.metadata() or {}))


def load_probe(registered: Registered) -> LoadedProbe:
    """A probe of its file; StartError naming the file, the field, its value and what would be valid.

    Sizes are held against ``schemas.limits`` before memory is taken.
    """
    with opened(registered) as file:
        metadata = dict(file.metadata() or {})
        site, layer = _place(registered, metadata)
        names = set(file.keys())
        if "directions" not in names or names - set(_TENSORS):
            raise refusal(registered, "tensors", sorted(names), "directions, and if need be bias and mean; no others")
        shapes = {name: shape_of(registered, name, file) for name in names}
        given = shapes["directions"]
        if len(given) not in (1, 2) or 0 in given:
            raise refusal(registered, "directions", list(given), "[k, width] or [width]")
        k, width = (1, given[0]) if len(given) == 1 else given
        if k > limits.probe_scores_max:
            raise refusal(registered, "directions", list(given), f"at most {limits.probe_scores_max} of them")
        if width > limits.width_max:
            raise refusal(registered, "directions", list(given), f"a width of at most {limits.width_max}")
        for name, fitting, scalar in (("bias", (k,), k == 1), ("mean", (width,), False)):
            if shapes.get(name, fitting) != fitting and not (scalar and shapes[name] == ()):
                raise refusal(registered, name, list(shapes[name]), f"{list(fitting)}, beside directions {list(given)}")
        numbers = {name: numbers_of(registered, name, file) for name in names}
    directions = numbers["directions"].reshape(k, width)
    bias = numbers.get("bias", np.zeros(k)).reshape(k) - directions @ numbers.get("mean", np.zeros(width))
    probe = Probe(site, layer, _score_names(registered, metadata, k), _activation(registered, metadata), "")
    with np.errstate(over="ignore"):
        kept = LoadedProbe(probe, directions.astype(np.float32), bias.astype(np.float32))
    if not (np.isfinite(kept.directions).all() and np.isfinite(kept.bias).all()):
        raise refusal(registered, "directions", "…", "numbers that float32 can hold")
    digest = xxhash.xxh3_128(kept.directions.tobytes())
    digest.update(kept.bias.tobytes())
    digest.update(f"{site}.{layer} {probe.activation}".encode())
    return LoadedProbe(msgspec.structs.replace(
        probe, names=probe.names or ([registered.name] if k == 1 else [str(number) for number in range(k)]),
        fingerprint=digest.hexdigest()), kept.directions, kept.bias)


def opened(registered: Registered) -> Any:
    """The safetensors file of a probe or a vector; StartError where it cannot be read or is too large."""
    from safetensors import SafetensorError, safe_open

    start = f"{registered.kind} {registered.name!r}: {registered.path}:"
    try:
        size = registered.path.stat().st_size
        if size > limits.probe_file_bytes_max:
            raise refusal(registered, "bytes", size, f"at most {limits.probe_file_bytes_max}")
        return safe_open(registered.path, framework="np")
    except OSError as error:
        raise StartError(f"{start} {error.strerror or error}") from None
    except SafetensorError as error:
        raise StartError(f"{start} no safetensors file ({error}); save it with safetensors.numpy.save_file or "
                         "safetensors.torch.save_file") from None


def _place(registered: Registered, metadata: Mapping[str, str]) -> tuple[str, int]:
    """The site and layer that a probe reads: those named at the start win over those of the file."""
    field = "@" if registered.place else "site"
    said = registered.place or metadata.get("site", "")
    try:
        site, layer = parse_site(said)
    except SpecError as error:
        if said:
            raise StartError(f"probe {registered.name!r}: {registered.path}: {field} = {said!r}: {error.reason}"
                             ) from None
        raise refusal(registered, field, said, 'in its metadata, such as "resid_post", or NAME=FILE@resid_post.12'
                   ) from None
    if site not in SITES or SITES[site].ids:
        raise refusal(registered, field, said, "a site whose rows are numbers of the model: no ids, no other probe")
    if not SITES[site].per_layer:
        return site, 0
    if not registered.place and (text := metadata.get("layer")) is not None:
        if not (text.isascii() and text.isdecimal() and len(text) <= 4):
            raise refusal(registered, "layer", text, "a 0-based layer, such as 12")
        if layer not in (None, int(text)):
            raise refusal(registered, "layer", text, f"the layer that {said!r} fixes")
        layer = int(text)
    if layer is None:
        raise refusal(registered, field, said, f"which layer? {site}.12 says so, and so does layer in the metadata")
    return site, layer


def shape_of(registered: Registered, name: str, file: Any) -> tuple[int, ...]:
    """The shape of a file's tensor, whose dtype is one that is read; StartError where it is another."""
    part = file.get_slice(name)
    if part.get_dtype() not in _DTYPES:
        raise refusal(registered, name, part.get_dtype(), f"one of {', '.join(_DTYPES)} (tensor.float() makes it F32)")
    return tuple(part.get_shape())


def numbers_of(registered: Registered, name: str, file: Any) -> npt.NDArray[np.float64]:
    """The numbers of a file\'s tensor; StartError where one is not finite."""
    numbers: npt.NDArray[np.float64] = file.get_tensor(name).astype(np.float64)
    if not np.isfinite(numbers).all():
        at = [int(index) for index in np.argwhere(~np.isfinite(numbers))[0]]
        raise refusal(registered, f"{name}{at}", float(numbers[tuple(at)]), "finite numbers")
    return numbers


def _score_names(registered: Registered, metadata: Mapping[str, str], k: int) -> list[str]:
    """The names of the scores; none where the file has none."""
    text = metadata.get("names")
    if text is None:
        return []
    try:
        names = json.loads(text) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",")]
    except (ValueError, RecursionError):
        names = None
    if (not isinstance(names, list) or len(names) != k or len(set(map(str, names))) != k
            or not all(isinstance(name, str) and 0 < len(name) <= limits.probe_name_chars_max and name.isprintable()
                       for name in names)):
        raise refusal(registered, "names", text[:200], f"{k} different names, one a direction, of at most "
                   f"{limits.probe_name_chars_max} printable characters: a JSON list, or text with commas")
    return names


def _activation(registered: Registered, metadata: Mapping[str, str]) -> str:
    activation = metadata.get("activation", "none")
    if activation not in _ACTIVATIONS:
        raise refusal(registered, "activation", activation, " or ".join(_ACTIVATIONS))
    return activation


def refusal(registered: Registered, field: str, value: object, valid: str) -> StartError:
    """The refusal of a field of a file, with what would be valid."""
    return StartError(f"{registered.kind} {registered.name!r}: {registered.path}: {field} = {value!r}: valid: {valid}")
