"""GET and DELETE of captures: the list, the manifest, the tombstone."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import anyio
import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import BeforeValidator, Field, WithJsonSchema
from starlette.responses import Response

from api.description import DONE, answers, json_content
from api.errors import Json
from api.live.waiting import FINAL, poll
from api.parameters import SITE_SCHEMA, ULID, Parameters, Ref, Route, Seconds, digits
from api.service import is_divided, owner_of, service_of
from schemas import limits
from schemas.bucket.reader import AnyReader
from schemas.catalog.filters import WHEN, read_filter
from schemas.errors import ConflictError, NotFoundError
from schemas.ids import split_capture_id
from schemas.manifest import STATUSES, Manifest
from schemas.wire.records import Delete

router = APIRouter(route_class=Route)

_ROW: Final = {"id": ULID, "owner": "", "status": "complete", "created_ms": 1769860800000, "tags": {"run": "a"},
               "aliases": [f"cmpl-{ULID}"], "sites": ["resid_post"], "prompt_len": 5, "total_len": 13,
               "finish_reason": "length", "hold": False, "adapter": "", "writer": None}
_MANIFEST: Final = {"id": ULID, "status": "complete", "prompt_len": 5, "total_len": 13, "expected": 12, "captured": 12,
                    "missing": 0}
_CHARS: Final = f"1 to {limits.filter_chars_max} characters"
_Text = Annotated[str, Field(min_length=1, max_length=limits.filter_chars_max)]
_Time = Annotated[str, Field(examples=["2026-01-31T12:00:00Z"]), WithJsonSchema({"anyOf": [
    {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}, {"type": "string", "format": "date-time"}]})]


class ListParameters(Parameters):
    """A page of captures, and what it is narrowed by."""

    limit: Annotated[int, Field(ge=1, le=limits.captures_page_max), BeforeValidator(digits)] = Field(
        default=100, description=f"1 to {limits.captures_page_max}", examples=[20])
    before: str | None = Field(
        default=None, pattern=r"^[0-7][0-9A-HJKMNP-TV-Z]{25}(\.(0|[1-9][0-9]{0,5}))?$", examples=[ULID],
        description="a capture id, such as the answer's next: list what is older")
    status: str | None = Field(default=None, pattern=rf"^({'|'.join(STATUSES)})$", examples=["complete"],
                               description=", ".join(STATUSES))
    tag: list[_Text] = Field(default=[], max_length=limits.filter_tags_max, examples=[["run=a"]], description=(
        f"key=value, or a key alone, {_CHARS}; at most {limits.filter_tags_max}, all must be there"))
    model: _Text | None = Field(default=None, description=f"the model's name, or that of a LoRA adapter, {_CHARS}")
    site: Annotated[str, WithJsonSchema(SITE_SCHEMA)] | None = Field(
        default=None, description="a site that was captured", examples=["resid_post"])
    since: _Time | None = Field(default=None, description=f"made at this time or later: {WHEN}")
    until: _Time | None = Field(default=None, description=f"made before this time: {WHEN}")
    text: _Text | None = Field(default=None, description=f"part of an id, a name or a tag, {_CHARS}")


class WaitParameters(Parameters):
    """Whether the answer waits until the status is final, and how long at most."""

    wait: Literal["complete"] | None = Field(default=None, description="complete")
    timeout: Seconds = 10.0


@router.get("/v1/captures", tags=["captures"],
            responses=answers(json_content({"object": "list", "data": [_ROW], "next": None}), 400, 404))
async def captures(request: Request, asked: Annotated[ListParameters, Query()]) -> Json:
    """The caller's captures, newest first; ``next`` is the ``before`` of the next page, null on the last."""
    owner = owner_of(request)
    chosen = read_filter(asked.tag, asked.model, asked.site, asked.since, asked.until, asked.text)
    rows, following = await service_of(request).read_all(
        lambda reader: reader.page(owner, asked.status, asked.limit, asked.before, chosen))
    return Json({"object": "list", "data": [msgspec.to_builtins(row) for row in rows], "next": following})


@router.get("/v1/captures/{ref}", tags=["captures"], responses=answers(json_content(_MANIFEST), 400, 404))
async def manifest(request: Request, ref: Ref, asked: Annotated[WaitParameters, Query()]) -> Json:
    """The manifest; for a name of several captures, their ids.

    With ``wait=complete`` the answer comes when the status is final, or as it is when ``timeout`` seconds have passed.
    """
    service, owner = service_of(request), owner_of(request)

    def final() -> bool:
        reader = service.reader()
        return all(reader.capture(sample, owner).status in FINAL for sample in reader.samples(ref, owner))

    def answer(reader: AnyReader) -> dict[str, Any]:
        samples = reader.samples(ref, owner)
        return as_json(reader.manifest(ref, owner)) if len(samples) == 1 else {"id": ulid_of(samples[0]),
                                                                               "captures": samples}

    if asked.wait is not None and await service.waits_for(ref, owner):
        await poll(service, final, bool, asked.timeout)
    return Json(await service.read_capture(ref, owner, answer))


def ulid_of(capture: str) -> str:
    """ULID that the samples of one request have in common."""
    split = split_capture_id(capture)
    assert split is not None
    return split[0]


def as_json(found: Manifest) -> dict[str, Any]:
    """The manifest as JSON types, with its sums."""
    built: dict[str, Any] = msgspec.to_builtins(found)
    return {**built, "expected": found.expected, "captured": found.captured,
            "missing": found.expected - found.captured}


@router.delete("/v1/captures/{ref}", tags=["captures"], status_code=204, response_class=Response, responses=DONE)
async def delete(request: Request, ref: Ref) -> Response:
    """Hides a capture (with all its samples) for good, and lets its bytes go; 409 while it is held."""
    service, owner = service_of(request), owner_of(request)
    is_ours = service.bucket is None and await service.is_here(ref, owner)
    if (bucket := service.bucket or await service.elsewhere(ref, owner)) is not None:
        await anyio.to_thread.run_sync(lambda: bucket.delete(ref, owner), limiter=service.delete_limit)
        if not is_ours:
            return Response(status_code=204)
    elif await service.read(lambda reader: is_divided(reader, ref, owner)):
        raise ConflictError(f"layers of capture {ref} are in other writers' stores: start this service with --also and "
                            "--deletes, or use vllm-tap rm with a --store for each")
    target, last = await service.read(lambda reader: reader.target(ref, owner))
    await service.submit(lambda seq: Delete(seq=seq, capture=target))

    def gone() -> bool:
        try:
            service.reader().capture(last, owner)
        except NotFoundError:
            return True
        return False

    await poll(service, gone, bool, service.config.submit_s)  # so that the next request of this caller sees nothing
    return Response(status_code=204)
