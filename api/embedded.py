"""The service inside the model server's own process: its routes on that server's port, for users who run no gateway.

It is a middleware before the server's own application, behind the one that asks for keys. Requests that are not about
captures go by untouched, and are served even where the service itself cannot be had. With ``capture_all``, a request
that did not ask for a capture goes by as well if it cannot be captured. So no request fails for what it did not ask
for.

The page is below /captures/. Its files need no key, because they say nothing. All that the page asks for is below /v1;
there it needs a key if the server around it asks for one, as everybody else does. The service's metrics are among those
of the process. So a server that serves its own metrics serves these too.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Final

from fastapi import FastAPI
from prometheus_client import REGISTRY
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.app import create_app
from api.auth.guard import GENERATIONS, by_address
from api.config import Config
from api.errors import error_response
from api.generate.in_process import InProcess, ServerRequest, server_request
from api.page_files import FILES
from api.service import ApiService
from schemas.bodies import again, aside, in_body, whole
from schemas.errors import LimitError

__all__ = ["Embedded", "embeddable"]

log = logging.getLogger("vllm_tap.api")

_PAGE: Final = "/captures"
_OURS: Final = ("/v1/capabilities", "/v1/captures", "/v1/vectors")
_ENGINES: Final = {"vllm_xargs.capture", "vllm_xargs.capture_count", "vllm_xargs.edit"}


def embeddable(config: Config, keyed: Callable[[], bool]) -> dict[str, Any]:
    """The arguments of ``Embedded`` for a service; ``keyed``: whether the server around it asks for a key."""
    transport = InProcess()
    return {"service": create_app(config, by_address(keyed), transport), "transport": transport,
            "capture_all": bool(config.capture_all)}


class Embedded:
    """ASGI middleware: captures are answered by ``service``, everything else by ``app``, which is its upstream.

    Where there is no service, ``reason`` says why: requests about captures are answered 503.
    """

    def __init__(self, app: ASGIApp, service: FastAPI | None = None, transport: InProcess | None = None,
                 capture_all: bool = False, reason: str = "") -> None:
        self.app, self.service, self.capture_all, self.reason = app, service, capture_all, reason
        if transport is not None:
            transport.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["method"] == "POST" and path in GENERATIONS:
            messages = await whole(receive)
            if await aside(_asks, messages):
                await self._answer(ServerRequest(scope), path, again(messages, receive), send)
            elif not self.capture_all or not await self._captured(scope, path, messages, receive, send):
                await self.app(scope, again(messages, receive), send)
        elif path in _OURS or path.startswith(("/v1/captures/", "/v1/vectors/")):
            await self._answer(ServerRequest(scope), path, receive, send)
        elif path == _PAGE:
            await RedirectResponse(f"{scope.get('root_path', '')}{_PAGE}/")(scope, receive, send)
        elif path.startswith(_PAGE) and path.removeprefix(_PAGE) in FILES:  # nothing else: no key is asked for there
            await self._answer(ServerRequest(scope), path.removeprefix(_PAGE), receive, send)
        else:
            if path in ("/metrics", "/metrics/") and (service := self._running()) is not None:
                service.metrics.look(service.channel)
                service.pressure.tell()
            await self.app(scope, receive, send)

    def _running(self) -> ApiService | None:
        return None if self.service is None else getattr(self.service.state, "service", None)

    async def _answer(self, request: ServerRequest, path: str, receive: Receive, send: Send) -> None:
        if self.service is None:
            refusal = error_response(503, "captures_unavailable", f"no captures here: {self.reason}")
            await refusal(request.scope, receive, send)
            return
        server_request.set(request)
        await self.service({**request.scope, "path": path, "root_path": "", "state": {}}, receive, send)

    async def _captured(self, scope: Scope, path: str, messages: deque[Message], receive: Receive, send: Send) -> bool:
        """Whether a generation that did not ask for a capture was captured and answered. The service's refusals are not
        sent.

        Until ``request.upstream`` is set, an answer is the service's own: a refusal, from one of its parts.
        """
        if self.service is None or messages[-1]["type"] == "http.disconnect":
            return False
        service, request, refusal = self.service.state.service, ServerRequest(scope), b"the writer does not answer"

        async def upstreams(message: Message) -> None:
            nonlocal refusal
            if request.upstream:
                messages.clear()  # nobody else will be asked
                await send(message)
            elif message["type"] == "http.response.start":
                refusal = b""
            else:
                refusal += message.get("body", b"")

        if service.writer_alive:  # else each would wait for the writer, and be refused in the end
            try:
                await self._answer(request, path, again(messages.copy(), receive), upstreams)
            except Exception:  # it is logged where it is made an answer
                if request.upstream:
                    raise
        if not request.upstream:
            service.metrics.captures.labels("impossible").inc()
            log.warning("a request is not captured: %s", refusal.decode())
        return request.upstream

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The service lives as long as the server, and ends before its engine does."""
        async with AsyncExitStack() as stack:

            async def receiving() -> Message:
                message = await receive()
                if message["type"] == "lifespan.shutdown":
                    try:
                        await stack.aclose()
                    except Exception:
                        log.exception("the service of captures did not end well")
                return message

            if self.service is not None:
                try:
                    await stack.enter_async_context(self.service.router.lifespan_context(self.service))
                    metrics = self.service.state.service.metrics.registry
                    REGISTRY.register(metrics)
                    stack.callback(REGISTRY.unregister, metrics)
                except Exception as error:
                    log.exception("there are no captures on this server's port")
                    self.service, self.reason = None, str(error)
            await self.app(scope, receiving, send)


def _asks(messages: deque[Message]) -> bool:
    """Whether a body names a capture or edits, in a wrong place too. False for a body that is no JSON object: the
    server refuses it.

    False where only the engine's own fields name them, as a gateway in front of this server sends it, if the spec has
    an id. True if that spec has no id, because the server's answer will not tell one.
    """
    try:
        found = dict(in_body(b"".join(message.get("body", b"") for message in messages), "application/json"))
    except LimitError:
        return True  # it is refused
    if found.keys() <= _ENGINES and (spec := found.get("vllm_xargs.capture")) is not None:
        with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
            return json.loads(spec).get("id") is None
    return bool(found)
