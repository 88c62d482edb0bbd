"""Upstream servers: requests passed on, answers passed back, and a caller who leaves takes the request along."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar
from urllib.parse import quote

import anyio
import httpx
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from api.engines.route import Route
from api.engines.upstreams import ENGINE_HEADER, Upstream
from api.errors import ApiError, stopped
from api.service import ApiService, owner_of, service_of

__all__ = ["ClientGone", "Relay", "caller_headers", "forward_headers", "passed", "read_body", "send",
           "served_by", "while_connected"]

T = TypeVar("T")

log = logging.getLogger("vllm_tap.api")

# Of one connection, not of the message (RFC 9110, section 7.6.1), and what the client library or our server adds.
_HOP: Final = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "content-length", "expect", "date", "server",
))


_KEYS: Final = frozenset(("authorization", "x-api-key"))


_UPSTREAM: Final = "vllm_tap.upstream"  # of an answer: who gave it

Build = Callable[[Upstream], Awaitable[httpx.Request]]


class _Unreachable(ApiError):
    """No connection was made, so nothing was sent."""


class ClientGone(Exception):
    """The caller closed the connection before the answer."""


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The body of a request; 413 before more than ``bytes_max`` bytes are held, 408 where it is too slow.

    ClientGone where it does not come.
    """
    body_s = service_of(request).config.body_s
    try:
        async with asyncio.timeout(body_s):
            return await _read_body(request, bytes_max)
    except TimeoutError:
        raise ApiError(408, "too_slow", f"the body was not whole after {body_s:g} s, the limit",
                       headers={"Connection": "close"}) from None


async def _read_body(request: Request, bytes_max: int) -> bytes:
    stated = request.headers.get("content-length", "0")
    if stated.isdecimal() and int(stated) > bytes_max:
        raise ApiError(413, "too_large", f"the body has {stated} bytes, limit {bytes_max}")
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > bytes_max:
                raise ApiError(413, "too_large", f"the body has more than {bytes_max} bytes, the limit")
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


def forward_headers(headers: Iterable[tuple[str, str]], drop: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    """The headers that travel on, in both directions."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP and name.lower() not in drop]


def caller_headers(request: Request, drop: frozenset[str] = frozenset()) -> list[tuple[bytes, bytes]]:
    """A caller's headers for upstream: without the key of this service, which is no business of the model server."""
    if service_of(request).upstreams.named:
        drop |= {ENGINE_HEADER.lower()}  # it was for this service
    passed_on = forward_headers(request.headers.items(), drop | _KEYS if owner_of(request) else drop)
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in passed_on]  # as they came


async def send(service: ApiService, request: Request, route: Route, build: Build) -> httpx.Response:
    """The answer of the best engine that takes a connection, its body not yet read; ApiError 503 or 502 without one.

    ``build`` makes the request for an engine. It is sent to another only where nothing was sent before: a generation is
    never made twice.
    """
    while True:
        asked = await build(route.upstream)
        upstream = route.upstream  # what the request needs may have ruled the best out
        try:
            return await _sent(service, request, upstream, asked)
        except _Unreachable as error:
            route.refused(error)


async def _sent(service: ApiService, request: Request, upstream: Upstream, asked: httpx.Request) -> httpx.Response:
    try:
        answer = await upstream.client.send(asked, stream=True)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        failed(service, upstream, "connect")
        raise _Unreachable(503, "upstream_unavailable", f"no connection to {upstream} "
                           f"({str(error) or type(error).__name__}); is it running?",
                           headers={"Retry-After": "2"}) from None
    except httpx.HTTPError as error:
        _tell(service, request, upstream)
        raise broken(service, upstream, error) from None
    _tell(service, request, upstream)
    answer.extensions[_UPSTREAM] = upstream
    return answer


def _tell(service: ApiService, request: Request, upstream: Upstream) -> None:
    """Notes that an engine has a request."""
    if upstream.name:
        request.state.engine = upstream.name
        service.metrics.engine_requests.labels(upstream.name).inc()


def served_by(answer: httpx.Response) -> Upstream:
    """The model server that an answer is from."""
    upstream = answer.extensions[_UPSTREAM]
    assert isinstance(upstream, Upstream)
    return upstream


def failed(service: ApiService, upstream: Upstream, kind: str) -> None:
    """Counts a failure of a model server."""
    service.metrics.upstream_failures.labels(kind).inc()
    if upstream.name:
        service.metrics.engine_failures.labels(upstream.name, kind).inc()


def broken(service: ApiService, upstream: Upstream, error: httpx.HTTPError | httpx.StreamError) -> ApiError:
    """The answer where upstream broke off, or was closed because the service stops."""
    if service.stopping.is_set():
        return stopped()
    failed(service, upstream, "broken")
    upstream.doubted.set()
    return ApiError(502, "upstream_broken", f"{upstream} broke off: {str(error) or type(error).__name__}")


async def while_connected(service: ApiService, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; where the caller leaves first, ``work`` is cancelled and ClientGone raised.

    The request's body must have been read: what comes after it is the end of the connection. A stop of the service
    ends ``work`` too, with 503.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    stopping = asyncio.ensure_future(service.stopping.wait())
    try:
        await asyncio.wait({task, gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone if gone.done() else stopped()
    finally:
        for each in (task, gone, stopping):
            each.cancel()
        await asyncio.gather(task, gone, stopping, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Relay(StreamingResponse):
    """A streamed answer from upstream, which is closed whatever ends the streaming."""

    def __init__(self, service: ApiService, upstream: httpx.Response, chunks: AsyncIterator[bytes],
                 headers: dict[str, str] | None = None) -> None:
        super().__init__(chunks, upstream.status_code)
        self.service, self.upstream = service, upstream
        self.raw_headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in [*forward_headers(upstream.headers.multi_items()), *(headers or {}).items()]
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.service.streams.add(self.upstream)
        try:
            await super().__call__(scope, receive, send)
        except* (httpx.HTTPError, httpx.StreamError) as errors:
            # The answer has begun: leaving it unfinished makes the server cut the connection, which callers notice.
            log.warning("%s: %s", scope["path"], broken(
                self.service, served_by(self.upstream), errors.exceptions[0]))  # type: ignore[arg-type]
        finally:
            self.service.streams.discard(self.upstream)
            with anyio.CancelScope(shield=True):
                await self.upstream.aclose()


async def passed(service: ApiService, request: Request, data: bytes, route: Route) -> Response:
    """A request that is none of our business: passed on and back, byte by byte."""
    path = request.scope["path"]  # as it was asked for: that of ``request.url`` is made with what Host says
    if not {".", ".."}.isdisjoint(path.split("/")):  # they would be resolved on the way, to a route that is not ours
        raise ApiError(404, "not_found", f"nothing is served at {path[:200]!r}; see /openapi.json")
    query = request.scope["query_string"].decode("latin-1")
    path = quote(path, safe="/:@+=~!$&'()*,;") + (f"?{query}" if query else "")

    async def build(upstream: Upstream) -> httpx.Request:
        return upstream.client.build_request(request.method, path, content=data, headers=caller_headers(request))

    answer = await while_connected(service, request, send(service, request, route, build))
    if answer.is_redirect:  # to an address that is nobody's but ours
        await answer.aclose()
        raise ApiError(404, "not_found", f"nothing is served at {request.scope['path'][:200]!r}; see /openapi.json")
    headers = {"content-length": answer.headers["content-length"]} if "content-length" in answer.headers else None
    return Relay(service, answer, answer.aiter_raw(), headers)
