"""Edits: what one generation asks to be changed in the model's tensors while they are computed.

    "edit": [{"site": "resid_post", "layers": [12], "positions": "generated", "op": "add", "vector": [...], "scale": 4},
             {"site": "resid_post.20", "op": "ablate", "vector": "refusal"}]

``parse_edits`` checks what a caller sent. EditError or LimitError names the field, its value and what would be valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from schemas import limits
from schemas.edits.arms import VALID_SITE
from schemas.edits.vectors import check_float32, floats_of
from schemas.errors import EditError, LimitError, Missing, json_fault
from schemas.spec import Positions, check_spans, spans_of, validated

__all__ = ["Base64", "EditSpec", "Source", "When", "each_position", "parse_edits"]

_Number = StrictInt | StrictFloat
_Natural = Annotated[StrictInt, Field(ge=0, le=limits.position_max)]


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


_SHOWN: Final = 200  # characters of a text: an error cuts it further
_VALID: Final = {
    "site": VALID_SITE,
    "layers": '"all" or a list of layers counted from 0',
    "heads": f"a list of heads counted from 0, at most {limits.edit_heads_max} of them, of a site that has heads",
    "positions": '"all", "prompt", "generated", a list of positions, or [[start, stop], …], counted from 0, at most '
                 f"{limits.edit_intervals_max} of them",
    "rows": 'a list with a list of numbers for each position, or {"base64": "…"} of their float32',
    "op": "add, scale, ablate, cap, set or stop",
    "vector": "the name of a vector that the engine was started with (--vector NAME=FILE) or that was stored (PUT "
              '/v1/vectors/NAME), a list of numbers, or {"base64": "…"} of float32, little-endian',
    "from": '{"capture": ID, "positions": [5]}, and if need be site, layer and decoded',
    "when": '{"probe": NAME, "above": a score, "below": a score or nothing}',
    "scale": "a number", "by": "a number", "low": "a number", "high": "a number",
}
_PARTS: Final[dict[str, dict[str, str]]] = {
    "vector": {"base64": f"text of at most {limits.edit_json_bytes_max} characters", "name": "text"},
    "from": {"capture": "the id of a capture, a response id or an X-Request-Id",
             "positions": _VALID["positions"].removeprefix('"all", "prompt", "generated", '),
             "site": "the name of a site", "layer": "a layer counted from 0", "decoded": "true or false"},
    "when": {"probe": "the name of a probe that the engine was started with", "score": "its name, or its number from 0",
             "above": "a number", "below": "a number"}}
# The fields of each operation. The first is needed; set may have one of the others in its place.
_FIELDS: Final = {"add": ("vector", "scale"), "scale": ("by",), "ablate": ("vector",), "cap": ("vector", "low", "high"),
                  "set": ("vector", "rows", "from"), "stop": ("when",)}
_OPERANDS: Final = {name for fields in _FIELDS.values() for name in fields} - {"when"}


def parse_edits(value: object) -> list[EditSpec]:
    """Checked edits of a list or of its JSON text; SpecError or LimitError otherwise."""
    if isinstance(value, str | bytes):
        if len(value) > limits.edit_json_bytes_max:
            raise LimitError("bytes of the edits", len(value), limits.edit_json_bytes_max)
        begins = value[:_SHOWN]
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise EditError("", begins, f"malformed JSON: {json_fault(error)}") from None
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
            raise LimitError(f"edit{at}.{field}", len(value[field]), most,
                             "use ranges, as in [[0, 65]] for 65 positions" if field == "positions" else "")
    # Else which of its own fields is wrong is not told.
    for field, kind in (("from", Source), ("vector", Base64), ("when", When)):
        if isinstance(value.get(field), Mapping):
            validated(kind, value[field], _PARTS[field], EditError, f"{at}.{field}.")
    spec = validated(EditSpec, value, _VALID, EditError, f"{at}.")
    _check_fields(at, spec, value)
    _check_when(at, spec)
    for field in ("scale", "by", "low", "high"):
        if (given := getattr(spec, field)) is not None:
            check_float32(f"{at}.{field}", given)
    _check_positions(f"{at}.positions", spec.positions)
    if not spec.positions:
        raise EditError(f"{at}.positions", spec.positions, "names no position: leave the edit out")
    if isinstance(spec.vector, Base64):
        floats_of(f"{at}.vector.base64", spec.vector.base64)
    if spec.rows is not None or spec.from_ is not None:
        _check_rows(at, spec)
    elif getattr(spec, needed := _FIELDS[spec.op][0]) is None:
        raise EditError(f"{at}.{needed}", Missing, f"{spec.op} needs it; valid: {_VALID[needed]}")
    if spec.op == "cap" and spec.low is None and spec.high is None:
        raise EditError(f"{at}.high", Missing, "cap needs low or high, or both")
    if spec.low is not None and spec.high is not None and spec.low > spec.high:
        raise EditError(f"{at}.low", spec.low, f"is above high = {spec.high}")
    return spec


def _check_fields(at: str, spec: EditSpec, value: Mapping[str, Any]) -> None:
    """Refuse fields of another operation, and an edit without a site unless it is ``stop``, which changes none."""
    fields = _FIELDS[spec.op]
    others = value.keys() - {"op"} if spec.op == "stop" else value.keys() & _OPERANDS
    if wrong := sorted(others - set(fields)):
        raise EditError(f"{at}.{wrong[0]}", value[wrong[0]], f"{spec.op} has {' and '.join(fields)}, and no {wrong[0]}")
    if not spec.site and spec.op != "stop":
        raise EditError(f"{at}.site", Missing, f"valid: {_VALID['site']}")


def _check_when(at: str, spec: EditSpec) -> None:
    if spec.when is None:
        return
    above, below = spec.when.above, spec.when.below
    check_float32(f"{at}.when.above", above)
    if below is not None:
        check_float32(f"{at}.when.below", below)
        if spec.op == "stop":
            raise EditError(f"{at}.when.below", below, "stop ends the request, so no later score counts; leave it out")
        if below > above:
            raise EditError(f"{at}.when.below", below, f"is beyond above = {above}")
    if spec.positions == "prompt":
        raise EditError(f"{at}.positions", "prompt", "a condition counts from the prompt's last token on, so it "
                                                     'never edits a prompt; valid: "all", "generated", or a list')


def _check_rows(at: str, spec: EditSpec) -> None:
    if spec.vector is not None:
        raise EditError(f"{at}.rows", "…", "set takes vector, one row for all positions, or rows, given or from a "
                                           "capture, not both")
    if isinstance(spec.positions, str):
        raise EditError(f"{at}.positions", spec.positions, "rows need listed positions; valid: a list of "
                                                           "positions, or [[start, stop], …]")
    if (count := _count(spec.positions)) > limits.edit_rows_max:
        raise LimitError(f"edit{at}.positions", count, limits.edit_rows_max)
    if len(set(each_position(spec.positions))) != count:
        raise EditError(f"{at}.positions", spec.positions, "names a position twice, with two rows")
    if spec.from_ is not None and spec.from_.positions is not None:
        _check_positions(f"{at}.from.positions", spec.from_.positions)
        if (named := _count(spec.from_.positions)) != count:
            raise EditError(f"{at}.from.positions", f"{named} of them", f"the edit has {count}; name as many, in their "
                            "order, or none if they are the same")


def _check_positions(field: str, positions: str | Positions) -> None:
    if not isinstance(positions, str):
        check_spans(field, positions, EditError)
    elif positions not in ("all", "prompt", "generated"):
        raise EditError(field, positions, f"valid: {_VALID['positions']}")


def _count(positions: Positions) -> int:
    return sum(stop - start for start, stop in spans_of(positions))


def each_position(positions: Positions) -> list[int]:
    """Listed positions one by one, in their order."""
    return [position for start, stop in spans_of(positions) for position in range(start, stop)]
