"""Edits: what one generation asks to be changed in the model's tensors while they are computed.

    "edit": [{"site": "resid_post", "layers": [12], "positions": "generated", "op": "add", "vector": [...], "scale": 4},
             {"site": "resid_post.20", "op": "ablate", "vector": "refusal"}]

Every operation is one form, of a row x and a vector v, in float32 and rounded once at the end ::

    y = a·x + (c + clamp(t, low, high) − t)·v        t = x·v

An edit of some heads has this for each of them alone, in its own columns; the others stay.

``parse_edits`` checks what a caller sent, ``resolve_edits`` holds it against what the engine has armed for edits. Both
raise SpecError naming the field, its value and what would be valid.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from schemas import limits
from schemas.checks import parse_arm
from schemas.errors import LimitError, NotArmedError, SpecError, StartError, json_fault
from schemas.sites import ask_site, has_heads, place_of, site_meant
from schemas.spec import intervals, merged, ranges_of, validated

__all__ = ["EDITABLE", "IDENTITY", "Arms", "Base64", "EditError", "EditSpec", "Edits", "Placed", "Source",
           "each_position", "floats_of", "layers_meant", "no_vector", "parse_edit_places", "parse_edits",
           "resolve_edits"]

EDITABLE: Final = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_post", "q", "k", "v", "q_rot",
                   "k_rot", "z")

_Number = StrictInt | StrictFloat
_Natural = Annotated[StrictInt, Field(ge=0, le=limits.position_max)]
F32 = npt.NDArray[np.float32]
_MOST: Final = float(np.finfo(np.float32).max)  # no bound: JSON has no infinity
IDENTITY: Final = (1.0, 0.0, -_MOST, _MOST)


class EditError(SpecError):
    """An edit that cannot be made."""

    @staticmethod
    def name_of(field: str) -> str:
        return f"edit{field}" if field.startswith("[") else f"edit.{field}" if field else "edit"


class UnarmedEditError(EditError, NotArmedError):
    """The site or layer exists, but the engine was not started with an edit armed there."""


class Base64(BaseModel):
    """Numbers as base64 of little-endian float32; ``name`` is what a manifest calls a vector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base64: StrictStr = Field(min_length=1, max_length=limits.edit_json_bytes_max)
    name: StrictStr | None = Field(None, description="Of a stored vector: its name. The service alone gives it.")


class Source(BaseModel):
    """Rows of a stored capture."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    capture: StrictStr = Field(max_length=limits.alias_chars_max, description="A capture of the caller's own.")
    positions: list[_Natural] | list[tuple[_Natural, _Natural]] | None = Field(
        None, max_length=limits.edit_intervals_max, description="Of the rows, as many as those of the edit and in "
                                                                "their order; default: the same.")
    site: StrictStr | None = Field(None, description="Default: that of the edit.")
    layer: _Natural | None = Field(None, description="Default: for each layer of the edit the same.")
    decoded: StrictBool = Field(False, description="Take rows of a codec that is not exact, as they decode.")


class When(BaseModel):
    """The condition of an edit: a registered probe's score of the request's newest row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    probe: StrictStr = Field(description="Name of a registered probe.")
    score: StrictStr | _Natural | None = Field(None, description="Which of its scores, by name or from 0, where it has "
                                                                 "several.")
    above: _Number = Field(description="From this score on the edit is made, from the next step on.")
    below: _Number | None = Field(None, description="Below this score it is made no more; not given: it stays.")


class EditSpec(BaseModel):
    """One edit of a request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    site: StrictStr = Field("", description="A site or its TransformerLens name; one with a layer in it fixes it.")
    layers: Literal["all"] | list[_Natural] = Field("all", max_length=limits.layers_max,
                                                    description='"all" that are armed for edits, or 0-based layers.')
    heads: list[_Natural] | None = Field(None, min_length=1, max_length=limits.edit_heads_max,
                                         description="Of a site that has heads: those that are edited, each alone.")
    positions: StrictStr | list[_Natural] | list[tuple[_Natural, _Natural]] = Field(
        "all", max_length=limits.edit_intervals_max,
        description='"all", "prompt", "generated", positions from 0, or [[start, stop], …].')
    op: Literal["add", "scale", "ablate", "cap", "set", "stop"] = Field(
        description='What is done; "stop": the request ends where "when" says.')
    when: When | None = Field(None, description="Makes the edit depend on a probe's score; of all edits of a request "
                                                "the same.")
    vector: StrictStr | Annotated[list[_Number], Field(max_length=limits.width_max)] | Base64 | None = Field(
        None, description="Name of a registered or stored vector, or its numbers: of a row or, with heads, of a head.")
    rows: Base64 | Annotated[list[list[_Number]], Field(max_length=limits.edit_rows_max)] | None = Field(
        None, description="Of set, in place of vector: a row for each position that positions lists, in its order.")
    from_: Source | None = Field(None, alias="from", description="Of set: the capture whose rows it takes. The service "
                                                                 "looks them up, and tells the engine rows as well.")
    scale: _Number = Field(1, description="Of add: how many times the vector is added.")
    by: _Number | None = Field(None, description="Of scale: the factor.")
    low: _Number | None = Field(None, description="Of cap: the least projection on the vector's direction.")
    high: _Number | None = Field(None, description="Of cap: the largest.")


class Placed(msgspec.Struct, frozen=True):
    """One edit held against an engine; ``vector`` is the digest of its vector, "" where it has none.

    ``form``: a, c, low, high of the module's formula. ``rows``: how many the vector is of, one for each position in
    ascending order; 0: it is one, for every position. ``heads``: edited each alone; none: the whole row. ``when``:
    only while the request's condition says so.
    """

    site: str
    layers: list[int]
    positions: str | list[tuple[int, int]]
    form: tuple[float, float, float, float]
    vector: str
    rows: int = 0
    heads: list[int] = []
    when: bool = False

    @property
    def places(self) -> list[tuple[str, int]]:
        """Site and layer of every tensor that is edited."""
        return [place_of(self.site, layer) for layer in self.layers]


class Condition(msgspec.Struct, frozen=True):
    """When a request's conditional edits are made, or with ``stops`` it ends: from a score of ``above`` on, of a row
    that a token is drawn from, until one ``below``, each time from the next step on. ``column``: which score of the
    probe.
    """

    probe: str
    column: int
    above: float
    below: float | None
    stops: bool


class Edits(msgspec.Struct, frozen=True, tag="vllm-tap-edit", tag_field="ticket"):
    """All edits of a request in their order, with their vectors: float32, by digest."""

    placed: list[Placed]
    vectors: dict[str, bytes]
    told: str  # as in Manifest.edits, JSON
    condition: Condition | None = None

    @property
    def row_positions(self) -> list[tuple[int, int]]:
        """Positions that have rows of their own in any edit, as sorted, disjoint ranges."""
        return merged(span for one in self.placed if one.rows for span in one.positions if not isinstance(span, str))

    @property
    def rows_kept(self) -> int:
        """Rows that an engine keeps for them: every edit with rows has a place for each of ``row_positions``."""
        return sum(one.rows > 0 for one in self.placed) * sum(stop - start for start, stop in self.row_positions)

    def salt(self, prompt_len: int) -> str:
        """Text that is equal where the same rows get the same edits: what such requests cached they may share."""
        placed = [(one.places, intervals(one.positions, prompt_len), list(map(repr, one.form)), one.vector, one.heads,
                   one.when) for one in self.placed]
        # What is generated is edited or not by what a condition saw of it, from the end of the prompt on.
        depends = (self.condition, prompt_len) if any(one.when for one in self.placed) else None
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode([placed, depends]))


class Arms(msgspec.Struct, frozen=True):
    """What an engine is armed to edit: layers and width by site; ``depth`` edits at most of one row, ``rows`` that it
    keeps at once for all its requests.

    ``vectors``: numbers of its own vectors by name; ``heads``: numbers of a head, by site that has heads; ``probes``:
    names of a probe's scores, that conditions may be about. ``without_when``, ``without_stop``: why this engine has no
    conditions, or none that end a request; "" where it has.
    """

    layers: dict[str, list[int]]
    widths: dict[str, int]
    n_layers: int
    depth: int
    vectors: dict[str, F32]
    names: dict[str, str]  # Armed.names
    rows: int
    max_len: int  # tokens of a request, at most
    heads: dict[str, int] = {}
    probes: dict[str, list[str]] = {}
    without_when: str = ""
    without_stop: str = ""


def digest_of(vector: F32) -> str:
    """The name of a vector by its numbers."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(vector, np.float32).tobytes())


_VALID: Final = {
    "site": f"one of {', '.join(EDITABLE)}, with a layer (resid_post.12) or without",
    "layers": '"all" or a list of layers counted from 0',
    "heads": f"a list of heads counted from 0, at most {limits.edit_heads_max} of them, of a site that has heads",
    "positions": '"all", "prompt", "generated", a list of positions, or [[start, stop], …], counted from 0, at most '
                 f"{limits.edit_intervals_max} of them",
    "rows": 'a list with a list of numbers for each position, or {"base64": "…"} of their float32',
    "op": "add, scale, ablate, cap or set",
    "vector": "the name of a vector that the engine was started with (--vector NAME=FILE) or that was stored (PUT "
              '/v1/vectors/NAME), a list of numbers, or {"base64": "…"} of float32, little-endian',
    "from": '{"capture": ID, "positions": [5]}, and if need be site, layer and decoded',
    "when": '{"probe": NAME, "above": a score, "below": a score or nothing}',
    "scale": "a number", "by": "a number", "low": "a number", "high": "a number",
}
_PARTS: Final[dict[str, dict[str, str]]] = {
    "vector": {"base64": "text of at most " f"{limits.edit_json_bytes_max} characters", "name": "text"},
    "from": {"capture": "the id of a capture, a response id or an X-Request-Id",
             "positions": _VALID["positions"].removeprefix('"all", "prompt", "generated", '),
             "site": "the name of a site", "layer": "a layer counted from 0", "decoded": "true or false"},
    "when": {"probe": "the name of a probe that the engine was started with", "score": "its name, or its number from 0",
             "above": "a number", "below": "a number"}}
_FIELDS: Final = {"add": ("vector", "scale"), "scale": ("by",), "ablate": ("vector",), "cap": ("vector", "low", "high"),
                  "set": ("vector", "rows", "from"), "stop": ()}


def parse_edits(value: object) -> list[EditSpec]:
    """Checked edits of a list or of its JSON text; SpecError or LimitError otherwise."""
    if isinstance(value, str | bytes):
        if len(value) > limits.edit_json_bytes_max:
            raise LimitError("bytes of the edits", len(value), limits.edit_json_bytes_max)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise EditError("", "…", f"malformed JSON: {json_fault(error)}") from None
    if not isinstance(value, list):
        raise EditError("", value, 'must be a list such as [{"site": "resid_post.12", "op": "scale", "by": 0}]')
    own = sum(not (isinstance(each, Mapping) and each.keys() & {"rows", "from"}) for each in value)
    for count, most in ((own, limits.edits_max), (len(value), limits.edits_of_rows_max)):
        if count > most:
            raise LimitError("edits", count, most, "one edit may have many layers and positions")
    return [_parse_one(number, each) for number, each in enumerate(value)]


def _parse_one(number: int, value: object) -> EditSpec:
    at = f"[{number}]"
    if not isinstance(value, Mapping):
        raise EditError(at, value, 'must be an object such as {"site": "resid_post.12", "op": "scale", "by": 0}')
    for field, most in (("vector", limits.width_max), ("positions", limits.edit_intervals_max)):
        if isinstance(value.get(field), list) and len(value[field]) > most:
            raise LimitError(f"edit{at}.{field}", len(value[field]), most)
    # Else which of its own fields is wrong is not told.
    for field, kind in (("from", Source), ("vector", Base64), ("when", When)):
        if isinstance(value.get(field), Mapping):
            validated(kind, value[field], _PARTS[field], EditError, f"{at}.{field}.")
    spec = validated(EditSpec, value, _VALID, EditError, f"{at}.")
    for field in ("vector", "rows", "from", "scale", "by", "low", "high"):
        if field in value and field not in _FIELDS[spec.op]:
            raise EditError(f"{at}.{field}", value[field],
                            f"{spec.op} has {' and '.join(_FIELDS[spec.op])}, and no {field}")
    _check_when(at, spec, value)
    for field in ("scale", "by", "low", "high"):
        if (given := getattr(spec, field)) is not None and not _is_float32(given):
            raise EditError(f"{at}.{field}", given, "valid: a finite number that float32 holds")
    _check_positions(f"{at}.positions", spec.positions)
    if isinstance(spec.vector, Base64):
        floats_of(f"{at}.vector.base64", spec.vector.base64)
    if spec.rows is not None or spec.from_ is not None:
        _check_rows(at, spec)
    for field in ("vector", "by"):
        if field == "vector" and (spec.rows is not None or spec.from_ is not None):
            continue
        if field in _FIELDS[spec.op] and getattr(spec, field) is None:
            raise EditError(f"{at}.{field}", "nothing", f"{spec.op} needs it; valid: {_VALID[field]}")
    if spec.op == "cap":
        low, high = (-math.inf if spec.low is None else spec.low), (math.inf if spec.high is None else spec.high)
        if spec.low is None and spec.high is None:
            raise EditError(f"{at}.high", "nothing", "cap needs low or high, or both")
        if low > high:
            raise EditError(f"{at}.low", spec.low, f"is above high = {spec.high}")
    return spec


def _check_when(at: str, spec: EditSpec, value: Mapping[str, Any]) -> None:
    if spec.op == "stop":
        if more := sorted(value.keys() - {"op", "when"}):
            raise EditError(f"{at}.{more[0]}", value[more[0]], f"stop has when, and no {more[0]}")
        if spec.when is None:
            raise EditError(f"{at}.when", "nothing", f"stop needs it; valid: {_VALID['when']}")
    elif not spec.site:
        raise EditError(f"{at}.site", spec.site or "nothing", f"valid: {_VALID['site']}")
    if spec.when is None:
        return
    for field, given in (("above", spec.when.above), ("below", spec.when.below)):
        if given is not None and not _is_float32(given):
            raise EditError(f"{at}.when.{field}", given, "valid: a finite number that float32 holds")
    if spec.when.below is not None and spec.op == "stop":
        raise EditError(f"{at}.when.below", spec.when.below, "what has ended does not go on: leave it out")
    if spec.when.below is not None and spec.when.below > spec.when.above:
        raise EditError(f"{at}.when.below", spec.when.below, f"is beyond above = {spec.when.above}")
    if spec.positions == "prompt":
        raise EditError(f"{at}.positions", "prompt", "a condition is asked from the prompt's last token on: nothing of "
                                                     "a prompt is edited by it")


def _check_rows(at: str, spec: EditSpec) -> None:
    if spec.vector is not None:
        raise EditError(f"{at}.rows", "…", "set has vector, one row for all positions, or rows, its own or from a "
                                           "capture, and not both")
    if isinstance(spec.positions, str):
        raise EditError(f"{at}.positions", spec.positions, "rows are of positions that are listed; valid: a list of "
                                                           "positions, or [[start, stop], …]")
    if not spec.positions:
        raise EditError(f"{at}.positions", spec.positions, "names no position: leave the edit out")
    if (count := sum(stop - start for start, stop in _spans(spec.positions))) > limits.edit_rows_max:
        raise LimitError(f"edit{at}.positions", count, limits.edit_rows_max)
    if len(at_once := each_position(spec.positions)) != len(set(at_once)):
        raise EditError(f"{at}.positions", spec.positions, "names a position twice, with two rows")
    if spec.from_ is not None and spec.from_.positions is not None:
        _check_positions(f"{at}.from.positions", spec.from_.positions)
        named = sum(stop - start for start, stop in _spans(spec.from_.positions))
        if named != count:
            raise EditError(f"{at}.from.positions", f"{named} of them", f"the edit has {count}; name as many, in their "
                            "order, or none where they are the same")


def _spans(positions: Sequence[int] | Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(each, each + 1) if isinstance(each, int) else each for each in positions]


def each_position(positions: Sequence[int] | Sequence[tuple[int, int]]) -> list[int]:
    """Listed positions one by one, in their order."""
    return [position for start, stop in _spans(positions) for position in range(start, stop)]


def _check_positions(field: str, positions: str | Sequence[object]) -> None:
    if isinstance(positions, str) and positions not in ("all", "prompt", "generated"):
        raise EditError(field, positions, f"valid: {_VALID['positions']}")
    for item in () if isinstance(positions, str) else positions:
        if isinstance(item, tuple) and item[0] >= item[1]:
            raise EditError(field, list(item), "a range is [start, stop] with start < stop")


def resolve_edits(specs: Sequence[EditSpec], arms: Arms) -> Edits:
    """Edits held against an engine; EditError where they do not fit."""
    placed, vectors, told = [], {}, []
    for number, spec in enumerate(specs):
        if spec.from_ is not None and spec.rows is None:
            raise EditError(f"[{number}].from", spec.from_.capture, "rows of a capture are looked up by the service "
                            "(the request's own field edit), not by the engine; read them from the store, and give "
                            "the array as rows")
        if spec.op == "stop":
            told.append(spec.model_dump(exclude_unset=True))
            continue
        site, layers = layers_meant(f"[{number}]", spec, arms)
        _check_reach(f"[{number}].positions", spec.positions, arms.max_len)
        heads = _heads(f"[{number}].heads", spec.heads, site, arms)
        form, vector = _form(f"[{number}]", spec, site, arms)
        digest = ""
        if vector is not None:
            digest = digest_of(vector)
            vectors[digest] = vector.tobytes()
        rows = 0 if vector is None or spec.rows is None else len(vector)
        placed.append(Placed(site, layers, ranges_of(spec.positions), form, digest, rows, heads,
                             spec.when is not None))
        told.append(_told(spec, placed[-1]))
    found = Edits(placed, vectors, json.dumps(told), _condition(specs, arms))
    if found.rows_kept > arms.rows:
        raise EditError("", f"{found.rows_kept} rows", f"the engine keeps {arms.rows} for all its requests: edits with "
                        "rows of their own have a place for each of their positions together (VLLM_TAP_EDIT_ROWS, "
                        "--edit-rows, raises that)")
    _check_depth(found, arms)
    return found


def _condition(specs: Sequence[EditSpec], arms: Arms) -> Condition | None:
    """The condition of a request's edits, None where it has none; EditError where there are several, or none here."""
    with_one = [(number, spec) for number, spec in enumerate(specs) if spec.when is not None]
    if not with_one:
        return None
    number, first = with_one[0]
    when, at = first.when, f"[{number}].when"
    assert when is not None
    for other, spec in with_one:
        if spec.when != when or (spec.op == "stop") != (first.op == "stop"):
            raise EditError(f"[{other}].when", "…", "a request has one condition, of edits or of its end: the same in "
                                                    "all")
    if reason := arms.without_when or (first.op == "stop" and arms.without_stop):
        raise EditError(at, when.probe, reason)
    if when.probe not in arms.probes:
        raise EditError(f"{at}.probe", when.probe, f"no such probe; registered: {', '.join(arms.probes) or 'none'} "
                                                   "(start the engine with --probe NAME=FILE to add one)")
    names = arms.probes[when.probe]
    column = 0 if when.score is None else names.index(when.score) if when.score in names else when.score
    if isinstance(column, str) or not 0 <= column < len(names) or (when.score is None and len(names) > 1):
        raise EditError(f"{at}.score", "nothing" if when.score is None else when.score,
                        f"the probe has the scores {', '.join(names)}; valid: one of them, or its number from 0")
    return Condition(when.probe, column, float(when.above), None if when.below is None else float(when.below),
                     first.op == "stop")


def _told(spec: EditSpec, placed: Placed) -> dict[str, Any]:
    """An edit as a manifest has it: as asked, its site and layers as they were found, its vector by its digest."""
    asked = spec.model_dump(exclude_defaults=True, exclude={"site", "layers", "vector", "rows"}, by_alias=True)
    return {"site": placed.site, "layers": placed.layers, **asked,
            **({"vector": name} if (name := _name_of(spec.vector)) is not None else {}),
            **({"digest": placed.vector} if placed.vector else {})}


def _name_of(vector: str | list[int | float] | Base64 | None) -> str | None:
    return vector if isinstance(vector, str) else vector.name if isinstance(vector, Base64) else None


def layers_meant(at: str, spec: EditSpec, arms: Arms) -> tuple[str, list[int]]:
    """The site and the layers of an edit; EditError, naming the field below ``at``, where they cannot be edited."""
    field = f"{at}.site"
    site, fixed = ask_site(spec.site, field, EditError)
    site = site_meant(site, arms.names, spec.site, field, EditError)
    if site not in EDITABLE:
        raise EditError(field, spec.site, f"cannot be edited; valid: {_VALID['site']}")
    if site not in arms.layers:
        armed = "; ".join(f"{name} {layers}" for name, layers in arms.layers.items()) or "nothing"
        raise UnarmedEditError(field, spec.site, f"not armed for edits; armed: {armed} (start the engine with --edit, "
                                                 "or VLLM_TAP_EDIT)")
    asked = arms.layers[site] if spec.layers == "all" and fixed is None else spec.layers
    if fixed is not None:
        if isinstance(asked, list) and fixed not in asked:
            raise EditError(f"{at}.layers", asked, f"does not contain the layer that {spec.site!r} fixes")
        asked = [fixed]
    assert isinstance(asked, list)
    if not asked:
        raise EditError(f"{at}.layers", asked, "names no layer: leave the edit out")
    if out := [layer for layer in asked if layer >= arms.n_layers]:
        raise EditError(f"{at}.layers", out, f"out of range; the model has layers 0 to {arms.n_layers - 1}")
    if missing := sorted(set(asked) - set(arms.layers[site])):
        raise UnarmedEditError(f"{at}.layers", missing, f"not armed for edits of {site}; armed: {arms.layers[site]} "
                                                        "(start the engine with --edit, or VLLM_TAP_EDIT)")
    return site, sorted(set(asked))


def _check_reach(field: str, positions: str | Sequence[int] | Sequence[tuple[int, int]], max_len: int) -> None:
    if not isinstance(positions, str) and (beyond := [span for span in _spans(positions) if span[1] > max_len]):
        raise EditError(field, list(beyond[0]), f"beyond the model: a request has {max_len} tokens at most, counted "
                                                "from 0 (max_model_len)")


def _heads(field: str, asked: list[int] | None, site: str, arms: Arms) -> list[int]:
    """The heads of a spec, in their order; none where it is about whole rows."""
    if asked is None:
        return []
    if site not in arms.heads:
        raise EditError(field, asked, f"{site} has no heads; valid with heads: "
                                      f"{', '.join(one for one in EDITABLE if has_heads(one))}")
    count = arms.widths[site] // arms.heads[site]
    if out := [head for head in asked if head >= count]:
        raise EditError(field, out, f"out of range; {site} has heads 0 to {count - 1} in this model")
    return sorted(set(asked))


def _form(at: str, spec: EditSpec, site: str, arms: Arms) -> tuple[tuple[float, float, float, float], F32 | None]:
    heads = _heads(f"{at}.heads", spec.heads, site, arms)
    if spec.op == "scale":
        assert spec.by is not None
        return (float(spec.by), *IDENTITY[1:]), None
    if spec.rows is not None and not isinstance(spec.positions, str):
        sizes = [arms.widths[site], *([arms.heads[site]] if heads else [])]
        given = _rows(f"{at}.rows", spec.rows, each_position(spec.positions), sizes)
        return (0.0, 1.0, -_MOST, _MOST), _laid(given, site, heads, arms)
    vector = _vector(f"{at}.vector", spec.vector, arms)
    if len(vector) != arms.widths[site] and not (heads and len(vector) == arms.heads[site]):
        raise EditError(f"{at}.vector", f"{len(vector)} numbers", f"rows of {site} have {arms.widths[site]}" + (
            f", heads {arms.heads[site]}" if heads else ""))
    vector = _laid(vector[None], site, heads, arms)[0]
    if spec.op == "add":
        return (1.0, float(spec.scale), -_MOST, _MOST), vector
    if spec.op == "set":
        return (0.0, 1.0, -_MOST, _MOST), vector
    direction = _direction(f"{at}.vector", spec.op, vector, heads, arms.heads[site] if heads else 0)
    if spec.op == "ablate":
        return (1.0, 0.0, 0.0, 0.0), direction
    return (1.0, 0.0, -_MOST if spec.low is None else float(spec.low),
            _MOST if spec.high is None else float(spec.high)), direction


def _direction(field: str, op: str, vector: F32, heads: list[int], size: int) -> F32:
    """A vector of length 1 or, with heads of this size, such a one for each of them."""
    parts = vector.astype(np.float64).reshape(-1, size or len(vector))
    lengths = np.linalg.norm(parts, axis=1, keepdims=True)
    for part in heads or [0]:
        if lengths[part] == 0:
            raise EditError(field, "zeros" if not heads else f"zeros for head {part}", f"{op} needs a direction")
    found: F32 = (parts / np.where(lengths == 0, 1, lengths)).reshape(-1).astype(np.float32)
    return found


def _laid(given: F32, site: str, heads: list[int], arms: Arms) -> F32:
    """Rows [n, width] of rows, or of what each of the heads gets; zeros where no head is edited."""
    if not heads:
        return given
    size, width = arms.heads[site], arms.widths[site]
    parts = (given if given.shape[1] == width else np.tile(given, width // size)).reshape(len(given), -1, size)
    found = np.zeros_like(parts)
    found[:, heads] = parts[:, heads]
    return found.reshape(len(given), width)


def _vector(field: str, given: str | list[int | float] | Base64 | None, arms: Arms) -> F32:
    if isinstance(given, str):
        if given not in arms.vectors:
            raise no_vector(field, given, arms.vectors)
        return arms.vectors[given]
    if isinstance(given, Base64):
        numbers = floats_of(f"{field}.base64", given.base64)
        if given.name in arms.vectors and digest_of(arms.vectors[given.name]) != digest_of(numbers):
            raise EditError(f"{field}.name", given.name, "the engine was started with other numbers under this name")
        return numbers
    assert given is not None
    for number, each in enumerate(given):
        if not _is_float32(each):
            raise EditError(f"{field}[{number}]", each, "valid: a finite number that float32 holds")
    return np.array(given, np.float32)


def _rows(field: str, given: Base64 | list[list[int | float]], positions: Sequence[int], sizes: Sequence[int]) -> F32:
    """Rows float32 [positions, one of ``sizes``], in the order of positions."""
    said = " or ".join(map(str, sizes))
    if isinstance(given, Base64):
        flat = floats_of(f"{field}.base64", given.base64)
        if flat.size not in (len(positions) * size for size in sizes):
            raise EditError(field, f"{flat.size} numbers", f"{len(positions)} positions of {said} numbers each")
        found = flat.reshape(len(positions), -1)
    else:
        if len(given) != len(positions):
            raise EditError(field, f"{len(given)} rows", f"positions lists {len(positions)}")
        for number, row in enumerate(given):
            if len(row) not in sizes or len(row) != len(given[0]):
                raise EditError(f"{field}[{number}]", f"{len(row)} numbers", f"rows of the site have {said}")
            for column, each in enumerate(row):
                if not _is_float32(each):
                    raise EditError(f"{field}[{number}][{column}]", each, "valid: a finite number that float32 holds")
        found = np.array(given, np.float32)
    return found[np.argsort(positions)]


def floats_of(field: str, text: str, error: type[SpecError] = EditError) -> F32:
    """The numbers of base64, float32 [n]; ``error`` where it is none, holds none, or one that is not finite."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as fault:
        raise error(field, text, f"no base64 ({fault}); valid: base64.b64encode(array.astype('<f4').tobytes())"
                    ) from None
    if not data or len(data) % 4:
        raise error(field, f"{len(data)} bytes", "float32 takes 4 bytes a number, and at least one is needed")
    found = np.frombuffer(data, "<f4").astype(np.float32)
    if not (finite := np.isfinite(found)).all():
        at = int(finite.argmin())
        raise error(f"{field}[{at}]", float(found[at]), "valid: a finite number that float32 holds")
    return found


def no_vector(field: str, name: str, registered: Iterable[str]) -> EditError:
    """The refusal of a name that no vector has."""
    return EditError(field, name, f"no such vector; registered: {', '.join(registered) or 'none'} (start the engine "
                                  "with --vector NAME=FILE to add one, or store one: PUT /v1/vectors/NAME)")


def _check_depth(edits: Edits, arms: Arms) -> None:
    """No row has more edits of one site and layer than the graph has steps: held without regard to positions."""
    seen: dict[tuple[str, int], int] = {}
    for number, one in enumerate(edits.placed):
        for layer, place in zip(one.layers, one.places, strict=True):
            seen[place] = count = seen.get(place, 0) + 1
            if count > arms.depth:
                raise EditError(f"[{number}].layers", layer, f"edit {count} of {place[0]}.{place[1]}: the engine makes "
                                f"{arms.depth} of one site and layer (VLLM_TAP_EDIT_DEPTH raises that)")


def _is_float32(number: Any) -> bool:
    try:
        return math.isfinite(number) and abs(number) <= _MOST
    except OverflowError:
        return False


def encode(edits: Edits) -> str:
    """The JSON text of edits, as it travels in ``SamplingParams.extra_args``."""
    return msgspec.json.encode(edits).decode()


_decoder = msgspec.json.Decoder(Edits)


def decode(text: str) -> Edits:
    """Edits of their JSON text; msgspec.DecodeError on anything else."""
    return _decoder.decode(text)


def parse_edit_places(name: str, text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of what may be edited: sites, or ``site.layer``; StartError, beginning with
    ``name``, where one cannot be. Empty: nothing.
    """
    places = parse_arm(name, text) if text.strip(", ") else ()
    for place in places:
        if place.partition(".")[0] not in EDITABLE:
            raise StartError(f"{name} = {text!r}: {place!r} cannot be edited; valid: {', '.join(EDITABLE)}, each with "
                             "a layer or without")
    return places
