"""GET and POST /v1/captures/{ref}/map: one number for each layer × position, so that a picture needs no whole rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Query, Request
from starlette.datastructures import QueryParams
from starlette.responses import Response

from api.errors import BadParam, Json
from api.generate.token_text import texts
from api.generate.upstream import ClientGone, read_body
from api.live.waiting import FINAL
from api.measures import MEASURES, Cells, Pair, cells, read_direction
from api.service import check_ref, owner_of, service_of
from api.slices.query import SliceQuery, check_known, one_of, parse_slice_query
from api.slices.reading import end_of, past_the_end, sole
from schemas import limits
from schemas.errors import LimitError, NotFoundError
from schemas.manifest import Manifest
from schemas.read.reader import StoreReader
from schemas.wire.messages import EngineInfo

router = APIRouter()

_Site = Annotated[str | None, Query(description="Site or TransformerLens name; default the first captured.")]
_Layer = Annotated[list[str] | None, Query(description='"3", "0,2", "a:b:c" or "all"; repeatable.')]
_Start = Annotated[str | None, Query(description="First position.")]
_Stop = Annotated[str | None, Query(description="Position past the last one.")]

_PARAMS = ("site", "layer", "start", "stop", "measure", "position", "against")


@dataclass(frozen=True, slots=True)
class _MapQuery:
    rows: SliceQuery  # site, layers, range
    measure: str
    position: int | None
    against: str | None


@router.get("/v1/captures/{ref}/map", tags=["captures"])
async def map_of(
    request: Request,
    ref: str,
    site: _Site = None,
    layer: _Layer = None,
    start: _Start = None,
    stop: _Stop = None,
    measure: Annotated[str | None, Query(description="norm (default), cosine, distance")] = None,
    position: Annotated[str | None, Query(description="Of cosine: the position to compare with.")] = None,
    against: Annotated[str | None, Query(description="Of cosine and distance: another capture.")] = None,
) -> Json:
    """``values`` [layers][positions], null where there is no number; ``missing`` says which rows are not there, why."""
    return await _answer(request, ref, None)


@router.post("/v1/captures/{ref}/map", tags=["captures"])
async def projection(
    request: Request,
    ref: str,
    site: _Site = None,
    layer: _Layer = None,
    start: _Start = None,
    stop: _Stop = None,
    measure: Annotated[str | None, Query(description="projection")] = None,
) -> Response:
    """The same for the projection on a direction: the body is npy or safetensors, [width] or [layers, width]."""
    try:
        data = await read_body(request, limits.map_direction_bytes_max)
    except ClientGone:
        return Response(status_code=499)
    return await _answer(request, ref, data)


@router.get("/v1/captures/{ref}/tokens", tags=["captures"])
async def tokens(
    request: Request,
    ref: str,
    start: _Start = None,
    stop: _Stop = None,
) -> Json:
    """Token ids and, where the model that made them still serves, each token's text (else null).

    Of a capture that is being made as many as its rows tell of without a gap, or none yet.
    """
    query = parse_slice_query(_only(request.query_params, ("start", "stop")), None)
    service, owner, ref = service_of(request), owner_of(request), check_ref(ref)
    last = query.start + limits.map_positions_max
    last = last if query.stop is None else min(last, query.stop)

    def read(reader: StoreReader) -> tuple[Manifest, EngineInfo | None, list[int]]:
        found = sole(reader, ref, owner)
        known = [*found.prompt_token_ids, *found.output_token_ids]
        if found.status in FINAL and 0 < query.start >= len(known):
            raise past_the_end("start", query.start, len(known))
        more = _tokens_of_rows(reader, found, max(query.start, len(known)), last)
        return found, reader.engine(), known[query.start : last] + more

    found, engine, ids = await service.read(read)
    same = engine is not None and engine.model == found.engine.get("model")
    return Json({"capture": found.id, "start": query.start, "stop": query.start + len(ids), "token_ids": ids,
                 "texts": await texts(service, ids) if same else [None] * len(ids)})


def _tokens_of_rows(reader: StoreReader, running: Manifest, start: int, stop: int) -> list[int]:
    """The ids at ``start`` and on, as far as there are rows of them, of a capture whose output is not known yet."""
    if start >= stop or running.status in FINAL or not running.sites:
        return []
    site = min(running.sites, key=lambda info: info.decoded_width).site
    rows = reader.slice(running.id, site, running.resolved["layers"][site][:1], start, stop)
    there = rows.positions == np.arange(start, start + len(rows.positions))
    ids: list[int] = rows.token_ids[: int(there.argmin()) if not there.all() else None].tolist()
    return ids


async def _answer(request: Request, ref: str, data: bytes | None) -> Json:
    query = _query(request.query_params, data is not None)
    service, owner, ref = service_of(request), owner_of(request), check_ref(ref)
    direction = None if data is None else read_direction(data)

    def read(reader: StoreReader) -> dict[str, Any]:
        shown = sole(reader, ref, owner)
        against = None if query.against is None else sole(reader, query.against, owner)
        site, layers = _chosen(shown, query.rows)
        if against is not None:
            _chosen(against, SliceQuery([(site, None)], [",".join(map(str, layers))], 0, None, "", "", None, 0))
        start, stop = _range(shown, against, query.rows)
        width = max((info.decoded_width for info in shown.sites if info.site == site), default=0)
        numbers = (stop - start) * len(layers) * max(width, 1) * (1 if against is None else 2)
        if numbers > limits.map_numbers_max or stop - start > limits.map_positions_max:
            fit = min(limits.map_positions_max, limits.map_numbers_max * (stop - start) // numbers)
            raise LimitError("positions of a map", stop - start, max(fit, 0), "ask for fewer positions or layers")
        found = cells(reader, owner, Pair(shown, against), site, layers, start, stop, query.measure, query.position,
                      direction)
        return _json(shown, against, site, layers, query, found, start, stop)

    return Json(await service.read_map(read, owner))


def _query(params: QueryParams, uploaded: bool) -> _MapQuery:
    rows = parse_slice_query(_only(params, _PARAMS), None)
    if len(rows.sites) > 1:
        raise BadParam("site", params.getlist("site"), "a map is of one site")
    measure = one_of(params, "measure", MEASURES) or ("projection" if uploaded else "norm")
    if (measure == "projection") != uploaded:
        raise BadParam("measure", measure, "projection needs a direction: POST it as the body (npy or safetensors)"
                       if measure == "projection" else "with a direction in the body only projection makes sense")
    position, against = params.get("position"), params.get("against")
    if position is not None and (not position.isdecimal() or not position.isascii() or len(position) > 10):
        raise BadParam("position", position, f"valid: a position from 0 to {limits.position_max}")
    if (position is not None) + (against is not None) != {"cosine": 1, "distance": 1}.get(measure, 0) or (
            measure == "distance" and against is None):
        raise BadParam("measure", measure, "cosine needs either position or against, distance needs against, "
                       "norm and projection take neither")
    return _MapQuery(rows, measure, None if position is None else int(position),
                     None if against is None else check_ref(against))


def _only(params: QueryParams, valid: tuple[str, ...]) -> QueryParams:
    """The part of the parameters that slices have too; BadParam for an unknown one, or one given more than once."""
    check_known(params, valid, ("layer",))
    return QueryParams([(name, value) for name, value in params.multi_items()
                        if name in ("site", "layer", "start", "stop")])


def _chosen(manifest: Manifest, query: SliceQuery) -> tuple[str, list[int]]:
    """The site and its layers; NotFoundError where the capture has no such rows."""
    captured: dict[str, list[int]] = manifest.resolved.get("layers", {})
    if not captured:
        raise NotFoundError(f"capture {manifest.id} is {manifest.status} and has no rows")
    first = SliceQuery(query.sites or [(next(iter(captured)), None)], query.layers, 0, None, "", "", None, 0)
    (site, layers), = first.choose(captured, manifest.engine).items()
    return site, layers


def _range(shown: Manifest, against: Manifest | None, query: SliceQuery) -> tuple[int, int]:
    end = max(end_of(manifest) for manifest in (shown, against) if manifest is not None)
    if 0 < query.start >= end:
        raise past_the_end("start", query.start, end)
    return query.start, end if query.stop is None else min(query.stop, end)


def _json(shown: Manifest, against: Manifest | None, site: str, layers: list[int], query: _MapQuery, found: Cells,
          start: int, stop: int) -> dict[str, Any]:
    info = next(info for info in shown.sites if info.site == site)
    names = [shown.id, None if against is None else against.id]
    return {
        "capture": shown.id, "status": shown.status, "site": site, "measure": query.measure,
        "position": query.position, "against": names[1], "codec": info.codec, "decoded": info.decoded,
        "width": info.decoded_width, "start": start, "stop": stop, "end": end_of(shown),
        "prompt_len": shown.prompt_len, "layers": layers,
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
