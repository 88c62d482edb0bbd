"""The service about itself: capabilities, health, metrics; and vLLM's own routes that clients need."""

from __future__ import annotations

from typing import Any, Final

import anyio
import httpx
import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from api.auth.guard import GENERATIONS
from api.description import answers, body, json_content
from api.engines.route import not_served, pinned, route_of
from api.engines.upstreams import Upstream
from api.errors import BadParam, Json, PartLost
from api.generate.generation import parse_body
from api.generate.rank_checks import check_ranks
from api.generate.upstream import ClientGone, passed, read_body
from api.service import ApiService, service_of
from api.slices.formats import DTYPES, FORMATS, available_formats
from schemas import limits
from schemas.bodies import named
from schemas.bucket.reader import AnyReader
from schemas.codecs import CODECS, DEFAULT_CODEC
from schemas.errors import TapError
from schemas.sites import SITES, lens_name
from schemas.spec import parse_spec, resolve
from schemas.store.pushing import read_pushing
from schemas.wire.engine_info import EngineInfo
from schemas.wire.layout import LEADER

router = APIRouter(tags=["service"])
_OBJECT: Final = {"type": "object"}

_LIMITS = ("attention_", "spec_", "edit", "vector", "tag_", "capture", "slice", "map", "wait_", "alias_")


@router.get("/v1/capabilities", responses=answers(json_content({
    "armed": {"resid_post": {"layers": [0, 1], "width": 1024, "meaning": "residual stream leaving the block",
                             "transformer_lens": "blocks.{l}.hook_resid_post", "source": "table",
                             "proved": {"identity": "resid_post = resid_pre + attn_out + mlp_out", "off": 3e-07}}},
    "store": {"bytes_s": 1200000000, "measured": "start"},
    "formats": list(FORMATS),
    "limits": {"slice_bytes_max": 1 << 30}})))
async def capabilities(request: Request) -> Json:
    """Sites that can be captured here and how rows can be read; ``engine`` is null until one has connected. ``bucket``
    says which head of which bucket is read, null where it is a store, and ``also`` the same of other stores beside it.
    """
    # Of several engines about the one that the request names, else the first that is up; ``engines`` is about all.
    service = service_of(request)
    upstreams = service.upstreams
    await upstreams.begun()
    found = {each.name: await _described(service, each) for each in upstreams}
    engine, lost = None, list[int]()
    if service.bucket is None:
        shown = pinned(request, upstreams) or next((each for each in upstreams if not each.away), upstreams.only)
        engine, lost = found[shown.name]
    return Json({
        **_can(engine, lost),
        "bucket": None if service.bucket is None else service.bucket.told(),
        "also": None if service.others is None else service.others.told(),
        **({"engines": {each.name: {"up": not each.away, "away": each.away or None, "models": list(each.models),
                                    **_can(*found[each.name])} for each in upstreams}} if upstreams.named else {}),
        "codecs": {name: {"meaning": codec.meaning, "error": codec.error, "default": name == DEFAULT_CODEC,
                          "sites": list(codec.sites), "decoded": codec.decoded,
                          "parameters": {p.name: {"meaning": p.meaning, "min": p.low, "max": p.high,
                                                  "default": p.default} for p in codec.parameters}}
                   for name, codec in CODECS.items()},
        "store": service.pressure.store(),
        "formats": list(available_formats()),
        "dtypes": list(DTYPES),
        "limits": {**{name: value for name, value in vars(limits).items() if name.startswith(_LIMITS)},
                   "request_body_bytes_max": service.config.body_bytes_max,
                   "request_values_max": limits.request_values_max,
                   "slice_bytes_max": service.config.slice_bytes_max,
                   "slices_in_flight_bytes_max": service.config.slices_in_flight_bytes_max},
        "versions": {"protocol": limits.PROTOCOL_VERSION, "store": limits.STORE_VERSION,
                     "vllm_tap": engine.tap_version if engine else None,
                     "vllm": engine.vllm_version if engine else None},
    })


async def _described(service: ApiService, upstream: Upstream) -> tuple[EngineInfo | None, list[int]]:
    """The engine's description of itself, None as long as it is not known, and its ranks without a sender."""

    try:
        engine, lost = await service.read(lambda reader: _engine_and_lost(reader, upstream.name))
        return engine, sorted({rank for ranks in lost.values() for rank in ranks})
    except TapError:
        return None, []


def _engine_and_lost(reader: AnyReader, name: str) -> tuple[EngineInfo | None, dict[str, list[int]]]:
    engine = reader.engine(name)
    return engine, {} if engine is None else reader.lost_of_server(engine.called)


def _can(engine: EngineInfo | None, lost_ranks: list[int]) -> dict[str, Any]:
    """An engine's name and model, and the places that it can capture and edit."""
    if engine is None:
        return {"engine": None, "lost_ranks": [], "armed": {}, "probes": {}, "edits": {}}
    return {
        "engine": msgspec.to_builtins(engine),
        "lost_ranks": lost_ranks,
        "armed": {site: _armed(engine, site) for site in engine.armed.sites},
        "probes": {name: {"site": probe.site, "layer": probe.layer, "k": len(probe.names), "names": probe.names,
                          "activation": probe.activation, "meaning": probe.meaning}
                   for name, probe in engine.armed.probes.items()},
        "edits": {} if engine.edits is None else {
            "armed": engine.edits.layers, "depth": engine.edits.depth, "rows": engine.edits.rows,
            "vectors": engine.edits.vectors},
    }


def _armed(engine: EngineInfo, site: str) -> dict[str, Any]:
    told = {"layers": engine.armed.sites[site], "width": engine.widths.get(site),
            "meaning": engine.meaning.get(site, SITES[site].meaning),
            "transformer_lens": lens_name(site, engine.armed.names), "source": engine.sources.get(site)}
    if engine.proved is msgspec.UNSET:  # an engine of an older version, which says nothing of it
        return told
    if (proved := engine.proved.get(site)) is not None:
        return told | {"proved": msgspec.to_builtins(proved)}
    return told | {"not_proved": engine.unproved or "the search does not find this site in this model"}


@router.get("/healthz", openapi_extra={"security": []}, responses=answers(json_content({"status": "ok"})))
async def healthz() -> Json:
    """200 while the process lives."""
    return Json({"status": "ok"})


@router.get("/readyz", responses=answers(json_content({
    "status": "ready", "checks": {"writer": "ok", "engine": "ok", "upstream": "ok"}})))
async def readyz(request: Request) -> Json:
    """200 when a generation with a capture can be served, else 503 naming what is not ready. Of a bucket: when the last
    look at its head succeeded.
    """
    service = service_of(request)
    if service.bucket is not None:
        checks = {"bucket": service.bucket.failed or "ok"}
        return _ready(not service.bucket.failed, _lacking(checks), {"checks": checks})
    await service.upstreams.begun()
    await service.upstreams.look()
    writer = {"writer": _writer(service)}
    engines = {each.name: await _checks(service, each) for each in service.upstreams}
    if not service.upstreams.named:
        checks = {**writer, **engines[""]}
        return _ready(not (lacking := _lacking(checks)), lacking, {"checks": checks})
    lacking = [*_lacking(writer), *(f"engine {name}: {'; '.join(found)}" for name, checks in engines.items()
                                    if (found := _lacking(checks)))]
    serve = any(not _lacking(checks) for checks in engines.values())  # one is enough
    return _ready(not _lacking(writer) and serve, lacking, {"checks": writer, "engines": engines})


def _ready(ready: bool, lacking: list[str], told: dict[str, Any]) -> Json:
    if ready:
        return Json({"status": "ready", **told})
    message = f"not ready: {'; '.join(lacking)}"
    return Json({"status": "not ready", **told, "error": {
        "message": message, "type": "server_error", "param": None, "code": "not_ready"}}, 503)


def _lacking(checks: dict[str, str]) -> list[str]:
    """The checks that failed, and what they found."""
    return [f"{name}: {state}" for name, state in checks.items() if state != "ok"]


async def _checks(service: ApiService, upstream: Upstream) -> dict[str, str]:
    """The checks of an engine, with their results."""
    checks = {"engine": await _engine(service, upstream), "upstream": await _upstream(upstream)}
    if service.config.capture_all:
        checks["capture_all"] = await _capture_all(service, upstream)
    return checks


def _writer(service: ApiService) -> str:
    return "ok" if service.writer_alive else f"no answer at {service.config.endpoint}"


async def _engine(service: ApiService, upstream: Upstream) -> str:
    try:
        engine, lost = await service.read(lambda reader: _engine_and_lost(reader, upstream.name))
    except TapError as error:
        return str(error)
    if engine is None:
        none = f"none with VLLM_TAP_ENGINE={upstream.name}" if upstream.name else "none"
        return f"{none} has connected to the writer"
    leads = next((name for name, ranks in lost.items() if LEADER in ranks), None)
    return "ok" if leads is None else f"rank {LEADER} of {leads} has no sender any more: start it again"


async def _capture_all(service: ApiService, upstream: Upstream) -> str:
    """Whether the engine can do what is to be captured of requests that bring no spec."""
    try:
        engine, lost = await service.read(lambda reader: _engine_and_lost(reader, upstream.name))
        if engine is not None:
            resolved = resolve(parse_spec(service.config.capture_all), engine.armed, engine.widths)
            check_ranks(resolved, engine, lost)
    except PartLost as error:
        return error.message
    except TapError as error:
        return str(error)
    return "ok"


async def _upstream(upstream: Upstream) -> str:
    if upstream.name:
        return upstream.away or "ok"
    try:
        answer = await upstream.client.get("/health", timeout=2.0)
    except httpx.HTTPError as error:
        return f"no answer at {upstream.url} ({error or type(error).__name__})"
    return "ok" if answer.status_code == 200 else f"/health answers {answer.status_code}"


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    service = service_of(request)
    service.metrics.look(service.channel)
    if (followed := service.bucket or service.others) is not None:
        followed.tell()
    if service.bucket is None:
        service.pressure.tell()
        service.metrics.tell_pushes(await anyio.to_thread.run_sync(read_pushing, service.config.store))
    service.upstreams.tell()
    text = await anyio.to_thread.run_sync(generate_latest, service.metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


_OTHERS: Final = "What the model server answers, its errors included."
_PASSED: Final = {**answers(json_content({"object": "list"}), 408, 413, 502),
                  "4XX": {"description": _OTHERS, "content": json_content({"error": {"message": "…"}})}}
_COUNTED: Final = {"model": "Qwen/Qwen3-0.6B", "messages": [{"role": "user", "content": "Hello"}]}
_upstream_routes = APIRouter(tags=["upstream"], responses=_PASSED)


@_upstream_routes.get("/v1/models")
@_upstream_routes.get("/v1/models/{model:path}", openapi_extra={"parameters": [{
    "name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": "Qwen/Qwen3-0.6B"}]})
@_upstream_routes.get("/version")
@_upstream_routes.post("/tokenize", openapi_extra=body(_OBJECT, {"model": "Qwen/Qwen3-0.6B", "prompt": "Hello"}))
@_upstream_routes.post("/detokenize", openapi_extra=body(_OBJECT, {"model": "Qwen/Qwen3-0.6B", "tokens": [9707]}))
@_upstream_routes.post("/v1/messages/count_tokens", openapi_extra=body(_OBJECT, _COUNTED))
async def others(request: Request) -> Response:
    """vLLM's own routes, passed through."""
    service = service_of(request)
    try:
        data = await read_body(request, service.config.body_bytes_max)
        model = request.path_params.get("model")
        if request.method == "POST":
            asked = parse_body(data)
            model = asked.get("model")
            for each in named(asked):
                if each.is_sure:
                    raise BadParam(each.param, each.value, f"taken by {', '.join(GENERATIONS)} only")
        if service.upstreams.named and request.url.path == "/v1/models":
            return await _models(request)
        return await passed(service, request, data, await route_of(
            service, request, model, any_model=request.method == "GET"))
    except ClientGone:
        return Response(status_code=499)


async def _models(request: Request) -> Json:
    """Models of all engines that are up, or of the one that the request names: each with the names of who serves it."""
    upstreams = service_of(request).upstreams
    await upstreams.look()
    one = pinned(request, upstreams)
    found: dict[str, dict[str, Any]] = {}
    if not (up := [each for each in ([one] if one is not None else upstreams) if not each.away]):
        raise not_served(upstreams, one)
    for upstream in up:
        for name, model in upstream.models.items():
            found.setdefault(name, {**model, "engines": []})["engines"].append(upstream.name)
    return Json({"object": "list", "data": list(found.values())})


router.include_router(_upstream_routes)
