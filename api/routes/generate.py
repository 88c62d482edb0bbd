"""POST /v1/completions, /v1/chat/completions, /v1/responses and /v1/messages: vLLM's own, with two more fields in and
one more field out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import anyio
import httpx
from fastapi import APIRouter, Request
from starlette.responses import Response

from api.description import generation_answers, generation_body
from api.errors import ApiError, BadParam, Json, OverQuota
from api.generate.done_finder import DoneFinder, last_event
from api.generate.edits import edits_text
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
    forward_headers,
    passed,
    read_body,
    send,
    while_connected,
)
from api.live.score_lists import answer_scores, missing_scores
from api.live.scores import ScoreEvents
from api.live.waiting import settle, status_of_all
from api.protocols import PROTOCOLS, Protocol
from api.service import ApiService, owner_of, service_of
from api.slices.inline import inline
from schemas.errors import LimitError, SpecError, StoreError, TapError
from schemas.read.reader import StoreReader
from schemas.wire.messages import EngineInfo, Own

router = APIRouter(tags=["generate"])
log = logging.getLogger("vllm_tap.api")

_NEVER_BEGUN: Final = ("the engine never began it: is the plugin loaded in the model server, and does the server's "
                       "log say that its sender ended?")
_EDIT_FIELD: Final = re.compile(r"(edit(?:\[[0-9]+\][\w.\[\]]*)?) = ")  # an error's first words
_TAIL_BYTES: Final = 16 * 1024  # of a stream, to find its last event in


async def generate(request: Request, protocol: Protocol) -> Response:
    """Without a capture or edits the bytes pass through; with any a capture is owned first, then asked for."""
    service = service_of(request)
    try:
        data = await read_body(request, service.config.body_bytes_max)
        body = parse_body(data)
        if owner := owner_of(request):
            check_owned(body, protocol, owner, await _engine(service) if protocol.salted_from else None)
        changed = salt_cache(body, owner, service.salt_secret)
        planned = None
        for name, nothing in (("capture", (None,)), ("edit", (None, []))):
            if name in body and body[name] in nothing:
                del body[name]
                changed = True
        if "capture" in body or "edit" in body or service.config.capture_all:
            planned = await _plan(service, request, body, protocol)
        if planned is None:
            return await passed(service, request, json.dumps(body).encode() if changed else data)
        _check_content_type(request)
        return await _captured(service, request, planned)
    except ClientGone:
        return Response(status_code=499)  # nobody reads it; the number shows in the metrics


async def _engine(service: ApiService) -> EngineInfo | None:
    """The engine that serves, None as long as that is not known."""
    try:
        return await service.read(StoreReader.engine)
    except TapError:
        return None


async def _plan(service: ApiService, request: Request, body: dict[str, Any], protocol: Protocol
                ) -> Plan | None:
    """The plan of the captures, its bytes reserved.

    None where all requests are captured, and this one, which did not ask for it, cannot be.
    """
    own = "capture" in body or not service.config.capture_all
    spec = body["capture"] if "capture" in body else json.loads(service.config.capture_all or json.dumps(NOTHING))
    try:
        asked = capture_request({**body, "capture": spec}, protocol, request.headers.get("x-request-id"))
        planned = await service.read(lambda reader: _looked_up(asked, reader, owner_of(request)))
        # Until the request ends: what its captures took by then is in the store, or is in a moment.
        request.state.at_end.callback(await service.quotas.reserve(owner_of(request), planned.ulid, planned.nbytes))
    except (BadParam, OverQuota, SpecError, LimitError) as error:
        if own:
            raise
        service.metrics.captures.labels("impossible").inc()
        log.warning("a request is not captured: %s", error)
        return await _plan(service, request, {**body, "capture": NOTHING}, protocol) if "edit" in body else None
    return planned


def _looked_up(asked: CaptureRequest, reader: StoreReader, owner: str) -> Plan:
    engine = known(reader.engine())
    return plan(asked, engine, edits_text(asked.edits, reader, owner, engine) if asked.edits else "")


def _check_content_type(request: Request) -> None:
    """As vLLM does: a form of a stranger's web page can send JSON too, but never under its own name."""
    found = request.headers.get("content-type", "")
    if found.partition(";")[0].strip().lower() != "application/json":
        raise BadParam("Content-Type", found, "valid: application/json")


async def _captured(service: ApiService, request: Request, planned: Plan) -> Response:
    await _own(service, planned, owner_of(request))
    headers = caller_headers(request, frozenset(("x-request-id", "accept-encoding", "content-type")))
    asked = service.upstream.build_request("POST", request.scope["path"], content=planned.body, headers=[
        *headers, ("x-request-id", planned.ulid), ("content-type", "application/json"), ("accept-encoding", "identity"),
    ])
    try:
        answer = await while_connected(service, request, send(service, asked))
        if answer.status_code >= 400:
            return await _refused(service, planned, answer)
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            service.metrics.captures.labels("streamed").inc()
            events = _with_capture_event(service, planned, answer, owner_of(request))
            return Relay(service, answer, events, {"x-tap-capture": planned.ulid})
        return await _plain(service, request, planned, answer)
    except ApiError as error:
        _abandon(service, planned, error.message)
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


async def _refused(service: ApiService, planned: Plan, answer: httpx.Response) -> Response:
    """Upstream's own error, with its status and its words, which say which of the edits it is about."""
    service.metrics.upstream_failures.labels("status").inc()
    try:
        content = await answer.aread()
    except httpx.HTTPError as error:
        raise broken(service, error) from None
    finally:
        await answer.aclose()
    _abandon(service, planned, f"the model server answered {answer.status_code}{_words(content)}")
    return _copy(answer, _with_param(content))


def _words(content: bytes) -> str:
    """What an error says, behind a colon; empty where it is none of the usual form."""
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
            raise broken(service, error) from None

    try:
        content = await while_connected(service, request, read())
    finally:
        with anyio.CancelScope(shield=True):
            await answer.aclose()
    try:
        body = json.loads(content)
        body["capture"] = await _field(service, planned, owner_of(request))
        if planned.probes:
            body["capture"]["scores"] = await answer_scores(service, planned, owner_of(request))
    except (ValueError, TypeError):
        raise ApiError(502, "upstream_broken", "the model server's answer is not a JSON object") from None
    service.metrics.captures.labels("answered").inc()
    headers = dict(forward_headers(answer.headers.multi_items(), frozenset(("content-type",))))
    return Json(body, answer.status_code, headers={**headers, "x-tap-capture": planned.ulid})


async def _field(service: ApiService, planned: Plan, owner: str) -> dict[str, Any]:
    """The ``capture`` field of an answer; waits a little for the captures to be final."""
    wait_s = service.config.inline_wait_s if planned.inline else service.config.status_wait_s
    status = await status_of_all(service, planned.ids, wait_s)
    if status == "pending":
        service.spawn(settle(service, planned.ids, _NEVER_BEGUN))
    url = f"/v1/captures/{planned.ulid}"
    field = {"id": planned.ulid, "ids": planned.ids, "status": status, "manifest_url": url,
             "activations_url": f"{url}/activations"}
    return {**field, "inline": await inline(service, planned.ids, owner)} if planned.inline else field


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
        failure = broken(service, error)
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
