"""The page at /: captures in a browser. Its files come from here alone, and it may load and ask nothing else."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.page_files import FILES, HEADERS
from api.slices.entity_tags import same_entity

__all__ = ["router"]

router = APIRouter(include_in_schema=False)

@router.get("/")
@router.get("/page/{name:path}")
async def page(request: Request) -> Response:
    """A file of the page."""
    file = FILES.get(request.scope["path"])
    if file is None:
        raise HTTPException(404)
    headers = {**HEADERS, "ETag": file.etag}
    if same_entity(request, file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers, media_type=file.media_type)
