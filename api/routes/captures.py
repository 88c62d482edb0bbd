"""GET and DELETE of captures: the list, the manifest, the tombstone."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.errors import BadParam, Json
from api.service import check_ref, owner_of, service_of
from api.slice_query import one_of, seconds
from api.waiting import FINAL, poll
from schemas import limits
from schemas.control import Delete
from schemas.errors import NotFoundError
from schemas.ids import split_capture_id
from schemas.manifest import STATUSES, Manifest

router = APIRouter()


@router.get("/v1/captures", tags=["captures"])
async def captures(
    request: Request,
    limit: Annotated[str, Query(description=f"1 to {limits.captures_page_max}")] = "100",
    before: Annotated[str | None, Query(description="A capture id: list what is older.")] = None,
    status: Annotated[str | None, Query(description=", ".join(STATUSES))] = None,
) -> Json:
    """The caller's captures, newest first."""
    params = request.query_params
    for name in params:
        if name not in ("limit", "before", "status"):
            raise BadParam(name, params[name], "unknown parameter; valid: limit, before, status")
    if not limit.isdecimal() or not limit.isascii() or not 1 <= int(limit[:9]) <= limits.captures_page_max:
        raise BadParam("limit", limit, f"valid: 1 to {limits.captures_page_max}")
    if before is not None and split_capture_id(before) is None:
        raise BadParam("before", before, "must be a capture id, such as the answer's next")
    one_of(params, "status", STATUSES)
    owner, count = owner_of(request), int(limit)
    found = await service_of(request).read(
        lambda reader: reader.captures(owner=owner, status=status, limit=count, before=before))
    rows = [msgspec.to_builtins(row) for row in found]
    return Json({"object": "list", "data": rows, "next": found[-1].id if len(found) == count else None})


@router.get("/v1/captures/{ref}", tags=["captures"])
async def manifest(
    request: Request,
    ref: str,
    wait: Annotated[str | None, Query(description="complete")] = None,
    timeout: Annotated[str | None, Query(description="Seconds to wait at most.")] = None,
) -> Json:
    """The manifest; for a name of several captures, their ids.

    With ``wait=complete`` the answer comes when the status is final, or as it is when ``timeout`` seconds have passed.
    """
    params = request.query_params
    for name in params:
        if name not in ("wait", "timeout"):
            raise BadParam(name, params[name], "unknown parameter; valid: wait, timeout")
    wait, timeout_s = one_of(params, "wait", ("complete",)), seconds(timeout)
    service, owner, ref = service_of(request), owner_of(request), check_ref(ref)

    def final() -> bool:
        reader = service.reader()
        return all(reader.capture(sample, owner).status in FINAL for sample in reader.samples(ref, owner))

    def answer() -> dict[str, Any]:
        reader = service.reader()
        samples = reader.samples(ref, owner)
        return as_json(reader.manifest(ref, owner)) if len(samples) == 1 else {"id": ulid_of(samples[0]),
                                                                               "captures": samples}

    if wait is not None:
        await poll(service, final, bool, timeout_s)
    return Json(await service.read(lambda _: answer()))


def ulid_of(capture: str) -> str:
    """What the samples of one request have in common."""
    split = split_capture_id(capture)
    assert split is not None
    return split[0]


def as_json(found: Manifest) -> dict[str, Any]:
    """The manifest as JSON types, with its sums."""
    built: dict[str, Any] = msgspec.to_builtins(found)
    return {**built, "expected": found.expected, "captured": found.captured,
            "missing": found.expected - found.captured}


@router.delete("/v1/captures/{ref}", tags=["captures"], status_code=204, response_class=Response)
async def delete(request: Request, ref: str) -> Response:
    """Hides a capture (with all its samples) for good, and lets its bytes go; 409 while it is held."""
    service, owner, ref = service_of(request), owner_of(request), check_ref(ref)

    def look() -> tuple[str, str]:
        reader = service.reader()
        samples = reader.samples(ref, owner)
        if len(samples) == 1:
            return samples[0], samples[0]
        return ulid_of(samples[0]), samples[-1]

    target, last = await service.read(lambda _: look())
    await service.submit(lambda seq: Delete(seq=seq, capture=target))

    def gone() -> bool:
        try:
            service.reader().capture(last, owner)
        except NotFoundError:
            return True
        return False

    await poll(service, gone, bool, service.config.submit_s)  # so that the next request of this caller sees nothing
    return Response(status_code=204)
