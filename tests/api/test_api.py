"""Generations through the service: what upstream is sent, what the caller gets, and how each way of failing ends."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import httpx
import openai
import pytest
from msgspec import structs

from api.routes.about import _can
from schemas import limits
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.wire.engine_info import Proved
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import engine_info
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import until
from vllm_tap import Client

SPEC = {"sites": ["resid_post"], "layers": [0, 2]}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("api")) as stack:
        yield stack


def status_is(stack: Stack, capture: str, status: str) -> Callable[[], bool]:
    return lambda: stack.http.get(f"/v1/captures/{capture}").json().get("status") == status


# ── with and without a capture ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chat", [False, True])
def test_a_captured_request_is_owned_sent_and_answered(stack: Stack, chat: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    answer = stack.http.post("/v1/chat/completions" if chat else "/v1/completions", json={
        "model": "played", **asked, "seed": 7, "unknown_field": {"kept": [1, None]}, "vllm_xargs": {"mine": 1},
        "capture": {**SPEC, "tags": {"run": "a"}}}, headers={"X-Request-Id": f"mine-{chat}", "x-extra": "1"})
    body, seen = answer.json(), stack.seen()[-1]
    ulid = body["capture"]["id"]
    assert body["capture"] == {"id": ulid, "ids": [ulid], "status": "complete", "manifest_url": f"/v1/captures/{ulid}",
                               "activations_url": f"/v1/captures/{ulid}/activations"}
    assert body["id"] == f"{'chatcmpl' if chat else 'cmpl'}-{ulid}" and answer.headers["x-tap-capture"] == ulid
    assert seen["headers"]["x-request-id"] == ulid and seen["headers"]["x-extra"] == "1"
    sent = seen["body"]
    assert "capture" not in sent and sent["seed"] == 7 and sent["unknown_field"] == {"kept": [1, None]}
    assert sent["vllm_xargs"]["mine"] == 1 and "capture_count" not in sent["vllm_xargs"]
    assert json.loads(sent["vllm_xargs"]["capture"])["id"] == ulid
    manifest = stack.http.get(f"/v1/captures/mine-{chat}").json()
    assert manifest["id"] == ulid and manifest["tags"] == {"run": "a"} and body["id"] in manifest["aliases"]
    assert manifest["expected"] == manifest["captured"] > 0 and manifest["missing"] == 0


def test_without_a_capture_the_bytes_pass_through(stack: Stack) -> None:
    for capture in ({}, {"capture": None}):
        answer = stack.complete("plain", **capture)
        seen = stack.seen()[-1]
        assert answer.status_code == 200 and "capture" not in answer.json() and "capture" not in seen["body"]
    direct = httpx.post(f"{stack.upstream_url}/v1/completions", json={"model": "played", "prompt": "x", "stream": True})
    through = stack.complete("x", stream=True)
    assert through.content == direct.content and through.headers["content-type"] == direct.headers["content-type"]


@pytest.mark.parametrize("stream", [False, True])
def test_beside_the_capture_nothing_is_changed(stack: Stack, stream: bool) -> None:
    """Either way: of what the caller asks, and of what upstream answers."""
    asked = {"model": "played", "messages": [{"role": "user", "content": "hi"}], "stream": stream, "n": 2,
             "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
             "tool_choice": "none", "logprobs": True, "top_logprobs": 3, "stream_options": {"include_usage": True},
             "response_format": {"type": "json_object"}, "not known": [1.5, None, {"ü": "雪"}]}
    direct = httpx.post(f"{stack.upstream_url}/v1/chat/completions", json=asked)
    through = stack.http.post("/v1/chat/completions", json={**asked, "capture": SPEC})
    sent = stack.seen()[-1]["body"]
    assert isinstance(sent, dict) and sent.pop("vllm_xargs").keys() == {"capture", "capture_count"} and sent == asked
    text = through.text.replace(through.headers["x-tap-capture"], "none")  # upstream's name of a request without one
    if stream:
        lines = text.splitlines(keepends=True)
        at = next(number for number, line in enumerate(lines) if '"object": "capture"' in line)
        assert "".join(lines[:at] + lines[at + 2:]) == direct.text
    else:
        assert {**json.loads(text), "capture": None} == {**direct.json(), "capture": None}


@pytest.mark.parametrize(("prompt", "n", "count"), [
    ("one", 1, 1), ("one", 3, 3), (["a", "b"], 1, 2), (["a", "b"], 2, 4), ([1, 2, 3], 1, 1), ([[1, 2], [3]], 1, 2),
])
def test_samples_and_prompt_lists_make_one_capture_each(stack: Stack, prompt: object, n: int, count: int) -> None:
    body = stack.complete(prompt, n=n, capture=SPEC).json()
    ulid, ids = body["capture"]["id"], body["capture"]["ids"]
    assert len(body["choices"]) == len(ids) == count and body["capture"]["status"] == "complete"
    assert ids == ([ulid] if count == 1 else [f"{ulid}.{i}" for i in range(count)])
    for i, capture in enumerate(ids):
        manifest = stack.http.get(f"/v1/captures/{capture}").json()
        lengths = [len(p) if isinstance(p, list | str) else 1 for p in prompt] if isinstance(prompt, list) else [3]
        assert manifest["prompt_len"] == (len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], int)
                                          else lengths[i // n])
    if count > 1:
        assert stack.http.get(f"/v1/captures/{body['id']}").json() == {"id": ulid, "captures": ids}
        refused = stack.http.get(f"/v1/captures/{ulid}/activations")
        assert refused.status_code == 400 and f"{ulid}.1" in refused.json()["error"]["message"]


def test_a_stream_ends_with_a_capture_event(stack: Stack) -> None:
    body = {"model": "played", "prompt": "hello", "stream": True, "max_tokens": 5, "capture": SPEC}
    with stack.http.stream("POST", "/v1/completions", json=body) as answer:
        events = [line for line in answer.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    last = json.loads(events[-2].removeprefix("data: "))
    assert last["object"] == "capture" and last["choices"] == [] and last["capture"]["status"] == "complete"
    assert last["id"] == f"cmpl-{last['capture']['id']}" == json.loads(events[0].removeprefix("data: "))["id"]
    assert answer.headers["x-tap-capture"] == last["capture"]["id"]
    assert len(events) == 5 + 1 + 2


def test_the_official_client_takes_both_ways(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "hi"}]
    plain = client.chat.completions.create(model="played", messages=messages, max_tokens=4,
                                           extra_body={"capture": SPEC})
    assert plain.choices[0].message.content == "abcd" and plain.model_extra["capture"]["status"] == "complete"
    chunks = list(client.chat.completions.create(model="played", messages=messages, max_tokens=4, stream=True,
                                                 stream_options={"include_usage": True}, extra_body={"capture": SPEC}))
    assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == "abcd"
    assert chunks[-1].model_extra["capture"]["ids"] == [chunks[0].id.removeprefix("chatcmpl-")]
    text = list(client.completions.create(model="played", prompt="x", max_tokens=3, stream=True,
                                          extra_body={"capture": SPEC}))
    assert "".join(c.choices[0].text for c in text if c.choices) == "abc"
    with client.chat.completions.stream(model="played", messages=messages, max_tokens=4,
                                        stream_options={"include_usage": True}, extra_body={"capture": SPEC}) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "abcd" and final.usage is not None and final.usage.completion_tokens == 4


@pytest.mark.parametrize("spec", [
    {"sites": []}, {"layers": []}, {"positions": []}, {**SPEC, "positions": [[90, 99]]},
    {**SPEC, "positions": "generated"},
])
def test_what_names_no_row_is_legal_and_ends_as_empty(stack: Stack, spec: dict[str, object]) -> None:
    """Not as complete: whoever reads that expects rows."""
    mark = new_ulid()
    whole = stack.complete("x", capture={**SPEC, "tags": {"mark": mark}}).json()["capture"]["id"]
    body = stack.complete("x", max_tokens=1, capture={**spec, "tags": {"mark": mark}}).json()["capture"]
    assert body["status"] == "empty"
    manifest = stack.http.get(f"{body['manifest_url']}?wait=complete&timeout=20").json()
    assert (manifest["status"], manifest["expected"], manifest["missing"]) == ("empty", 0, 0)
    for status, found in (("empty", [body["id"]]), ("complete", [whole]), ("incomplete", [])):
        listed = stack.http.get(f"/v1/captures?tag=mark={mark}&status={status}").json()
        assert [row["id"] for row in listed["data"]] == found and listed["next"] is None
        assert {row["status"] for row in listed["data"]} <= {status}
    events = stack.http.get(f"/v1/captures/{body['id']}/events").text
    assert events.startswith("event: finish") and '"status":"empty"' in events
    with Client(stack.url) as client:
        assert client.capture(body["id"]).wait(PATIENCE_S).status == "empty"


def test_pages_of_a_status_that_is_no_column(stack: Stack) -> None:
    ids = [stack.complete("x", capture={**SPEC, **({"layers": []} if i % 2 else {})}).json()["capture"]["id"]
           for i in range(6)][::-1]
    for status, want in (("empty", ids[0::2]), ("complete", ids[1::2])):
        found: list[str] = []
        query = ""
        while len(found) < 3:
            body = stack.http.get(f"/v1/captures?status={status}&limit=2{query}").json()
            found += [row["id"] for row in body["data"]]
            query = f"&before={body['next']}"
        assert found[:3] == want


# ── refused before anything is asked ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("fields", "status", "param", "says"), [
    ({"capture": {"sites": ["resid_pst"]}}, 400, "capture.sites", "resid_post"),
    ({"capture": {"sites": ["mlp_out"]}}, 400, "capture.sites", "armed: resid_post, attn_out"),
    ({"capture": {"sites": "resid_post"}}, 400, "capture.sites", "valid"),
    ({"capture": {"layers": [0, 99]}}, 400, "capture.layers", "0 to 3"),
    ({"capture": {"layers": "1:2:0"}}, 400, "capture.layers", "valid"),
    ({"capture": {"positions": [[5, 2]]}}, 400, "capture.positions", "start < stop"),
    ({"capture": {"positions": "first"}}, 400, "capture.positions", '"last_prompt"'),
    ({"capture": {"positions": "last"}}, 400, "capture.positions", '"last_prompt"'),
    ({"capture": {"layers": [-1]}}, 400, "capture.layers", '"-1:"'),
    ({"capture": {"codec": "zip"}}, 400, "capture.codec", "int8b64"),
    ({"capture": {"id": "../../x"}}, 400, "capture.id", "ULID"),
    ({"capture": {"id": "a" * 300}}, 400, "capture.id", "ULID"),
    ({"capture": {"tags": {"../x": "y"}}}, 400, "capture.tags", "A-Z"),
    ({"capture": {"nonsense": 1}}, 400, "capture.nonsense", "unknown field"),
    ({"capture": {"\ud800": 1}}, 400, "capture", "unicode"),
    ({"capture": {"tags": {"a": "\ud800"}}}, 400, "capture.tags", "valid"),
    ({"capture": True}, 400, "capture", "object"),
    ({"capture": {"return": "file"}}, 400, "capture.return", "inline"),
    ({"capture": {"return_": "inline"}}, 400, "capture.return_", "unknown field"),
    ({"capture": {"probe": ["p"]}}, 400, "capture.probe", "probe"),
    ({"capture": {}, "use_beam_search": True}, 400, "use_beam_search", "beam"),
    ({"capture": {}, "n": 0}, 400, "n", "valid"),
    ({"capture": {}, "n": "2"}, 400, "n", "valid"),
    ({"capture": {}, "n": 5000}, 413, None, "4096"),
    ({"capture": {}, "n": int("9" * 4299)}, 400, "n", "63 bits"),
    ({"capture": {}, "vllm_xargs": {"capture": "{}"}}, 400, "vllm_xargs.capture", "reserved"),
    ({"vllm_xargs": {"capture": "{}"}}, 400, "vllm_xargs.capture", "reserved"),
    ({"vllm_xargs": {"capture_count": 2}}, 400, "vllm_xargs.capture_count", "reserved"),
    ({"capture": {}, "vllm_xargs": [1]}, 400, "vllm_xargs", "object"),
    ({"capture": {}, "prompt_embeds": "AAAA"}, 400, "prompt_embeds", "text"),
    ({"capture": {"tags": {"a": "b" * 70_000}}}, 400, "capture.tags", "512"),
])
def test_bad_specs_are_refused_with_field_value_and_fix(
    stack: Stack, fields: dict[str, object], status: int, param: str | None, says: str
) -> None:
    asked = len(stack.seen())
    answer = stack.http.post("/v1/completions", content=json.dumps({"model": "played", "prompt": "x", **fields}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert says in error["message"] and error["type"] == "invalid_request_error" and error["code"]
    assert len(stack.seen()) == asked


def test_a_taken_id_is_refused(stack: Stack) -> None:
    ulid = new_ulid()
    assert stack.complete("x", capture={**SPEC, "id": ulid}).json()["capture"]["id"] == ulid
    asked = len(stack.seen())
    again = stack.complete("y", capture={**SPEC, "id": ulid})
    assert again.status_code == 409 and ulid in again.json()["error"]["message"]
    assert len(stack.seen()) == asked
    assert stack.http.get(f"/v1/captures/{ulid}").json()["status"] == "complete"


@pytest.mark.parametrize("request_id", [
    "../x", "a/b", "x" * 257, "sp ace", "q?",
    # The name of another capture: whoever asked for that one would get this one's rows.
    *(f"{kind}01J00000000000000000000000{sample}" for kind in ("", "cmpl-", "chatcmpl-") for sample in ("", ".1")),
])
def test_a_request_id_that_could_name_no_capture_is_refused(stack: Stack, request_id: str) -> None:
    answer = stack.http.post("/v1/completions", json={"model": "played", "prompt": "x", "capture": {}},
                             headers={"X-Request-Id": request_id})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "X-Request-Id"


@pytest.mark.parametrize("content", [b'{"prompt": ', b"", b"\xff\xfe", b"[1]", b'"text"', b"[" * 100_000, b"1" * 9000])
def test_malformed_json(stack: Stack, content: bytes) -> None:
    answer = stack.http.post("/v1/completions", content=content)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "malformed_json"


@pytest.mark.parametrize("field", ["captures", "Capture", "pacture", "capture_spec", "activation_capture"])
def test_a_misspelled_capture_is_not_silently_none(stack: Stack, field: str) -> None:
    asked = len(stack.seen())
    answer = stack.http.post("/v1/completions", json={"model": "played", "prompt": "x", field: {}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field) and 'did you mean "capture"?' in error["message"]
    assert len(stack.seen()) == asked


def test_a_spec_longer_than_the_engine_takes_is_refused_here(stack: Stack) -> None:
    asked = len(stack.seen())
    ranges = [[10**9 + 2 * i, 10**9 + 2 * i + 1] for i in range(limits.spec_intervals_max)]
    answer = stack.complete("x", capture={**SPEC, "positions": ranges})
    assert answer.status_code == 413 and "capture spec" in answer.json()["error"]["message"]
    assert len(stack.seen()) == asked


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_capture_is_not_taken_from_a_web_pages_form(stack: Stack, content_type: str) -> None:
    asked = len(stack.seen())
    answer = stack.http.post("/v1/completions", content=json.dumps({"model": "played", "prompt": "x", "capture": {}}),
                             headers={"content-type": content_type})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "Content-Type"
    assert len(stack.seen()) == asked


def test_headers_without_end_are_refused(stack: Stack) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 1_000_000 + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert connection.recv(65536).split()[1] != b"200"


def test_a_caller_who_leaves_within_the_body_is_no_fault_of_the_service(stack: Stack) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    left = 'vllm_tap_api_requests_total{method="POST",route="/v1/completions",status="499"}'
    before = stack.http.get("/metrics").text.count(left)
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.1)
    assert before or until(lambda: left in stack.http.get("/metrics").text)
    assert "ClientDisconnect" not in (stack.store.parent / "api.log").read_text()


def test_a_body_over_the_limit_is_not_read(stack: Stack) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: [::1]:8\r\nContent-Length: 1099511627776\r\n\r\n{}")
        assert connection.recv(65536).split()[1] == b"413"

    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 20)

    with contextlib.suppress(httpx.WriteError, httpx.ReadError):
        assert stack.http.post("/v1/completions", content=endless()).status_code == 413


# ── upstream fails, callers leave ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_upstreams_errors_pass_through_and_close_the_capture(stack: Stack, status: int, stream: bool) -> None:
    ulid = new_ulid()
    answer = stack.complete("x", stream=stream, play={"status": status}, capture={**SPEC, "id": ulid})
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, "as asked")
    assert until(status_is(stack, ulid, "failed"))
    told = f"the model server answered {status}: as asked"
    assert stack.http.get(f"/v1/captures/{ulid}").json()["failed"] == told
    rows = stack.http.get(f"/v1/captures/{ulid}/activations")
    assert rows.status_code == 404 and told in rows.json()["error"]["message"]


def test_a_stream_that_upstream_cuts_ends_with_an_error_event(stack: Stack) -> None:
    answer = stack.complete("x", stream=True, max_tokens=9, play={"break_after": 3}, capture=SPEC)
    events = [line for line in answer.text.splitlines() if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "upstream_broken"
    assert len(events) == 3 and "[DONE]" not in answer.text


def test_a_stream_without_a_capture_that_upstream_cuts_is_cut(stack: Stack) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        stack.complete("x", stream=True, max_tokens=9, play={"break_after": 3})
    assert "Traceback" not in stack.processes["api"].log.read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_takes_the_request_along(stack: Stack, stream: bool) -> None:
    ulid = new_ulid()
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=stack.url, timeout=0.7) as http:
        http.post("/v1/completions", json={"model": "played", "prompt": "leaver", "stream": stream, "max_tokens": 50,
                                           "play": {"delay_s": 60}, "capture": {**SPEC, "id": ulid}})
    assert until(lambda: stack.seen()[-1]["ended"] == "abort")
    assert until(status_is(stack, ulid, "complete"))
    assert stack.http.get(f"/v1/captures/{ulid}").json()["finish_reason"] == "abort"


def test_a_text_without_its_capture_says_pending(stack: Stack) -> None:
    body = stack.complete("x", play={"unopened": True}, capture=SPEC).json()
    assert body["choices"][0]["text"] and body["capture"]["status"] == "pending"
    manifest = stack.http.get(body["capture"]["manifest_url"]).json()
    assert manifest["status"] == "pending" and manifest["rows"] == []


# ── captures ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_list_pages_newest_first(stack: Stack) -> None:
    ids = [stack.complete(f"page {i}", capture=SPEC).json()["capture"]["id"] for i in range(5)]
    first = stack.http.get("/v1/captures?limit=2").json()
    assert [row["id"] for row in first["data"]] == ids[:2:-1] and first["next"] == ids[3]
    second = stack.http.get(f"/v1/captures?limit=2&before={first['next']}").json()
    assert [row["id"] for row in second["data"]] == [ids[2], ids[1]]
    ulid = new_ulid()
    stack.complete("x", play={"status": 500}, capture={**SPEC, "id": ulid})
    assert until(status_is(stack, ulid, "failed"))
    failed = stack.http.get("/v1/captures?status=failed").json()["data"]
    assert failed[0]["id"] == ulid and {row["status"] for row in failed} == {"failed"}
    assert first["data"][0]["prompt_len"] == len("page 4") and first["data"][0]["sites"] == ["resid_post"]


def test_the_list_is_narrowed(stack: Stack) -> None:
    def made(tags: dict[str, str], spec: dict[str, object] = SPEC, **fields: object) -> str:
        headers = {"x-request-id": f"Named-{tags.get('n')}"}
        body = {"model": "played", "prompt": "x", "capture": {**spec, "tags": {"test": "narrow", **tags}}, **fields}
        ulid: str = stack.http.post("/v1/completions", json=body, headers=headers).json()["capture"]["id"]
        return ulid

    def listed(query: str) -> list[str]:
        body = stack.http.get(f"/v1/captures?tag=test=narrow&{query}").json()
        assert body["next"] is None
        return [row["id"] for row in body["data"]]

    one, two = made({"n": "1", "run": "a=b'\"%"}), made({"n": "2", "run": "c"})
    middle_ms = time.time_ns() // 1_000_000 + 1
    time.sleep(0.01)
    three = made({"n": "3"}, {"sites": ["attn_out"]}, model="songs")  # a LoRA adapter's name
    when = datetime.fromtimestamp(middle_ms / 1000, UTC).isoformat(timespec="milliseconds")
    for query, found in {
        "": [three, two, one], "tag=n=2": [two], "tag=run": [two, one], "tag=run=a%3Db'%22%25": [one], "tag=none": [],
        "site=attn_out": [three], "site=blocks.1.hook_resid_post": [two, one], "model=played": [three, two, one],
        "model=songs": [three], "model=other": [], f"since={middle_ms}": [three], f"until={middle_ms}": [two, one],
        f"since={when.replace('+00:00', 'Z')}": [three], "text=named-2": [two], f"text={one[-8:].lower()}": [one],
        "text=A%3DB": [one], "text=%25": [one], "tag=run&text=named-2&status=complete": [two], "status=failed": [],
    }.items():
        assert listed(query) == found, query
    rows = stack.http.get("/v1/captures?tag=test=narrow").json()["data"]
    assert [row["adapter"] for row in rows] == ["songs", "", ""]
    assert stack.http.get(f"/v1/captures/{three}").json()["adapter"] == "songs"
    with Client(stack.url) as client:
        assert [row.id for row in client.captures(tags={"test": "narrow"}, model="songs")] == [three]


def test_pages_of_a_narrowed_list(stack: Stack) -> None:
    ids = [stack.complete("x", capture={**SPEC, "tags": {"page": str(i % 2)}}).json()["capture"]["id"]
           for i in range(6)][::-1]
    found: list[str] = []
    query: str | None = ""
    while query is not None:
        body = stack.http.get(f"/v1/captures?tag=page=1&limit=2{query}").json()
        found += [row["id"] for row in body["data"]]
        query = None if body["next"] is None else f"&before={body['next']}"
    assert found == ids[0::2]


@pytest.mark.parametrize(("query", "param"), [
    ("limit=0", "limit"), ("limit=1001", "limit"), ("limit=x", "limit"), ("limit=99999999999999", "limit"),
    ("before=../x", "before"), ("status=done", "status"), ("page=2", "page"), ("since=yesterday", "since"),
    ("until=-1", "until"), ("since=9999999999999999999", "since"), ("site=nothing", "site"), ("tag=", "tag"),
    ("text=" + "x" * 300, "text"), ("&".join(["tag=a"] * 17), "tag"), ("limit=1&limit=2", "limit"),
    ("site=resid_post&site=attn_out", "site"),
])
def test_bad_lists(stack: Stack, query: str, param: str) -> None:
    answer = stack.http.get(f"/v1/captures?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_capture_deleted_while_it_is_made_says_so(stack: Stack) -> None:
    name = "deleted-early"
    body = {"model": "played", "prompt": "bye", "max_tokens": 8, "stream": True, "capture": SPEC,
            "play": {"delay_s": 0.1, "live": True}}
    with stack.http.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": name}) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if '"choices"' in line)
        assert stack.http.delete(f"/v1/captures/{name}").status_code == 204
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [event["capture"]["status"] for event in events if "capture" in event] == ["deleted"]


def test_what_passes_through_has_each_header_once(stack: Stack) -> None:
    for answer in (stack.http.get("/v1/models"), stack.complete("once", capture=SPEC), stack.complete("once"),
                   stack.http.get("/v1/captures")):
        names = [name for name, _ in answer.headers.multi_items()]
        assert len(names) == len(set(names)) and "date" in names, names


def test_no_page_of_ours_needs_other_hosts(stack: Stack) -> None:
    assert stack.http.get("/docs").status_code == 404 and stack.http.get("/openapi.json").status_code == 200


def test_deleted_is_gone_at_once(stack: Stack) -> None:
    one = stack.complete("bye", capture=SPEC).json()["capture"]["id"]
    many = stack.complete("bye", n=3, capture=SPEC).json()
    for name, ids in ((one, [one]), (many["id"], many["capture"]["ids"])):
        answer = stack.http.delete(f"/v1/captures/{name}")
        assert answer.status_code == 204 and not answer.content
        for capture in [name, *ids]:
            assert stack.http.get(f"/v1/captures/{capture}").status_code == 404
            assert stack.http.get(f"/v1/captures/{capture}/activations").status_code == 404
            assert stack.http.delete(f"/v1/captures/{capture}").status_code == 404
    listed = {row["id"] for row in stack.http.get("/v1/captures").json()["data"]}
    assert not listed & {one, *many["capture"]["ids"]}


def test_what_is_held_is_not_deleted(stack: Stack) -> None:
    one = stack.complete("hold", capture=SPEC).json()["capture"]["id"]
    many = stack.complete("hold", n=2, capture=SPEC).json()
    for name, ids in ((one, [one]), (many["id"], many["capture"]["ids"])):
        assert stack.http.put(f"/v1/captures/{name}/hold").status_code == 204
        assert all(stack.http.get(f"/v1/captures/{capture}").json()["hold"] for capture in ids)
        for capture in [name, *ids]:
            refused = stack.http.delete(f"/v1/captures/{capture}")
            assert refused.status_code == 409 and refused.json()["error"]["code"] == "conflict"
            assert "on hold" in refused.json()["error"]["message"]
        assert stack.http.delete(f"/v1/captures/{name}/hold").status_code == 204
        assert not any(stack.http.get(f"/v1/captures/{capture}").json()["hold"] for capture in ids)
        assert stack.http.delete(f"/v1/captures/{name}").status_code == 204
        assert stack.http.put(f"/v1/captures/{name}/hold").status_code == 404


def test_waiting_for_a_capture(stack: Stack) -> None:
    body = stack.complete("wait", play={"unfinished": True}, capture=SPEC).json()
    ulid = body["capture"]["id"]
    assert body["capture"]["status"] == "running"
    started_s = time.monotonic()
    assert stack.http.get(f"/v1/captures/{ulid}?wait=complete&timeout=0.5").json()["status"] == "running"
    late = stack.http.get(f"/v1/captures/{ulid}/activations?wait=complete&timeout=0.5")
    assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
    assert 0.9 < time.monotonic() - started_s < 5
    now = stack.http.get(f"/v1/captures/{ulid}/activations?layer=0&stop=4&wait=rows&timeout=5")
    assert now.status_code == 200 and now.headers["x-tap-rows"] == "4" and now.headers["x-tap-status"] == "running"
    never = stack.http.get(f"/v1/captures/{ulid}/activations?layer=0&stop=9&wait=rows&timeout=0.3")
    assert never.status_code == 504


@pytest.mark.parametrize("ref", [
    "../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..", "%2e%2e", "a%00b", "x" * 300, "A" * 26, "%ff%fe",
    "'%20OR%201=1--", "01J0000000000000000000000", "01J00000000000000000000000.999999999", "%F0%9F%92%A9", "-", "%25",
])
def test_names_that_name_nothing(stack: Stack, ref: str) -> None:
    # Over a bare socket: clients tidy paths up before they send them.
    host, port = stack.url.removeprefix("http://").split(":")
    for method, suffix in (("GET", ""), ("GET", "/activations"), ("DELETE", "")):
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(f"{method} /v1/captures/{ref}{suffix} HTTP/1.1\r\nHost: localhost\r\n"
                               "Connection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split()[1] in (b"404", b"400", b"405"), head
        assert json.loads(body)["error"]["message"]


# ── the service itself ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/nothing", 404), ("GET", "/v1/captures/", 404), ("PUT", "/v1/captures", 405),
    ("GET", "/v1/completions", 405), ("POST", "/v1/load_lora_adapter", 404), ("POST", "/v1/captures/x", 405),
])
def test_the_frameworks_errors_have_the_same_shape(stack: Stack, method: str, path: str, status: int) -> None:
    answer = stack.http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [
    "/v1/models/../../_log", "/v1/models/%2e%2e/%2e%2e/_log", "/v1/models/./x", "/v1/models/%2e/..%2f..%2f_log",
])
def test_no_other_route_of_upstream_can_be_reached(stack: Stack, path: str) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split()[1] == b"404" and b"not_found" in answer, answer


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1:1", 200), ("localhost", 200), ("tap.localhost:8100", 200), ("[::1]:8100", 200), ("evil.example", 403),
    ("127.0.0.1.evil.example", 403), ("10.0.0.1", 403), ("[::1", 403), ("localhost@evil.example", 403),
])
def test_a_foreign_host_is_refused(stack: Stack, host: str, status: int) -> None:
    answer = stack.http.get("/v1/captures", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "foreign_host"


def test_models_and_tokenize_pass_through(stack: Stack) -> None:
    assert stack.http.get("/v1/models").json()["data"][0]["id"] == "played"
    assert stack.http.post("/tokenize", json={"prompt": "ab"}).json() == {"tokens": [97, 98]}
    refused = stack.http.post("/tokenize", json={"prompt": "ab", "capture": {}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "capture"


def test_capabilities(stack: Stack) -> None:
    body = stack.http.get("/v1/capabilities").json()
    assert body["armed"]["resid_post"] == {"layers": [0, 1, 2, 3], "width": 96, "transformer_lens":
                                           "blocks.{l}.hook_resid_post", "meaning": "residual stream leaving the block",
                                           "source": None}  # the played engine does not say, as older ones
    assert body["codecs"]["int8b64"]["default"] and "0.51" in body["codecs"]["int8b64"]["error"]
    assert "arrow" in body["formats"] and body["limits"]["slice_bytes_max"] == 1 << 30
    assert body["engine"]["model"] == "played" and body["versions"]["store"] == 2


def test_capabilities_say_what_the_start_proved_and_of_what_it_did_not() -> None:
    sources = {"resid_post": "table", "attn_out": "table"}
    engine = structs.replace(engine_info("float32"), sources=sources, unproved="weights of nearly nothing",
                             proved={"resid_post": Proved("resid_post = resid_pre + attn_out + mlp_out", 2e-7)})
    armed = _can(engine, [])["armed"]
    assert armed["resid_post"]["proved"] == {"identity": "resid_post = resid_pre + attn_out + mlp_out", "off": 2e-7}
    assert "not_proved" not in armed["resid_post"] and "proved" not in armed["attn_out"]
    assert (armed["attn_out"]["source"], armed["attn_out"]["not_proved"]) == ("table", "weights of nearly nothing")
    found = _can(structs.replace(engine, unproved=""), [])["armed"]["attn_out"]  # others were
    assert found["not_proved"] == "the search does not find this site in this model"


def test_health_and_metrics(stack: Stack) -> None:
    assert stack.http.get("/healthz").json() == {"status": "ok"}
    assert stack.http.get("/readyz").json()["checks"] == {"writer": "ok", "engine": "ok", "upstream": "ok"}
    stack.http.get("/v1/captures/secret-name")
    text = stack.http.get("/metrics").text
    assert 'vllm_tap_api_requests_total{method="GET",route="/v1/captures/{ref}",status="404"}' in text
    assert "vllm_tap_api_writer_alive 1.0" in text and "secret-name" not in text


def test_what_the_api_says_is_what_the_store_holds(stack: Stack) -> None:
    ulid = stack.complete("same", capture=SPEC).json()["capture"]["id"]
    with StoreReader(stack.store) as reader:
        manifest = reader.manifest(ulid)
    body = stack.http.get(f"/v1/captures/{ulid}").json()
    assert body["rows"][0]["captured"] == manifest.rows[0].captured and body["sites"][0]["codec"] == "int8b64"
    assert body["prompt_token_ids"] == list(b"same") and body["output_token_ids"] == list(b"abcd")
