"""The last check before vLLM's own routes: a request that still names a capture or edits there would be answered
without them.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Container, MutableMapping
from typing import Any, Final
from urllib.parse import parse_qsl

from engine_side.front.ticket import COUNT_KEY, EDIT_KEY, KEY
from schemas import limits
from schemas.bodies import Named, again, aside, has_key, in_body, in_fields, may_name, named, whole
from schemas.errors import ArgumentError, LimitError, shown

logger = logging.getLogger("vllm.tap")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_BODILESS: Final = ("GET", "HEAD", "OPTIONS", "DELETE")
# By the field that holds them: where a spec does reach the engine, on routes whose requests have that field.
_CARRIED: Final = {field: tuple(f"{field}{holder}.{key}" for key in (KEY, COUNT_KEY, EDIT_KEY))
                   for field, holder in (("vllm_xargs", ""), ("sampling_params", ".extra_args"))}
_FIX: Final = ('nothing would be {done} here; "{name}" is a field of POST /v1/completions, /v1/chat/completions, '
               "/v1/responses and /v1/messages where the service of captures is: on the port of vllm-tap serve, or on "
               "vLLM's own with VLLM_PLUGINS=vllm_tap,vllm_tap_http")
_BATCH_FIX: Final = ("nothing would be {done} in a batch file, so none of it is generated; send its requests to a "
                     "service of captures{other}")


class Unheard:
    """ASGI middleware: it answers 400 to a request that names a capture or edits which would not be made, whatever the
    route. It answers 413 where the body is too large to be searched.

    ``fields`` says which fields the requests of a route have, as far as that is known. It says None where there is no
    such route: then the application answers, and no body is held. A service of captures has taken its own fields out
    before. So this middleware has no list of routes, and holds for the routes of later vLLMs too.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]],
                 fields: Callable[[Scope], Container[str] | None]) -> None:
        self.app, self.fields = app, fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _BODILESS or (fields := self.fields(scope)) is None:
            await self.app(scope, receive, send)
            return
        messages = await whole(receive, limits.request_body_bytes_max)
        try:
            fault = await aside(lambda messages: _fault(scope, fields, messages), messages)
        except Exception:  # no request fails because it could not be looked at
            logger.exception("vllm-tap: checking a request's body for misspelt fields failed; the request goes on")
            fault = None
        if fault is None:
            await self.app(scope, again(messages, receive), send)
        else:
            await _refuse(send, *fault)


def _fault(scope: Scope, fields: Container[str], messages: deque[Message]
           ) -> tuple[int, str, str, str | None] | None:
    """Refusal of a request: status, code, message and field; None where nothing names a capture or edits."""
    kind = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
    data = b"".join(message.get("body", b"") for message in messages)
    try:
        found = [each for each in in_body(data, kind) if each.is_sure]
        if not found and messages[-1].get("more_body", False) and "multipart" not in kind and has_key(data):
            raise LimitError("bytes of the body", len(data), limits.request_body_bytes_max)
    except LimitError as error:
        return 413, "too_large", f"{error}: a body is searched for captures and edits up to this size; send less", None
    except ArgumentError as error:
        return 400, "invalid_parameter", str(error), None
    found += in_fields(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
    if not found:
        return None
    taken = {path for field, paths in _CARRIED.items() if field in fields for path in paths}
    for each in found:
        if each.param not in taken:
            fix = _FIX.format(done="edited", name=EDIT_KEY) if each.of_edits else _FIX.format(done="captured", name=KEY)
            return 400, "invalid_parameter", f"{each.param} = {shown(each.value)}: {fix}", each.param
    return None


def check_batch(text: str) -> None:
    """ArgumentError, naming line and field, where a batch file (one request in JSON a line) names a capture or edits
    that would not be made.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if not may_name(line.encode()):
            continue
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):  # vLLM says so
            continue
        if not isinstance(request, dict):
            continue
        found, body = [each for each in named(request) if each.is_sure], request.get("body")
        if isinstance(body, dict):
            taken = _CARRIED["vllm_xargs"] if request.get("url") == "/v1/chat/completions" else ()
            found += [Named(f"body.{each.param}", each.value) for each in named(body)
                      if each.is_sure and each.param not in taken]
        if found:
            fix = _BATCH_FIX.format(done="edited", other="") if found[0].of_edits else _BATCH_FIX.format(
                done="captured", other=", or give its prompts to `vllm-tap capture`")
            raise ArgumentError(f"line {number}: {found[0].param}", found[0].value, fix)


async def _refuse(send: Send, status: int, code: str, message: str, param: str | None) -> None:
    content = json.dumps({"error": {"message": message, "type": "invalid_request_error", "param": param,
                                    "code": code}}).encode()
    await send({"type": "http.response.start", "status": status, "headers": [
        (b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]})
    await send({"type": "http.response.body", "body": content})
