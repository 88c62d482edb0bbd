"""Server-sent events of a capture while it is made: how far it is, and its rows as they come."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, Field, WithJsonSchema
from starlette.responses import Response

from api.description import answers, event_content
from api.errors import BROKEN, ApiError, BadParam, body_of, several_captures
from api.live.follower import Follower, choose
from api.live.waiting import FINAL, poll
from api.parameters import REF_SCHEMA, ULID, EventId, Parameters, Ref, Route, Sites, digits
from api.service import ApiService, check_ref, owner_of, service_of
from api.slices.formats import cast
from api.slices.query import OneSiteQuery, SiteQuery
from api.slices.sending import StallLimited
from schemas import limits
from schemas.bucket.reader import AnyReader
from schemas.errors import ArgumentError, NotFoundError
from schemas.manifest import Manifest
from schemas.read.reader import LiveRows, Progress
from schemas.sites import ask_site, names_of

router = APIRouter(route_class=Route)
log = logging.getLogger("vllm_tap.api")

_QUIET_S: Final = 10.0  # after this long without an event a comment is sent, so that nothing on the way gives up
_PROGRESS_S: Final = 0.1  # between two looks of a stream that tells of progress
_DTYPES: Final = ("float32", "float16", "bfloat16")
_PROGRESS: Final = (f'event: finish\ndata: {{"id":"{ULID}","status":"complete","expected":12,"captured":12,'
                    '"missing":0,"prompt_len":5,"total_len":13,"finish_reason":"length"}\n\n')
_ROWS: Final = (f'event: rows\nid: 17\ndata: {{"id":"{ULID}","site":"resid_post","layers":[0],"positions":[5],'
                '"token_ids":[198],"flags":[1],"durable":false,"dtype":"float32","shape":[1,1,2],'
                '"values":"AACAPwAAAEA="}\n\n')


class EventParameters(Parameters):
    """Captures and sites that a stream tells of beside its own capture."""

    also: list[Annotated[str, AfterValidator(partial(check_ref, param="also")), WithJsonSchema(REF_SCHEMA)]] = Field(
        default=[], max_length=limits.watched_max - 1, examples=[[ULID]],
        description=f"other captures that it tells of, at most {limits.watched_max - 1}")
    site: Sites = Field(default=[], max_length=limits.watched_max, description=(
        f"sites whose rows it tells as well, at most {limits.watched_max}"))


class LiveParameters(OneSiteQuery):
    """The rows that are told as they come, and from where on."""

    dtype: Literal["float32", "float16", "bfloat16"] = Field(default="float32", description=", ".join(_DTYPES))
    after: EventId | None = Field(default=None, examples=[17], description=(
        "the id of the last event of this stream that was had; default: from the beginning. Also as the header "
        "Last-Event-ID"))


@router.get("/v1/captures/{ref}/events", tags=["captures"], response_class=Response,
            responses=answers(event_content(_PROGRESS), 400, 404))
async def events(request: Request, ref: Ref, asked: Annotated[EventParameters, Query()]) -> Response:
    """Progress of a capture as server-sent events: ``progress`` whenever that changes, ``finish`` at its end.

    One stream can carry all that somebody watches: several captures, and rows of sites, float32, of those that have
    them. The captures of a name of several have events of their own; the stream ends when all are final.
    """
    service, owner, refs = service_of(request), owner_of(request), [ref, *asked.also]
    sites = [ask_site(name, "site", ArgumentError) for name in asked.site]

    def named() -> list[str]:
        reader = service.reader()
        return list(dict.fromkeys(capture for ref in refs for capture in reader.samples(ref, owner)))

    captures = await poll(service, named, bool, 1.0)
    if len(captures) > limits.capture_samples_max:
        raise BadParam("also", f"{len(captures)} captures", f"at most {limits.capture_samples_max} in one stream")
    if len(captures) * len(sites) > limits.watched_max:
        raise BadParam("site", f"{len(sites)} of {len(captures)} captures",
                       f"captures × sites at most {limits.watched_max}; open a stream for some of them")
    return EventStream(service, _watched(service, captures, owner, sites))


@router.get("/v1/captures/{ref}/live", tags=["captures"], response_class=Response,
            responses=answers(event_content(_ROWS), 400, 404))
async def live(request: Request, ref: Ref, query: Annotated[LiveParameters, Query()]) -> Response:
    """Rows of one site as they are computed, as server-sent events; those that are not yet durable say so."""
    service, owner = service_of(request), owner_of(request)
    last = _last_event(request.headers.get("last-event-id")) if query.after is None else query.after
    captures = await poll(service, lambda: service.reader().samples(ref, owner), bool, 1.0)
    if len(captures) > 1:
        raise several_captures(ref, captures)
    await service.read(lambda reader: choose(reader, captures[0], owner, query))  # what is wrong with it is a 4xx
    return EventStream(service, _rows(service, captures[0], owner, query, last))


def _last_event(header: str | None) -> int:
    try:
        return 0 if header is None else int(str(digits(header)))
    except ValueError:
        raise BadParam("Last-Event-ID", header, "must be the id of an event of this stream") from None


# ── progress, and rows beside it ────────────────────────────────────────────────────────────────────────────────────


class _Watched:
    """One of the captures that a stream tells of."""

    def __init__(self, capture: str, owner: str, sites: Sequence[tuple[str, int | None]]) -> None:
        self.capture, self.owner, self.sites = capture, owner, sites
        self.told: Progress | None = None
        self.followers: list[Follower] | None = None  # of the sites that it has, once it is known which

    def look(self, reader: AnyReader) -> Progress:
        """Progress of the capture; finds rows to send. What is final by then has all its rows among them."""
        try:
            found = reader.progress(self.capture, self.owner)
            if self.followers is None and self.sites:
                self.followers = self._follow(reader.manifest(self.capture, self.owner))
        except NotFoundError:  # it was there when the stream began
            return Progress(self.capture, "deleted", 0, 0, 0, 0, 0, None)
        for follower in self.followers or ():
            follower.look(reader)
        return found

    def _follow(self, manifest: Manifest) -> list[Follower] | None:
        if not manifest.resolved:
            return None
        layers, names = manifest.resolved["layers"], names_of(manifest.engine)
        sites = [(names.get(site, site), layer) for site, layer in self.sites]
        found = [site if layer is None else f"{site}.{layer}" for site, layer in sites
                 if layers.get(site) and layer in (None, *layers[site])]
        return [Follower(self.capture, self.owner, SiteQuery(site=[name]), 0, self._event) for name in found]

    def _event(self, site: str, rows: LiveRows) -> bytes:
        return _event("rows", _row_event(self.capture, site, rows, "float32"))


async def _watched(service: ApiService, captures: list[str], owner: str, sites: Sequence[tuple[str, int | None]]
                   ) -> AsyncIterator[bytes]:
    left = {capture: _Watched(capture, owner, sites) for capture in captures}
    with service.feed.follow(captures, owner) as moved:
        looked = captures
        while True:
            for watched in [left[capture] for capture in looked]:
                found = await service.read(watched.look)
                for follower in watched.followers or ():
                    while follower.todo:
                        if taken := await service.read(follower.take):
                            yield taken
                if found != watched.told:
                    watched.told = found
                    yield _event("finish" if found.status in FINAL else "progress", msgspec.to_builtins(found))
                if found.status in FINAL:
                    del left[watched.capture]
            if not left:
                return
            await asyncio.sleep(_PROGRESS_S)
            async for comment in _until(service, moved):
                yield comment
            went = moved.take()
            looked = [capture for capture in captures if capture in left and capture in went]


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _rows(service: ApiService, capture: str, owner: str, query: LiveParameters, after: int
                ) -> AsyncIterator[bytes]:
    # The id comes with a frame's last piece: who comes back with it has had all of the frame.
    follower = Follower(capture, owner, query, after, lambda site, rows: _event(
        "rows", _row_event(capture, site, rows, query.dtype), None if rows.more else rows.seq))
    with service.feed.follow([capture], owner) as moved:
        while True:
            moved.clear()
            status = await service.read(follower.look)
            while follower.todo:
                if taken := await service.read(follower.take):
                    yield taken
            if follower.newly_durable:
                yield _event("durable", {"id": capture, "through": follower.durable})
                follower.newly_durable = False
            if status in FINAL:
                yield _event("finish", {"id": capture, "status": status})
                return
            async for comment in _until(service, moved):
                yield comment


def _row_event(capture: str, site: str, rows: LiveRows, dtype: str) -> dict[str, Any]:
    values = cast(rows.values, dtype)
    return {"id": capture, "site": site, "layers": rows.layers, "positions": rows.positions.tolist(),
            "token_ids": rows.token_ids.tolist(), "flags": rows.flags.tolist(), "durable": rows.durable,
            "dtype": dtype, "shape": list(values.shape), "values": base64.b64encode(values.tobytes()).decode()}


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _until(service: ApiService, moved: asyncio.Event) -> AsyncIterator[bytes]:
    """Ends when ``moved`` is set; comments until then. ApiError where the service stops."""
    waits = [asyncio.ensure_future(moved.wait()), asyncio.ensure_future(service.stopping.wait())]
    try:
        while not moved.is_set():
            await asyncio.wait(waits, timeout=_QUIET_S, return_when=asyncio.FIRST_COMPLETED)
            if service.stopping.is_set():
                raise ApiError(503, "stopping", "the service is being stopped")
            if not moved.is_set():
                yield b": quiet\n\n"
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _event(kind: str, data: dict[str, Any], number: int | None = None) -> bytes:
    head = f"event: {kind}\n" if number is None else f"event: {kind}\nid: {number}\n"
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode("ascii")


class EventStream(StallLimited):
    """Events on their way; an error on the way is the last of them."""

    def __init__(self, service: ApiService, events: AsyncIterator[bytes]) -> None:
        super().__init__(self._guarded(events), service.config.slice_stall_s, media_type="text/event-stream",
                         headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    @staticmethod
    async def _guarded(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield event
        except BROKEN as error:
            if not isinstance(error, ApiError):
                log.warning("an event stream ended: %r", error)
            yield _event("error", body_of(error))
