"""The query of a slice: which sites, layers and positions, in which format. Checked before anything is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, WithJsonSchema, model_validator

from api.errors import ApiError, BadParam, NotCaptured
from api.parameters import OneSite, Parameters, RangeParameters, Seconds, Sites
from api.slices.formats import DTYPES, FORMATS, MEDIA_TYPES, Dtype, Format, available_formats
from schemas import limits
from schemas.errors import ArgumentError, NotFoundError
from schemas.sites import ask_site, names_of, site_meant
from schemas.spec import merged

__all__ = ["OneSiteQuery", "RangesQuery", "SiteQuery", "SliceQuery", "accepted_format"]

_SLICE: Final = re.compile(r"(-?[0-9]{1,4})?:(-?[0-9]{1,4})?(?::([1-9][0-9]{0,3}))?", re.ASCII)
_LAYER: Final = r"^(all|[0-9]{1,4}(,[0-9]{1,4})*|(-?[0-9]{1,4})?:(-?[0-9]{1,4})?(:[1-9][0-9]{0,3})?)$"
_POSITIONS: Final = r"^[0-9]{1,10}(:[0-9]{1,10})?(,[0-9]{1,10}(:[0-9]{1,10})?)*$"
_Layer = Annotated[str, Field(pattern=_LAYER, max_length=8 * limits.layers_max),
                   WithJsonSchema({"type": "string", "pattern": _LAYER})]


class SiteQuery(Parameters):
    """Sites and layers as asked for; none means all."""

    site: Sites = []
    layer: list[_Layer] = Field(default=[], examples=[["0,12"]], description=(
        'a layer ("3"), several ("0,2"), a slice ("0:32:4"; "-1:" is the last) or "all"; repeatable'))

    def choose(self, captured: dict[str, list[int]], engine: Mapping[str, Any]) -> dict[str, list[int]]:
        """The layers to read of each site, out of what the capture has; NotFoundError where it has them not.

        ``engine`` is the manifest's: what names mean on its model, and the layers that negative numbers count from.
        """
        chosen: dict[str, set[int]] = {}
        names, n_layers = names_of(engine), int(engine.get("n_layers", 0))
        for name in self.site or captured:
            asked, fixed = ask_site(name, "site", ArgumentError)
            site = site_meant(asked, names, asked, "site", ArgumentError)
            if site not in captured:
                raise NotCaptured("site", site, f"is not in this capture, which has {', '.join(captured) or 'no site'}")
            chosen.setdefault(site, set()).update(self._layers(site, fixed, captured[site], n_layers))
        if not any(chosen.values()):
            raise NotFoundError("this capture asked for nothing: no site, or no layer of one")
        return {site: sorted(layers) for site, layers in chosen.items()}

    def _layers(self, site: str, fixed: int | None, have: list[int], n_layers: int) -> set[int]:
        asked: set[int] = set()
        for text in self.layer:
            if match := _SLICE.fullmatch(text):
                start, stop, step = (None if part is None else int(part) for part in match.groups())
                asked |= set(range(n_layers)[start:stop:step]) & set(have)
            else:
                asked |= set(have) if text == "all" else {int(part) for part in text.split(",")}
        if fixed is not None:
            if self.layer and fixed not in asked:
                raise BadParam("layer", self.layer, f"does not contain the layer {fixed} that the site's name fixes")
            asked = {fixed}
        elif not self.layer:
            asked = set(have)
        if absent := sorted(asked - set(have)) or ([] if asked else self.layer):
            there = f"layers {', '.join(map(str, have))}" if have else "no layer"
            raise NotCaptured("layer" if fixed is None else "site", ",".join(map(str, absent)),
                              f"of {site} this capture has {there}")
        return asked


class OneSiteQuery(SiteQuery):
    """One site, by default the first or only one of a capture."""

    site: OneSite = []


class RangesQuery(RangeParameters):
    """Positions by one range or by several."""

    positions: str | None = Field(default=None, pattern=_POSITIONS, examples=["0,5,8:12"], description=(
        f'positions and ranges, such as "0,5,8:12", at most {limits.slice_ranges_max} of them; instead of start and '
        "stop"))
    _ranges: list[tuple[int, int]] = []

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The positions asked for, as ``[start, stop)``, ascending and disjoint."""
        return self._ranges

    @model_validator(mode="after")
    def _find_ranges(self) -> RangesQuery:
        if self.positions is None:
            self._ranges = [(self.start, limits.position_max if self.stop is None else self.stop)]
        elif self.model_fields_set & {"start", "stop"}:
            raise BadParam("positions", self.positions, "either positions, or start and stop")
        else:
            self._ranges = _ranges_of(self.positions)
            self.start, self.stop = self._ranges[0][0], self._ranges[-1][1]
        return self


class SliceQuery(RangesQuery, SiteQuery):
    """Rows that a slice is to hold, and their format."""

    format: Format = Field(default="safetensors", description=(
        f"{', '.join(FORMATS)}; default by Accept, else safetensors"))
    dtype: Dtype = Field(default="float32", description=", ".join(DTYPES))
    wait: Literal["complete", "rows"] | None = Field(default=None, description="complete, rows")
    timeout: Seconds = 10.0
    rows: Literal["accepted", "rejected"] = Field(default="accepted", description=(
        "accepted, rejected (the drafts of speculative decoding that were not accepted)"))

    @property
    def rejected(self) -> bool:
        """Whether drafts that were not accepted are asked for, instead of the sequence's own rows."""
        return self.rows == "rejected"

    def accepting(self, accept: str | None) -> SliceQuery:
        """The query in the format of an Accept header, where it names none itself.

        BadParam where the format cannot hold the dtype, ApiError 406 where none of the header's types can be had.
        """
        query, available = self, available_formats()
        if accept and "format" not in self.model_fields_set and (
                found := accepted_format(accept, available)) != self.format:
            query = self.model_copy(update={"format": found})
        if query.format not in available:
            raise BadParam("format", query.format, f"needs pyarrow on the server; valid: {', '.join(available)}")
        if query.dtype == "bfloat16" and query.format in ("npy", "npz", "arrow"):
            raise BadParam("dtype", "bfloat16", f"{query.format} has no bfloat16; use safetensors, or float16, float32")
        if query.dtype == "codes" and query.format == "json":
            raise BadParam("dtype", "codes", "json holds numbers only; use safetensors, npz or arrow")
        return query


def _ranges_of(text: str) -> list[tuple[int, int]]:
    parts = text.split(",", limits.slice_ranges_max)
    if len(parts) > limits.slice_ranges_max:
        raise BadParam("positions", text, f"at most {limits.slice_ranges_max} positions and ranges")
    ranges = [(int(first), int(last or int(first) + 1)) for first, _, last in (part.partition(":") for part in parts)]
    if not all(start < stop <= limits.position_max for start, stop in ranges):
        raise BadParam("positions", text, f"a range is start:stop with start < stop <= {limits.position_max}")
    return merged(ranges)


def accepted_format(accept: str, available: Sequence[Format]) -> Format:
    """The first of the formats ``available`` that is one of an Accept header's types, best first; ApiError 406."""
    ranked: list[tuple[float, str]] = []
    for part in accept[:4096].split(","):
        media_type, _, rest = part.partition(";")
        quality = re.search(r"\bq=([01](?:\.[0-9]{0,3})?)", rest)
        ranked.append((-float(quality[1]) if quality else -1.0, media_type.strip().lower()))
    wanted = [name for name in available if (0.0, MEDIA_TYPES[name][0]) not in ranked]
    for weight, media_type in sorted(ranked, key=lambda pair: pair[0]):
        for name in wanted if weight else ():
            if media_type in ("*/*", "application/*", *MEDIA_TYPES[name]):
                return name
    raise ApiError(406, "not_acceptable", f"Accept = {accept[:120]!r}: none of its types can be had; valid: "
                   + ", ".join(MEDIA_TYPES[name][0] for name in available), "Accept")
