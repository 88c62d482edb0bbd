"""Legal holds: a held capture is neither deleted nor expired until it is released."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.description import DONE
from api.errors import ApiError
from api.live.waiting import poll
from api.parameters import Ref
from api.service import owner_of, service_of
from schemas.wire.records import Hold

router = APIRouter()


@router.put("/v1/captures/{ref}/hold", tags=["captures"], status_code=204, response_class=Response, responses=DONE)
async def hold(request: Request, ref: Ref) -> Response:
    """Holds a capture with all its samples."""
    return await _set(request, ref, True)


@router.delete("/v1/captures/{ref}/hold", tags=["captures"], status_code=204, response_class=Response, responses=DONE)
async def release(request: Request, ref: Ref) -> Response:
    """Releases it."""
    return await _set(request, ref, False)


async def _set(request: Request, ref: str, on: bool) -> Response:
    service, owner = service_of(request), owner_of(request)
    if not await service.is_here(ref, owner) and await service.elsewhere(ref, owner) is not None:
        raise ApiError(403, "read_only", f"capture {ref} is in another node's store; hold and release it there")
    target, last = await service.read(lambda reader: reader.target(ref, owner))
    await service.submit(lambda seq: Hold(seq=seq, capture=target, on=on))
    await poll(service, lambda: service.reader().capture(last, owner).hold is on, bool, service.config.submit_s)
    return Response(status_code=204)
