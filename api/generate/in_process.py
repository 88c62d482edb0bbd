"""Upstream in this process: requests to an ASGI application, answered as it answers them, streams as they come.

The client's own transport of this kind holds an answer back until it is whole, and so cannot stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import anyio
import httpx
from starlette.types import ASGIApp, Message, Scope

__all__ = ["InProcess", "ServerRequest", "server_request"]

log = logging.getLogger("vllm_tap.api")

_MESSAGES: Final = 16  # of an answer that wait for who reads it


@dataclass(slots=True)
class ServerRequest:
    """A request as the server has it, and whether anything was asked of ``app`` for it."""

    scope: Scope
    upstream: bool = False


server_request: Final[ContextVar[ServerRequest]] = ContextVar("server_request")  # the request that is being answered


class InProcess(httpx.AsyncBaseTransport):
    """Leads to ``app``, which must be there before the first request; the caller is that of ``server_request``."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The answer, its body not yet read; RemoteProtocolError where the application gives none."""
        assert self.app is not None
        server_request.get().upstream |= request.method == "POST"  # not a look at its metrics
        outer, (path, _, query) = server_request.get().scope, request.url.raw_path.partition(b"?")
        root = outer.get("root_path", "")
        call = _AppCall(await request.aread())
        scope = {**outer, "method": request.method, "path": root + unquote(path.decode("ascii")),
                 "raw_path": root.encode() + path, "query_string": query, "state": dict(outer.get("state", {})),
                 "headers": [(name.lower(), value) for name, value in request.headers.raw]}
        call.task = asyncio.create_task(call.run(self.app, scope))
        # Nobody waits for its end: after its answer an application may have things to do.
        self._calls.add(call.task)
        call.task.add_done_callback(self._calls.discard)
        try:
            start = await call.next()
        except BaseException:
            await call.aclose()
            raise
        return httpx.Response(start["status"], headers=start["headers"], stream=call)


class _AppCall(httpx.AsyncByteStream):
    """One request to an application. Closed before its end, it is a client that left."""

    task: asyncio.Task[None]

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        self._put, self._take = anyio.create_memory_object_stream[Message](_MESSAGES)

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Runs the application to its end."""
        async with self._put:
            try:
                await app(scope, self._receive, self._send)
            except Exception:
                log.exception("%s %s: the model server failed", scope["method"], scope["path"])

    async def _receive(self) -> Message:
        if self._body is None:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Message) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # nobody reads it any more
            await self._put.send(message)

    async def next(self) -> Message:
        """The next part of the answer."""
        try:
            return await self._take.receive()
        except anyio.EndOfStream:
            raise httpx.RemoteProtocolError("no whole answer; its log says why") from None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self.next()
            more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]

    async def aclose(self) -> None:
        """Leaves the answer, whatever is still to come."""
        self._gone.set()
        self._take.close()
