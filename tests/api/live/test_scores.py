"""Scores of probes with the completion: events of its stream, a field of its answer, and slices afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from msgspec import structs
from safetensors.numpy import load

from schemas import limits
from schemas.wire.row_table import FLAG_DRAFT
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import ARMED, TONE, EnginePlayer, rows
from tests.support.store_helpers import until

SPEC = {"probe": ["tone"]}
LIVE = {"delay_s": 0.08, "live": True}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("scores")) as stack:
        yield stack


def streamed(stack: Stack, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed completion, without the end mark, which must be there."""
    text = stack.complete("hello", stream=True, **fields).text
    *events, done = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def gathered(parts: list[dict[str, Any]]) -> dict[int, list[float]]:
    """The scores by position; a later one counts."""
    return {position: values for part in parts for position, values in
            zip(part["positions"], part["values"], strict=True)}


def true(sample: int, end: int) -> dict[int, list[float]]:
    return dict(enumerate(rows(sample, "probe.tone", 2, list(range(end)), "bfloat16").tolist()))


def test_scores_come_with_the_tokens_and_are_those_that_are_stored(stack: Stack) -> None:
    events = streamed(stack, max_tokens=8, capture=SPEC, play=LIVE)
    kinds = [event["object"] for event in events]
    parts = [event["scores"] for event in events if event["object"] == "capture.scores"]
    assert kinds[-1] == "capture" and kinds.index("capture.scores") < len(kinds) - 1 - kinds[::-1].index(
        "text_completion"), "no score came before the last token"
    assert events[-1]["capture"]["status"] == "complete"
    capture = events[-1]["capture"]["id"]
    whole = {"capture": capture, "index": 0, "probe": "tone", "layer": 2, "names": ["glad", "sad"], "fingerprint": "p1"}
    assert events[-1]["capture"]["scores"] == [{**whole, "missing": []}]
    for event in events:
        assert event["id"] == f"cmpl-{capture}" and event["model"] == "played"
        assert event["object"] == "text_completion" or event["choices"] == []
    for part in parts:
        assert (part["capture"], part["index"], part["probe"], part["layer"]) == (capture, 0, "tone", 2)
        assert whole.items() <= part.items() and isinstance(part["durable"], bool)
        assert len(part["token_ids"]) == len(part["flags"]) == len(part["positions"]) == len(part["values"])
    found = gathered(parts)
    assert found == true(0, 12)
    slice_ = stack.http.get(f"/v1/captures/{capture}/activations?site=probe.tone")
    arrays = load(slice_.content)
    assert arrays["probe.tone.2"].dtype == np.float32
    assert dict(zip(arrays["positions"].tolist(), arrays["probe.tone.2"].tolist(), strict=True)) == found
    tokens = {position: token for part in parts for position, token in
              zip(part["positions"], part["token_ids"], strict=True)}
    assert [tokens[position] for position in arrays["positions"]] == arrays["token_ids"].tolist()
    manifest = stack.http.get(f"/v1/captures/{capture}").json()
    assert manifest["resolved"]["layers"] == {"probe.tone": [2]} and manifest["captured"] == 12
    (site,) = manifest["sites"]
    assert (site["dtype"], site["width"], site["streams"][0]["dtype"]) == ("float32", 2, "float32")


def test_upstreams_own_bytes_are_not_touched(stack: Stack) -> None:
    def bare(text: str) -> list[str]:
        return [line for line in text.split("\n\n") if '"capture' not in line]

    body = {"model": "played", "prompt": "hello", "stream": True, "max_tokens": 6, "play": LIVE}
    through = stack.http.post("/v1/completions", json={**body, "capture": SPEC}).text
    direct = httpx.post(f"{stack.upstream_url}/v1/completions", json=body).text
    name = through.partition('"id": "')[2].partition('"')[0]
    assert bare(through) == [line.replace("cmpl-none", name) for line in bare(direct)]


def test_scores_beside_rows_of_samples(stack: Stack) -> None:
    events = streamed(stack, n=2, max_tokens=4, play=LIVE, capture={**SPEC, "sites": ["resid_post"], "layers": [1],
                                                                    "positions": [[2, 7]]})
    parts = [event["scores"] for event in events if "scores" in event]
    assert {(part["capture"], part["index"]) for part in parts} == {
        (capture, index) for index, capture in enumerate(events[-1]["capture"]["ids"])}
    for index in (0, 1):
        want = {position: scores for position, scores in true(index, 8).items() if 2 <= position < 7}
        assert gathered([part for part in parts if part["index"] == index]) == want
    manifest = stack.http.get(f"/v1/captures/{events[-1]['capture']['ids'][1]}").json()
    assert manifest["resolved"]["layers"] == {"resid_post": [1], "probe.tone": [2]}
    assert manifest["resolved"]["codec"] == {"resid_post": "int8b64", "probe.tone": "raw"}


def test_the_official_client_takes_the_stream(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "played", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5,
                             "stream_options": {"include_usage": True}, "extra_body": {"capture": SPEC, "play": LIVE}}
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices) == "abcde"
    parts = [chunk.model_extra["scores"] for chunk in chunks if "scores" in (chunk.model_extra or {})]
    assert gathered(parts) == true(0, 6)
    assert chunks[-1].model_extra["capture"]["status"] == "complete"
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "abcde" and final.usage and final.usage.completion_tokens == 5


def test_scores_in_an_answer(stack: Stack) -> None:
    answer = stack.complete("hello", n=2, max_tokens=3, capture={**SPEC, "positions": "generated"}).json()["capture"]
    assert [part["capture"] for part in answer["scores"]] == answer["ids"]
    for index, part in enumerate(answer["scores"]):
        assert gathered([part]) == {position: scores for position, scores in true(index, 7).items() if position >= 5}
        assert (part["probe"], part["names"], part["missing"]) == ("tone", ["glad", "sad"], [])
    dropped = stack.complete("hello", max_tokens=3, capture=SPEC, play={"drop": ["probe.tone", [2], 1, 3]}).json()
    (part,) = dropped["capture"]["scores"]
    assert part["positions"] == [0, 3, 4, 5, 6]
    assert part["missing"] == [{"start": 1, "stop": 3, "reason": "dropped"}]


def test_more_scores_than_an_answer_has_room_for(stack: Stack) -> None:
    answer = stack.complete("x" * (limits.answer_scores_max // 2 + 1), max_tokens=1, capture=SPEC).json()["capture"]
    (part,) = answer["scores"]
    assert part["url"] == f"/v1/captures/{answer['id']}/activations?site=probe.tone" and "values" not in part
    rows_there = load(stack.http.get(part["url"]).content)["probe.tone.2"]
    assert rows_there.shape == (limits.answer_scores_max // 2 + 1, 2)


def test_a_stream_says_what_does_not_come(stack: Stack) -> None:
    events = streamed(stack, max_tokens=4, capture=SPEC, play={**LIVE, "drop": ["probe.tone", [2], 1, 3]})
    gap = [{"start": 1, "stop": 3, "reason": "dropped"}]
    told = [number for number, event in enumerate(events) if "missing" in event.get("scores", {})]
    assert [events[number]["scores"]["missing"] for number in told] == [gap]
    assert any(event["choices"] for event in events[told[0]:]), "it was known while tokens came"
    last = events[-1]["capture"]
    assert last["status"] == "incomplete" and [part["missing"] for part in last["scores"]] == [gap]


@pytest.mark.parametrize("tokens", [7, 8])
def test_guesses_are_scored_once_they_are_known_to_be_right(stack: Stack, tokens: int) -> None:
    events = streamed(stack, max_tokens=tokens, capture=SPEC, play={**LIVE, "guess": True})
    parts = [event["scores"] for event in events if "scores" in event]
    positions = [position for part in parts for position in part["positions"]]
    assert sorted(positions) == list(range(tokens + 4)), "each once: the last guess of seven tokens was right"
    truth = true(0, tokens + 4)
    for part in parts:
        assert part["values"] == [truth[position] for position in part["positions"]]
    flags = {position: flag for part in parts for position, flag in
             zip(part["positions"], part["flags"], strict=True)}
    assert {position for position, flag in flags.items() if flag & FLAG_DRAFT} == {7, 10}
    known = next(number for number, event in enumerate(events) if 7 in event.get("scores", {}).get("positions", ()))
    assert any(event["choices"] for event in events[known:]), "a right guess is known with the next step"
    assert events[-1]["capture"]["status"] == "complete"


def test_scores_that_are_no_numbers(stack: Stack) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    asked: dict[str, Any] = {"max_tokens": 3, "capture": SPEC, "play": {"nan": [2, 5]}}
    (part,) = json.loads(stack.complete("hello", **asked).text, parse_constant=refuse)["capture"]["scores"]
    found = gathered([part])
    assert found == gathered([event["scores"] for event in streamed(stack, **asked) if "scores" in event])
    assert [position for position, values in found.items() if values == [None, None]] == [2, 5]
    assert {position: values for position, values in found.items() if position not in (2, 5)} == {
        position: values for position, values in true(0, 7).items() if position not in (2, 5)}


def test_more_lists_than_are_streamed(stack: Stack) -> None:
    most = limits.score_lists_streamed_max
    events = streamed(stack, n=most + 1, max_tokens=1, capture={**SPEC, "positions": "last_prompt"})
    ids, lists = events[-1]["capture"]["ids"], events[-1]["capture"]["scores"]
    assert {event["scores"]["capture"] for event in events if "scores" in event} == set(ids[:most])
    assert [part["capture"] for part in lists] == ids and all(part["missing"] == [] for part in lists[:most])
    assert load(stack.http.get(lists[most]["url"]).content)["probe.tone.2"].shape == (1, 2)
    too_many = stack.complete("x", n=limits.score_lists_max // 2 + 1, capture={"probe": ["tone", "mood"]})
    assert too_many.status_code == 413 and "captures × probes" in too_many.json()["error"]["message"]


def test_a_stream_that_upstream_cuts_still_ends(stack: Stack) -> None:
    text = stack.complete("x", stream=True, max_tokens=9, play={**LIVE, "break_after": 4}, capture=SPEC).text
    events = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]
    assert events[-1]["error"]["code"] == "upstream_broken"


def test_a_caller_who_leaves_in_mid_stream(stack: Stack) -> None:
    body = {"model": "played", "prompt": "leaver", "stream": True, "max_tokens": 200, "capture": SPEC, "play": LIVE}
    with stack.http.stream("POST", "/v1/completions", json=body) as answer:
        ulid = answer.headers["x-tap-capture"]
        for number, _ in enumerate(answer.iter_lines()):
            if number > 8:
                break
    manifest = stack.http.get(f"/v1/captures/{ulid}?wait=complete&timeout=10").json()
    assert manifest["status"] in ("complete", "incomplete") and manifest["finish_reason"] == "abort"


def test_rows_of_a_probe_are_read_as_any_other(stack: Stack) -> None:
    ulid = stack.complete("hello", max_tokens=3, capture=SPEC).json()["capture"]["id"]
    for site in ("probe.tone", "probe.tone.2"):
        found = stack.http.get(f"/v1/captures/{ulid}/activations?site={site}&format=json&start=2&stop=4").json()
        assert dict(zip(found["positions"], found["arrays"]["probe.tone.2"], strict=True)) == {
            position: scores for position, scores in true(0, 4).items() if position >= 2}
    live = stack.http.get(f"/v1/captures/{ulid}/live?site=probe.tone").text
    assert live.startswith("event: rows\n") and '"shape":[1,5,2]' in live
    shown = stack.http.get(f"/v1/captures/{ulid}/map").json()
    assert shown["site"] == "probe.tone" and len(shown["values"][0]) == 7
    listed = stack.http.get("/v1/captures?site=probe.tone&limit=1").json()["data"]
    assert listed[0]["id"] == ulid


def test_what_is_registered_can_be_seen(stack: Stack) -> None:
    found = stack.http.get("/v1/capabilities").json()
    assert list(found["armed"]) == list(ARMED.sites)
    (probe,) = found["probes"].items()
    assert probe == ("tone", {"site": "resid_post", "layer": 2, "k": 2, "names": ["glad", "sad"], "activation": "none",
                              "meaning": "scores directions @ (x - mean) + bias of the rows x of resid_post.2"})


@pytest.mark.parametrize(("capture", "param", "says"), [
    ({"probe": ["mood"]}, "capture.probe", "registered: tone"),
    ({"probe": ["tone"], "layers": [1]}, "capture.layers", "name the sites whose layers"),
    ({"sites": ["probe.tone"]}, "capture.sites", "name a probe in the field probe"),
    ({"probe": ["tone"], "sites": ["resid_post"], "codec": {"probe.tone": "raw16"}}, "capture.codec", "not captured"),
])
def test_probes_that_cannot_be_had(stack: Stack, capture: dict[str, Any], param: str, says: str) -> None:
    answer = stack.complete("x", capture=capture)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param and says in answer.text


# ── a service of its own ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("slow"), program="tests.programs.slow_reads") as stack:
        yield stack


def test_tokens_never_wait_for_scores(slow: Stack) -> None:
    body = {"model": "played", "prompt": "hello", "stream": True, "max_tokens": 24, "capture": SPEC, "play": LIVE}
    came: list[float] = []
    kinds: list[str] = []
    parts: list[dict[str, Any]] = []
    with slow.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                kinds.append(event["object"])
                came += [time.monotonic()] if event["choices"] else []
                parts += [event["scores"]] if "scores" in event else []
    assert max(np.diff(came)) < 0.9, "a look takes a second"
    assert kinds.index("capture.scores") < len(kinds) - 1 - kinds[::-1].index("text_completion")
    assert kinds[-1] == "capture" and gathered(parts) == true(0, 28)


def test_scores_bear_the_names_of_the_engine_that_made_them(slow: Stack) -> None:
    """And not those of the newest that the store knows, which this test makes another."""
    other = structs.replace(ARMED, probes={"tone": structs.replace(TONE, names=["sad", "glad"], fingerprint="p2")})
    engine = EnginePlayer(slow.endpoint, armed=other)
    try:
        assert until(lambda: slow.http.get("/v1/capabilities").json()["probes"]["tone"]["names"] == ["sad", "glad"])
        events = streamed(slow, max_tokens=2, capture=SPEC)
        answer = slow.complete("hello", max_tokens=2, capture=SPEC).json()["capture"]["scores"]
    finally:
        engine.close()
    parts = [event["scores"] for event in events if "scores" in event] + events[-1]["capture"]["scores"] + answer
    assert len(parts) >= 3
    for part in parts:
        assert (part["names"], part["fingerprint"]) == (["glad", "sad"], "p1")
