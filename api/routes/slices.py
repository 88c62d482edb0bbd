"""GET and HEAD /v1/captures/{ref}/activations: rows of a capture, by site, layer and position."""

from __future__ import annotations

from typing import Annotated, Final

import xxhash
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.description import answers, json_content
from api.errors import ApiError, BadParam
from api.live.waiting import FINAL, poll
from api.parameters import ULID, Ref, Route
from api.service import owner_of, service_of
from api.slices.entity_tags import same_entity
from api.slices.formats import MEDIA_TYPES
from api.slices.parts import asked_part, head_of, sent_part
from api.slices.query import SliceQuery
from api.slices.reading import SliceMemory, captured, end_of, past_the_end, read_slices, slice_bytes, sole
from schemas.bucket.reader import AnyReader
from schemas.manifest import Manifest
from schemas.sites import SITES

router = APIRouter(route_class=Route)

_ENCODING: Final = 2  # grows when the same rows become other bytes


_BINARY: Final = {kinds[0]: {"schema": {"type": "string", "format": "binary"}}
                  for name, kinds in MEDIA_TYPES.items() if name != "json"}
_CONTENT: Final = {**_BINARY, **json_content({"capture": ULID, "positions": [0], "token_ids": [9707],
                                              "arrays": {"resid_post.0": [[1.0, 2.0]]}})}
_PATH: Final = "/v1/captures/{ref}/activations"
_ANSWERS: Final = {**answers(_CONTENT, 400, 404, 406, 413, 416, 504),
                   304: {"description": "The slice is as it was."}}


@router.get(_PATH, tags=["captures"], response_class=Response,
            responses={**_ANSWERS, 206: {"description": "A part of it.", "content": _CONTENT}})
@router.head(_PATH, tags=["captures"], response_class=Response, responses=_ANSWERS,
             description="What GET would answer, without its body: size, ETag, rows, what is missing.")
async def activations(request: Request, ref: Ref, asked: Annotated[SliceQuery, Query()]) -> Response:
    """A slice; what is missing is named in X-Tap-Missing and never filled in."""
    service, owner, query = service_of(request), owner_of(request), asked.accepting(request.headers.get("accept"))

    def look() -> tuple[Manifest, bool]:
        manifest = sole(service.reader(), ref, owner)
        return manifest, manifest.status in FINAL or _rows_there(manifest, query)

    if query.wait and await service.waits_for(ref, owner):
        manifest, there = await poll(service, look, lambda found: found[1], query.timeout)
        if not there:
            raise ApiError(504, "timeout", f"capture {manifest.id} is {manifest.status} after {query.timeout:g} s; "
                           "ask again, or without wait to get the rows that are there")
    # All in one go, since each turn of a thread takes as long as reading a page of rows.
    return await service.read_capture(
        ref, owner, lambda reader: _answer(request, reader, sole(reader, ref, owner), query), service.slice_limit)


def _rows_there(manifest: Manifest, query: SliceQuery) -> bool:
    """Whether every position before ``query.stop`` of what is asked is there, or known to be missing."""
    if query.wait != "rows" or query.stop is None or manifest.end < query.stop:
        return False
    chosen = query.choose(captured(manifest), manifest.engine)
    return not any(
        gap.start < query.stop and gap.stop > query.start and gap.reason == "pending"
        for row in manifest.rows if row.layer in chosen.get(row.site, ()) for gap in row.missing
    )


def _answer(request: Request, reader: AnyReader, manifest: Manifest, query: SliceQuery) -> Response:
    """Reads and encodes what the capture has of it; runs in a thread."""
    service, owner = service_of(request), owner_of(request)
    if not manifest.resolved:
        # Never begun, or failed: the reader knows which, and its NotFoundError says so.
        reader.slice(manifest.id, next(iter(SITES)), [0], owner=owner)
    chosen = query.choose(captured(manifest), manifest.engine)
    if query.format == "npy" and [len(layers) for layers in chosen.values()] != [1]:
        raise BadParam("format", "npy", "holds one array: name one site and one layer, or use safetensors or npz")
    if query.rejected and len(chosen) != 1:
        raise BadParam("rows", "rejected", f"of one site at a time: name one of {', '.join(chosen)}")
    end = end_of(manifest)
    if 0 < query.start >= end and not query.rejected:
        raise past_the_end("start" if query.positions is None else "positions", query.start, end)
    tag = _tag(manifest, chosen, query)
    if tag and same_entity(request, tag):
        return Response(status_code=304, headers={"ETag": tag, "Vary": "Accept"})
    held = SliceMemory(service, owner, slice_bytes(service.config, manifest, chosen, query))
    try:
        answer = read_slices(reader, manifest, chosen, query, owner)
        part = asked_part(request, answer.size, tag)
        headers = {**answer.headers(manifest, query), "X-Tap-Xxh3": answer.xxh3(), "Vary": "Accept"}
        if "sha-256" in request.headers.get("want-repr-digest", ""):
            headers["Repr-Digest"] = answer.sha256()
    except BaseException:
        held.release()
        raise
    held.only(answer.size)
    if tag:
        headers |= {"ETag": tag, "Accept-Ranges": "bytes"}
    if request.method == "HEAD":
        held.release()
        return head_of(answer.size, headers, MEDIA_TYPES[query.format][0])
    return sent_part(request, answer.buffers, part, held, headers, MEDIA_TYPES[query.format][0])


def _tag(manifest: Manifest, chosen: dict[str, list[int]], query: SliceQuery) -> str:
    """The entity tag of a slice of a final capture, "" of one that may yet get rows."""
    if manifest.status not in FINAL:
        return ""
    rows = [(row.site, row.layer, row.captured, row.rejected) for row in manifest.rows]
    what = (manifest.id, manifest.created_ms, manifest.status, manifest.end, rows, sorted(chosen.items()),
            query.ranges, query.format, query.dtype, query.rejected, _ENCODING)
    return f'"{xxhash.xxh3_128_hexdigest(repr(what).encode())}"'
