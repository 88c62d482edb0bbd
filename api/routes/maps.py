"""GET and POST /v1/captures/{ref}/map: one number for each layer × position, so that a picture needs no whole rows."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from starlette.responses import Response

from api.description import answers, json_content
from api.engines.upstreams import Upstream
from api.errors import BadParam, Json
from api.generate.token_text import texts
from api.generate.upstream import ClientGone, read_body
from api.live.waiting import FINAL
from api.parameters import REF_SCHEMA, ULID, Position, RangeParameters, Ref, Route
from api.service import ApiService, check_ref, owner_of, service_of
from api.slices.measures import F64, Cells, MapRequest, cells, read_direction
from api.slices.query import OneSiteQuery, SiteQuery
from api.slices.reading import captured, end_of, past_the_end, sole
from schemas import limits
from schemas.bucket.reader import AnyReader
from schemas.errors import LimitError, NotFoundError
from schemas.manifest import Manifest

router = APIRouter(route_class=Route)

_MAP: Final = {"capture": ULID, "site": "resid_post", "measure": "norm", "layers": [0], "start": 0, "stop": 2,
               "token_ids": [9707, 11], "values": [[12.5, 3.25]], "missing": []}
_TOKENS: Final = {"capture": ULID, "start": 0, "stop": 2, "token_ids": [9707, 11], "texts": ["Hello", ","]}
_UPLOADED: Final = {"requestBody": {"required": True, "content": {"application/octet-stream": {
    "schema": {"type": "string", "format": "binary"}}}}}
_NEEDS: Final = ("cosine needs either position or against, distance needs against, norm and projection take neither")


class ProjectionParameters(RangeParameters, OneSiteQuery):
    """The part of a capture whose rows are projected on an uploaded direction."""

    measure: Literal["projection"] = Field(default="projection", description=(
        "projection: with a direction in the body only that makes sense"))


class MapParameters(RangeParameters, OneSiteQuery):
    """The part of a capture that is drawn, and by which number."""

    measure: Literal["norm", "cosine", "distance"] = Field(default="norm", description=(
        "norm, cosine, distance; projection needs a direction: POST it as the body (npy or safetensors)"))
    position: Position | None = Field(default=None, examples=[3], description=(
        f"of cosine: the position to compare with, 0 to {limits.position_max}"))
    against: Annotated[str, AfterValidator(partial(check_ref, param="against")), WithJsonSchema(REF_SCHEMA)] | None = (
        Field(default=None, examples=[ULID], description="of cosine and distance: another capture"))

    @model_validator(mode="after")
    def _check_measure(self) -> MapParameters:
        others = (self.position is not None) + (self.against is not None)
        if others != (self.measure != "norm") or (self.measure == "distance" and self.against is None):
            raise BadParam("measure", self.measure, _NEEDS)
        return self


@router.get("/v1/captures/{ref}/map", tags=["captures"], responses=answers(json_content(_MAP), 400, 404, 413, 416))
async def map_of(request: Request, ref: Ref, query: Annotated[MapParameters, Query()]) -> Json:
    """``values`` [layers][positions], null where there is no number; ``missing`` says which rows are not there, why."""
    return await _answer(request, ref, query)


@router.post("/v1/captures/{ref}/map", tags=["captures"], openapi_extra=_UPLOADED, responses=answers(
    json_content({**_MAP, "measure": "projection"}), 400, 404, 408, 413, 416))
async def projection(request: Request, ref: Ref, query: Annotated[ProjectionParameters, Query()]) -> Response:
    """The same for the projection on a direction: the body is npy or safetensors, [width] or [layers, width]."""
    try:
        data = await read_body(request, limits.map_direction_bytes_max)
    except ClientGone:
        return Response(status_code=499)
    return await _answer(request, ref, query, read_direction(data))


@router.get("/v1/captures/{ref}/tokens", tags=["captures"], responses=answers(json_content(_TOKENS), 400, 404, 416))
async def tokens(request: Request, ref: Ref, query: Annotated[RangeParameters, Query()]) -> Json:
    """Token ids and, where the model that made them still serves, each token's text (else null).

    Of a capture that is being made as many as its rows tell of without a gap, or none yet.
    """
    service, owner = service_of(request), owner_of(request)
    last = query.start + limits.map_positions_max
    last = last if query.stop is None else min(last, query.stop)

    def read(reader: AnyReader) -> tuple[Manifest, Upstream | None, list[int]]:
        found = sole(reader, ref, owner)
        known = [*found.prompt_token_ids, *found.output_token_ids]
        if found.status in FINAL and 0 < query.start >= len(known):
            raise past_the_end("start", query.start, len(known))
        more = _tokens_of_rows(reader, found, max(query.start, len(known)), last)
        return found, _speaker(service, reader, found), known[query.start : last] + more

    found, upstream, ids = await service.read_capture(ref, owner, read)
    told: list[str | None] = [None] * len(ids)
    if upstream is not None:
        told = await texts(service, upstream, found.engine["tokenizer"], ids)
    return Json({"capture": found.id, "start": query.start, "stop": query.start + len(ids), "token_ids": ids,
                 "texts": told})


def _speaker(service: ApiService, reader: AnyReader, capture: Manifest) -> Upstream | None:
    """The engine that has the tokenizer of a capture's model, its own before others; None where none has."""
    its = capture.engine.get("name", "")
    for upstream in sorted(service.upstreams, key=lambda each: each.name != its):
        engine = None if upstream.away else reader.engine(upstream.name)
        if engine is not None and engine.model == capture.engine.get("model") and (
                not upstream.name or (engine.tokenizer == capture.engine.get("tokenizer") and
                                      engine.fingerprint == capture.engine.get("fingerprint", engine.fingerprint))):
            return upstream
    return None


def _tokens_of_rows(reader: AnyReader, running: Manifest, start: int, stop: int) -> list[int]:
    """The ids at ``start`` and on, as far as there are rows of them, of a capture whose output is not known yet."""
    if start >= stop or running.status in FINAL or not running.sites:
        return []
    site = min(running.sites, key=lambda info: info.decoded_width).site
    rows = reader.slice(running.id, site, running.resolved["layers"][site][:1], start, stop)
    there = rows.positions == np.arange(start, start + len(rows.positions))
    ids: list[int] = rows.token_ids[: int(there.argmin()) if not there.all() else None].tolist()
    return ids


async def _answer(request: Request, ref: str, query: MapParameters | ProjectionParameters,
                  direction: F64 | None = None) -> Json:
    service, owner = service_of(request), owner_of(request)
    other, position = (query.against, query.position) if isinstance(query, MapParameters) else (None, None)

    def read(reader: AnyReader) -> dict[str, Any]:
        shown = sole(reader, ref, owner)
        against = None if other is None else sole(reader, other, owner)
        site, layers = _chosen(shown, query)
        if against is not None:
            _chosen(against, SiteQuery(site=[site], layer=[",".join(map(str, layers))]))
        start, stop = _range(shown, against, query)
        width = max((info.decoded_width for info in shown.sites if info.site == site), default=0)
        numbers = (stop - start) * len(layers) * max(width, 1) * (1 if against is None else 2)
        if numbers > limits.map_numbers_max or stop - start > limits.map_positions_max:
            fit = min(limits.map_positions_max, limits.map_numbers_max * (stop - start) // numbers)
            raise LimitError("positions of a map", stop - start, max(fit, 0), "ask for fewer positions or layers")
        asked = MapRequest(shown, against, site, layers, start, stop, query.measure, position)
        return _json(asked, cells(reader, owner, asked, direction))

    return Json(await service.read_map(ref, owner, read))


def _chosen(manifest: Manifest, query: SiteQuery) -> tuple[str, list[int]]:
    """The site and its layers; NotFoundError where the capture has no such rows."""
    has = captured(manifest)
    if not has:
        raise NotFoundError(f"capture {manifest.id} is {manifest.status} and has no rows")
    first = query if query.site else SiteQuery(site=[next(iter(has))], layer=query.layer)
    (site, layers), = first.choose(has, manifest.engine).items()
    return site, layers


def _range(shown: Manifest, against: Manifest | None, query: RangeParameters) -> tuple[int, int]:
    end = max(end_of(manifest) for manifest in (shown, against) if manifest is not None)
    if 0 < query.start >= end:
        raise past_the_end("start", query.start, end)
    return query.start, end if query.stop is None else min(query.stop, end)


def _json(asked: MapRequest, found: Cells) -> dict[str, Any]:
    shown, info = asked.shown, asked.info
    names = [shown.id, None if asked.against is None else asked.against.id]
    return {
        "capture": shown.id, "status": shown.status, "site": asked.site, "measure": asked.measure,
        "position": asked.position, "against": names[1], "codec": info.codec, "decoded": info.decoded,
        "width": info.decoded_width, "start": asked.start, "stop": asked.stop, "end": end_of(shown),
        "prompt_len": shown.prompt_len, "layers": asked.layers,
        "token_ids": [None if token < 0 else token for token in found.token_ids.tolist()],
        "values": [[None if number != number else number for number in row] for row in _short(found.values)],
        "missing": [{"layer": layer, **msgspec.to_builtins(gap), "capture": names[of]}
                    for layer, gap, of in found.missing],
    }


def _short(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[list[float]]:
    """Six digits are more than a picture shows; what is not finite is no number."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        size = np.where(values == 0, 1.0, np.abs(values))
        digits = 10.0 ** (5 - np.floor(np.log10(size)))
        short = np.round(values * digits) / digits
    return np.where(np.isfinite(short), short, np.nan).tolist()  # type: ignore[no-any-return]
