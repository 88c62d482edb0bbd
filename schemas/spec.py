"""The capture spec: what one generation asks for, how it is checked, and what it resolves to.

``parse_spec`` checks the shape of what a caller sent; ``resolve`` holds it against what the engine has armed. Both
raise SpecError naming the field, the value and what would be valid, before anything is scheduled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from schemas import limits
from schemas.codecs import DEFAULT_CODEC, parse_codec, streams
from schemas.errors import LimitError, Missing, NotArmedError, SpecError, json_fault
from schemas.ids import check_ulid
from schemas.probes import Probe
from schemas.sites import PROBE, SITES, ask_site, has_heads, is_probe, layers_by_site, site_meant

__all__ = ["Armed", "CaptureSpec", "Positions", "Resolved", "armed_at", "check_spans", "intervals", "merged",
           "parse_spec", "ranges_of", "resolve", "spans_of", "validated"]

NAMED_POSITIONS: Final = ("all", "prompt", "generated", "last_prompt")
_SLICE: Final = re.compile(r"(-?[0-9]{1,5})?:(-?[0-9]{1,5})?(?::([0-9]{1,5}))?", re.ASCII)
_TAG_KEY: Final = re.compile(r"[A-Za-z0-9_.\-]+", re.ASCII)

Positions = Sequence[int] | Sequence[tuple[int, int]]  # one by one, or as ranges [start, stop)
_Model = TypeVar("_Model", bound=BaseModel)
_Natural = Annotated[StrictInt, Field(ge=0, le=limits.position_max)]


class CaptureSpec(BaseModel):
    """The capture that one generation asks for; unknown fields are refused.

    >>> parse_spec({"sites": ["blocks.12.hook_resid_post"], "positions": "last_prompt"}).positions
    'last_prompt'
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True,
        json_schema_extra={"examples": [{"sites": ["resid_post"], "layers": "::4", "positions": "all"}]},
    )

    sites: list[StrictStr] | None = Field(
        None, max_length=limits.spec_sites_max,
        description="Sites or TransformerLens names; a name with a layer in it fixes that layer. "
                    "Default: what is armed; with `probe` none.",
    )
    layers: Literal["all"] | list[_Natural] | StrictStr = Field(
        "all", description='"all", a list of 0-based layers, or a slice "start:stop:step".')
    positions: StrictStr | list[_Natural] | list[tuple[_Natural, _Natural]] = Field(
        "all", description='"all", "prompt", "generated", "last_prompt", positions from 0, or [[start, stop], …].')
    codec: StrictStr | dict[StrictStr, StrictStr] = Field(
        DEFAULT_CODEC, description='A codec, such as "int8b64" or "rp8:k=256,seed=3", or a map site → codec; '
                                   "ids (experts) are always raw.")
    prefix_cache: Literal["recompute", "allow"] | None = Field(
        None, description="Whether cached prompt rows are computed again; default: where they could be missing.")
    return_: Literal["reference", "inline"] = Field("reference", alias="return")
    probe: list[StrictStr] = Field(default_factory=list, max_length=limits.probes_max,
                                   description="Names of registered probes, whose scores are taken at the positions.")
    id: StrictStr | None = Field(None, description="A ULID; made by the service where absent.")
    tags: dict[StrictStr, StrictStr] = Field(default_factory=dict, max_length=limits.spec_tags_max)

    def to_json(self) -> str:
        """The canonical JSON that travels in ``SamplingParams.extra_args`` and in manifests."""
        return self.model_dump_json(by_alias=True, exclude_defaults=True)


class Armed(msgspec.Struct, frozen=True):
    """The sites × layers that the engine has taps for; ``n_layers`` of the model, ``heads``: a head's columns,
    0 where they are not known yet.

    ``probes`` by name; what a probe alone is fed from is not armed for anybody else. ``names``: the site that each of
    schemas.sites.BY_MODEL is on this model.
    """

    sites: dict[str, list[int]]
    n_layers: int
    heads: dict[str, int] = {}
    probes: dict[str, Probe] = {}
    names: dict[str, str] = {}


def armed_at(places: Iterable[str], n_layers: int, head: int, probes: dict[str, Probe],
             names: Mapping[str, str] | None = None) -> Armed:
    """Taps at ``places`` (sites, or ``site.layer``), as far as they are known without the model. Only the worker knows
    which layers have a site. A place that its model lacks becomes `not_armed` in the manifest. ``head``: a head's
    columns, or 0.
    """
    asked = layers_by_site(places)
    every = {site: list(range(n_layers)) if SITES[site].per_layer else [0] for site in asked}
    return Armed({site: every[site] if layers is None else layers for site, layers in asked.items()}, n_layers,
                 dict.fromkeys(filter(has_heads, asked), head), probes, dict(names or {}))


class Resolved(msgspec.Struct, frozen=True, omit_defaults=True):
    """A spec held against one engine and one prompt: every site with its layers and its codec's identity, and positions
    as asked. ``images``: positions ``[start, stop)`` of the prompt whose rows were made of an image, not of their
    token.

    ``elsewhere``: those layers by site that ranks with other writers send; ``writer``: the number of this one
    (EngineInfo.divided).
    """

    layers: dict[str, list[int]]
    codec: dict[str, str]
    positions: str | list[tuple[int, int]]
    prefix_cache: str
    images: list[tuple[int, int]] = []
    elsewhere: dict[str, list[int]] = {}
    writer: int = 0

    @property
    def here(self) -> set[tuple[str, int]]:
        """The sites and layers that this writer gets."""
        return {(site, layer) for site, layers in self.layers.items() for layer in layers
                if layer not in self.elsewhere.get(site, ())}

    @property
    def empty(self) -> bool:
        """Whether it captures nothing (legal: the zero-layer control of benchmarks)."""
        return not any(self.layers.values()) or self.positions == []


_MORE: Final = " (start the engine with more in --arm, or VLLM_TAP_ARM)"
_VALID: Final = {
    "sites": 'a list of sites, such as ["resid_post"] or ["blocks.12.hook_resid_post"]',
    "layers": '"all", a list of layers counted from 0, or a slice such as "0:32:4" ("-1:" is the last)',
    "positions": '"all", "prompt", "generated", "last_prompt", a list of positions, or [[start, stop], …], counted '
                 f"from 0, none above {limits.position_max:,}",
    "codec": 'a codec such as "int8b64" or "rp8:k=256,seed=3", or a map from site to codec',
    "prefix_cache": '"recompute" or "allow"',
    "return": '"reference" or "inline"',
    "probe": f"a list of at most {limits.probes_max} names of registered probes",
    "id": "a ULID",
    "tags": f"at most {limits.spec_tags_max} pairs of strings",
}


# Counted before anything is looked at: a list of millions takes seconds to check.
_LONGEST: Final = {"positions": limits.spec_intervals_max, "layers": limits.layers_max, "sites": limits.spec_sites_max,
                   "codec": limits.spec_sites_max, "probe": limits.probes_max}


def parse_spec(value: object) -> CaptureSpec:
    """A checked spec of a mapping or of its JSON text; SpecError or LimitError otherwise."""
    if isinstance(value, str | bytes):
        if len(value) > limits.spec_json_bytes_max:
            raise LimitError("bytes of the capture spec", len(value), limits.spec_json_bytes_max)
        if value.lstrip()[:1] not in ("{", b"{"):
            raise SpecError("", value, "must be an object such as {\"sites\": [\"resid_post\"]}")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise SpecError("", "…", f"malformed JSON: {json_fault(error)}") from None
    if not isinstance(value, Mapping):
        raise SpecError("", value, "must be an object such as {\"sites\": [\"resid_post\"]}")
    for field, most in _LONGEST.items():
        if isinstance(value.get(field), list | Mapping) and len(value[field]) > most:
            raise LimitError(f"capture.{field}", len(value[field]), most, "use ranges, or \"all\"")
    spec = validated(CaptureSpec, value, _VALID)
    _check_values(spec)
    return spec


def validated(kind: type[_Model], value: Mapping[Any, Any], valid: Mapping[str, str],
              error: type[SpecError] = SpecError, at: str = "") -> _Model:
    """The model of a mapping; else ``error``, naming the field (below ``at``), its value and what is ``valid``."""
    try:
        return kind.model_validate(value)
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        field, missing = f"{at}{name}", first["type"] == "missing"
        if first["type"] == "extra_forbidden":
            raise error(field, first["input"], f"unknown field; valid: {', '.join(valid)}") from None
        raise error(field, Missing if missing else value.get(name, first["input"]),
                    f"valid: {valid.get(name, first['msg'])}") from None


def _check_values(spec: CaptureSpec) -> None:
    for name in spec.sites or ():
        if is_probe(ask_site(name)[0]):
            raise SpecError("sites", name, f'name a probe in the field probe, as in "probe": ["{name[len(PROBE):]}"]')
    _check_layers(spec)
    _check_positions(spec.positions)
    for site, codec in (spec.codec if isinstance(spec.codec, dict) else {"": spec.codec}).items():
        if site:
            ask_site(site, "codec")
        parse_codec(codec)
    if spec.id is not None:
        check_ulid(spec.id)
    _check_tags(spec.tags)


def _check_layers(spec: CaptureSpec) -> None:
    if spec.probe and spec.sites is None and spec.layers != "all":
        raise SpecError("layers", spec.layers, "without sites, a spec with probe captures only scores, of each "
                                               "probe's own layer; name the sites whose layers you mean")
    if isinstance(spec.layers, str) and spec.layers != "all":
        match = _SLICE.fullmatch(spec.layers)
        if match is None or match[3] == "0" or (match[3] or "1").strip("0") == "":
            raise SpecError("layers", spec.layers, f"valid: {_VALID['layers']}")


def _check_positions(positions: str | list[int] | list[tuple[int, int]]) -> None:
    if isinstance(positions, str):
        if positions == "last":
            raise SpecError("positions", positions, '"last_prompt" is the last token of the prompt; nobody knows '
                            'before the end which token is the last of all: ask for "generated", and take the last of '
                            'its rows')
        if positions not in NAMED_POSITIONS:
            raise SpecError("positions", positions, f"valid: {_VALID['positions']}")
        return
    if len(positions) > limits.spec_intervals_max:
        raise LimitError("capture.positions", len(positions), limits.spec_intervals_max,
                         "use [[start, stop], …] for ranges")
    check_spans("positions", positions)


def check_spans(field: str, positions: Positions, error: type[SpecError] = SpecError) -> None:
    """``error`` where a range of listed positions has nothing in it."""
    for item in positions:
        if isinstance(item, tuple) and item[0] >= item[1]:
            raise error(field, list(item), "a range is [start, stop] with start < stop")


def _check_tags(tags: Mapping[str, str]) -> None:
    for key, text in tags.items():
        if len(key) > limits.tag_key_chars_max or _TAG_KEY.fullmatch(key) is None:
            raise SpecError("tags", key, f"a key is 1 to {limits.tag_key_chars_max} of A-Z a-z 0-9 _ . -")
        if len(text) > limits.tag_value_chars_max:
            raise SpecError("tags", text, f"a value has at most {limits.tag_value_chars_max} characters")
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise SpecError("tags", text, "valid: text without lone surrogates, which no file or message can hold")


def resolve(spec: CaptureSpec, armed: Armed, widths: Mapping[str, int] | None = None) -> Resolved:
    """Sites, layers and codecs of a spec on an engine; SpecError or NotArmedError where they do not fit.

    ``widths`` are the numbers in a row by site, as far as they are known here.
    """
    asked = _layers_asked(spec.layers, armed.n_layers)
    layers: dict[str, set[int]] = {}
    everything = [] if spec.probe else list(armed.sites)  # a probe alone takes no row off the device but its scores
    nowhere = set() if spec.sites is not None else set(asked or ())  # of layers that are asked for of every site
    for name in everything if spec.sites is None else spec.sites:
        site, fixed = ask_site(name)
        site = site_meant(site, armed.names, name)
        if site not in armed.sites:
            raise NotArmedError("sites", name, f"not armed; armed: {', '.join(armed.sites) or 'nothing'}{_MORE}")
        if not SITES[site].per_layer:
            wanted = set(armed.sites[site])  # one a model: `layers` is not about it
        elif fixed is None:
            wanted = set(armed.sites[site]) if asked is None else asked
            if spec.sites is None and asked:  # of each site what it has of them
                wanted = asked & set(armed.sites[site])
                nowhere -= wanted
                if not wanted:
                    continue
        elif fixed >= armed.n_layers:
            raise SpecError("sites", name, f"layer out of range; the model has layers 0 to {armed.n_layers - 1}")
        elif asked is not None and fixed not in asked:
            raise SpecError("layers", spec.layers, f"does not contain the layer that {name!r} fixes")
        else:
            wanted = {fixed}
        if missing := sorted(wanted - set(armed.sites[site])):
            field, value = ("layers", missing) if fixed is None else ("sites", name)
            raise NotArmedError(field, value, f"not armed for {site}; armed: {armed.sites[site]}{_MORE}")
        layers.setdefault(site, set()).update(wanted)
    if nowhere and (blocks := [site for site in everything if SITES[site].per_layer]):
        raise NotArmedError("layers", sorted(nowhere), "not armed for any site; armed: " + "; ".join(
            f"{site} {armed.sites[site]}" for site in blocks) + _MORE)
    scores = _probes(spec.probe, armed.probes)
    return Resolved(
        layers={**{site: sorted(chosen) for site, chosen in layers.items()}, **scores},
        codec={**{site: _identity(codec, site, armed, (widths or {}).get(site))
                  for site, codec in _codecs(spec, layers, armed.names).items()}, **dict.fromkeys(scores, "raw")},
        positions=ranges_of(spec.positions),
        prefix_cache=spec.prefix_cache or ("recompute" if _could_be_cached(spec.positions) else "allow"),
    )


def _probes(names: list[str], registered: Mapping[str, Probe]) -> dict[str, list[int]]:
    """The sites of the probes asked for, each with the layer that it has."""
    if unknown := [name for name in names if name not in registered]:
        raise SpecError("probe", unknown[0], f"no such probe; registered: {', '.join(registered) or 'none'} (start the "
                                             "engine with --probe NAME=FILE to add one)")
    return {f"{PROBE}{name}": [registered[name].layer] for name in names}


def _layers_asked(layers: str | list[int], n_layers: int) -> set[int] | None:
    """The layers asked for, None for all that are armed."""
    if layers == "all":
        return None
    if isinstance(layers, str):
        match = _SLICE.fullmatch(layers)
        assert match is not None  # checked when parsed
        parts = [None if part is None else int(part) for part in match.groups()]
        if not (chosen := set(range(n_layers)[slice(*parts)])):
            raise SpecError("layers", layers, f"selects none of the layers 0 to {n_layers - 1}; write [] if you mean "
                                              f"none")
        return chosen
    if out := [layer for layer in layers if layer >= n_layers]:
        raise SpecError("layers", out, f"out of range; the model has layers 0 to {n_layers - 1}")
    return set(layers)


def _codecs(spec: CaptureSpec, layers: dict[str, set[int]], names: Mapping[str, str]) -> dict[str, str]:
    sites = list(layers)
    if isinstance(spec.codec, str):
        return {site: "raw" if SITES[site].ids else spec.codec for site in sites}
    named: dict[str, str] = {}
    for name, codec in spec.codec.items():
        site, fixed = ask_site(name, "codec")
        site = site_meant(site, names, name, "codec")
        if site in named or (fixed is not None and layers.get(site, {fixed}) != {fixed}):
            raise SpecError("codec", name, f"a site has one codec for all its layers: name it once, as {site!r}")
        named[site] = codec
    if extra := sorted(set(named) - set(sites)):
        raise SpecError("codec", extra, f"names sites that are not captured; captured: {', '.join(sites)}")
    if coded := {site: codec for site, codec in named.items() if SITES[site].ids and codec != "raw"}:
        raise SpecError("codec", coded, "its rows are ids, which other codecs would change; valid: raw")
    return {site: named.get(site, "raw" if SITES[site].ids else DEFAULT_CODEC) for site in sites}


def _identity(text: str, site: str, armed: Armed, width: int | None) -> str:
    """The identity of a codec at a site, the size of its heads filled in."""
    codec = parse_codec(text)
    family = codec.family
    if family.sites and site not in family.sites:
        raise SpecError("codec", text, f"{site} has no heads for it to encode; {family.name} is for "
                                       f"{', '.join(family.sites)}")
    if family.sites:
        head, asked = armed.heads.get(site), codec.parameters.get("head")
        if head is None or (head and asked not in (None, head)):
            raise SpecError("codec", text, f"heads of {site} have {head or 'an unknown number of'} columns")
        codec = parse_codec(f"{family.name}:head={head}") if head else codec
    identity = codec.identity
    if width:
        streams(identity, width, "float32")
    return identity


def ranges_of(positions: str | list[int] | list[tuple[int, int]]) -> str | list[tuple[int, int]]:
    """A name as it is; lists as sorted, disjoint, merged ``[start, stop)`` ranges."""
    if isinstance(positions, str):
        return positions
    return merged(spans_of(positions))


def spans_of(positions: Positions) -> list[tuple[int, int]]:
    """Listed positions as ranges ``[start, stop)``, in their order."""
    return [(item, item + 1) if isinstance(item, int) else item for item in positions]


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges ``[start, stop)`` as sorted, disjoint ones."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _could_be_cached(positions: str | list[int] | list[tuple[int, int]]) -> bool:
    # The last prompt token and every generated one are always computed; anything else may come from the cache.
    return positions not in ("generated", "last_prompt") and positions != []


def intervals(positions: str | list[tuple[int, int]], prompt_len: int) -> list[tuple[int, int]]:
    """Resolved positions as sorted, disjoint ranges ``[start, stop)`` of absolute positions."""
    named = {
        "all": (0, limits.position_max),
        "prompt": (0, prompt_len),
        "generated": (prompt_len, limits.position_max),
        "last_prompt": (prompt_len - 1, prompt_len),
    }
    return [named[positions]] if isinstance(positions, str) else list(positions)
