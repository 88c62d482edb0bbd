"""Protocols of the routes that generate: their requests, their names, and how their streams end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from api.errors import BadParam
from schemas import limits

__all__ = ["CHAT", "COMPLETION", "MESSAGES", "PROTOCOLS", "RESPONSES", "Protocol"]

# All others are the caller's to run, between one request and the next.
_SERVERS_TOOLS: Final = ("web_search_preview", "code_interpreter", "container", "mcp")


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way to ask for a generation. ``id_prefix`` and the id of a capture make the id of the response.

    The end of a stream begins like one of ``ends``. Without a ``place`` it is a mark, and our own event comes before
    it. With a ``place`` it is the last event, which holds the field ``capture`` there.
    """

    path: str
    meaning: str  # of an answer
    id_prefix: str
    texts: Callable[[Mapping[str, Any]], list[int | bytes]]  # of each prompt how many tokens it has, or its text
    bounds: tuple[str, ...] = ("max_completion_tokens", "max_tokens")  # of what is generated, the first that is there
    lists: bool = False  # whether one request may have several prompts
    samples: bool = True  # … and several samples of each
    ends: tuple[bytes, ...] = (b"data: [DONE]",)
    place: tuple[str, ...] | None = None
    check: Callable[[Mapping[str, Any]], None] = lambda body: None  # BadParam for what cannot be captured
    salted_from: tuple[int, ...] = ()  # the first vLLM version whose requests have a salt; (): all have one
    captured_from: tuple[int, ...] = ()  # … that have a field for a spec

    def count(self, body: Mapping[str, Any]) -> int:
        """Number of captures that a request makes; BadParam where that cannot be told."""
        n = _n(body.get("n"))
        if n > 1 and not self.samples:
            raise BadParam("n", n, f"{self.path} gives one answer and would ignore it; leave it out")
        return (_prompts(body.get("prompt")) if self.lists else 1) * n

    def named(self, event: bytes, field: dict[str, Any]) -> bytes:
        """The last event of a stream with the field in it. The event as it came, where it does not have the expected
        form.
        """
        lines = event.split(b"\n")
        for number, line in enumerate(lines):
            if line.startswith(b"data: {"):
                try:
                    value = holder = json.loads(line.removeprefix(b"data: "))
                    for name in self.place or ():
                        holder = holder[name]
                    holder["capture"] = field
                except (ValueError, KeyError, TypeError):
                    return event
                lines[number] = b"data: " + _dumps(value)
                break
        return b"\n".join(lines)

    def event(self, kind: str, value: dict[str, Any], encode: Callable[[Any], bytes] = _dumps) -> bytes:
        """An event of our own, between those of the protocol."""
        if self.place is None:
            return b"data: " + encode(value) + b"\n\n"
        return f"event: {kind}\ndata: ".encode() + encode({"type": kind, **value}) + b"\n\n"


def _n(value: object) -> int:
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadParam("n", value, "valid with a capture: a number of samples, 1 or more")
    if value.bit_length() > 63:  # of several thousand digits not even the product can be told
        raise BadParam("n", "a number of more than 63 bits", f"at most {limits.capture_samples_max} captures")
    return value


def _prompts(prompt: object) -> int:
    """Number of prompts of a completion: text or one list of token ids is one; a list of those is many."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1


def _completion(body: Mapping[str, Any]) -> list[int | bytes]:
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    return [len(each) if isinstance(each, list) else str(each or "").encode(errors="replace") for each in prompts]


def _spoken(*names: str) -> Callable[[Mapping[str, Any]], list[int | bytes]]:
    """The one prompt of a conversation, which stands in these fields."""
    return lambda body: ["".join(text for name in names for text in _texts(body.get(name))).encode(errors="replace")]


_WORDS: Final = ("text", "content", "output", "arguments", "thinking")


def _texts(said: object) -> Iterator[str]:
    """The text in messages and items, whatever else is in them."""
    waiting = [(said, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list) and depth < 8:
            waiting += [(item, depth + 1) for item in reversed(value)]
        elif isinstance(value, dict) and depth < 8:
            waiting += [(value[name], depth + 1) for name in _WORDS if name in value]


def _check_response(body: Mapping[str, Any]) -> None:
    if body.get("background"):
        raise BadParam("background", body["background"], "a generation in the background cannot be captured: nobody "
                       "waits for its end; leave it out, or stream")
    if body.get("request_id") is not None:
        raise BadParam("request_id", body["request_id"], "with a capture the response is named after it; send an "
                       "X-Request-Id, or a ULID of your own as capture.id")
    _check_tools("tools", body.get("tools"))


def _check_tools(path: str, tools: object) -> None:
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and path == "tools":
            _check_tools(f"{path}[{number}].tools", tool.get("tools"))
        elif kind in _SERVERS_TOOLS:
            raise BadParam(f"{path}[{number}].type", kind, "a tool that the server runs makes several generations of "
                           "one request, which cannot be captured under one id; leave it out, and run it yourself")


COMPLETION: Final = Protocol("/v1/completions", "A completion", "cmpl-", _completion, lists=True)
CHAT: Final = Protocol("/v1/chat/completions", "A chat completion", "chatcmpl-", _spoken("messages"))
RESPONSES: Final = Protocol(
    "/v1/responses", "A response, as agents ask for it", "resp_",
    _spoken("instructions", "input", "previous_input_messages"), ("max_output_tokens",),
    samples=False, place=("response",), check=_check_response,
    ends=tuple(f"event: response.{end}\n".encode() for end in ("completed", "incomplete", "failed")))
MESSAGES: Final = Protocol(
    "/v1/messages", "A message of Anthropic's protocol", "chatcmpl-", _spoken("system", "messages"), ("max_tokens",),
    samples=False, place=(),
    ends=(b"event: message_stop\n",), salted_from=(0, 27, 1), captured_from=(0, 29))
PROTOCOLS: Final = {each.path: each for each in (COMPLETION, CHAT, RESPONSES, MESSAGES)}
