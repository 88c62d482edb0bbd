"""GET and HEAD /v1/captures/{ref}/zarr/{key}: a final capture as a Zarr v3 hierarchy, for any client of Zarr."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from api.description import answers
from api.errors import ApiError, several_captures
from api.parameters import Ref, Route
from api.service import owner_of, service_of
from api.slices.entity_tags import check_match, same_entity
from api.slices.parts import asked_part, head_of, sent_part
from api.slices.reading import SliceMemory
from schemas.bucket.reader import AnyReader
from schemas.errors import NotFoundError
from schemas.zarr_view.arrays import Value, is_chunk
from schemas.zarr_view.view import CaptureView

router = APIRouter(route_class=Route)

_TIMES: Final = 4  # a chunk lies in memory as stored, as float32, in its place and as what is sent
_PATH: Final = "/v1/captures/{ref}/zarr/{key:path}"
_CONTENT: Final = {
    "application/json": {"schema": {"type": "object"}, "example": {"zarr_format": 3, "node_type": "group"}},
    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_ANSWERS: Final = {**answers(_CONTENT, 400, 404, 409, 410, 412, 416),
                   304: {"description": "What lies there is as it was."}}
_Key = Annotated[str, Path(description="A key of Zarr: zarr.json, SITE/rows/zarr.json, SITE/rows/c/0/0/0, …",
                           json_schema_extra={"examples": ["resid_post/rows/c/0/0/0"]})]


@router.get(_PATH, tags=["captures"], response_class=Response,
            responses={**_ANSWERS, 206: {"description": "A part of it.", "content": _CONTENT}})
@router.head(_PATH, tags=["captures"], response_class=Response, responses=_ANSWERS,
             description="What GET would answer, without its body: size and ETag.")
async def zarr_key(request: Request, ref: Ref, key: _Key) -> Response:
    """The value of a key; decoded when it is asked for. A chunk is never 404 while its array is there: readers of
    Zarr would take that for fill values. So 410, not 404, answers for chunks of a capture that is deleted.
    """
    service = service_of(request)
    return await service.read_capture(ref, owner_of(request), lambda reader: _answer(request, reader, ref, key),
                                      service.slice_limit)


def _answer(request: Request, reader: AnyReader, ref: str, key: str) -> Response:
    """Runs in a thread."""
    service, owner = service_of(request), owner_of(request)
    media_type = "application/octet-stream" if is_chunk(key) else "application/json"
    try:
        value = _value(reader, ref, owner, key)
        check_match(request, value.tag)
        headers = {"ETag": value.tag, "Cache-Control": "private, no-cache"}  # a cache asks: it may be deleted by then
        if same_entity(request, value.tag):
            return Response(status_code=304, headers=headers)
        headers["Accept-Ranges"] = "bytes"
        if request.method == "HEAD":
            return head_of(value.size, headers, media_type)
        part, held = asked_part(request, value.size, value.tag), SliceMemory(service, owner, _TIMES * value.size)
        try:
            body = value.read()
        except BaseException:
            held.release()
            raise
    except NotFoundError as error:
        if not is_chunk(key):
            raise
        raise ApiError(410, "gone", str(error), "ref") from None
    held.only(value.size)
    return sent_part(request, [body], part, held, headers, media_type)


def _value(reader: AnyReader, ref: str, owner: str, key: str) -> Value:
    names = reader.samples(ref, owner)
    if len(names) > 1:
        raise several_captures(ref, names)
    found = CaptureView(reader, names[0], owner).value(key)
    if found is None:
        raise ApiError(404, "no_such_key", f"capture {names[0]} has no key {key[:200]!r}", "key")
    return found
