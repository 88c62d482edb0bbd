"""Bodies of requests: where a capture is named in them, and what looking for it costs."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlencode

import pytest

from api.embedded import Embedded
from api.errors import BadParam
from api.generate.generation import parse_body
from engine_side.front.unheard import Unheard
from schemas import limits
from schemas.bodies import Message, Receive, aside, has_key, in_body, named
from schemas.errors import ArgumentError, LimitError

FORM = "multipart/form-data; boundary=x"


def cost(look: Callable[[], object]) -> float:
    took = []
    for _ in range(3):
        before = time.thread_time()
        look()
        took.append(time.thread_time() - before)
    return min(took)


@pytest.mark.parametrize("line", [b"ontent-Disposition:", b"\nContent-Disposition:", b"\ncontent-disposition:; name=",
                                  b"\n\r", b"\rContent-Disposition: " + b"; " * 500])
def test_a_form_is_looked_through_in_one_go(line: bytes) -> None:
    """Its own cost in processor time, next to that of counting the bytes one by one."""
    data = line * (500_000 // len(line))

    assert in_body(data, FORM) == []
    assert cost(lambda: in_body(data, FORM)) < 5 * cost(lambda: sum(1 for _ in data))


def test_a_form_of_too_many_fields_is_refused_where_one_may_name_a_capture() -> None:
    """Else the one that does would be passed on unseen."""
    fields = b"&".join(b"a=%d" % number for number in range(1000))

    assert in_body(fields, "application/x-www-form-urlencoded") == []
    with pytest.raises(ArgumentError, match="body = 'a form of 1001 fields': at most 1000"):
        in_body(fields + b"&capture=1", "application/x-www-form-urlencoded")

    async def app(scope: dict[str, object], receive: Receive, send: Callable[[Message], Awaitable[None]]) -> None:
        raise AssertionError("it was passed on")

    async def receive() -> Message:
        return {"type": "http.request", "body": fields + b"&capture=1"}

    async def send(message: Message) -> None:
        sent.append(message)

    sent: list[Message] = []
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "query_string": b"",
             "headers": [(b"content-type", b"application/x-www-form-urlencoded")]}
    asyncio.run(Unheard(app, lambda scope: ())(scope, receive, send))
    assert sent[0]["status"] == 400 and b"1001 fields" in sent[1]["body"]


def test_large_bodies_are_looked_at_beside_the_loop() -> None:
    def thread(messages: deque[Message]) -> int:
        return threading.get_ident()

    async def look(size: int) -> bool:
        return await aside(thread, deque([{"body": b" " * size}])) == threading.get_ident()

    assert asyncio.run(look(1000)) and not asyncio.run(look(2 << 20))


MANY = b'"list": [' + b"[]," * limits.request_values_max + b"1]"


@pytest.mark.parametrize("rest", [
    b'"prompt": "What is captured in this video?"', b'"prompt": "caf\\u00e9"', b'"prompt": "a \\u0041"',
    b'"prompt": "{\\"capture\\": {}}"', b'"creates": 1, "trapper": 1', b'"x": ["capture", "captures"]',
    b'"edit": "this"', b'"edit": true', b'"edits": [{"line": 1}]', b'"x": "edits", "op": [1]', b'"edits": "op"'])
def test_a_word_in_the_text_refuses_no_large_body(rest: bytes) -> None:
    assert in_body(b"{" + rest + b", " + MANY + b"}", "application/json") == []


@pytest.mark.parametrize("rest", [
    b'"capture": {}', b'"myCaptures" : 1', b'"\\u0063apture": {}', b'"cpature": {}', b'"edit": [{"op": "scale"}]',
    b'"edit" : "[{}]"', b'"edits": [{"op": 1}]', b'"Edit": "[{\\"op\\": 1}]"', b'"eidt": {"op": 1}',
    b'"x": {"my_edits": [{"op": 1}]}'])
def test_a_key_does(rest: bytes) -> None:
    for text in (body := b"{" + rest + b", " + MANY + b"}", body.decode().encode("utf-16")):
        with pytest.raises(LimitError):
            in_body(text, "application/json")


def test_looking_for_a_key_takes_one_go_as_well() -> None:
    for part in (b'"', b'"captur', b'"capture" ', b'"' + b"capturx" * 5, b'"\\u0041', b'"aceptur":', b'" captur"   \n',
                 b'"edit" ', b'"edit":"', b"edit", b'"edits": ', b'"deti'):
        data = part * (500_000 // len(part))
        assert cost(lambda data=data: has_key(data)) < 10 * cost(lambda data=data: sum(1 for _ in data)), part


@pytest.mark.parametrize("body", [
    {"extra_args": {"captured_at": "2026-01-01"}}, {"vllm_xargs": {"screen_capture": 1, "capture_device": "x"}},
    {"sampling_params": {"extra_args": {"plugin": {"screen_capture": {"x": 1}}}}},
    {"requests": [{"extra_body": {"captured_at": 1}}]}, {"messages": [{"content": [{"input": {"capture": {}}}]}]},
    {"messages": [{"role": "user", "capture": "of a screen"}]}, {"edits": [{"line": 1}]}, {"edit": None},
    {"edits": "[]", "Edit": "this", "edited": True}, {"edit_distance": 3}, {"vllm_xargs": {"edits": "the text"}},
    {"messages": [{"content": [{"input": {"edits": [{"op": "add"}]}}]}]},
    {"vllm_xargs": {"edit": "the text"}}, {"messages": [{"edit": [{"line": 1}]}]}])
def test_arguments_of_others_go_by(body: dict[str, Any]) -> None:
    assert list(named(body)) == []


@pytest.mark.parametrize(("body", "param"), [
    ({"vllm_xargs": {"capturs": 1}}, "vllm_xargs.capturs"),
    ({"vllm_xargs": {"capture_spec": '{"layers": [0]}'}}, "vllm_xargs.capture_spec"),
    ({"extra_args": {"plugin": {"myOwnCapture": {"layers": [0]}}}}, "extra_args.plugin.myOwnCapture"),
    ({"messages": [{"capture": {}}]}, "messages[0].capture"),
    ({"requests": [[{"capture": {}}]]}, "requests[0][0].capture"),
    ({"requests": [{"extra_body": {"capture": True}}]}, "requests[0].extra_body.capture"),
    ({"requests": [{"sampling_params": {"extra_args": {"capture": "{}"}}}]},
     "requests[0].sampling_params.extra_args.capture"),
    ({"edit": [{"op": "scale"}]}, "edit"), ({"vllm_xargs": {"edit": '[{"op": "scale"}]'}}, "vllm_xargs.edit"),
    ({"requests": [{"edit": [{"op": "scale"}]}]}, "requests[0].edit"), ({"edits": [{"op": "scale"}]}, "edits"),
    ({"Edit": {"op": "scale"}}, "Edit"), ({"eidt": [{"op": "scale"}]}, "eidt"),
    ({"my_edits": '[{"op": "scale"}]'}, "my_edits"),
    ({"vllm_xargs": {"edits": '[{"op": "scale"}]'}}, "vllm_xargs.edits"),
    ({"extra_body": {"edit_spec": [{"op": "scale"}]}}, "extra_body.edit_spec"),
    ({"requests": [{"EDIT": [{"op": "scale"}]}]}, "requests[0].EDIT")])
def test_a_capture_among_them_does_not(body: dict[str, Any], param: str) -> None:
    assert [each.param for each in named(body)] == [param]
    assert [each.param for each in in_body(json.dumps(body).encode(), "application/json")] == [param]


@pytest.mark.parametrize(("body", "message"), [
    ({"edits": [{"op": 1}]}, "edits = [{'op': 1}]: unknown, and nothing would be edited; did you mean \"edit\"?"),
    ({"vllm_xargs": {"edits": '{"op": 1}'}},
     "vllm_xargs.edits = '{\"op\": 1}': reserved, nothing else would be edited"),
    ({"captures": 1}, 'captures = 1: unknown, and nothing would be captured; did you mean "capture"?')])
def test_a_generation_says_which_field_is_meant(body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParam) as refused:
        parse_body(json.dumps(body).encode())
    assert refused.value.message.startswith(message)


def test_a_generation_with_anothers_edits_goes_by() -> None:
    body = {"edits": [{"line": 1}], "Edit": "this", "vllm_xargs": {"edits": "the text"}}
    assert parse_body(json.dumps(body).encode()) == body


@pytest.mark.parametrize("name", ["edit", "edits", "Edit", "vllm_xargs"])
def test_edits_on_a_route_that_takes_none_are_refused_by_their_field(name: str) -> None:
    edits = [{"op": "scale"}]
    body = json.dumps({name: {"edits": edits} if name == "vllm_xargs" else edits}).encode()
    param = "vllm_xargs.edits" if name == "vllm_xargs" else name
    sent: list[Message] = []

    async def app(scope: dict[str, object], receive: Receive, send: Callable[[Message], Awaitable[None]]) -> None:
        raise AssertionError("it was passed on")

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/x", "query_string": b"",
             "headers": [(b"content-type", b"application/json")]}
    asyncio.run(Unheard(app, lambda scope: ("vllm_xargs",))(scope, receive, send))
    error = json.loads(sent[1]["body"])["error"]
    assert (sent[0]["status"], error["param"]) == (400, param)
    assert 'nothing would be edited here; "edit" is a field of' in error["message"]


EDITS = json.dumps([{"site": "z", "op": "scale", "by": 0}])
PARTS = "--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n" \
    "--x\r\nContent-Disposition: form-data; name=\"{}\"\r\nContent-Type: application/json\r\n\r\n{}\r\n--x--\r\n"


@pytest.mark.parametrize("name", ["edit", "Edits", "eidt"])
@pytest.mark.parametrize(("edits", "found"), [(EDITS, True), ("the second paragraph", False)])
def test_edits_in_a_form_are_found_and_what_others_call_so_is_not(name: str, edits: str, found: bool) -> None:
    right = [(name, edits)] if found else []
    for kind, body in (("application/x-www-form-urlencoded", urlencode({"model": "m", name: edits})),
                       (FORM, PARTS.format(name, edits))):
        told = in_body(body.encode(), kind)
        assert told == right and all(each.is_sure and each.of_edits for each in told), kind


def test_edits_in_a_query_are_refused() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def passed_on(scope: object, receive: object, send: object) -> None:
        sent.append({"status": None})

    async def send(message: Message) -> None:
        sent.append(message)

    for query, status in ((urlencode({"edit": EDITS}), 400), ("edit=paragraph", None)):
        sent.clear()
        scope = {"type": "http", "method": "POST", "path": "/v1/x", "query_string": query.encode(), "headers": []}
        asyncio.run(Unheard(passed_on, lambda scope: ())(scope, receive, send))
        assert sent[0]["status"] == status


class Part(dict[str, Any]):
    """A message that can be seen to be gone."""


def test_a_body_is_let_go_of_while_it_is_answered() -> None:
    """A stream may last for minutes, and as many as there are would each keep their request."""
    parts, kept = [Part(type="http.request", body=b"{}", more_body=number < 2) for number in range(3)], []

    async def receive() -> Message:
        kept.append(weakref.ref(part := parts.pop(0)))
        return part

    async def app(scope: MutableMapping[str, Any], receive: Receive, send: object) -> None:
        while (await receive())["more_body"]:
            pass
        gc.collect()
        assert [part() for part in kept] == [None] * 3

    async def ask(served: Any) -> None:
        await served({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, None)

    asyncio.run(ask(Unheard(app, lambda scope: ())))
    parts += [Part(type="http.request", body=b"{}", more_body=number < 2) for number in range(3)]
    kept.clear()
    asyncio.run(ask(Embedded(app)))
