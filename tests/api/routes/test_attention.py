"""Attention over HTTP: the summaries of the store's own reader, in each format, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from api.auth.keys import make_key
from schemas import limits
from schemas.attended import AttentionAsked, attend, reading
from schemas.errors import LimitError
from tests.support.api_stack import Process
from tests.support.engines.attending import PROMPT, RULE, WHOLE, WINDOWED, Attending, attending

BY_RULE = "head_size=16&scale=0.25&window=none&soft_cap=none"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attending]:
    with attending(tmp_path_factory.mktemp("attention")) as engine:
        yield engine


@pytest.fixture(scope="module")
def capture(engine: Attending) -> str:
    return engine.capture(WHOLE, told=True)


def get(engine: Attending, ref: str, query: str, **headers: str) -> httpx.Response:
    return engine.stack.http.get(f"/v1/captures/{ref}/attention?{query}", headers={
        name.replace("_", "-"): value for name, value in headers.items()})


def arrays_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] != "application/json":
        return load(answer.content)
    body = answer.json()
    return {name: np.array(body[name], dtype) for name, dtype in (
        ("positions", np.uint32), ("token_ids", np.uint32), ("keys", np.int32), ("weights", np.float32),
        ("entropy", np.float32))}


@pytest.mark.parametrize("format_", ["safetensors", "json"])
def test_it_is_what_the_reader_has_bit_for_bit(engine: Attending, capture: str, format_: str) -> None:
    reader = engine.store.reader
    for query, layer, spans, heads, top in (
            ("layer=0", 0, [(0, None)], None, 8), ("layer=1&heads=3,0&top=2", 1, [(0, None)], [3, 0], 2),
            ("layer=2&positions=1,5:8,11&top=20", 2, [(1, 2), (5, 8), (11, 12)], None, 20),
            ("layer=2&start=4&stop=90&heads=1", 2, [(4, 90)], [1], 8)):
        manifest = reader.manifest(capture)
        asked = AttentionAsked(layer=layer, spans=spans, heads=heads, top=top)
        expected = attend(manifest, asked, reading(reader, capture, layer))
        found = arrays_of(get(engine, capture, f"{query}&format={format_}"))
        for name, array in found.items():
            theirs = getattr(expected, name)
            assert array.reshape(theirs.shape).tobytes() == theirs.tobytes(), (query, name)
        assert expected.positions.tolist() == [at for first, last in spans for at in range(first, last or PROMPT)
                                               if at < PROMPT]


def test_it_says_what_it_was_computed_from(engine: Attending, capture: str) -> None:
    body = get(engine, capture, "layer=1&heads=2&format=json").json()
    assert (body["capture"], body["status"], body["layer"], body["heads"]) == (capture, "complete", 1, [2])
    assert body["rule"] == {"head_size": 16, "scale": 0.25, "window": WINDOWED.window, "soft_cap": None}
    assert body["codecs"] == {"q_rot": "raw", "k_rot": "raw"} and body["unattended"] == [] and body["z_error"] is None
    answer = get(engine, capture, "layer=1&heads=2")
    header = json.loads(answer.content[8 : 8 + int.from_bytes(answer.content[:8], "little")])["__metadata__"]
    assert json.loads(header["attention"])["rule"] == body["rule"] and header["capture"] == capture


def test_formats_by_accept(engine: Attending, capture: str) -> None:
    for accept, kind in (("application/json", "application/json"), ("*/*", "application/vnd.safetensors"),
                         ("application/x-npz, application/json;q=0.5", "application/json")):
        assert get(engine, capture, "layer=0", accept=accept).headers["content-type"] == kind
    refused = get(engine, capture, "layer=0", accept="application/x-npz")
    assert refused.status_code == 406 and refused.json()["error"]["param"] == "Accept"


def test_an_answer_that_one_has_is_not_sent_again_and_parts_of_it_can_be_had(engine: Attending, capture: str) -> None:
    whole = get(engine, capture, "layer=0")
    tag = whole.headers["etag"]
    assert get(engine, capture, "layer=0", if_none_match=tag).status_code == 304
    part = get(engine, capture, "layer=0", range="bytes=8-15", if_range=tag)
    assert part.status_code == 206 and part.content == whole.content[8:16]
    others = {get(engine, capture, query).headers["etag"] for query in (
        "layer=2", "layer=0&heads=0", "layer=0&top=3", "layer=0&format=json", "layer=0&positions=1", "layer=1")}
    assert len(others) == 6 and tag not in others
    assert get(engine, capture, f"layer=0&{BY_RULE}").headers["etag"] == tag  # the same rule, told or given
    running = engine.capture(WHOLE, finish=False)
    assert "etag" not in get(engine, running, f"layer=0&missing=leave_out&{BY_RULE}").headers


def test_missing_rows_are_refused_or_named(engine: Attending) -> None:
    holed = engine.capture({"q_rot": range(PROMPT), "k_rot": [at for at in range(PROMPT) if at != 7]})
    refused = get(engine, holed, f"layer=0&{BY_RULE}")
    assert refused.status_code == 409
    assert refused.json()["error"] == {
        "message": "attention of layer 0 needs k_rot, which lacks positions [7, 8) dropped; missing=leave_out leaves "
        "out the queries that need them", "type": "invalid_request_error", "param": "missing", "code": "missing_rows"}
    body = get(engine, holed, f"layer=0&missing=leave_out&format=json&{BY_RULE}").json()
    assert body["positions"] == list(range(7)) and len(body["keys"][0]) == 7
    assert body["unattended"] == [{"start": 7, "stop": PROMPT, "site": "k_rot",
                                   "missing": {"start": 7, "stop": 8, "reason": "dropped"}}]
    assert get(engine, holed, f"layer=0&stop=7&{BY_RULE}").status_code == 200


@pytest.mark.parametrize(("query", "status", "param", "says"), [
    ("", 400, "layer", None),
    ("layer=-1", 400, "layer", "layer = '-1': valid: one layer's number"),
    ("layer=9", 404, "layer", "capture q_rot and k_rot of all positions"),
    ("layer=0&heads=4", 400, "heads", "each once; the layer has 4, counted from 0"),
    ("layer=0&heads=1,1", 400, "heads", "each once"),
    ("layer=0&heads=a", 400, "heads", "valid: query heads by number"),
    ("layer=0&top=0", 400, "top", "top = '0': valid: keys of each head and query"),
    ("layer=0&top=1000000000", 413, None, "ask for fewer positions or heads, or a smaller top"),
    ("layer=0&top=3000&format=json", 413, None, "numbers in json"),
    ("layer=3", 400, "layer", "its attention has attention sinks, which no rule says"),
    (f"layer=3&{BY_RULE}", 400, "layer", "its attention has attention sinks"),
    (f"layer=1&{BY_RULE}", 400, "window", "window = None: the engine that made this capture told 3"),
    ("layer=0&scale=0.25", 400, "head_size", "head_size: missing; leave head_size, scale, window and soft_cap out"),
    ("layer=0&head_size=16&scale=none&window=none&soft_cap=none", 400, "scale", "scale = None: valid: a number above"),
    ("layer=0&head_size=16&scale=0&window=none&soft_cap=none", 400, "scale", "scale = 0.0: valid: a number above 0"),
    ("layer=0&head_size=16&scale=1&window=0&soft_cap=none", 400, "window", "window = 0: valid: a whole number from 1"),
    ("layer=0&head_size=16&scale=1&window=none&soft_cap=x", 400, "soft_cap", "soft_cap = 'x': valid: above 0"),
    ("layer=0&head_size=48&scale=0.25&window=none&soft_cap=none", 400, "head_size", "head_size = 48: the engine"),
    ("layer=0&start=12", 416, "start", "the capture has 12 positions"),
    ("layer=0&positions=1&start=0", 400, "positions", "either positions, or start and stop"),
    ("layer=0&missing=fill", 400, "missing", "valid: refuse, leave_out"),
    ("layer=0&check=true", 404, "layer", "is checked by v and z of it"),
    ("layer=0&format=npz", 400, "format", "valid: safetensors, json"),
    ("layer=0&wait=complete", 400, "wait", "unknown parameter; valid: start, stop, positions, layer, heads"),
])
def test_what_is_refused_by_name(engine: Attending, capture: str, query: str, status: int, param: str | None,
                                 says: str | None) -> None:
    answer = get(engine, capture, query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert says is None or says in answer.json()["error"]["message"], answer.text


def test_a_capture_whose_engine_told_nothing_needs_the_rule(engine: Attending) -> None:
    silent = engine.capture(WHOLE)
    error = get(engine, silent, "layer=0").json()["error"]
    assert error["param"] == "head_size" and "did not tell how its attention weighs keys" in error["message"]
    body = get(engine, silent, "layer=0&format=json&head_size=16&scale=2.5e-1&window=none&soft_cap=none").json()
    assert body["rule"]["scale"] == RULE.scale
    projected = engine.capture(WHOLE, "rp8:k=8,seed=1")
    assert "whose numbers are not the columns of heads" in get(engine, projected, f"layer=0&{BY_RULE}").text
    assert "has no k_rot.0" in get(engine, engine.capture({"q_rot": range(PROMPT)}), f"layer=0&{BY_RULE}").text


def test_anothers_capture_is_not_there(engine: Attending, capture: str, tmp_path: Path) -> None:
    secret, stack = make_key(tmp_path / "keys.json", "someone"), engine.stack
    process = Process(["api", "--store", str(stack.store), "--endpoint", stack.endpoint, "--port", "0", "--keys",
                       str(tmp_path / "keys.json"), "--upstream", "http://127.0.0.1:1"], tmp_path / "api.log")
    try:
        with httpx.Client(base_url=process.wait_ready()) as http:
            url = f"/v1/captures/{capture}/attention?layer=0"
            assert http.get(url).status_code == 401
            assert http.get(url, headers={"Authorization": f"Bearer {secret}"}).status_code == 404
    finally:
        process.stop()


def test_work_is_bounded_before_it_is_done(engine: Attending, capture: str) -> None:
    manifest, reader = engine.store.manifest(capture), engine.store.reader
    most = 2 * 3 * 64  # of heads and queries, each of which costs as much as one that sees 64 keys
    for weights_max, refused in ((most, False), (most - 1, True)):
        asked = AttentionAsked(layer=0, spans=[(2, 5)], heads=[0, 3], weights_max=weights_max)
        if refused:
            with pytest.raises(LimitError, match="attention weights to compute: 384 asked, limit 383; ask for fewer"):
                attend(manifest, asked, reading(reader, capture, 0))
        else:
            attend(manifest, asked, reading(reader, capture, 0))
    told = engine.stack.http.get("/v1/capabilities").json()["limits"]
    assert told["attention_weights_max"] == limits.attention_weights_max

