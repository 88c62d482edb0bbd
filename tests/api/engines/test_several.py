"""Several model servers behind one service: real processes, one writer and store, engines that send real rows."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.engines.choice import SLACK, in_turn, prefix_of
from api.engines.upstreams import Upstream
from api.protocols import COMPLETION
from schemas.ids import new_ulid
from tests.support.api_stack import ROOT, Stack, stack_in
from tests.support.pages.readme import blocks
from tests.support.processes import PATIENCE_S
from vllm_tap import Client
from vllm_tap.errors import BadRequest

ENGINE = "x-vllm-tap-engine"
SPEC = {"sites": ["resid_post"], "codec": "raw"}
WAIT_S = 60


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Engines a and b: the same model, but what each has armed; a knows an adapter too, and c another model."""
    with stack_in(tmp_path_factory.mktemp("two")) as stack:
        start(stack)
        stack.start_engine("a", "--model", "played", "--model", "tuned")
        stack.start_engine("b", "--armed", "attn_out")
        stack.start_engine("c", "--model", "other")
        stack.start_gateway()
        all_up(stack)
        yield stack


@pytest.fixture
def alike(tmp_path: Path) -> Iterator[Stack]:
    """Engines a and b that can do the same."""
    with stack_in(tmp_path) as stack:
        start(stack)
        stack.start_engine("a")
        stack.start_engine("b")
        stack.start_gateway()
        all_up(stack)
        yield stack


def start(stack: Stack) -> None:
    stack.start_writer()
    stack.processes["writer"].wait_ready()


def until(true: Callable[[], bool], what: Callable[[], object] = str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s, what()
        time.sleep(0.1)


def checks(stack: Stack) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = stack.http.get("/readyz").json()["engines"]
    return found


def all_up(stack: Stack) -> None:
    until(lambda: all(state == "ok" for each in checks(stack).values() for state in each.values()),
          lambda: checks(stack))


def at(stack: Stack, engine: str) -> str:
    """A prompt whose home is this engine."""
    for number in range(100):
        if stack.complete(f"prompt {number}", max_tokens=1).headers[ENGINE] == engine:
            return f"prompt {number}"
    raise AssertionError(f"no prompt of 100 has its home at {engine}")


def asked(stack: Stack, engine: str, prompt: str) -> int:
    """How often an engine was asked this."""
    return sum(each["body"]["prompt"] == prompt for each in stack.seen(engine))  # type: ignore[index]


# ── who answers ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_prompts_go_to_one_engine_and_others_to_all(two: Stack) -> None:
    served = {number: two.complete(f"question {number}", max_tokens=1).headers[ENGINE] for number in range(24)}
    assert set(served.values()) == {"a", "b"}
    again = {number: two.complete(f"question {number}", max_tokens=1).headers[ENGINE] for number in range(24)}
    assert again == served


def test_every_answer_says_who_gave_it(two: Stack) -> None:
    plain = two.complete("hello", capture=SPEC)
    assert (plain.headers[ENGINE], plain.json()["capture"]["engine"]) == ("a", "a")
    manifest = two.http.get(plain.json()["capture"]["manifest_url"]).json()
    assert (manifest["status"], manifest["engine"]["name"]) == ("complete", "a")
    streamed = two.complete("hello", capture=SPEC, stream=True)
    assert streamed.headers[ENGINE] == "a" and '"engine": "a"' in streamed.text
    for path, body in (("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "x"}]}),
                       ("/v1/completions", {"model": "other", "prompt": "x", "stream": True}),
                       ("/v1/completions", {"model": "other", "prompt": {}}),  # which it refuses itself
                       ("/tokenize", {"model": "other", "prompt": "x"})):
        assert two.http.post(path, json=body).headers.get_list(ENGINE) == ["c"], (path, body)
    assert two.http.get("/v1/models/other").headers[ENGINE] == "c"
    assert ENGINE not in two.http.get("/v1/captures").headers


def test_a_request_may_name_its_engine(two: Stack) -> None:
    for name in ("a", "b"):
        pinned = {ENGINE: name}
        answer = two.http.post("/v1/completions", headers=pinned, json={"model": "played", "prompt": "pin"})
        assert (answer.status_code, answer.headers[ENGINE]) == (200, name)
        assert all(ENGINE not in each["headers"] for each in two.seen(name))  # type: ignore[operator]
        about = two.http.get("/v1/capabilities", headers=pinned).json()
        assert about["engine"]["name"] == name
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/capabilities")):
        body = {"model": "played", "prompt": "x"} if method == "POST" else None
        wrong = two.http.request(method, path, headers={ENGINE: "d"}, json=body)
        error = wrong.json()["error"]
        assert (wrong.status_code, error["code"], error["param"]) == (400, "invalid_parameter", "X-VLLM-Tap-Engine")
        assert "'d'" in error["message"] and "a, b, c" in error["message"]


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_models_are_those_of_all_engines(two: Stack) -> None:
    listed = two.http.get("/v1/models").json()["data"]
    assert {each["id"]: each["engines"] for each in listed} == {"played": ["a", "b"], "tuned": ["a"], "other": ["c"]}
    alone = two.http.get("/v1/models", headers={ENGINE: "b"}).json()["data"]
    assert [each["id"] for each in alone] == ["played"]


def test_a_request_goes_to_who_serves_its_model(two: Stack) -> None:
    for number in range(8):
        assert two.complete(f"p {number}", model="tuned").headers[ENGINE] == "a"
        assert two.complete(f"p {number}", model="other").headers[ENGINE] == "c"


@pytest.mark.parametrize("capture", [None, SPEC])
def test_a_model_that_nobody_serves_is_refused_by_name(two: Stack, capture: object) -> None:
    refused = two.complete("x", model="unknown", capture=capture)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (404, "not_found", "model")
    assert all(word in error["message"] for word in ("'unknown'", "played, tuned", "'c' serves other"))
    pinned = two.http.post("/v1/completions", headers={ENGINE: "b"}, json={"model": "other", "prompt": "x"})
    assert pinned.status_code == 404 and "'b' serves played" in pinned.json()["error"]["message"]
    assert two.http.get("/v1/models/unknown").status_code == 404


# ── what each can do ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_spec_goes_to_an_engine_that_can(two: Stack) -> None:
    for number in range(8):  # wherever their home is
        answer = two.complete(f"spec {number}", capture=SPEC)
        assert (answer.status_code, answer.headers[ENGINE]) == (200, "a")
        assert answer.json()["capture"]["status"] == "complete"
    both = {two.complete(f"spec {number}", capture={"sites": ["attn_out"]}).headers[ENGINE] for number in range(24)}
    assert both == {"a", "b"}


def test_what_no_engine_can_is_refused_naming_engine_and_field(two: Stack) -> None:
    before = len(two.seen("a")) + len(two.seen("b"))
    nobody = two.complete("x", capture={"sites": ["mlp_out"]})
    error = nobody.json()["error"]
    assert (nobody.status_code, error["code"], error["param"]) == (400, "not_armed", "capture.sites")
    assert "engine a: " in error["message"] and "engine b: " in error["message"] and "mlp_out" in error["message"]
    pinned = two.http.post("/v1/completions", headers={ENGINE: "b"},
                           json={"model": "played", "prompt": "x", "capture": SPEC})
    error = pinned.json()["error"]
    assert (pinned.status_code, error["param"]) == (400, "capture.sites")
    assert error["message"].startswith("engine b: ") and "engine a" not in error["message"]
    tuned = two.complete("x", model="tuned", capture={"sites": ["attn_out"], "layers": [9]})
    assert tuned.status_code == 400 and "engine a: capture.layers" in tuned.json()["error"]["message"]
    assert len(two.seen("a")) + len(two.seen("b")) == before
    assert ENGINE not in pinned.headers  # it answered nothing


def test_edits_go_to_an_engine_that_has_them_armed(two: Stack) -> None:
    edit = [{"site": "resid_post.1", "op": "scale", "by": 0}]
    assert {two.complete(f"edit {number}", edit=edit).headers[ENGINE] for number in range(8)} == {"a"}
    refused = two.http.post("/v1/completions", headers={ENGINE: "b"},
                            json={"model": "played", "prompt": "x", "edit": edit})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "edit[0].site")
    assert refused.json()["error"]["message"].startswith("engine b: ")


def test_capabilities_are_told_by_engine(two: Stack) -> None:
    found = two.http.get("/v1/capabilities").json()
    assert (found["engine"]["name"], list(found["armed"])) == ("a", ["resid_post", "attn_out"])
    assert {name: list(each["armed"]) for name, each in found["engines"].items()} == {
        "a": ["resid_post", "attn_out"], "b": ["attn_out"], "c": ["resid_post", "attn_out"]}
    assert found["engines"]["a"]["up"] and found["engines"]["a"]["models"] == ["played", "tuned"]
    assert found["engines"]["b"]["edits"] == {} and found["engines"]["a"]["edits"]["depth"] == 2


def test_a_vector_is_for_all_engines_and_who_cannot_use_it_is_told(two: Stack) -> None:
    put = two.http.put("/v1/vectors/calm", json={"vector": [1.0] * 96})
    assert put.status_code == 201
    assert put.json()["engines"] == {"a": "ok", "b": "it was started without edits (VLLM_TAP_EDIT)", "c": "ok"}
    narrow = two.http.put("/v1/vectors/narrow", json={"vector": [1.0] * 5}).json()["engines"]
    assert narrow["a"] == "its rows have 96 numbers, the vector 5"
    taken = two.http.put("/v1/vectors/tone", json={"vector": [1.0] * 96})  # with which they were started
    assert taken.status_code == 409 and "engine a, c was started" in taken.json()["error"]["message"]
    edit = [{"site": "resid_post.1", "op": "add", "vector": "calm"}]
    for model, engine in (("played", "a"), ("other", "c")):
        assert two.complete("x", model=model, edit=edit).headers[ENGINE] == engine
        sent = two.seen(engine)[-1]["body"]["vllm_xargs"]["edit"]  # type: ignore[index]
        assert json.loads(sent)[0]["vector"]["name"] == "calm"


def test_a_response_is_continued_where_it_was_made(two: Stack) -> None:
    body = {"model": "played", "input": "x", "previous_response_id": "resp_1"}
    refused = two.http.post("/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    pinned = two.http.post("/v1/responses", json=body, headers={ENGINE: "b"})
    assert (pinned.status_code, pinned.headers[ENGINE]) == (200, "b")


def test_texts_of_tokens_come_from_who_has_the_tokenizer(two: Stack) -> None:
    made = two.complete("hey", model="other", capture=SPEC).json()["capture"]["id"]
    before = len(two.seen("c"))
    assert two.http.get(f"/v1/captures/{made}/tokens").json()["texts"][:3] == ["h", "e", "y"]
    assert len(two.seen("c")) == before  # it is no generation


def test_metrics_tell_of_each_engine(two: Stack) -> None:
    two.complete("x", model="other")
    # What ended is not counted any more, as soon as the gateway is done with it.
    until(lambda: all(f'vllm_tap_api_engine_in_flight{{engine="{name}"}} 0.0' in two.http.get("/metrics").text
                      for name in "abc"))
    text = two.http.get("/metrics").text
    for name in "abc":
        assert f'vllm_tap_api_engine_up{{engine="{name}"}} 1.0' in text
    assert 'vllm_tap_api_engine_requests_total{engine="c"}' in text


@pytest.mark.parametrize("name", ["a", "b"])
def test_who_leaves_ends_its_own_capture_which_its_request_id_names(alike: Stack, name: str) -> None:
    """On either engine, each with a sender of its own, while the other goes on."""
    kept, left = [new_ulid(), new_ulid()], f"left-{name}"
    others = {"a": "b", "b": "a"}
    body = {"model": "played", "prompt": "leave", "max_tokens": 60, "stream": True,
            "play": {"delay_s": 0.5, "live": True}, "capture": {**SPEC, "positions": "all", "id": kept[0]}}
    with httpx.Client(base_url=alike.url) as client:
        leaving = client.send(client.build_request("POST", "/v1/completions", json=body, headers={
            ENGINE: name, "x-request-id": left}), stream=True)
        stays = alike.http.post("/v1/completions", headers={ENGINE: others[name], "x-request-id": "stays"}, json={
            **body, "stream": False, "max_tokens": 3, "capture": {**SPEC, "positions": "all", "id": kept[1]}})
        next(leaving.iter_bytes())
        leaving.close()
    assert stays.headers[ENGINE] == others[name] and stays.json()["capture"]["status"] == "complete"
    found: dict[str, Any] = {}

    def ended() -> bool:
        found.update(alike.http.get(f"/v1/captures/{left}").json())
        return found["status"] in ("complete", "incomplete")

    until(ended, lambda: found)
    assert (found["id"], found["finish_reason"], found["engine"]["name"]) == (kept[0], "abort", name)
    for ref, ulid in ((left, kept[0]), ("stays", kept[1])):
        rows = alike.http.get(f"/v1/captures/{ref}/activations?site=resid_post&layer=1&stop=5&format=json")
        assert rows.headers["x-tap-capture"] == ulid and len(rows.json()["arrays"]["resid_post.1"]) == 5
    taken = alike.http.post("/v1/completions", headers={ENGINE: others[name]}, json={
        "model": "played", "prompt": "x", "capture": {**SPEC, "id": kept[0]}})
    assert taken.status_code == 409  # an id is one capture's, whichever engine is asked


def test_the_client_may_name_an_engine(alike: Stack) -> None:
    with Client(alike.url, engine="b") as client:
        served = {client.generate(f"x {number}", capture=SPEC).manifest().engine["name"] for number in range(4)}
        assert served == {"b"} and client.capabilities()["engine"]["name"] == "b"
    with Client(alike.url, engine="z") as client, pytest.raises(BadRequest, match="there are: a, b"):
        client.generate("x")
    with pytest.raises(ValueError, match=r"^engine = 'a b': valid: a name"):
        Client(alike.url, engine="a b")


def test_the_page_about_them(alike: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {}
    for block in blocks("python", "docs/howto/several-engines.md"):
        exec(block.replace("http://127.0.0.1:8100", alike.url), space)  # noqa: S102
    space["client"].close()
    assert capsys.readouterr().out == "b ['a', 'b']\n"


def test_a_busy_home_is_passed_over(alike: Stack) -> None:
    prompt = at(alike, "a")
    body = {"model": "played", "prompt": prompt, "stream": True, "max_tokens": 40, "play": {"delay_s": 1}}
    with httpx.Client(base_url=alike.url) as client:
        streams = [client.send(client.build_request("POST", "/v1/completions", json=body), stream=True)
                   for _ in range(2 * SLACK)]
        served = [each.headers[ENGINE] for each in streams]
        assert served[:SLACK + 1] == ["a"] * (SLACK + 1), served  # home, while nobody else is much idler
        assert set(served[SLACK + 1:]) == {"a", "b"} and served[SLACK + 1] == "b", served
        told = alike.http.get("/metrics").text
        assert f'vllm_tap_api_engine_in_flight{{engine="a"}} {served.count("a")}.0' in told
        for each in streams:
            each.close()
    until(lambda: 'engine_in_flight{engine="a"} 0.0' in alike.http.get("/metrics").text)
    assert alike.complete(prompt).headers[ENGINE] == "a"


# ── health ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("capture", [None, SPEC])
def test_an_engine_that_takes_no_connection_is_left_out_and_comes_back(alike: Stack, capture: Any) -> None:
    prompt = at(alike, "a")
    alike.processes["a"].kill()
    ulid = new_ulid()
    asks = {"capture": {**capture, "id": ulid}} if capture else {}
    answer = alike.complete(prompt, **asks)  # its home may not have been missed yet
    assert (answer.status_code, answer.headers[ENGINE]) == (200, "b")
    assert asked(alike, "b", prompt) == 1
    if capture:
        assert answer.json()["capture"]["id"] == ulid and answer.json()["capture"]["engine"] == "b"
        assert alike.http.get(f"/v1/captures/{ulid}").json()["status"] == "complete"
    ready = alike.http.get("/readyz")
    assert ready.status_code == 200 and ready.json()["engines"]["a"]["upstream"] != "ok"
    assert ready.json()["engines"]["b"] == {"engine": "ok", "upstream": "ok"}
    assert 'vllm_tap_api_engine_up{engine="a"} 0.0' in alike.http.get("/metrics").text
    assert not alike.http.get("/v1/capabilities").json()["engines"]["a"]["up"]
    pinned = alike.http.post("/v1/completions", headers={ENGINE: "a"}, json={"model": "played", "prompt": "x"})
    assert (pinned.status_code, pinned.json()["error"]["code"]) == (503, "upstream_unavailable")
    assert "engine 'a'" in pinned.json()["error"]["message"] and pinned.headers["retry-after"]
    alike.start_engine("a")
    all_up(alike)
    assert alike.complete(prompt).headers[ENGINE] == "a"


def test_a_generation_that_breaks_off_is_not_made_again(alike: Stack) -> None:
    prompt, ulid = at(alike, "a"), new_ulid()
    killer = threading.Timer(1, alike.processes["a"].kill)
    killer.start()
    broken = alike.complete(prompt, play={"delay_s": 60}, capture={**SPEC, "id": ulid})
    killer.join()
    assert (broken.status_code, broken.json()["error"]["code"]) == (502, "upstream_broken")
    assert "engine 'a'" in broken.json()["error"]["message"] and broken.headers[ENGINE] == "a"
    assert asked(alike, "b", prompt) == 0
    until(lambda: checks(alike)["a"]["upstream"] != "ok")
    assert alike.complete(prompt).headers[ENGINE] == "b"


def test_while_engines_die_and_come_back_nothing_is_made_twice(alike: Stack) -> None:
    """Every generation is made by the engine that answers, once, or breaks off; every whole capture has its rows."""
    ended: dict[str, tuple[int, str, str]] = {}  # by prompt: status, engine, capture
    prompts = iter([f"storm {number}" for number in range(120)])
    lock = threading.Lock()

    def ask() -> None:
        with httpx.Client(base_url=alike.url) as client:
            while True:
                with lock:
                    if (prompt := next(prompts, None)) is None:
                        return
                ulid = new_ulid()
                answer = client.post("/v1/completions", json={
                    "model": "played", "prompt": prompt, "max_tokens": 3, "play": {"delay_s": 0.02}, "stream": True,
                    "capture": {**SPEC, "layers": [1], "positions": "all", "id": ulid}})
                broke = "upstream_broken" in answer.text
                with lock:
                    ended[prompt] = (502 if broke else answer.status_code, answer.headers.get(ENGINE, ""), ulid)

    callers = [threading.Thread(target=ask) for _ in range(6)]
    for caller in callers:
        caller.start()
    until(lambda: len(ended) > 15)
    alike.processes["a"].kill()
    until(lambda: len(ended) > 50)
    alike.start_engine("a")
    for caller in callers:
        caller.join()
    assert len(ended) == 120
    assert {status for status, _, _ in ended.values()} <= {200, 502}
    for prompt, (status, engine, ulid) in ended.items():
        assert asked(alike, "b", prompt) == (1 if engine == "b" else 0), (prompt, status, engine)
        if status == 200:
            manifest = alike.http.get(f"/v1/captures/{ulid}").json()
            rows = len(prompt) + 2
            assert (manifest["status"], manifest["captured"], manifest["engine"]["name"]) == ("complete", rows, engine)
    assert sum(status == 200 for status, _, _ in ended.values()) >= 100
    all_up(alike)
    until(lambda: all(f'engine_in_flight{{engine="{name}"}} 0.0' in alike.http.get("/metrics").text for name in "ab"))


def test_a_refusal_of_an_engine_is_the_answer(alike: Stack) -> None:
    prompt = at(alike, "a")
    failed = alike.complete(prompt, play={"status": 503}, capture=SPEC)
    assert (failed.status_code, failed.headers[ENGINE]) == (503, "a")
    assert asked(alike, "b", prompt) == 0


def test_without_any_engine_it_is_not_ready_and_says_who_is_away(alike: Stack) -> None:
    for name in "ab":
        alike.processes[name].kill()
    for capture in (None, SPEC):
        refused = alike.complete("x", capture=capture)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "upstream_unavailable")
    until(lambda: all(each["upstream"] != "ok" for each in checks(alike).values()))
    ready = alike.http.get("/readyz")
    assert ready.status_code == 503
    assert all(f"engine {name}: upstream: " in ready.json()["error"]["message"] for name in "ab")
    models = alike.http.get("/v1/models")
    assert models.status_code == 503 and "engine 'a' at" in models.json()["error"]["message"]
    assert alike.complete("x").status_code == 503
    closed = [each["status"] for each in alike.http.get("/v1/captures").json()["data"]]
    assert set(closed) <= {"failed", "pending"}


@pytest.mark.parametrize("third", [True, False])
def test_what_takes_no_connection_is_followed_by_who_can_do_it(tmp_path: Path, third: bool) -> None:
    """Not by the next idlest, which has not armed what is asked for."""
    with stack_in(tmp_path) as stack:
        start(stack)
        stack.start_engine("a")
        stack.start_engine("b", "--armed", "attn_out")
        if third:
            stack.start_engine("c")
        stack.start_gateway()
        all_up(stack)
        known = [Upstream(name, url, httpx.AsyncClient()) for name, url in stack.engines.items()]
        prompt = next(text for text in map(str, range(1000)) if [each.name for each in in_turn(
            known, prefix_of({"model": "played", "prompt": text}, COMPLETION, ""))] == list(stack.engines))
        stack.processes["a"].kill()
        ulid = new_ulid()
        answer = stack.complete(prompt, capture={**SPEC, "id": ulid})
        assert stack.seen("b") == []
        if third:
            assert (answer.status_code, answer.headers[ENGINE]) == (200, "c") and asked(stack, "c", prompt) == 1
            assert stack.http.get(f"/v1/captures/{ulid}").json()["engine"]["name"] == "c"
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
            assert "engine b: capture.sites" in answer.json()["error"]["message"]
            until(lambda: stack.http.get(f"/v1/captures/{ulid}").json().get("status") in (None, "failed"))


def test_what_only_an_engine_that_is_away_can_do_is_to_be_asked_again(tmp_path: Path) -> None:
    with stack_in(tmp_path) as stack:
        start(stack)
        stack.start_engine("a")
        stack.start_engine("b", "--armed", "attn_out")
        stack.start_gateway()
        all_up(stack)
        stack.processes["a"].kill()
        until(lambda: checks(stack)["a"]["upstream"] != "ok")
        refused = stack.complete("x", capture=SPEC)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (503, "upstream_unavailable")
        assert "engine 'a' at " in error["message"] and "engine b: capture.sites" in error["message"]
        assert stack.complete("x", capture={"sites": ["attn_out"]}).headers[ENGINE] == "b"


def test_engines_whose_names_are_mixed_up_are_found_out(tmp_path: Path) -> None:
    with stack_in(tmp_path) as stack:
        start(stack)
        stack.start_engine("a")
        stack.start_engine("b")
        stack.engines = {"a": stack.engines["b"], "b": stack.engines["a"]}
        stack.start_gateway()
        all_up(stack)
        answer = stack.complete("x", capture=SPEC)
        told, went = answer.json()["capture"]["engine"], answer.headers[ENGINE]
        assert told == went and answer.status_code == 200  # by what the rows say, not by where they were asked for
        other = "b" if told == "a" else "a"
        until(lambda: f"captures say that it is engine '{told}'" in checks(stack)[other]["upstream"])


def test_an_engine_without_a_name_serves_but_captures_nothing(tmp_path: Path) -> None:
    with stack_in(tmp_path) as stack:
        start(stack)
        stack.start_upstream()
        stack.start_engine("a")
        stack.engines["b"] = stack.upstream_url
        stack.start_gateway()
        until(lambda: checks(stack)["b"]["upstream"] == "ok")
        assert "VLLM_TAP_ENGINE=b" in checks(stack)["b"]["engine"] and stack.http.get("/readyz").status_code == 200
        assert {stack.complete(f"x {number}").headers[ENGINE] for number in range(24)} == {"a", "b"}
        assert {stack.complete(f"x {number}", capture=SPEC).headers[ENGINE] for number in range(24)} == {"a"}


# ── one ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_with_one_nothing_is_told_of_engines(tmp_path: Path) -> None:
    with stack_in(tmp_path) as stack:
        start(stack)
        stack.start_upstream()
        stack.start_api()
        stack.wait_ready()
        assert stack.http.get("/readyz").json() == {
            "status": "ready", "checks": {"writer": "ok", "engine": "ok", "upstream": "ok"}}
        about = stack.http.get("/v1/capabilities").json()
        assert list(about) == ["engine", "lost_ranks", "armed", "probes", "edits", "bucket", "also", "codecs", "store",
                               "formats", "dtypes", "limits", "versions"]
        assert "name" not in about["engine"]
        body = b'{"model":  "unknown", "prompt": "x"}'  # whose models are its own business
        sent = {"content-type": "application/json", ENGINE: "nobody"}
        through, direct = (httpx.post(f"{url}/v1/completions", content=body, headers=sent)
                           for url in (stack.url, stack.upstream_url))
        assert through.content == direct.content and ENGINE not in through.headers
        assert stack.seen()[0]["headers"][ENGINE] == "nobody"  # type: ignore[index]
        captured = stack.complete("x", capture=SPEC)
        assert list(captured.json()["capture"]) == ["id", "ids", "status", "manifest_url", "activations_url"]
        assert ENGINE not in captured.headers
        models, own = (httpx.get(f"{url}/v1/models").content for url in (stack.url, stack.upstream_url))
        assert models == own
        assert "engines" not in stack.http.put("/v1/vectors/v", json={"vector": [1.0]}).json()
        assert "vllm_tap_api_engine" not in stack.http.get("/metrics").text
        refused = stack.complete("x", capture={"sites": ["mlp_out"]}).json()["error"]
        assert refused["message"].startswith("capture.sites")
        stack.processes["upstream"].kill()
        away = stack.complete("x").json()["error"]["message"]
        assert away.startswith(f"no connection to the model server at {stack.upstream_url} (")


def test_one_with_a_name_is_told_of_as_several_are(tmp_path: Path) -> None:
    with stack_in(tmp_path) as stack:
        start(stack)
        stack.start_engine("a")
        stack.start_gateway()
        all_up(stack)
        assert stack.complete("x", capture=SPEC).headers[ENGINE] == "a"
        assert list(stack.http.get("/v1/capabilities").json()["engines"]) == ["a"]
        stack.processes["a"].kill()
        refused = stack.complete("x")
        assert refused.status_code == 503 and "engine 'a'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("more", [[], ["--key", "k"]])
def test_who_does_not_say_its_models_is_left_out(tmp_path: Path, more: list[str]) -> None:
    with stack_in(tmp_path) as stack:
        start(stack)
        stack.start_engine("a", *more)
        stack.start_gateway()
        until(lambda: checks(stack)["a"]["upstream"] == ("/v1/models answers 401" if more else "ok"))


@pytest.mark.parametrize(("upstreams", "says"), [
    (["http://h:1", "http://h:2"], "each of several needs a name"),
    (["a=http://h:1", "http://h:2"], "each of several needs a name"),
    (["a=http://h:1", "a=http://h:2"], "this name was given before"),
    (["a=http://h:1", "b=http://h:1/"], "this URL was given before"),
    (["a b=http://h:1"], "a name is 1 to 64 of"),
    (["=http://h:1"], "a name is 1 to 64 of"),
    (["a=h:1"], "valid: a URL such as"),
    ([f"e{number}=http://h:{number + 1}" for number in range(65)], "valid: 1 to 64"),
])
def test_engines_that_cannot_be_told_apart_do_not_start(tmp_path: Path, upstreams: list[str], says: str) -> None:
    words = [word for each in upstreams for word in ("--upstream", each)]
    done = subprocess.run([sys.executable, "-m", "api", "--store", str(tmp_path), "--endpoint", "ipc:///tmp/x", *words],
                          cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
