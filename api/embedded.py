"""The service inside the model server's own process: its routes on that server's port, for who runs no gateway.

It stands as a middleware before the server's own application, behind the one that asks for keys. What is not about
captures goes by untouched, and goes on where the service itself cannot be had.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Final

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.app import create_app
from api.config import Config
from api.errors import error_response
from api.guard import by_address
from api.in_process import InProcess, asked

__all__ = ["Embedded", "embeddable"]

log = logging.getLogger("vllm_tap.api")

_GENERATIONS: Final = ("/v1/completions", "/v1/chat/completions")


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
        ours = False
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            ours = path in ("/v1/capabilities", "/v1/captures") or path.startswith("/v1/captures/")
            if scope["method"] == "POST" and path in _GENERATIONS:
                receive, ours = await self._wanted(receive)
        if not ours:
            await self.app(scope, receive, send)
        elif self.service is None:
            await error_response(503, "captures_unavailable", f"no captures here: {self.reason}")(scope, receive, send)
        else:
            asked.set(scope)
            await self.service({**scope, "path": path, "root_path": "", "state": {}}, receive, send)

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
                except Exception as error:
                    log.exception("there are no captures on this server's port")
                    self.service, self.reason = None, str(error)
            await self.app(scope, receiving, send)

    async def _wanted(self, receive: Receive) -> tuple[Receive, bool]:
        """The same request to be received again, and whether it asks for a capture."""
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)

        async def again() -> Message:
            return messages.pop(0) if messages else await receive()

        return again, (self.capture_all and self.service is not None) or _asks(body)


def _asks(body: bytes) -> bool:
    """Whether a body has a ``capture``; what is no JSON object is the server's to refuse."""
    if b"capture" not in body and b"\\u00" not in body:  # most bodies: they are parsed once, where they are served
        return False
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("capture") is not None
