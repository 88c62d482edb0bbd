"""Responses and messages, as agents ask for generations: what upstream is sent, and where the field stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from msgspec import structs

from api.auth.keys import make_key
from api.errors import ApiError, BadParam
from api.generate.done_finder import DoneFinder
from api.generate.generation import capture_request, check_owned, plan
from api.protocols import CHAT, MESSAGES, PROTOCOLS, RESPONSES
from schemas.ids import new_ulid
from schemas.store.paths import KEYS_FILE
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import engine_info
from tests.support.store_helpers import until

SPEC = {"sites": ["resid_post"], "layers": [0, 2]}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "played", "input": "hello", "max_output_tokens": 6},
    "/v1/messages": {"model": "played", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}}
PATHS = sorted(ASKED)
EDITS: list[dict[str, Any]] = [{"site": "resid_post.1", "op": "scale", "by": 0.5}]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("protocols"), owner="alice") as stack:
        yield stack


def post(stack: Stack, path: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return stack.http.post(path, json={**ASKED[path], **fields}, headers=headers)


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("path", PATHS)
def test_a_captured_request_is_owned_sent_and_answered(stack: Stack, path: str) -> None:
    answer = post(stack, path, {"X-Request-Id": f"mine{path[3:]}".replace("/", "-")}, seed=7, vllm_xargs={"mine": 1},
                  capture={**SPEC, "tags": {"run": "a"}})
    body, seen = answer.json(), stack.seen()[-1]
    ulid = body["capture"]["id"]
    assert body["capture"]["status"] == "complete" and body["id"] == PROTOCOLS[path].id_prefix + ulid
    assert answer.headers["x-tap-capture"] == seen["headers"]["x-request-id"] == ulid  # type: ignore[index]
    sent: Any = seen["body"]
    assert "capture" not in sent and sent["seed"] == 7 and sent["vllm_xargs"]["mine"] == 1
    assert json.loads(sent["vllm_xargs"]["capture"])["id"] == ulid
    for name in (ulid, body["id"], f"mine{path[3:]}".replace("/", "-")):
        manifest = stack.http.get(f"/v1/captures/{name}").json()
        assert manifest["id"] == ulid and manifest["expected"] == manifest["captured"] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_edits_go_to_the_engine_with_a_capture_or_without(stack: Stack, path: str, stream: bool) -> None:
    for capture, rows in ((None, 0), (SPEC, 20)):
        answer = post(stack, path, edit=EDITS, stream=stream, capture=capture)
        sent: Any = stack.seen()[-1]["body"]
        xargs = sent["vllm_xargs"]
        assert "edit" not in sent and json.loads(xargs["edit"]) == EDITS
        ulid = answer.headers["x-tap-capture"]
        assert json.loads(xargs["capture"]) == {**(capture or {"sites": []}), "id": ulid}
        assert ulid in answer.text
        manifest = stack.http.get(f"/v1/captures/{ulid}", params={"wait": "complete"}).json()
        assert (manifest["status"], manifest["captured"]) == ("complete" if rows else "empty", rows)
    for nothing in (None, []):
        assert "x-tap-capture" not in post(stack, path, edit=nothing).headers
        assert not {"edit", "vllm_xargs"} & stack.seen()[-1]["body"].keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_is_upstreams_and_its_last_event_has_the_field(stack: Stack, path: str) -> None:
    text = post(stack, path, stream=True, capture=SPEC).text
    direct = httpx.post(f"{stack.upstream_url}{path}", json={**ASKED[path], "stream": True}).text
    *first, last, nothing = text.split("\n\n")
    assert not nothing and first == direct.split("\n\n")[:-2] and len(first) == 6
    event = events_of(last)[0]
    holder = event["response"] if path == "/v1/responses" else event
    capture = holder.pop("capture")
    assert capture["status"] == "complete" and event["type"] in ("response.completed", "message_stop")
    want = events_of(direct)[-1]
    if path == "/v1/responses":
        assert event["response"].pop("id") == f"resp_{capture['id']}" and want["response"].pop("id")
    assert event == want
    assert stack.http.get(capture["manifest_url"]).json()["captured"] > 0


@pytest.mark.parametrize("path", PATHS)
def test_without_a_capture_a_stream_is_upstreams(stack: Stack, path: str) -> None:
    for fields in ({"stream": True}, {}):
        direct = httpx.post(f"{stack.upstream_url}{path}", json={**ASKED[path], **fields})
        through = post(stack, path, **fields)
        assert through.content == direct.content and "x-tap-capture" not in through.headers


def test_the_official_clients_take_both_ways(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key, max_retries=0)
    probed = {"capture": {**SPEC, "probe": ["tone"]}, "play": {"delay_s": 0.05, "live": True}}
    plain = client.responses.create(model="played", input="hi", max_output_tokens=4, extra_body={"capture": SPEC})
    assert plain.output_text == "abcd" and plain.model_extra["capture"]["status"] == "complete"  # type: ignore[index]
    events: Any = list(client.responses.create(model="played", input="hi", max_output_tokens=4, stream=True,
                                               extra_body=probed))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "abcd"
    assert events[-1].type == "response.completed" and events[-1].response.model_extra["capture"]["ids"]
    assert any(each.type == "capture.scores" for each in events)
    claude = anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]
    message: Any = claude.messages.create(model="played", max_tokens=4, messages=messages, extra_body={"capture": SPEC})
    assert message.content[0].text == "abcd" and message.capture["status"] == "complete"
    parts: Any = list(claude.messages.create(model="played", max_tokens=4, messages=messages, stream=True,
                                             extra_body=probed))
    assert "".join(each.delta.text for each in parts if each.type == "content_block_delta") == "abcd"
    assert parts[-1].type == "message_stop" and parts[-1].capture["status"] == "complete"


@pytest.mark.parametrize("path", PATHS)
def test_scores_come_with_the_tokens(stack: Stack, path: str) -> None:
    text = post(stack, path, stream=True, capture={"probe": ["tone"]}, play={"delay_s": 0.08, "live": True}).text
    events = events_of(text)
    assert {at for event in events if "scores" in event for at in event["scores"]["positions"]} == set(range(10))
    assert text.count("event: ") == len(events) and events[0]["type"] != "message_stop"
    field = events[-1].get("capture") or events[-1]["response"]["capture"]
    assert field["scores"][0]["missing"] == []
    answer = post(stack, path, capture={"probe": ["tone"]}).json()
    assert len(answer["capture"]["scores"][0]["positions"]) == 10


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_breaks_off_says_so(stack: Stack, path: str) -> None:
    text = post(stack, path, stream=True, play={"break_after": 2}, capture={**SPEC, "id": (ulid := new_ulid())}).text
    assert text.split("\n\n")[-2].startswith("event: error\ndata: ")
    assert events_of(text)[-1]["error"]["code"] == "upstream_broken"
    assert until(lambda: stack.http.get(f"/v1/captures/{ulid}").json()["finish_reason"] == "abort")


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/v1/responses", {"background": True}, "background"),
    ("/v1/responses", {"request_id": "resp_x"}, "request_id"),
    ("/v1/responses", {"tools": [{"type": "function", "name": "f"}, {"type": "code_interpreter"}]}, "tools[1].type"),
    ("/v1/responses", {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
     "tools[0].tools[0].type"),
    *(("/v1/responses", {"tools": [{"type": kind}]}, "tools[0].type") for kind in ("web_search_preview", "container")),
    ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    *((path, fields, param) for path in PATHS for fields, param in (
        ({"n": 2}, "n"), ({"use_beam_search": True}, "use_beam_search"), ({"prompt_embeds": "A"}, "prompt_embeds"),
        ({"captures": {}}, "captures"), ({"extra_body": {"capture": {}}}, "extra_body.capture"),
        ({"extra_body": {"edit": EDITS}}, "extra_body.edit"), ({"vllm_xargs": {"edit": json.dumps(EDITS)}},
                                                               "vllm_xargs.edit"),
        ({"edit": EDITS[0]}, "edit"), ({"edit": [{**EDITS[0], "op": "turn"}]}, "edit[0].op"),
        ({"edit": "scale"}, "edit"), ({"edit": [*EDITS, 7]}, "edit[1]"),
        ({"vllm_xargs": {"capture": "{}"}}, "vllm_xargs.capture"), ({"cache_salt": 7}, "cache_salt"),
        ({"messages": [{"role": "user", "content": "x", "capture": SPEC}]}, "messages[0].capture"))),
])
def test_what_cannot_be_right_is_refused_by_name(stack: Stack, path: str, fields: dict[str, Any], param: str) -> None:
    before = len(stack.seen())
    answer = post(stack, path, capture=SPEC, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert len(stack.seen()) == before


def test_a_response_with_tools_of_the_callers_is_captured(stack: Stack) -> None:
    tools = [{"type": "function", "name": "capture", "parameters": {"properties": {"capture": {}}}},
             {"type": "namespace", "name": "n", "tools": [{"type": "function"}]},
             *({"type": kind, "name": "c"} for kind in ("custom", "local_shell", "shell", "apply_patch", "web_search",
                                                        "file_search"))]
    assert post(stack, "/v1/responses", capture=SPEC, tools=tools).json()["capture"]["status"] == "complete"
    tool = {"name": "f", "input_schema": {"type": "object"}}
    assert post(stack, "/v1/messages", capture=SPEC, tools=[tool]).json()["capture"]["status"] == "complete"


@pytest.mark.parametrize("path", PATHS)
def test_anothers_captures_are_as_if_absent(stack: Stack, path: str) -> None:
    hers = post(stack, path, {"x-request-id": f"hers-{len(path)}"}, capture=SPEC).json()
    bob = {"x-api-key": make_key(stack.store / KEYS_FILE, f"bob-{len(path)}")}
    for name in (hers["id"], hers["capture"]["id"], f"hers-{len(path)}"):
        assert stack.http.get(f"/v1/captures/{name}").status_code == 200
        for url in (f"/v1/captures/{name}", f"/v1/captures/{name}/activations"):
            assert httpx.get(f"{stack.url}{url}", headers=bob).status_code == 404
    taken = httpx.post(f"{stack.url}{path}", headers=bob,
                       json={**ASKED[path], "capture": {"id": hers["capture"]["id"]}})
    assert taken.status_code == 409
    named = post(stack, path, {"x-request-id": hers["id"]}, capture=SPEC)  # it would be found in that one's place
    assert named.status_code == 400 and named.json()["error"]["param"] == "X-Request-Id"
    assert httpx.post(f"{stack.url}{path}", json={**ASKED[path], "capture": {}}).status_code == 401
    salts = []
    for headers in ({"x-api-key": stack.key}, bob):
        httpx.post(f"{stack.url}{path}", headers=headers, json=ASKED[path]).raise_for_status()
        salts.append(stack.seen()[-1]["body"]["cache_salt"])  # type: ignore[index]
    assert salts[0] != salts[1]


def test_with_keys_no_response_is_continued() -> None:
    """The model server would give one key's conversation to another's; where it cannot salt, nor its cache."""
    engine = engine_info("float32")
    older, newer = (structs.replace(engine, vllm_version=version) for version in ("0.26.0", "0.27.1+cpu"))
    built = structs.replace(engine, vllm_version="0.1.dev9837+g1a2b3c4d5")  # from sources, without tags
    for owner, protocol, known in (("", RESPONSES, None), ("", MESSAGES, older), ("a", MESSAGES, newer),
                                    ("a", MESSAGES, built), ("a", CHAT, older), ("a", CHAT, None)):
        check_owned({}, protocol, owner, known)
    with pytest.raises(ApiError, match="no engine") as refused:  # it may be an old one
        check_owned({}, MESSAGES, "a", None)
    assert (refused.value.status, refused.value.code) == (503, "no_engine")
    with pytest.raises(ApiError, match=r"0\.26\.0"):
        check_owned({}, MESSAGES, "a", older)
    check_owned({"previous_response_id": "resp_1"}, RESPONSES, "", None)
    with pytest.raises(ApiError, match="previous_response_id"):
        check_owned({"previous_response_id": "resp_1"}, RESPONSES, "a", None)


def test_messages_of_an_old_vllm_are_not_captured() -> None:
    for version, protocol, captured in (("0.28.0", MESSAGES, False), ("0.29.0", MESSAGES, True),
                                        ("0.28.1.dev3+g1a2", MESSAGES, False), ("0.0.0.dev1", MESSAGES, True),
                                        ("0.1.dev9837+g1a2b3c4d5.cu129", MESSAGES, True), ("0.26.0", CHAT, True),
                                        ("0.26.0", RESPONSES, True)):
        engine = structs.replace(engine_info("float32"), vllm_version=version)
        asked = capture_request({"capture": {}}, protocol, None)
        if captured:
            assert plan(asked, engine).response_id.startswith(protocol.id_prefix)
        else:
            with pytest.raises(BadParam, match=r"0\.28\."):
                plan(asked, engine)


def test_tokens_of_messages_are_counted_by_upstream(stack: Stack) -> None:
    assert stack.http.post("/v1/messages/count_tokens", json={"prompt": "ab"}).json() == {"tokens": [97, 98]}
    refused = stack.http.post("/v1/messages/count_tokens", json={"prompt": "ab", "capture": {}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "capture"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_last_event_is_found_however_it_comes(size: int) -> None:
    text = b"event: response.created\ndata: {}\n\nevent: response.completed_x\n\nevent: response.completed\ndata: 1\n\n"
    finder, before = DoneFinder(RESPONSES.ends), b""
    for start in range(0, len(text), size):
        part, done = finder.feed(text[start:start + size])
        before += part
        if done:
            break
    assert before == text[:text.index(b"event: response.completed\n")]
    assert done.startswith(b"event: response.completed\n")


@pytest.mark.parametrize("event", [b"event: message_stop\ndata: {", b"event: message_stop", b"event: x\ndata: [1]"])
def test_what_is_not_the_last_event_stays_as_it_is(event: bytes) -> None:
    assert MESSAGES.named(event, {}) == event
    assert RESPONSES.named(b'data: {"response": 1}', {}) == b'data: {"response": 1}'


def test_how_much_a_prompt_is() -> None:
    body = {"instructions": "ab", "input": [{"role": "user", "content": [{"type": "input_text", "text": "cd"}]},
                                            {"type": "function_call_output", "output": "ef"}]}
    assert RESPONSES.texts(body) == [b"abcdef"] and RESPONSES.texts({"input": "x"}) == [b"x"]
    said = {"system": [{"type": "text", "text": "ab"}], "messages": [{"role": "user", "content": [
        {"type": "tool_result", "content": [{"type": "text", "text": "cd"}]}]}, {"role": "user", "content": "ef"}]}
    assert MESSAGES.texts(said) == [b"abcdef"]
