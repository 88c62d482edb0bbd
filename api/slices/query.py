"""The query of a slice: which sites, layers and positions, in which format. Checked before anything is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import QueryParams

from api.errors import ApiError, BadParam
from api.slices.formats import DTYPES, FORMATS, MEDIA_TYPES, available_formats
from schemas import limits
from schemas.errors import ArgumentError, NotFoundError
from schemas.sites import ask_site, names_of, site_meant

__all__ = ["SiteQuery", "SliceQuery", "check_known", "one_of", "parse_site_query", "parse_slice_query", "seconds"]

_NUMBER: Final = re.compile(r"[0-9]{1,10}", re.ASCII)
_RANGE: Final = re.compile(r"([0-9]{1,10})(?::([0-9]{1,10}))?", re.ASCII)
_LAYER: Final = re.compile(r"[0-9]{1,4}", re.ASCII)
_SLICE: Final = re.compile(r"(-?[0-9]{1,4})?:(-?[0-9]{1,4})?(?::([1-9][0-9]{0,3}))?", re.ASCII)
_PARAMS: Final = ("site", "layer", "start", "stop", "positions", "format", "dtype", "wait", "timeout", "rows")
_LAYER_VALID: Final = 'valid: a layer ("3"), several ("0,2"), a slice ("0:32:4"; "-1:" is the last) or "all"'


@dataclass(frozen=True, slots=True)
class SiteQuery:
    """``sites`` as (site, layer fixed by the name or None); ``layers`` as asked; empty means all."""

    sites: list[tuple[str, int | None]]
    layers: list[str]

    def choose(self, captured: dict[str, list[int]], engine: Mapping[str, Any]) -> dict[str, list[int]]:
        """The layers to read of each site, out of what the capture has; NotFoundError where it has them not.

        ``engine`` is the manifest's: what names mean on its model, and the layers that negative numbers count from.
        """
        chosen: dict[str, set[int]] = {}
        names, n_layers = names_of(engine), int(engine.get("n_layers", 0))
        for asked, fixed in self.sites or [(site, None) for site in captured]:
            site = site_meant(asked, names, asked, "site", ArgumentError)
            if site not in captured:
                raise NotFoundError(f"site {site!r} is not in this capture; it has: {', '.join(captured) or 'no rows'}")
            chosen.setdefault(site, set()).update(self._layers(site, fixed, captured[site], n_layers))
        if not any(chosen.values()):
            raise NotFoundError("this capture asked for nothing: no site, or no layer of one")
        return {site: sorted(layers) for site, layers in chosen.items()}

    def _layers(self, site: str, fixed: int | None, have: list[int], n_layers: int) -> set[int]:
        asked: set[int] = set()
        for text in self.layers:
            if match := _SLICE.fullmatch(text):
                start, stop, step = (None if part is None else int(part) for part in match.groups())
                asked |= set(range(n_layers)[start:stop:step]) & set(have)
            else:
                asked |= set(have) if text == "all" else {int(part) for part in text.split(",")}
        if fixed is not None:
            if self.layers and fixed not in asked:
                raise BadParam("layer", self.layers, f"does not contain the layer {fixed} that the site's name fixes")
            asked = {fixed}
        elif not self.layers:
            asked = set(have)
        if absent := sorted(asked - set(have)) or ([] if asked else self.layers):
            raise NotFoundError(f"layer {absent} of {site} is not in this capture; it has: {have}")
        return asked


@dataclass(frozen=True, slots=True)
class SliceQuery(SiteQuery):
    """What a slice is to hold, and how; ``stop`` None means to the end."""

    start: int = 0
    stop: int | None = None
    format: str = "safetensors"
    dtype: str = "float32"
    wait: str | None = None
    timeout_s: float = 0.0
    rejected: bool = False  # drafts that were not accepted, instead of the sequence's own rows
    several: tuple[tuple[int, int], ...] = ()  # the ranges, ascending and disjoint, where they were given one by one

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The positions asked for, as ``[start, stop)``."""
        return list(self.several) or [(self.start, limits.position_max if self.stop is None else self.stop)]


def check_known(params: QueryParams, valid: Sequence[str], repeatable: Sequence[str] = ()) -> None:
    """BadParam for a parameter that is none of ``valid``, or comes twice and is none of ``repeatable``."""
    for name in params:
        if name not in valid:
            raise BadParam(name, params[name], f"unknown parameter; valid: {', '.join(valid) or 'none'}")
        if name not in repeatable and len(params.getlist(name)) > 1:
            raise BadParam(name, params.getlist(name), "given more than once")


def parse_site_query(params: QueryParams) -> SiteQuery:
    """The parameters ``site`` and ``layer``."""
    return SiteQuery(_sites(params.getlist("site")), _layer_texts(params.getlist("layer")))


def parse_slice_query(params: QueryParams, accept: str | None) -> SliceQuery:
    """The checked query; BadParam names the parameter, its value and what would be valid; 406 for an Accept header."""
    check_known(params, _PARAMS, ("site", "layer"))
    start, stop = _position(params, "start"), _position(params, "stop")
    if stop is not None and (start or 0) >= stop:
        raise BadParam("stop", stop, f"must be greater than start = {start or 0}; a range is [start, stop)")
    several = _ranges(params)
    if several:
        start, stop = several[0][0], several[-1][1]
    asked = parse_site_query(params)
    query = SliceQuery(
        asked.sites, asked.layers, start or 0, stop,
        _format(params.get("format"), accept), one_of(params, "dtype", DTYPES) or "float32",
        one_of(params, "wait", ("complete", "rows")), seconds(params.get("timeout")),
        one_of(params, "rows", ("accepted", "rejected")) == "rejected", several,
    )
    if query.dtype == "bfloat16" and query.format in ("npy", "npz", "arrow"):
        raise BadParam("dtype", "bfloat16", f"{query.format} has no bfloat16; use safetensors, or float16, float32")
    if query.dtype == "codes" and query.format == "json":
        raise BadParam("dtype", "codes", "json holds numbers only; use safetensors, npz or arrow")
    return query


def one_of(params: QueryParams, name: str, valid: Iterable[str]) -> str | None:
    """The parameter's value, which must be one of ``valid``; None where it is absent."""
    value = params.get(name)
    if value is not None and value not in valid:
        raise BadParam(name, value, f"valid: {', '.join(valid)}")
    return value


def seconds(value: str | None) -> float:
    """A ``timeout`` parameter, in seconds; 10 where absent."""
    if value is None:
        return 10.0
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= limits.wait_timeout_s_max:
        raise BadParam("timeout", value, f"valid: seconds from 0 to {limits.wait_timeout_s_max}")
    return number


def _ranges(params: QueryParams) -> tuple[tuple[int, int], ...]:
    text = params.get("positions")
    if text is None:
        return ()
    valid = f'valid: positions and ranges, such as "0,5,8:12", at most {limits.slice_ranges_max} of them'
    if "start" in params or "stop" in params:
        raise BadParam("positions", text, "either positions, or start and stop")
    parts = text.split(",", limits.slice_ranges_max)
    matches = [_RANGE.fullmatch(part) for part in parts]
    if len(parts) > limits.slice_ranges_max or not all(matches):
        raise BadParam("positions", text, valid)
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((int(m[1]), int(m[2] or int(m[1]) + 1)) for m in matches if m):
        if not start < stop <= limits.position_max:
            raise BadParam("positions", text, f"a range is start:stop with start < stop <= {limits.position_max}")
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def _position(params: QueryParams, name: str) -> int | None:
    value = params.get(name)
    if value is None:
        return None
    if _NUMBER.fullmatch(value) is None or int(value) > limits.position_max:
        raise BadParam(name, value, f"valid: a position from 0 to {limits.position_max}")
    return int(value)


def _sites(names: list[str]) -> list[tuple[str, int | None]]:
    names = [part.strip() for name in names for part in name.split(",")]
    if len(names) > limits.spec_sites_max:
        raise BadParam("site", f"{len(names)} of them", f"at most {limits.spec_sites_max}")
    try:
        return [ask_site(name, "site", ArgumentError) for name in names]
    except ArgumentError as error:
        raise BadParam("site", error.value, error.reason) from None


def _layer_texts(texts: list[str]) -> list[str]:
    for text in texts:
        numbers = len(text) <= 8 * limits.layers_max and all(_LAYER.fullmatch(part) for part in text.split(","))
        if not (numbers or text == "all" or _SLICE.fullmatch(text)):
            raise BadParam("layer", text, _LAYER_VALID)
    return texts


def _format(asked: str | None, accept: str | None) -> str:
    available = available_formats()
    if asked is not None:
        if asked in FORMATS and asked not in available:
            raise BadParam("format", asked, f"needs pyarrow on the server; valid: {', '.join(available)}")
        if asked not in FORMATS:
            raise BadParam("format", asked, f"valid: {', '.join(available)}")
        return asked
    accepted, refused = _accepted(accept or "*/*")
    wanted = [name for name in available if MEDIA_TYPES[name][0] not in refused]
    for media_type in accepted:
        for name in wanted:
            if media_type in ("*/*", "application/*", *MEDIA_TYPES[name]):
                return name
    raise ApiError(406, "not_acceptable", f"Accept = {(accept or '')[:120]!r}: none of its types can be had; valid: "
                   + ", ".join(MEDIA_TYPES[name][0] for name in available), "Accept")


def _accepted(accept: str) -> tuple[list[str], set[str]]:
    """The media types of an Accept header, best first, and those that it refuses."""
    ranked, refused = [], set()
    for part in accept[:4096].split(","):
        media_type, _, rest = part.partition(";")
        quality = re.search(r"\bq=([01](?:\.[0-9]{0,3})?)", rest)
        weight = float(quality[1]) if quality else 1.0
        name = media_type.strip().lower()
        if weight > 0:
            ranked.append((-weight, name))
        else:
            refused.add(name)
    return [name for _, name in sorted(ranked, key=lambda pair: pair[0])], refused
