"""Edits that were admitted before are known again, and only those."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine_side.front.edit_admission import Arming
from engine_side.front.json_key import KEY_BYTES_MAX, json_key
from engine_side.front.ticket import find_edits
from schemas.edits.arms import Arms
from schemas.edits.resolve import resolve_edits
from schemas.edits.resolved import Edits, decode
from schemas.edits.spec import parse_edits
from schemas.errors import EditError

ADD = {"site": "resid_post", "layers": [1], "op": "add", "vector": "v", "scale": 0.5}


@pytest.fixture
def arming() -> Arming:
    vector = np.arange(4, dtype=np.float32)
    return Arming(Arms({"resid_post": [0, 1]}, {"resid_post": 4}, 2, 4, {"v": vector}, {}, 8, 64))


def whole(arming: Arming, value: object) -> Edits:
    admitted = arming.admit(value)
    assert admitted is not None
    return decode(admitted.text)


@pytest.mark.parametrize("value", [
    [ADD], json.dumps([ADD]), [ADD, {**ADD, "positions": [[0, 3]]}], [{**ADD, "scale": 1}], [{**ADD, "scale": 1.0}],
    [{**ADD, "vector": [0.1, 1e-30, 3, -0.0]}], [{**ADD, "op": "set", "rows": [[1.0] * 4] * 2, "positions": [[0, 2]],
                                                  "vector": None, "scale": None}],
])
def test_edits_known_again_are_those_that_were_asked(arming: Arming, value: object) -> None:
    if isinstance(value, list):
        value = [{name: given for name, given in each.items() if given is not None} for each in value]
    fresh = resolve_edits(parse_edits(value), arming.arms)
    first, again = arming.admit(value), arming.admit(json.loads(json.dumps(value)))
    assert first is again is not None and decode(first.text) == fresh
    for prompt_len in (1, 3, 17):
        assert [first.salt(prompt_len) for _ in range(2)] == [fresh.salt(prompt_len)] * 2


def test_edits_that_differ_in_anything_are_others(arming: Arming) -> None:
    asked: list[Any] = [[ADD], [{**ADD, "scale": 0.25}], [{**ADD, "layers": [0]}], [ADD, ADD], [{**ADD, "scale": -0.0}],
                        [{**ADD, "scale": 0.0}], [{**ADD, "positions": [[0, 3]]}]]
    seen = [arming.admit(value) for value in asked]
    assert len({id(each) for each in seen}) == len(asked) and [arming.admit(value) for value in asked] == seen


def test_a_list_that_its_owner_changes_is_another(arming: Arming) -> None:
    mine = [dict(ADD)]
    before = whole(arming, mine)
    mine[0]["scale"] = 2.0
    assert whole(arming, mine) != before == whole(arming, [ADD])


def test_what_is_refused_is_refused_again(arming: Arming) -> None:
    for value in ([{**ADD, "scale": float("nan")}], [{**ADD, "scale": float("inf")}], [{**ADD, "scale": None}],
                  [{**ADD, "layers": [7]}], "[\0]\0", "\ufeff[]", "[\ud800", {1: 2}, [{**ADD, "vector": b"v"}]):
        said = set()
        for _ in range(2):
            with pytest.raises(EditError) as error:
                arming.admit(value)
            said.add(str(error.value))
        assert len(said) == 1 and not len(arming.known)
    assert arming.admit([]) is None and arming.admit("[]") is None


def test_a_prompt_with_too_many_combinations_is_refused_each_time(arming: Arming) -> None:
    many = [{**ADD, "positions": [[at, at + 1] for at in range(32) if at >> bit & 1]} for bit in range(5)]
    arming = Arming(Arms(**{name: getattr(arming.arms, name) for name in Arms.__struct_fields__} | {"depth": 32}))
    admitted = arming.admit(many)
    assert admitted is not None
    for _ in range(2):
        with pytest.raises(EditError, match="different combinations"):
            admitted.salt(64)


def test_long_ones_are_not_kept(arming: Arming) -> None:
    long = json.dumps([ADD]) + " " * KEY_BYTES_MAX
    assert whole(arming, long) == whole(arming, [ADD]) and len(arming.known) == 1
    assert json_key(["x" * KEY_BYTES_MAX]) == b""
    assert json_key(float("inf")) == b"" != json_key(None)
    assert find_edits(None) is None
