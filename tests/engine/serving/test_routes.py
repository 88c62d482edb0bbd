"""vLLM's own routes, those of this version's application whatever they are: none answers a capture that nobody makes.

The real application with our seam in it, and no engine behind it: what is not refused fails for the lack of one.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from engine_side.seams import http_routes
from schemas import limits
from schemas.errors import ArgumentError

pytestmark = pytest.mark.versions

SPEC = {"sites": ["resid_post"], "layers": [0]}
SAYS = "nothing would be captured"
EDITS = [{"site": "resid_post.1", "op": "scale", "by": 0}]
UNEDITED = "nothing would be edited"


@pytest.fixture(scope="module")
def app() -> Any:
    """As a plain ``vllm serve`` with the plugin has it."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    http_routes.connect()
    try:
        options = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    except ModuleNotFoundError:  # before 0.29
        options = importlib.import_module("vllm.entrypoints.openai.cli_args")
    server = importlib.import_module("vllm.entrypoints.openai.api_server")
    arguments = options.make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "x"])
    arguments.enable_scale_out = True  # where there is such a thing: more routes
    app = server.build_app(arguments, ("generate",))
    app.add_api_route("/v9/later", later, methods=["POST"])
    return app


async def later() -> None:
    """As of a later vLLM."""


def routes(app: Any) -> Iterator[str]:
    """Those of this vLLM, whichever it is, and one of a later."""
    for route in app.routes:
        if "POST" in (getattr(route, "methods", None) or ()):
            yield route.path.replace("{response_id}", "resp_1")


def post(app: ASGIApp, path: str, **arguments: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, **arguments)

    return asyncio.run(ask())


def as_json(content: bytes) -> dict[str, Any]:
    return {"content": content, "headers": {"content-type": "application/json"}}


NAMED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"model": "x", "capture": SPEC}}, "capture"),
    ({"json": {"capture": {}}}, "capture"),
    ({"json": {"capture": True}}, "capture"),
    ({"json": {"captures": SPEC}}, "captures"),
    ({"json": {"Capture": "all"}}, "Capture"),
    ({"json": {"capture_spec": {}}}, "capture_spec"),
    ({"json": {"activationCapture": 1}}, "activationCapture"),
    ({"json": {"cpature": SPEC}}, "cpature"),
    ({"json": {"extra_body": {"capture": {}}}}, "extra_body.capture"),
    ({"json": {"vllm_xargs": {"captures": "{}"}}}, "vllm_xargs.captures"),
    ({"json": {"sampling_params": {"capture": SPEC}}}, "sampling_params.capture"),
    ({"json": {"sampling_params": {"extra_args": {"Capture": "{}"}}}}, "sampling_params.extra_args.Capture"),
    ({"json": {"requests": [{"prompt": "x"}, {"prompt": "y", "capture": SPEC}]}}, "requests[1].capture"),
    ({"json": {"messages": [[{"role": "user", "content": "x", "capture": SPEC}]]}}, "messages[0][0].capture"),
    (as_json(b'{"\\u0063apture": {}}'), "capture"),
    (as_json(json.dumps({"capture": SPEC}).encode("utf-16")), "capture"),
    ({"content": b'{"capture": {}}'}, "capture"),  # under no name, as some clients send it
    ({"data": {"model": "x", "capture": "{}"}}, "capture"),
    ({"data": {"model": "x", "capture": "{}"}, "files": {"file": ("a.wav", b"RIFF")}}, "capture"),
    ({"content": b'--x\r\ncontent-disposition: form-data; name="capture"\r\n\r\n{}\r\n--x--\r\n',
      "headers": {"content-type": "multipart/form-data; boundary=x"}}, "capture"),  # names of headers have no case
    ({"params": {"capture": "{}"}, "json": {"model": "x"}}, "capture"),
]


EDITED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"model": "x", "edit": EDITS}}, "edit"), ({"json": {"edit": EDITS[0]}}, "edit"),
    ({"json": {"edit": json.dumps(EDITS)}}, "edit"),
    ({"json": {"extra_body": {"edit": EDITS}}}, "extra_body.edit"),
    ({"json": {"requests": [{"prompt": "x"}, {"prompt": "y", "edit": EDITS}]}}, "requests[1].edit"),
    (as_json(json.dumps({"edit": EDITS}).encode("utf-16")), "edit"), ({"json": {"edits": EDITS}}, "edits"),
    ({"json": {"vllm_xargs": {"edits": json.dumps(EDITS)}}}, "vllm_xargs.edits"),
]


def test_every_route_refuses_edits_that_it_would_not_make(app: Any) -> None:
    for path in routes(app):
        for arguments, param in EDITED:
            answer = post(app, path, **arguments)
            assert answer.status_code == 400 and UNEDITED in answer.text, (path, arguments, answer.text)
            assert answer.json()["error"]["param"] == param, (path, arguments)


def test_every_route_refuses_what_it_would_not_capture(app: Any) -> None:
    paths = list(routes(app))
    assert {"/v1/completions", "/v1/responses", "/v1/messages", "/v1/chat/completions/batch", "/inference/v1/generate",
            "/invocations", "/generative_scoring", "/v9/later"} <= set(paths)
    for path in paths:
        for arguments, param in NAMED:
            answer = post(app, path, **arguments)
            assert answer.status_code == 400 and SAYS in answer.text, (path, arguments, answer.text)
            assert answer.json()["error"]["param"] == param, (path, arguments)


@pytest.mark.parametrize("body", [
    {"capture": None}, {"prompt": "capture"}, {"messages": [{"role": "user", "content": '{"capture": {}}'}]},
    {"tools": [{"type": "function", "function": {"name": "capture", "parameters": {
        "type": "object", "properties": {"capture": {"type": "object"}}}}}]},
    {"tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"capture": {}}}}]},
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {
        "capture": SPEC}}]}]},
    {"edit": "the second line"}, {"edit": [{"line": 2}]}, {"edit": []}, {"edits": [{"line": 2}]},
    {"metadata": {"edit": EDITS}},
    {"tools": [{"name": "f", "input_schema": {"edit": EDITS}}]},
    {"vllm_xargs": {"edit": "x"}},
    {"metadata": {"capture": "one"}}, {"text": {"format": {"type": "json_schema", "schema": {"properties": {
        "capture": {"type": "string"}}}}}}, {"sites": ["x"]}, [{"capture": SPEC}], "capture",
])
def test_the_word_elsewhere_is_content(app: Any, body: object) -> None:
    for path in routes(app):
        answer = post(app, path, json=body)
        assert SAYS not in answer.text and UNEDITED not in answer.text, path


def test_a_file_may_have_any_name(app: Any) -> None:
    """And hold what it may."""
    answer = post(app, "/v9/later", data={"prompt": 'a name="capture" in text'}, files={
        "file": ("capture.wav", b'RIFF; name="capture"')})
    assert answer.status_code == 200, answer.text


def test_a_spec_that_reaches_the_engine_goes_by(app: Any) -> None:
    """Only where a request has the field: elsewhere it would be passed over."""
    for path in routes(app):
        answer = post(app, path, json={"model": "x", "vllm_xargs": {
            "capture": "{}", "capture_count": 2, "edit": json.dumps(EDITS)}})
        carried = path in ("/v1/completions", "/v1/chat/completions", "/v1/responses") or (
            path == "/v1/messages" and "vllm_xargs" in message_fields())
        if not path.endswith("/render"):  # which answers what is to be sent to /inference/v1/generate
            assert (SAYS in answer.text) != carried, (path, answer.text)
        answer = post(app, path, json={"token_ids": [1], "sampling_params": {"extra_args": {
            "capture": "{}", "edit": json.dumps(EDITS)}}})
        assert (SAYS in answer.text) != (path == "/inference/v1/generate"), (path, answer.text)


@pytest.mark.parametrize(("path", "status"), [("/v9/not/yet", 404), ("/v1/models", 405)])
def test_no_body_is_held_where_there_is_no_route(app: Any, path: str, status: int) -> None:
    """Whoever has no key could fill the memory with them."""
    read = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(32):
            read += 1
            yield b" " * (1 << 20)

    answer = post(app, path, content=parts())
    assert answer.status_code == status and read <= 1, (answer.text, read)


def message_fields() -> Any:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    return AnthropicMessagesRequest.model_fields


@pytest.mark.parametrize("make", [
    lambda: b'{"capture": [' + b"[]," * limits.request_values_max + b"1]}",  # costs too much to parse
    lambda: b'{"captures": "' + b"x" * limits.request_body_bytes_max + b'"}',  # its end is not looked at
])
def test_a_body_too_long_to_be_looked_into_is_refused_where_it_may_name_one(
        app: Any, make: Callable[[], bytes]) -> None:
    async def parts(content: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(content), 1 << 20):
            yield content[start:start + (1 << 20)]

    answer = post(app, "/generative_scoring", content=parts(make()), headers={"content-type": "application/json"})
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "too_large", answer.text
    plain = b'{"prompt": "' + b"x" * limits.request_body_bytes_max + b'"}'
    assert post(app, "/v9/not/yet", content=parts(plain)).status_code == 404


CHAT = {"model": "x", "messages": [{"role": "user", "content": "which capture?"}], "metadata": {"capture": "no"}}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}


@pytest.mark.parametrize(("line", "param"), [
    ({**LINE, "body": {**CHAT, "capture": SPEC}}, "line 3: body.capture = "),
    ({**LINE, "body": {**CHAT, "vllm_xargs": {"captures": "{}"}}}, "line 3: body.vllm_xargs.captures = "),
    ({**LINE, "capture": SPEC}, "line 3: capture = "),
    ({**LINE, "body": {**CHAT, "edit": EDITS}}, "line 3: body.edit = "), ({**LINE, "edit": EDITS}, "line 3: edit = "),
    ({**LINE, "url": "/v1/score", "body": {"vllm_xargs": {"capture": "{}"}}}, "line 3: body.vllm_xargs.capture = "),
])
def test_a_batch_file_that_names_a_capture_is_refused(tmp_path: Path, line: dict[str, Any], param: str) -> None:
    """``vllm run-batch`` calls what is behind the routes; a spec that does reach the engine goes by."""
    http_routes.connect()
    batch, file = importlib.import_module(http_routes.batch_module()), tmp_path / "in.jsonl"
    heard = [LINE, {**LINE, "body": {**CHAT, "edit": "x", "vllm_xargs": {
        "capture": json.dumps(SPEC), "edit": json.dumps(EDITS)}}}]
    text = "\n".join(map(json.dumps, heard))
    file.write_text(text)
    assert asyncio.run(batch.read_file(str(file))) == text
    file.write_text(f"{text}\n{json.dumps(line)}\nno json: capture")
    with pytest.raises(ArgumentError, match=f"{re.escape(param)}.*({SAYS}|{UNEDITED})"):
        asyncio.run(batch.read_file(str(file)))
