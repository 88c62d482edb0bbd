"""Stored vectors: PUT, GET and DELETE of what edits name, each key's own."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Final, TypeVar

import msgspec
from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from api.description import DONE, answers, json_content
from api.errors import BadParam, Json
from api.generate.stored_vectors import About, StoredVectors
from api.generate.upstream import ClientGone, read_body
from api.parameters import Route
from api.service import owner_of, service_of
from schemas import limits
from schemas.checks import NAME, is_name
from schemas.edits.vectors import F32, read_vector
from schemas.errors import ConflictError, NotFoundError
from schemas.sites import has_heads
from schemas.wire.engine_info import EngineInfo

router = APIRouter(route_class=Route, tags=["vectors"])
T = TypeVar("T")

_ABOUT: Final = {"name": "refusal", "digest": "0" * 32, "width": 2, "created_ms": 1769860800000}
_BASE64: Final = {"base64": "AACAPwAAAMA="}
_VECTOR: Final = {"anyOf": [
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": limits.vector_width_max},
    {"type": "object", "required": ["base64"], "additionalProperties": False,
     "properties": {"base64": {"type": "string", "minLength": 8, "contentEncoding": "base64"}}}]}
_BODY: Final = {"requestBody": {"required": True, "content": {
    "application/json": {"schema": {"type": "object", "required": ["vector"], "additionalProperties": False,
                                    "properties": {"vector": _VECTOR}}, "example": {"vector": [1, -2]}},
    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}
Name = Annotated[str, Path(description="The vector's name, as edits have it.", json_schema_extra={
    "type": "string", "pattern": f"^{NAME}$", "examples": ["refusal"]})]


@router.get("/v1/vectors", responses=answers(json_content({"object": "list", "data": [_ABOUT]})))
async def vectors(request: Request) -> Json:
    """The caller's stored vectors, by name, without their numbers."""
    found = await _stored(request, lambda stored, owner: stored.all(owner))
    return Json({"object": "list", "data": [msgspec.to_builtins(each) for each in found]})


@router.get("/v1/vectors/{name}", responses=answers(json_content({**_ABOUT, "vector": _BASE64}), 404))
async def vector(request: Request, name: Name) -> Json:
    """A stored vector with its numbers: float32, little-endian, in base64, as a PUT takes them."""
    found = await _stored(request, lambda stored, owner: stored.numbers(owner, name))
    if found is None:
        raise NotFoundError(f"no vector {name[:100]!r}; GET /v1/vectors lists those that are stored")
    about, numbers = found
    return Json({**msgspec.to_builtins(about), "vector": {"base64": base64.b64encode(
        numbers.astype("<f4").tobytes()).decode()}})


@router.put("/v1/vectors/{name}", openapi_extra=_BODY,
            responses={201: {"description": "Stored, durably.", "content": json_content(_ABOUT)},
                       **answers(json_content(_ABOUT), 400, 408, 409, 413)})
async def put(request: Request, name: Name) -> Response:
    """Stores a vector, durably, for edits to name: safetensors with one tensor ``vector`` [width], or JSON.

    201 where it is new, 200 where the name has these numbers already, 409 where it has others, or where the engine was
    started with a vector of that name.
    """
    if not is_name(name):
        raise BadParam("name", name, f"valid: 1 to {limits.probe_name_chars_max} of A-Z a-z 0-9 _ -, not beginning "
                                     f"with _ or -")
    kind = request.headers.get("content-type", "")
    try:
        data = await read_body(request, limits.vector_body_bytes_max)
    except ClientGone:
        return Response(status_code=499)

    def store(stored: StoredVectors, owner: str) -> tuple[About, bool]:
        numbers: F32 = read_vector(data, kind)
        return stored.put(owner, name, numbers)

    service = service_of(request)
    engines = await service.read(lambda reader: {each.name: reader.engine(each.name) for each in service.upstreams})
    if having := [each for each, engine in engines.items() if name in _registered(engine)]:
        who = f"engine {', '.join(having)}" if service.upstreams.named else "the engine"
        raise ConflictError(f"vector {name!r}: {who} was started with one of this name; take another")
    about, new = await _stored(request, store)
    told = msgspec.to_builtins(about)
    if service.upstreams.named:
        told["engines"] = {each: _usable(engine, about.width) for each, engine in engines.items()}
    return Json(told, 201 if new else 200)


@router.delete("/v1/vectors/{name}", status_code=204, response_class=Response,
               responses={204: DONE[204], 404: DONE[404]})
async def delete(request: Request, name: Name) -> Response:
    """Deletes a stored vector, so that the name is free; requests that named it have their numbers."""
    await _stored(request, lambda stored, owner: stored.delete(owner, name))
    return Response(status_code=204)


async def _stored(request: Request, call: Callable[[StoredVectors, str], T]) -> T:
    """``call`` with the store's vectors and the caller, in a thread; StoreError where there is no store yet."""
    owner = owner_of(request)
    return await service_of(request).read(lambda reader: call(StoredVectors(reader.path), owner))


def _registered(engine: EngineInfo | None) -> list[str]:
    """Names of the vectors that the engine was started with."""
    return [] if engine is None or engine.edits is None else engine.edits.vectors


def _usable(engine: EngineInfo | None, width: int) -> str:
    """Whether edits on an engine can use a vector of this width: "ok", or why not. It goes there with each edit."""
    if engine is None:
        return "no engine of this name has connected to the writer yet"
    if engine.edits is None:
        return "it was started without edits (VLLM_TAP_EDIT)"
    sites = engine.edits.layers
    widths = {engine.widths.get(site, 0) for site in sites}  # 0: not captured, so not told
    if not widths & {0, width} and not any(map(has_heads, sites)):  # an edit of a head takes a vector of its width
        return f"its rows have {', '.join(map(str, sorted(widths)))} numbers, the vector {width}"
    return "ok"
