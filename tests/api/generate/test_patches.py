"""``set`` from a stored capture: the rows that the engine is sent are those of the store, bit for bit, or none."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from api.auth.keys import make_key
from api.generate.edits import ask_edits, edits_text, is_exact
from schemas import limits
from schemas.errors import LimitError
from schemas.ids import new_ulid
from schemas.read.reader import RowsAt, StoreReader
from schemas.store.paths import KEYS_FILE
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import WIDTH, decoded, engine_info, rows

PROMPT = "hello there"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("patches"), "float32", owner="alice") as stack:
        yield stack


@pytest.fixture(scope="module")
def captures(stack: Stack) -> dict[str, str]:
    """Alice's captures by what is special about them, of positions 0 to 13."""
    asked: dict[str, dict[str, Any]] = {
        "raw": {"capture": {"codec": "raw", "sites": ["resid_post", "attn_out"]}},
        "raw16": {"capture": {"codec": "raw16"}}, "lossy": {"capture": {"codec": "int8b64"}},
        "projected": {"capture": {"codec": "rp8:k=32"}}, "few": {"capture": {"codec": "raw", "layers": [1]}},
        "gappy": {"capture": {"codec": "raw"}, "play": {"drop": ["resid_post", [2], 3, 5]}},
        "running": {"capture": {"codec": "raw"}, "play": {"unfinished": True}},
        "broken": {"capture": {"codec": "raw", "probe": ["tone"]}, "play": {"nan": [4]}},
        "several": {"capture": {"codec": "raw"}, "n": 2}}
    return {name: str(stack.complete(PROMPT, **each).json()["capture"]["id"]) for name, each in asked.items()}


def edit(capture: str, into: list[Any], layers: list[int] | str = "all", /, **source: Any) -> dict[str, Any]:
    """Rows set at the positions ``into``; layer 1 where no layers are named."""
    site = "resid_post.1" if layers == "all" else "resid_post"
    return {"site": site, "layers": layers, "op": "set", "positions": into, "from": {
        "capture": capture, **source}}


def sent(stack: Stack, *edits: dict[str, Any]) -> list[dict[str, Any]]:
    """What the engine gets, its rows as arrays."""
    answer = stack.complete(PROMPT, edit=list(edits))
    assert answer.status_code == 200, answer.text
    body: Any = stack.seen()[-1]["body"]
    return [{**each, "rows": np.frombuffer(base64.b64decode(each["rows"]["base64"]), "<f4").reshape(-1, WIDTH)}
            if "rows" in each else each for each in json.loads(body["vllm_xargs"]["edit"])]


def true(layer: int, positions: list[int], site: str = "resid_post") -> Any:
    return rows(0, site, layer, positions, "float32")


def test_rows_go_to_the_positions_that_they_are_named_for(stack: Stack, captures: dict[str, str]) -> None:
    one, = sent(stack, edit(captures["raw"], [5]))
    assert np.array_equal(one.pop("rows"), true(1, [5]))
    assert one == {"site": "resid_post", "layers": [1], "op": "set", "positions": [5],
                   "from": {"capture": captures["raw"], "site": "resid_post", "layer": 1}}
    moved, = sent(stack, edit(captures["raw"], [7, 2], positions=[0, 9]))  # 0 goes to 7, and 9 to 2
    assert moved["positions"] == [7, 2] and moved["from"]["positions"] == [0, 9]
    assert np.array_equal(moved["rows"], true(1, [0, 9]))
    ranged, = sent(stack, edit(captures["raw"], [[0, 3], [8, 10]], positions=[[1, 6]]))
    assert ranged["positions"] == [[0, 3], [8, 10]] and np.array_equal(ranged["rows"], true(1, [1, 2, 3, 4, 5]))


def test_each_layer_gets_its_own_rows_or_all_those_of_one(stack: Stack, captures: dict[str, str]) -> None:
    made = sent(stack, {**edit(captures["raw"], [3, 4]), "site": "resid_post"})
    assert [each["layers"] for each in made] == [[0], [1], [2], [3]]
    for each in made:
        layer, = each["layers"]
        assert each["from"]["layer"] == layer and np.array_equal(each["rows"], true(layer, [3, 4]))
    one, = sent(stack, edit(captures["raw"], [3], [0, 2], layer=3))
    assert one["layers"] == [0, 2] and np.array_equal(one["rows"], true(3, [3]))
    for source in ({"site": "attn_out", "layer": 2}, {"site": "attn_out.2"}, {"site": "blocks.2.hook_attn_out"}):
        other, = sent(stack, edit(captures["raw"], [3], [0], **source))
        assert np.array_equal(other["rows"], true(2, [3], "attn_out")) and other["from"]["site"] == "attn_out"
    named, = sent(stack, {**edit(captures["raw"], [3]), "site": "blocks.2.hook_resid_post"})
    assert (named["site"], named["layers"]) == ("resid_post", [2]) and np.array_equal(named["rows"], true(2, [3]))


def test_other_edits_stay_beside_it_in_their_order(stack: Stack, captures: dict[str, str]) -> None:
    scale = {"site": "resid_post", "op": "scale", "by": 2}
    first, patched, last = sent(stack, scale, edit(captures["raw"], [3]), scale)
    assert first == last == scale and patched["op"] == "set"


def test_a_capture_by_any_name_is_told_by_its_id(stack: Stack) -> None:
    made = stack.http.post("/v1/completions", json={"model": "played", "prompt": PROMPT, "capture": {"codec": "raw"}},
                           headers={"x-request-id": "earlier"}).json()
    for name in ("earlier", made["id"], made["capture"]["id"]):
        assert sent(stack, edit(name, [1]))[0]["from"]["capture"] == made["capture"]["id"]


def test_lossy_rows_only_where_that_is_said(stack: Stack, captures: dict[str, str]) -> None:
    for name, codec in (("lossy", "int8b64"), ("raw16", "raw16")):
        refused = stack.complete(PROMPT, edit=[edit(captures[name], [3])])
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_edit", "edit[0].from")
        assert f"{codec}, which is not exact" in error["message"] and '"decoded": true' in error["message"]
        taken, = sent(stack, edit(captures[name], [3], decoded=True))
        assert np.array_equal(taken["rows"], decoded(codec, 0, "resid_post", 1, [3], "float32"))


@pytest.mark.parametrize(("codec", "dtype", "exact"), [
    ("raw", "float32", True), ("raw16", "bfloat16", True), ("raw16", "float16", True), ("raw16", "float32", False),
    ("int8b64", "bfloat16", False)])
def test_exact_is_what_keeps_every_bit(codec: str, dtype: str, exact: bool) -> None:
    nothing = np.zeros(0, np.uint32)
    assert is_exact(RowsAt("resid_post", [0], codec, dtype, 8, nothing, nothing, {})) is exact


MANY: Any = [[0, 4096]]


@pytest.mark.parametrize(("capture", "positions", "more", "status", "says"), [
    ("projected", [3], {"decoded": True}, 400, "other numbers than the row's own"),
    ("few", [3], {"layer": 2}, 404, "has no layer [2] of resid_post; it has: [1]"),
    ("raw", [3], {"site": "mlp_out"}, 404, "has no site mlp_out"),
    ("raw", [99], {}, 404, "no row of resid_post at position 99: its positions end at 14"),
    ("gappy", [2, 3], {"layer": 2}, 404, "no row of resid_post at position 3: dropped"),
    ("several", [3], {}, 404, "has 2 samples"), ("raw", [3, 3], {}, 400, "edit[0].positions = [3, 3]: names"),
    ("raw", MANY, {}, 404, "position 14"), ("raw", [[0, 2**31 - 1]], {}, 413, "edit[0].positions: 2147483647"),
    ("raw", [3], {"site": "resid_post.1", "layer": 2}, 400, "edit[0].from.layer = 2: is not the layer"),
    ("raw", [3], {"site": "nothing"}, 400, "edit[0].from.site = 'nothing': unknown site"),
    ("broken", [4], {"site": "probe.tone", "layer": 2}, 400, "position 4 holds numbers that are not finite"),
])
def test_rows_that_cannot_be_had_are_named(stack: Stack, captures: dict[str, str], capture: str, positions: Any,
                                           more: dict[str, Any], status: int, says: str) -> None:
    answer = stack.complete(PROMPT, edit=[edit(captures[capture], positions, **more)])
    assert answer.status_code == status and says in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"]["param"] is None or answer.json()["error"]["param"].startswith("edit[0]")


def test_rows_of_a_running_capture_are_there_as_far_as_it_is(stack: Stack, captures: dict[str, str]) -> None:
    assert np.array_equal(sent(stack, edit(captures["running"], [2]))[0]["rows"], true(1, [2]))


def test_what_is_not_armed_or_too_much_is_refused(stack: Stack, captures: dict[str, str]) -> None:
    unarmed = stack.complete(PROMPT, edit=[{**edit(captures["raw"], [3]), "site": "attn_out.1"}]).json()["error"]
    assert (unarmed["code"], unarmed["param"]) == ("not_armed", "edit[0].layers")
    many = [edit(captures["raw"], [each], [0, 1, 2, 3]) for each in range(3)]
    assert len(sent(stack, *many)) == 12
    both = stack.complete(PROMPT, edit=[{**many[0], "rows": [[1.0] * WIDTH]}]).json()["error"]
    assert both["param"] == "edit[0].from" and "not both" in both["message"]


def test_edits_are_counted_before_anything_is_looked_up(stack: Stack, captures: dict[str, str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    one = edit(captures["raw"], [3], [0, 1, 2, 3])
    many = stack.complete(PROMPT, edit=[one] * 257)
    assert many.status_code == 413 and "counted once for each layer: 1028 asked, limit 1024" in many.text
    many = stack.complete(PROMPT, edit=[one] * 1025)
    assert many.status_code == 413 and "edits: 1025 asked, limit 1024" in many.text
    plain = {"site": "resid_post", "op": "scale", "by": 2}
    assert "edits: 9 asked, limit 8" in stack.complete(PROMPT, edit=[plain] * 9).text
    assert len(sent(stack, *[plain] * 8, one)) == 12
    asked = ask_edits([edit(captures["raw"], [[0, 14]], [0, 1, 2, 3])] * 2)
    monkeypatch.setattr(limits, "edit_json_bytes_max", 4 * 14 * WIDTH * 4 * 4 // 3)
    with StoreReader(stack.store) as reader, pytest.raises(LimitError, match="bytes of the edits"):
        edits_text(asked, reader, "alice", engine_info("float32"))


def test_rows_beyond_the_bytes_of_edits_are_not_read(stack: Stack) -> None:
    length = limits.edit_json_bytes_max * 3 // 4 // (4 * WIDTH * 4) + 1
    prompt = [1] * min(length, 4000)
    capture = stack.complete(prompt, capture={"codec": "raw"}).json()["capture"]["id"]
    answer = stack.complete(PROMPT, edit=[edit(capture, [[0, len(prompt)]], [0, 1, 2, 3])])
    assert answer.status_code == 413 and "bytes of the rows of edit[0].from" in answer.text


def test_anothers_capture_is_answered_as_one_that_never_was(stack: Stack, captures: dict[str, str]) -> None:
    unknown = new_ulid()
    with httpx.Client(base_url=stack.url, headers={"x-api-key": make_key(stack.store / KEYS_FILE, "bob")}) as bob:
        def ask(capture: str, **source: Any) -> httpx.Response:
            return bob.post("/v1/completions", json={"model": "played", "prompt": PROMPT,
                                                     "edit": [edit(capture, [3], **source)]})

        for source in ({}, {"site": "z"}, {"positions": [99]}, {"decoded": True}, {"site": "blocks.1.hook_mlp_out"}):
            for name in ("raw", "gappy", "several", "projected"):
                theirs, never = ask(captures[name], **source), ask(unknown, **source)
                assert theirs.status_code == never.status_code == 404
                assert theirs.text == never.text.replace(unknown, captures[name])
        assert ask("../../etc").status_code == ask("").status_code == 404
    assert stack.http.delete(f"/v1/captures/{captures['few']}").status_code == 204
    gone = stack.complete(PROMPT, edit=[edit(captures["few"], [3])])
    assert gone.status_code == 404 and re.search("no capture", gone.text)
