"""Counts of edited rows, as a manifest tells them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine_side.transport.edit_counts import ToldEdits
from engine_side.transport.events import EditsCounted

PLACES = [("resid_post", 0), ("resid_post", 2), ("z", 1)]
TOLD = [{"site": "resid_pre", "layers": [1, 3], "op": "scale"},  # which is what blocks 0 and 2 hand on
        {"site": "z", "layers": [1], "op": "scale", "positions": [[3, 8], [12, 15]]}]
BOTH, FIRST = [0, 1], [0]  # edits that are made together, of a request of 10 prompt tokens whose rows end at 14


def counted(made: list[list[int]] | None, cached: list[tuple[int, int]], end: int = 14) -> list[Any]:
    """Applied, cached and missing rows, by edit and layer; ``made``: as the device tells it."""
    event = EditsCounted("c", PLACES, [tuple(FIRST), tuple(BOTH)], cached)
    told = ToldEdits(json.dumps(TOLD), 10, event, None if made is None else np.array(made, np.int32).ravel())
    found = []
    for edit in json.loads(told.with_counts(end)):
        by_layer = {layer: each for each in edit["rows"] for layer in each["layers"]}
        for each in by_layer.values():
            assert each["expected"] == each["applied"] + each["cached"] + each["missing"]
            assert ("reason" in each) == (each["missing"] > 0)
        found.append([(by_layer[layer]["applied"], by_layer[layer]["cached"], by_layer[layer]["missing"])
                      for layer in edit["layers"]])
    return found


@pytest.mark.parametrize(("made", "cached", "right"), [
    # rows: the places' and last those that were due; columns: FIRST, BOTH
    ([[7, 7], [7, 7], [0, 7], [7, 7]], [], [[(14, 0, 0)] * 2, [(7, 0, 0)]]),
    ([[7, 7], [7, 6], [0, 7], [7, 7]], [], [[(14, 0, 0), (13, 0, 1)], [(7, 0, 0)]]),  # one layer left a row out
    ([[9, 11], [9, 10], [0, 11], [9, 11]], [], [[(14, 0, 0), (13, 0, 1)], [(7, 0, 0)]]),  # which hides behind no others
    ([[4, 4], [4, 4], [0, 4], [4, 4]], [], [[(8, 0, 6)] * 2, [(4, 0, 3)]]),  # for some steps nothing was due
    ([[4, 4], [4, 4], [0, 4], [4, 4]], [(0, 6)], [[(8, 6, 0)] * 2, [(4, 3, 0)]]),
    ([[4, 4], [4, 4], [0, 4], [4, 4]], [(0, 2), (4, 8)], [[(8, 6, 0)] * 2, [(3, 4, 0)]]),
    (None, [(0, 6)], [[(0, 6, 8)] * 2, [(0, 3, 4)]]),
])
def test_every_row_is_applied_cached_or_missing(made: list[list[int]] | None, cached: list[tuple[int, int]],
                                                right: list[Any]) -> None:
    assert counted(made, cached) == right


@pytest.mark.parametrize(("left", "used_up"), [(1, {}), (0, {"used_up": True})])
def test_a_condition_that_has_used_its_switches_says_so(left: int, used_up: dict[str, bool]) -> None:
    switches = [2 * number + 10 for number in range(16 - left)]
    numbers = np.array([14, 14, *switches, *[-1] * left], np.int32)
    told = [{"site": "z", "layers": [1], "op": "scale", "when": {"probe": "p", "above": 1}}]
    event = EditsCounted("c", [("z", 1)], [(0,)], [])
    edit, = json.loads(ToldEdits(json.dumps(told), 10, event, numbers).with_counts(50))
    assert {name: edit[name] for name in ("switched", "used_up") if name in edit} == {"switched": switches, **used_up}


def test_a_request_that_never_ran_has_no_rows_to_edit() -> None:
    assert counted(None, [], end=0) == [[(0, 0, 0)] * 2, [(0, 0, 0)]]
    assert json.loads(ToldEdits(json.dumps(TOLD), 10).with_counts(0))[1]["rows"][0]["expected"] == 0


def test_each_stage_tells_of_its_own_layers() -> None:
    """What blocks 0 and 2 hand on is of two stages, z of the second; what the other counts is not counted here."""
    told = [{"site": "resid_pre", "layers": [1, 3], "op": "scale"}, {"op": "stop", "when": {"probe": "p", "above": 1}},
            {"site": "z", "layers": [1], "op": "scale"}]
    whole = {"expected": 14, "applied": 14, "cached": 0, "missing": 0}
    numbers = np.array([[14], [14]], np.int32).ravel()
    first = ToldEdits(json.dumps(told), 10, EditsCounted("c", [("resid_post", 0)], [(0, 1)], []), numbers,
                      frozenset({("resid_post", 0)}))
    edits = json.loads(first.with_counts(14))
    none = {"expected": 14, "applied": 0, "cached": 0, "missing": 14, "reason": "not_counted"}
    assert edits[0]["rows"] == [{"layers": [1], **whole}, {"layers": [3], **none}] and "rows" not in edits[1]
    assert edits[2]["rows"] == [{"layers": [1], **none}]
    second = ToldEdits(json.dumps(told), 10, EditsCounted("c", [("resid_post", 2), ("z", 1)], [(0, 1)], []),
                       np.array([[13], [14], [14]], np.int32).ravel(), frozenset({("resid_post", 2), ("z", 1)}))
    assert json.loads(second.of_this_rank(14)) == [
        [{"layers": [3], **whole, "applied": 13, "missing": 1, "reason": "not_applied"}], [],
        [{"layers": [1], **whole}]]
    lost = ToldEdits(json.dumps(told), 10, here=frozenset({("z", 1)}))  # its ring was full
    assert json.loads(lost.of_this_rank(14)) == [[], [], [{"layers": [1], **none}]]
