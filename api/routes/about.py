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
from api.errors import BadParam, Json
from api.generate.generation import parse_body
from api.generate.upstream import ClientGone, passed, read_body
from api.service import ApiService, service_of
from api.slices.formats import DTYPES, FORMATS, available_formats
from schemas import limits
from schemas.bodies import named
from schemas.codecs import CODECS, DEFAULT_CODEC
from schemas.errors import TapError
from schemas.sites import SITES, lens_name
from schemas.spec import parse_spec, resolve
from schemas.wire.messages import EngineInfo

router = APIRouter(tags=["service"])
_OBJECT: Final = {"type": "object"}

_LIMITS = ("spec_", "edit", "vector", "tag_", "capture", "slice", "map", "wait_", "alias_")


@router.get("/v1/capabilities", responses=answers(json_content({
    "armed": {"resid_post": {"layers": [0, 1], "width": 1024, "meaning": "residual stream leaving the block",
                             "transformer_lens": "blocks.{l}.hook_resid_post", "source": "table"}},
    "formats": list(FORMATS),
    "limits": {"slice_bytes_max": 1 << 30}})))
async def capabilities(request: Request) -> Json:
    """Sites that can be captured here and how rows can be read; ``engine`` is null until one has connected."""
    service = service_of(request)
    try:
        engine = await service.read(lambda reader: reader.engine())
    except TapError:
        engine = None
    return Json({
        "engine": None if engine is None else msgspec.to_builtins(engine),
        "armed": {} if engine is None else {site: _armed(engine, site) for site in engine.armed.sites},
        "probes": {} if engine is None else {
            name: {"site": probe.site, "layer": probe.layer, "k": len(probe.names), "names": probe.names,
                   "activation": probe.activation, "meaning": probe.meaning}
            for name, probe in engine.armed.probes.items()},
        "edits": {} if engine is None or engine.edits is None else {
            "armed": engine.edits.layers, "depth": engine.edits.depth, "rows": engine.edits.rows,
            "vectors": engine.edits.vectors},
        "codecs": {name: {"meaning": codec.meaning, "error": codec.error, "default": name == DEFAULT_CODEC,
                          "sites": list(codec.sites), "decoded": codec.decoded,
                          "parameters": {p.name: {"meaning": p.meaning, "min": p.low, "max": p.high,
                                                  "default": p.default} for p in codec.parameters}}
                   for name, codec in CODECS.items()},
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


def _armed(engine: EngineInfo, site: str) -> dict[str, Any]:
    return {"layers": engine.armed.sites[site], "width": engine.widths.get(site),
            "meaning": engine.meaning.get(site, SITES[site].meaning),
            "transformer_lens": lens_name(site, engine.armed.names), "source": engine.sources.get(site)}


@router.get("/healthz", openapi_extra={"security": []}, responses=answers(json_content({"status": "ok"})))
async def healthz() -> Json:
    """200 while the process lives."""
    return Json({"status": "ok"})


@router.get("/readyz", responses=answers(json_content({
    "status": "ready", "checks": {"writer": "ok", "engine": "ok", "upstream": "ok"}})))
async def readyz(request: Request) -> Json:
    """200 when a generation with a capture can be served, else 503 naming what is not ready."""
    service = service_of(request)
    checks = {"writer": _writer(service), "engine": await _engine(service), "upstream": await _upstream(service)}
    if service.config.capture_all:
        checks["capture_all"] = await _capture_all(service)
    ready = all(state == "ok" for state in checks.values())
    if ready:
        return Json({"status": "ready", "checks": checks})
    lacking = "; ".join(f"{name}: {state}" for name, state in checks.items() if state != "ok")
    return Json({"status": "not ready", "checks": checks, "error": {
        "message": f"not ready: {lacking}", "type": "server_error", "param": None, "code": "not_ready"}}, 503)


def _writer(service: ApiService) -> str:
    return "ok" if service.channel.alive else f"no answer at {service.config.endpoint}"


async def _engine(service: ApiService) -> str:
    try:
        engine = await service.read(lambda reader: reader.engine())
    except TapError as error:
        return str(error)
    return "ok" if engine is not None else "none has connected to the writer"


async def _capture_all(service: ApiService) -> str:
    """Whether the engine can do what is to be captured of requests that bring no spec."""
    try:
        engine = await service.read(lambda reader: reader.engine())
        if engine is not None:
            resolve(parse_spec(service.config.capture_all), engine.armed, engine.widths)
    except TapError as error:
        return str(error)
    return "ok"


async def _upstream(service: ApiService) -> str:
    try:
        answer = await service.upstream.get("/health", timeout=2.0)
    except httpx.HTTPError as error:
        return f"no answer at {service.config.upstream} ({error or type(error).__name__})"
    return "ok" if answer.status_code == 200 else f"/health answers {answer.status_code}"


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    service = service_of(request)
    service.metrics.look(service.channel)
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
        if request.method == "POST":
            asked = parse_body(data)
            for each in named(asked):
                if each.is_sure:
                    raise BadParam(each.param, each.value, f"taken by {', '.join(GENERATIONS)} only")
        return await passed(service, request, data)
    except ClientGone:
        return Response(status_code=499)


router.include_router(_upstream_routes)
