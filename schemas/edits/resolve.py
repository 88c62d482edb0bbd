"""Edits held against what an engine has armed for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from schemas.edits.arms import EDITABLE, VALID_SITE, Arms
from schemas.edits.forms import form_of
from schemas.edits.resolved import Condition, Edits, Placed
from schemas.edits.spec import Base64, EditSpec
from schemas.edits.vectors import F32, digest_of
from schemas.errors import EditError, Missing, UnarmedEditError
from schemas.sites import ask_site, has_heads, site_meant
from schemas.spec import Positions, ranges_of, spans_of

__all__ = ["layers_meant", "resolve_edits"]

_ARMED_BY: Final = "(start the engine with --edit, or VLLM_TAP_EDIT)"


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
        one, vector = _placed(f"[{number}]", spec, arms)
        if vector is not None:
            vectors[one.vector] = vector.tobytes()
        placed.append(one)
        told.append(_told(spec, one))
    found = Edits(placed, vectors, json.dumps(told), _condition(specs, arms))
    if found.rows_kept > arms.rows:
        raise EditError("", f"{found.rows_kept} rows", f"the engine keeps {arms.rows} for all requests together; "
                        "name fewer positions, or start it with more (--edit-rows, VLLM_TAP_EDIT_ROWS)")
    _check_depth(found, arms)
    return found


def _placed(at: str, spec: EditSpec, arms: Arms) -> tuple[Placed, F32 | None]:
    """One edit with its numbers, if it has any: float32 [width], or [rows, width]."""
    site, layers = layers_meant(at, spec, arms.layers, arms.names, arms.n_layers)
    _check_reach(f"{at}.positions", spec.positions, arms.max_len)
    heads = _heads(f"{at}.heads", spec.heads, site, arms)
    form, vector = form_of(at, spec, site, heads, arms)
    return Placed(site, layers, ranges_of(spec.positions), form, "" if vector is None else digest_of(vector),
                  0 if vector is None or spec.rows is None else len(vector), heads, spec.when is not None), vector


def _condition(specs: Sequence[EditSpec], arms: Arms) -> Condition | None:
    """The condition of a request's edits, None where it has none; EditError where there are several, or none here."""
    conditions = [(f"[{number}].when", spec.when, spec.op == "stop") for number, spec in enumerate(specs)
                  if spec.when is not None]
    if not conditions:
        return None
    at, when, stops = conditions[0]
    for other, *said in conditions:
        if said != [when, stops]:
            raise EditError(other, "…", "a request has one condition, the same for all of its edits and for its end")
    if arms.without_when:
        raise EditError(at, when.probe, arms.without_when)
    if when.probe not in arms.probes:
        raise EditError(f"{at}.probe", when.probe, f"no such probe; registered: {', '.join(arms.probes) or 'none'} "
                                                   "(start the engine with --probe NAME=FILE to add one)")
    return Condition(when.probe, _column(f"{at}.score", when.score, arms.probes[when.probe]), float(when.above),
                     None if when.below is None else float(when.below), stops)


def _column(field: str, score: str | int | None, names: Sequence[str]) -> int:
    """The number of a probe's score, by name or number; of its only one where none is named."""
    column = 0 if score is None and len(names) == 1 else names.index(score) if score in names else score
    if not isinstance(column, int) or column >= len(names):
        raise EditError(field, Missing if score is None else score,
                        f"the probe has the scores {', '.join(names)}; valid: one of them, or its number from 0")
    return column


def _told(spec: EditSpec, placed: Placed) -> dict[str, Any]:
    """An edit as a manifest has it: as asked, its site and layers as they were found, its vector by its digest."""
    asked = spec.model_dump(exclude_defaults=True, exclude={"site", "layers", "vector", "rows"}, by_alias=True)
    name = spec.vector.name if isinstance(spec.vector, Base64) else spec.vector
    return {"site": placed.site, "layers": placed.layers, **asked,
            **({"vector": name} if isinstance(name, str) else {}),
            **({"digest": placed.vector} if placed.vector else {})}


def layers_meant(at: str, spec: EditSpec, armed: Mapping[str, list[int]], names: Mapping[str, str], n_layers: int
                 ) -> tuple[str, list[int]]:
    """The site and the layers of an edit, of those ``armed`` by site; ``names`` as in Armed. EditError, naming the
    field below ``at``, where they cannot be edited.
    """
    field = f"{at}.site"
    site, fixed = ask_site(spec.site, field, EditError, EDITABLE)
    site = site_meant(site, names, spec.site, field, EditError)
    if site not in EDITABLE:
        raise EditError(field, spec.site, f"cannot be edited; valid: {VALID_SITE}")
    if site not in armed:
        shown = "; ".join(f"{name} {layers}" for name, layers in armed.items()) or "nothing"
        raise UnarmedEditError(field, spec.site, f"not armed for edits; armed: {shown} {_ARMED_BY}")
    field = f"{at}.layers"
    asked = spec.layers if isinstance(spec.layers, list) else armed[site] if fixed is None else [fixed]
    if fixed is not None and fixed not in asked:
        raise EditError(field, asked, f"does not contain the layer that {spec.site!r} fixes")
    layers = set(asked) if fixed is None else {fixed}
    if not layers:
        raise EditError(field, asked, "names no layer: leave the edit out")
    if out := sorted(layer for layer in layers if layer >= n_layers):
        raise EditError(field, out, f"out of range; the model has layers 0 to {n_layers - 1}")
    if missing := sorted(layers - set(armed[site])):
        raise UnarmedEditError(field, missing, f"not armed for edits of {site}; armed: {armed[site]} {_ARMED_BY}")
    return site, sorted(layers)


def _check_reach(field: str, positions: str | Positions, max_len: int) -> None:
    if not isinstance(positions, str) and (beyond := [span for span in spans_of(positions) if span[1] > max_len]):
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


def _check_depth(edits: Edits, arms: Arms) -> None:
    """No row has more edits of one site and layer than the graph has steps: held without regard to positions."""
    seen: dict[tuple[str, int], int] = {}
    for number, one in enumerate(edits.placed):
        for layer, place in zip(one.layers, one.places, strict=True):
            seen[place] = count = seen.get(place, 0) + 1
            if count > arms.depth:
                raise EditError(f"[{number}].layers", layer, f"edit {count} of {place[0]}.{place[1]}: the engine "
                                f"makes at most {arms.depth} at one site and layer; start it with more (--edit-depth, "
                                "VLLM_TAP_EDIT_DEPTH)")
