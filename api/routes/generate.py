"""POST /v1/completions, /v1/chat/completions, /v1/responses and /v1/messages: vLLM's own, with two more fields in and
one more field out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sqlite3
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import anyio
import httpx
from fastapi import APIRouter, Request
from starlette.responses import Response

from api.description import generation_answers, generation_body
from api.engines.choice import prefix_of
from api.engines.route import NoEngineCan, OnlyAwayCan, Route, all_that_can, first_that_can, pinned, route_of
from api.engines.upstreams import ENGINE_HEADER, Upstream
from api.errors import ApiError, BadParam, Json, OverQuota, PartLost
from api.generate.done_finder import DoneFinder, last_event
from api.generate.edits import check_armed, edits_text
from api.generate.generation import (
    NOTHING,
    CaptureRequest,
    Plan,
    capture_request,
    check_owned,
    known,
    parse_body,
    plan,
    salt_cache,
)
from api.generate.upstream import (
    ClientGone,
    Relay,
    broken,
    caller_headers,
    failed,
    forward_headers,
    passed,
    read_body,
    send,
    served_by,
    while_connected,
)
from api.live.score_lists import answer_scores, missing_scores
from api.live.scores import ScoreEvents
from api.live.waiting import settle, status_of_all
from api.protocols import PROTOCOLS, RESPONSES, Protocol
from api.service import ApiService, owner_of, service_of
from api.slices.inline import inline
from schemas.bucket.reader import AnyReader
from schemas.checks import is_name
from schemas.errors import LimitError, SpecError, StoreError, TapError
from schemas.wire.engine_info import EngineInfo
from schemas.wire.records import Own

router = APIRouter(tags=["generate"])
log = logging.getLogger("vllm_tap.api")

_NEVER_BEGUN: Final = ("the engine never began it: is the plugin loaded in the model server, and does the server's "
                       "log say that its sender ended?")
_EDIT_FIELD: Final = re.compile(r"(edit(?:\[[0-9]+\][\w.\[\]]*)?) = ")  # an error's first words
_REFUSALS: Final = (BadParam, NoEngineCan, OnlyAwayCan, OverQuota, PartLost, SpecError, LimitError)  # of a capture
_CAPTURE_FIELD: Final = re.compile(r"\bcapture(\.\w+)?( = |: )")  # in an error about a spec
_TAIL_BYTES: Final = 16 * 1024  # of a stream, to find its last event in


async def generate(request: Request, protocol: Protocol) -> Response:
    """Without a capture or edits the bytes pass through; with any a capture is owned first, then asked for."""
    service = service_of(request)
    try:
        data = await read_body(request, service.config.body_bytes_max)
        body = parse_body(data)
        route = await _route(service, request, body, protocol)
        if owner := owner_of(request):
            await _check_owned(service, body, protocol, owner, route)
        changed = salt_cache(body, owner, service.salt_secret)
        planned = None
        for name, nothing in (("capture", (None,)), ("edit", (None, []))):
            if name in body and body[name] in nothing:
                del body[name]
                changed = True
        if "capture" in body or "edit" in body or service.config.capture_all:
            planned = await _plan(service, request, body, protocol, route)
        if planned is None:
            return await passed(service, request, json.dumps(body).encode() if changed else data, route)
        _check_content_type(request)
        own = "capture" in body or "edit" in body
        try:
            return await _captured(service, request, *planned, route, own)
        except _Uncapturable as error:
            if own:
                raise error.error from None
            _impossible(service, error.error)
            return await passed(service, request, json.dumps(body).encode() if changed else data, route)
    except ClientGone:
        return Response(status_code=499)  # nobody reads it; the number shows in the metrics


async def _route(service: ApiService, request: Request, body: dict[str, Any], protocol: Protocol) -> Route:
    """The way of a generation: of several engines to those that serve its model."""
    if not service.upstreams.named:
        return await route_of(service, request)
    if (protocol is RESPONSES and not owner_of(request)  # with keys none is gone on with, whoever made it
            and (before := body.get("previous_response_id")) is not None
            and pinned(request, service.upstreams) is None):
        raise BadParam("previous_response_id", before, "only the engine that made it knows it: name that engine "
                                                       f"({ENGINE_HEADER}, as in the answer's headers), or send the "
                                                       "whole conversation as input")
    return await route_of(service, request, body.get("model"), prefix_of(body, protocol, owner_of(request)))


async def _check_owned(service: ApiService, body: dict[str, Any], protocol: Protocol, owner: str, route: Route) -> None:
    """``check_owned``; leaves the engines out that it refuses."""
    if not protocol.salted_from:
        check_owned(body, protocol, owner, None)
    elif not service.upstreams.named:
        check_owned(body, protocol, owner, await _engine(service))
    else:
        route.keep(await service.read(lambda reader: all_that_can(
            route, reader, lambda engine: check_owned(body, protocol, owner, engine))))


async def _engine(service: ApiService) -> EngineInfo | None:
    """The engine that serves, None as long as that is not known."""
    try:
        return await service.read(lambda reader: reader.engine())
    except TapError:
        return None


async def _plan(service: ApiService, request: Request, body: dict[str, Any], protocol: Protocol, route: Route
                ) -> tuple[Plan, CaptureRequest] | None:
    """The plan of the captures, its bytes reserved, for the engine that ``route`` begins with from now on; and what to
    plan for another one, under the same id.

    None where all requests are captured, and this one, which did not ask for it, cannot be.
    """
    own = "capture" in body or not service.config.capture_all
    spec = body["capture"] if "capture" in body else json.loads(service.config.capture_all or json.dumps(NOTHING))
    try:
        asked = capture_request({**body, "capture": spec}, protocol, request.headers.get("x-request-id"))
        planned = await _planned(service, asked, owner_of(request), route)
        # Until the request ends: what its captures took by then is in the store, or is in a moment.
        request.state.at_end.callback(await service.quotas.reserve(owner_of(request), planned.ulid, planned.nbytes))
    except _REFUSALS as error:
        if own:
            raise
        _impossible(service, error)
        return await _plan(service, request, {**body, "capture": NOTHING}, protocol, route) if "edit" in body else None
    return planned, replace(asked, spec=asked.spec.model_copy(update={"id": planned.ulid}))


class _Uncapturable(Exception):
    """The request cannot be captured, and nothing was generated.

    The engine that a capture was planned for took no connection, and no other can do it; or it refused to capture what
    did not ask for it.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _impossible(service: ApiService, error: Exception) -> None:
    """Notes that a request which did not ask for a capture gets none."""
    service.metrics.captures.labels("impossible").inc()
    log.warning("a request is not captured: %s", error)


async def _planned(service: ApiService, asked: CaptureRequest, owner: str, route: Route) -> Plan:
    """The plan for the best engine that can do what is asked, which is the route's first from now on."""

    def look(reader: AnyReader) -> tuple[Upstream, Plan]:
        def for_one(found: EngineInfo | None) -> Plan:
            engine = known(found)
            if asked.edits and service.upstreams.named:  # the only engine refuses by itself
                check_armed(asked.edits, engine)
            edits = edits_text(asked.edits, reader, owner, engine) if asked.edits else ""
            return plan(asked, engine, edits, reader.lost_of_server(engine.called))

        return first_that_can(route, reader, for_one)

    upstream, planned = await service.read(look)
    route.begin_with(upstream)
    return replace(planned, engine=upstream.name)


def _check_content_type(request: Request) -> None:
    """Refuse what is not called JSON, as vLLM does: a form of a stranger's web page can send JSON too, but never under
    its own name.
    """
    found = request.headers.get("content-type", "")
    if found.partition(";")[0].strip().lower() != "application/json":
        raise BadParam("Content-Type", found, "valid: application/json")


async def _captured(service: ApiService, request: Request, planned: Plan, asked: CaptureRequest, route: Route,
                    own: bool) -> Response:
    await _own(service, planned, owner_of(request))
    headers = caller_headers(request, frozenset(("x-request-id", "accept-encoding", "content-type")))
    request.state.at_end.callback(
        service.pressure.begin(planned.ulid, planned.demand, planned.engine, owner_of(request)))

    async def build(upstream: Upstream) -> httpx.Request:
        nonlocal planned
        if planned.engine != upstream.name:
            try:
                before, planned = planned.nbytes, await _planned(service, asked, owner_of(request), route)
                if (more := planned.nbytes - before) > 0:  # another engine's rows may be larger
                    request.state.at_end.callback(await service.quotas.reserve(owner_of(request), planned.ulid, more))
            except _REFUSALS as error:
                raise _Uncapturable(error) from None
            service.pressure.begin(planned.ulid, planned.demand, planned.engine, owner_of(request))
        return route.upstream.client.build_request("POST", request.scope["path"], content=planned.body, headers=[
            *headers, (b"x-request-id", planned.ulid.encode()), (b"content-type", b"application/json"),
            (b"accept-encoding", b"identity")])

    try:
        answer = await while_connected(service, request, send(service, request, route, build))
        if answer.status_code >= 400:
            return await _refused(service, planned, answer, own)
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            service.metrics.captures.labels("streamed").inc()
            events = _with_capture_event(service, planned, answer, owner_of(request))
            return Relay(service, answer, events, _capture_headers(service, planned))
        return await _plain(service, request, planned, answer)
    except (_Uncapturable, ApiError, StoreError, sqlite3.Error) as error:
        _abandon(service, planned, str(error))
        raise
    except ClientGone:
        service.metrics.captures.labels("client_gone").inc()
        service.spawn(settle(service, planned.ids, "the client left before the engine began"))
        raise


async def _own(service: ApiService, planned: Plan, owner: str) -> None:
    created_ms = time.time_ns() // 1_000_000

    def make(seq: int) -> Own:
        return Own(seq=seq, capture=planned.ulid, count=planned.count, owner=owner, aliases=planned.aliases,
                   tags=planned.tags, created_ms=created_ms)

    try:
        await service.submit(make)
    except (StoreError, ApiError):
        # It may still arrive: then nobody will ask for it, and it must not wait for ever.
        _abandon(service, planned, "the writer did not answer in time")
        raise


def _abandon(service: ApiService, planned: Plan, reason: str) -> None:
    """Closes the captures of a request that never reached the engine; the writer hears of it in its own time."""
    service.metrics.captures.labels("abandoned").inc()
    service.abandon(planned.ulid, reason)


async def _refused(service: ApiService, planned: Plan, answer: httpx.Response, own: bool) -> Response:
    """Upstream's own error, with its status and its words, which say which of the edits it is about.

    _Uncapturable where they are about a capture that the request did not ask for on its ``own``.
    """
    try:
        content = await answer.aread()
    except httpx.HTTPError as error:
        raise broken(service, served_by(answer), error) from None
    finally:
        await answer.aclose()
    if not own and _CAPTURE_FIELD.search(words := _words(content).removeprefix(": ")):
        raise _Uncapturable(TapError(words))
    failed(service, served_by(answer), "status")
    _abandon(service, planned, f"the model server answered {answer.status_code}{_words(content)}")
    return _copy(answer, _with_param(content))


def _words(content: bytes) -> str:
    """The text of an error, behind a colon; empty where it is none of the usual form."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if isinstance(message := json.loads(content)["error"]["message"], str):
            return f": {message}"
    return ""


def _with_param(content: bytes) -> bytes:
    """An error with ``param`` where its words begin with a field of edits: upstream does not tell that apart."""
    try:
        body = json.loads(content)
        if (found := _EDIT_FIELD.match(body["error"]["message"])) is None or body["error"].get("param"):
            return content
        body["error"]["param"] = found[1]
    except (ValueError, KeyError, TypeError, AttributeError):
        return content
    return json.dumps(body).encode()


async def _plain(service: ApiService, request: Request, planned: Plan, answer: httpx.Response) -> Response:
    async def read() -> bytes:
        try:
            return await answer.aread()
        except httpx.HTTPError as error:
            raise broken(service, served_by(answer), error) from None

    try:
        content = await while_connected(service, request, read())
    finally:
        with anyio.CancelScope(shield=True):
            await answer.aclose()
    try:
        body = json.loads(content)
        body["capture"] = await _field(service, planned, owner_of(request))
        if planned.engine:
            request.state.engine = body["capture"]["engine"]  # as the header says it
        if planned.probes:
            body["capture"]["scores"] = await answer_scores(service, planned, owner_of(request))
    except (ValueError, TypeError):
        raise ApiError(502, "upstream_broken", "the model server's answer is not a JSON object") from None
    service.metrics.captures.labels("answered").inc()
    headers = dict(forward_headers(answer.headers.multi_items(), frozenset(("content-type",))))
    return Json(body, answer.status_code, headers={**headers, **_capture_headers(service, planned)})


def _capture_headers(service: ApiService, planned: Plan) -> dict[str, str]:
    """The capture's id; and what it asks for beyond what the store takes, before a stream has begun."""
    said = service.pressure.said(planned.ulid)
    pressure = {} if said is None else {"x-tap-pressure": json.dumps({
        name: value for name, value in said.items() if name != "help"})}
    return {"x-tap-capture": planned.ulid, **pressure}


async def _field(service: ApiService, planned: Plan, owner: str) -> dict[str, Any]:
    """The ``capture`` field of an answer; waits a little for the captures to be final."""
    wait_s = service.config.inline_wait_s if planned.inline else service.config.status_wait_s
    status = await status_of_all(service, planned.ids, wait_s)
    if status == "pending":
        service.spawn(settle(service, planned.ids, _NEVER_BEGUN))
    url = f"/v1/captures/{planned.ulid}"
    field: dict[str, Any] = {"id": planned.ulid, "ids": planned.ids, "status": status, "manifest_url": url,
             "activations_url": f"{url}/activations"}
    if planned.engine:
        field["engine"] = await _made_by(service, planned, owner)
    if (said := service.pressure.said(planned.ulid)) is not None:
        field["pressure"] = said
    return {**field, "inline": await inline(service, planned.ids, owner)} if planned.inline else field


async def _made_by(service: ApiService, planned: Plan, owner: str) -> str:
    """Name of the engine that made the captures, by what it told the writer.

    Where that is another than the one that was asked, names and URLs are mixed up: nothing more is sent there.
    """
    try:
        told = await service.read(lambda reader: reader.engine_name(planned.ids[0], owner))
    except (TapError, sqlite3.Error):
        return planned.engine  # the capture is deleted already, or cannot be looked up now: the answer is there
    asked = service.upstreams.get(planned.engine)
    if told is None or told == planned.engine or asked is None:
        return planned.engine
    asked.misnamed = told
    asked.doubted.set()
    log.error("%s made captures as engine %r: VLLM_TAP_ENGINE and the name in --upstream must be the same", asked, told)
    return told if is_name(told) else ""


async def _with_capture_event(service: ApiService, planned: Plan, answer: httpx.Response, owner: str
                              ) -> AsyncIterator[bytes]:
    """Upstream's events byte by byte; scores of probes between them as they come, and ours before ``data: [DONE]``, or
    in the event that is the protocol's last.
    """
    protocol = planned.protocol
    finder, ended, tail = DoneFinder(protocol.ends), False, b""
    scores = ScoreEvents(service, planned, owner)
    try:
        async with scores:
            chunks = scores.beside(answer.aiter_bytes())
            async for chunk in chunks:
                before, done = finder.feed(chunk)
                if before:
                    tail = (tail + before)[-_TAIL_BYTES:]
                    yield before
                if done:
                    while protocol.place is not None and b"\n\n" not in done:  # the event must be whole
                        if (more := await anext(chunks, None)) is None:
                            break
                        done += more
                    last = await _last(service, planned, tail, done, owner)
                    async for events in scores.rest(tail):  # the captures are final now: so are the scores
                        yield events
                    ended = True
                    yield last
                elif tail.endswith(b"\n\n") and (events := scores.ready(tail)):  # no event of upstream is half sent
                    yield events
            if rest := finder.rest():
                yield rest
    except (httpx.HTTPError, httpx.StreamError) as error:
        failure = broken(service, served_by(answer), error)
        yield protocol.event("error", {"error": {"message": failure.message, "type": "server_error", "param": None,
                                                 "code": failure.code}})
    finally:
        if not ended:
            service.spawn(settle(service, planned.ids, "the stream ended before the engine began"))


async def _last(service: ApiService, planned: Plan, tail: bytes, done: bytes, owner: str) -> bytes:
    """The end of a stream, ``done`` being upstream's: with the field in its last event, or in one of our own before it.

    That is a chunk without choices, otherwise like the last one: clients take a chunk's usage as the final one.
    """
    field = await _field(service, planned, owner)
    if planned.probes:
        field["scores"] = await missing_scores(service, planned, owner)
    protocol = planned.protocol
    if protocol.place is not None:
        event, blank, rest = done.partition(b"\n\n")
        return protocol.named(event, field) + blank + rest
    last = last_event(tail)
    chunk = {"id": planned.response_id, "object": "capture", "created": last.get("created", int(time.time())),
             "model": last.get("model", ""), "choices": [], "capture": field}
    return protocol.event("capture", chunk if last.get("usage") is None else {**chunk, "usage": last["usage"]}) + done


def _copy(answer: httpx.Response, content: bytes) -> Response:
    headers = dict(forward_headers(answer.headers.multi_items(), frozenset(("content-encoding",))))
    return Response(content, answer.status_code, headers=headers)


def _add_route(protocol: Protocol) -> None:
    async def endpoint(request: Request) -> Response:
        return await generate(request, protocol)

    name = protocol.path.removeprefix("/v1/").replace("/", "_")
    router.add_api_route(protocol.path, endpoint, methods=["POST"], name=name,
                         description=f"{protocol.meaning}; the body is vLLM's, plus ``capture`` and ``edit``.",
                         responses=generation_answers(protocol), openapi_extra=generation_body(protocol))


for _protocol in PROTOCOLS.values():
    _add_route(_protocol)
