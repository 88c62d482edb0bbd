"""Edits of a capture whose engine runs on the stages of a pipeline: each counts those of its own layers, and a manifest
has them put together. What a rank has not told is missing, and says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from schemas.sites import edited_place
from schemas.wire.layout import LEADER

__all__ = ["Counting", "counting_of", "put_together", "ranks_of"]

Counting = Mapping[tuple[str, int], int]  # the rank that counts what edits did, by place


class _Counted(msgspec.Struct):
    counted: list[dict[str, list[int]]] = []


class _Told(msgspec.Struct):
    """The fields of an engine's description that are needed here."""

    edits: _Counted | None = None


@lru_cache(maxsize=64)
def counting_of(info: str) -> Counting:
    """The ranks that count edits, by an engine's description as JSON; none where the rank that leads counts all."""
    told = msgspec.json.decode(info, type=_Told).edits
    return {} if told is None else {(site, layer): rank for rank, places in enumerate(told.counted)
                                    for site, layers in places.items() for layer in layers}


def ranks_of(edits: str, counting: Counting) -> frozenset[int]:
    """Ranks beside the leader that count any of a capture's edits."""
    if not (edits and counting):
        return frozenset()
    return frozenset(_rank(edit, layer, counting) for edit in json.loads(edits) for layer in edit.get("layers", ())
                     ) - {LEADER}


def put_together(edits: list[dict[str, Any]], counting: Counting, told: Mapping[int, str],
                 reason_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """Edits as the leader tells them, with what other ranks have ``told`` (PartFinish.edits) of the layers that they
    count; ``reason_of`` a rank that has told nothing: why.
    """
    said = {rank: json.loads(text) for rank, text in told.items() if text}
    return [{**edit, "rows": _rows(number, edit, counting, said, reason_of)} if "rows" in edit else edit
            for number, edit in enumerate(edits)] if counting else edits


def _rows(number: int, edit: dict[str, Any], counting: Counting, said: Mapping[int, list[list[dict[str, Any]]]],
          reason_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """The statements about an edit, layers with equal numbers together."""
    alike: dict[str, tuple[dict[str, Any], list[int]]] = {}
    leads = {layer: group for group in edit["rows"] for layer in group["layers"]}
    for layer in edit["layers"]:
        group, rank = leads[layer], _rank(edit, layer, counting)
        if rank != LEADER:
            mine = said[rank][number] if number < len(said.get(rank, ())) else []
            own = next((each for each in mine if layer in each["layers"]), None)
            group = own or {**group, **({"reason": reason_of(rank)} if group["missing"] else {})}
        rest = {name: value for name, value in group.items() if name != "layers"}
        alike.setdefault(json.dumps(rest, sort_keys=True), (rest, []))[1].append(layer)
    return [{"layers": layers, **rest} for rest, layers in alike.values()]


def _rank(edit: dict[str, Any], layer: int, counting: Counting) -> int:
    return counting.get(edited_place(edit["site"], layer), LEADER)
