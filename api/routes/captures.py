"""GET and DELETE of captures: the list, the manifest, the tombstone."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.datastructures import QueryParams
from starlette.responses import Response

from api.errors import BadParam, Json
from api.live.waiting import FINAL, poll
from api.service import check_ref, owner_of, service_of
from api.slices.query import check_known, one_of, seconds
from schemas import limits
from schemas.catalog.filters import WHEN, Sieve, read_sieve
from schemas.errors import ArgumentError, NotFoundError
from schemas.ids import split_capture_id
from schemas.manifest import STATUSES, Manifest
from schemas.wire.messages import Delete

router = APIRouter()


LIST: Final = ("limit", "before", "status", "tag", "model", "site", "since", "until", "text")


@router.get("/v1/captures", tags=["captures"])
async def captures(
    request: Request,
    limit: Annotated[str, Query(description=f"1 to {limits.captures_page_max}")] = "100",
    before: Annotated[str | None, Query(description="A capture id: list what is older.")] = None,
    status: Annotated[str | None, Query(description=", ".join(STATUSES))] = None,
    tag: Annotated[list[str] | None, Query(description="key=value, or a key alone; repeatable, all must be there.")
                   ] = None,
    model: Annotated[str | None, Query(description="The model's name, or that of a LoRA adapter.")] = None,
    site: Annotated[str | None, Query(description="A site that was captured.")] = None,
    since: Annotated[str | None, Query(description=f"Made at this time or later: {WHEN}.")] = None,
    until: Annotated[str | None, Query(description=f"Made before this time: {WHEN}.")] = None,
    text: Annotated[str | None, Query(description="Part of an id, a name or a tag.")] = None,
) -> Json:
    """The caller's captures, newest first; ``next`` is the ``before`` of the next page, null on the last."""
    params = request.query_params
    check_known(params, LIST, ("tag",))
    if not limit.isdecimal() or not limit.isascii() or not 1 <= int(limit[:9]) <= limits.captures_page_max:
        raise BadParam("limit", limit, f"valid: 1 to {limits.captures_page_max}")
    if before is not None and split_capture_id(before) is None:
        raise BadParam("before", before, "must be a capture id, such as the answer's next")
    one_of(params, "status", STATUSES)
    owner, sieve = owner_of(request), _sieve(params)
    rows, following = await service_of(request).read(
        lambda reader: reader.page(owner, status, int(limit), before, sieve))
    return Json({"object": "list", "data": [msgspec.to_builtins(row) for row in rows], "next": following})


def _sieve(params: QueryParams) -> Sieve:
    try:
        return read_sieve(params.getlist("tag"), *map(params.get, ("model", "site", "since", "until", "text")))
    except ArgumentError as error:
        raise BadParam(error.field, error.value, error.reason) from None


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
    check_known(params, ("wait", "timeout"))
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
