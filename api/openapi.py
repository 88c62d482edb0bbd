"""``GET /openapi.json``: the framework knows the routes; what they take, answer and refuse is told here.

Parameters are strings to the framework, since errors name them in this service's own words; here are their true
schemas, with examples, and the statuses of every operation.
"""

from __future__ import annotations

import re
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.measures import MEASURES
from api.protocols import PROTOCOLS
from api.slices.formats import DTYPES, FORMATS, MEDIA_TYPES
from schemas import limits
from schemas.manifest import STATUSES
from schemas.sites import BY_MODEL, SITES
from schemas.spec import CaptureSpec

__all__ = ["describe"]

Schema = dict[str, Any]

_ULID: Final = "01KBJ8Z6X4R2T0N5QW3E7M9YHC"
_LENS: Final = [name for site in SITES.values() for name in site.lens] + [
    name for named in BY_MODEL.values() for name in named.lens]
_SUFFIXES: Final = sorted({re.escape(name.removeprefix("blocks.{l}.")) for name in _LENS if "{l}" in name})
_LAYERED: Final = "|".join(name for name, site in SITES.items() if site.per_layer)
_ONCE: Final = sorted({*SITES, *(name for name in _LENS if "{l}" not in name)})
_SITE: Final[Schema] = {"anyOf": [
    {"type": "string", "pattern": r"^probe\.[A-Za-z0-9][A-Za-z0-9_-]{0,63}(\.[0-9]{1,4})?$"},
    {"type": "string", "enum": _ONCE}, {"type": "string", "pattern": rf"^({_LAYERED})\.[0-9]{{1,4}}$"},
    {"type": "string", "pattern": rf"^blocks\.[0-9]{{1,4}}\.({'|'.join(_SUFFIXES)})$"}]}
_POSITION: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": limits.position_max}
_TEXT: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": limits.filter_chars_max}
_MOMENT: Final[Schema] = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 10**15 - 1},
                                    {"type": "string", "format": "date-time"}]}
_REF: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": limits.alias_chars_max,
                       "pattern": r"^[A-Za-z0-9_:@+=~-][A-Za-z0-9._:@+=~-]*$"}

# By name: the schema and an example. Repeatable ones are lists.
_PARAMETERS: Final[dict[str, tuple[Schema, Any]]] = {
    "ref": (_REF, _ULID),
    "model": ({"type": "string"}, "Qwen/Qwen3-0.6B"),
    "limit": ({"type": "integer", "minimum": 1, "maximum": limits.captures_page_max, "default": 100}, 20),
    "before": ({"type": "string", "pattern": r"^[0-7][0-9A-HJKMNP-TV-Z]{25}(\.(0|[1-9][0-9]{0,5}))?$"}, _ULID),
    "status": ({"type": "string", "enum": list(STATUSES)}, "complete"),
    "tag": ({"type": "array", "items": _TEXT, "maxItems": limits.filter_tags_max}, ["run=a"]),
    "since": (_MOMENT, "2026-01-31T12:00:00Z"),
    "until": (_MOMENT, 1769860800000),
    "text": (_TEXT, "chatcmpl"),
    "wait": ({"type": "string", "enum": ["complete", "rows"]}, "complete"),
    "timeout": ({"type": "number", "minimum": 0, "maximum": limits.wait_timeout_s_max, "default": 10}, 5),
    "site": (_SITE, "resid_post"),
    "layer": ({"type": "array", "items": {"type": "string", "pattern": (
        r"^(all|[0-9]{1,4}(,[0-9]{1,4})*|(-?[0-9]{1,4})?:(-?[0-9]{1,4})?(:[1-9][0-9]{0,3})?)$")}}, ["0,12"]),
    "start": (_POSITION, 0),
    "stop": ({**_POSITION, "minimum": 1}, 16),
    "positions": ({"type": "string", "pattern": r"^[0-9]{1,9}(:[0-9]{1,9})?(,[0-9]{1,9}(:[0-9]{1,9})?)*$"},
                  "0,5,8:12"),
    "format": ({"type": "string", "enum": list(FORMATS)}, "safetensors"),
    "dtype": ({"type": "string", "enum": list(DTYPES)}, "float32"),
    "rows": ({"type": "string", "enum": ["accepted", "rejected"]}, "accepted"),
    "after": ({"type": "integer", "minimum": 0, "maximum": 10**18 - 1}, 17),
    "measure": ({"type": "string", "enum": list(MEASURES)}, "norm"),
    "position": (_POSITION, 3),
    "against": (_REF, _ULID),
    "also": ({"type": "array", "items": _REF, "maxItems": limits.watched_max - 1}, [_ULID]),
}
# Where an operation takes less, or more than one.
_NARROWER: Final[dict[tuple[str, str, str], Schema]] = {
    ("get", "/v1/captures", "model"): _TEXT,
    ("get", "/v1/captures/{ref}", "wait"): {"type": "string", "enum": ["complete"]},
    ("get", "/v1/captures/{ref}/activations", "site"): {
        "type": "array", "items": _SITE, "maxItems": limits.spec_sites_max},
    ("get", "/v1/captures/{ref}/events", "site"): {"type": "array", "items": _SITE, "maxItems": limits.watched_max},
    ("get", "/v1/captures/{ref}/live", "dtype"): {
        "type": "string", "enum": [each for each in DTYPES if each != "codes"]},
    ("get", "/v1/captures/{ref}/map", "measure"): {
        "type": "string", "enum": [each for each in MEASURES if each != "projection"]},
    ("post", "/v1/captures/{ref}/map", "measure"): {"type": "string", "const": "projection"},
}

_ERROR: Final[Schema] = {
    "type": "object", "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"], "properties": {
        "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "integer", "null"]}}}},
}
_SPEC_EXAMPLE: Final = {"sites": ["resid_post"], "layers": "::4", "positions": "all", "tags": {"run": "a"}}
_FIELD: Final = {"id": _ULID, "ids": [_ULID], "status": "complete", "manifest_url": f"/v1/captures/{_ULID}",
                 "activations_url": f"/v1/captures/{_ULID}/activations"}
_EVENT: Final[Schema] = {"description": "Of one event.", "type": "object", "properties": {
    "event": {"type": "string"}, "id": {"type": "string"}, "data": {"type": "string"}}}
_BINARY: Final[Schema] = {"type": "string", "format": "binary"}


def _json(example: Any) -> Schema:
    return {"application/json": {"schema": {"type": "object"}, "example": example}}


def _events(example: str) -> Schema:
    return {"text/event-stream": {"schema": _EVENT, "example": example}}


_OTHERS: Final = "What the model server answers, its errors included."
_ROW: Final = {"id": _ULID, "owner": "", "status": "complete", "created_ms": 1769860800000, "tags": {"run": "a"},
               "aliases": [f"cmpl-{_ULID}"], "sites": ["resid_post"], "prompt_len": 5, "total_len": 13,
               "finish_reason": "length", "hold": False, "adapter": ""}
_PROGRESS: Final = (f'event: finish\ndata: {{"id":"{_ULID}","status":"complete","expected":12,"captured":12,'
                    '"missing":0,"prompt_len":5,"total_len":13,"finish_reason":"length"}\n\n')
_LIVE: Final = (f'event: rows\nid: 17\ndata: {{"id":"{_ULID}","site":"resid_post","layers":[0],"positions":[5],'
                '"token_ids":[198],"flags":[1],"durable":false,"dtype":"float32","shape":[1,1,2],'
                '"values":"AACAPwAAAEA="}\n\n')
_MAP: Final = {"capture": _ULID, "site": "resid_post", "measure": "norm", "layers": [0], "start": 0, "stop": 2,
               "token_ids": [9707, 11], "values": [[12.5, 3.25]], "missing": []}

# By operation: what a good answer holds, and which errors there are beside those of every route.
_ANSWERS: Final[dict[tuple[str, str], tuple[Schema, tuple[int, ...]]]] = {
    ("get", "/v1/captures"): (_json({"object": "list", "data": [_ROW], "next": None}), (400, 404)),
    ("get", "/v1/captures/{ref}"): (_json({"id": _ULID, "status": "complete", "prompt_len": 5, "total_len": 13,
                                           "expected": 12, "captured": 12, "missing": 0}), (400, 404)),
    ("get", "/v1/captures/{ref}/activations"): (
        {**{kinds[0]: {"schema": _BINARY} for name, kinds in MEDIA_TYPES.items() if name != "json"},
         **_json({"capture": _ULID, "positions": [0], "token_ids": [9707], "arrays": {"resid_post.0": [[1.0, 2.0]]}})},
        (400, 404, 406, 413, 416, 504)),
    ("get", "/v1/captures/{ref}/events"): (_events(_PROGRESS), (400, 404)),
    ("get", "/v1/captures/{ref}/live"): (_events(_LIVE), (400, 404)),
    ("get", "/v1/captures/{ref}/map"): (_json(_MAP), (400, 404, 413, 416)),
    ("post", "/v1/captures/{ref}/map"): (_json({**_MAP, "measure": "projection"}), (400, 404, 408, 413, 416)),
    ("get", "/v1/captures/{ref}/tokens"): (
        _json({"capture": _ULID, "start": 0, "stop": 2, "token_ids": [9707, 11], "texts": ["Hello", ","]}),
        (400, 404, 416)),
    ("get", "/v1/capabilities"): (_json({"armed": {"resid_post": {"layers": [0, 1], "width": 1024}},
                                         "formats": list(FORMATS), "limits": {"slice_bytes_max": 1 << 30}}), ()),
    ("get", "/healthz"): (_json({"status": "ok"}), ()),
    ("get", "/readyz"): (_json({"status": "ready", "checks": {"writer": "ok", "engine": "ok", "upstream": "ok"}}), ()),
    ("get", "/metrics"): ({"text/plain": {"schema": {"type": "string"}, "example": "vllm_tap_api_writer_alive 1.0\n"}},
                          ()),
}
_SAID: Final = [{"type": "text", "text": " Paris"}]
_GENERATED: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"object": "text_completion", "choices": [{"index": 0, "text": " Paris"}]},
    "/v1/chat/completions": {"object": "chat.completion", "choices": [
        {"index": 0, "message": {"role": "assistant", "content": " Paris"}}]},
    "/v1/responses": {"object": "response", "output": [{"type": "message", "role": "assistant", "content": _SAID}]},
    "/v1/messages": {"type": "message", "role": "assistant", "content": _SAID},
}


def _generation(prompt: Schema, example: dict[str, Any], bound: str = "max_tokens", samples: bool = True) -> Schema:
    n: Schema = {"n": {"type": "integer", "minimum": 1}} if samples else {}
    return {
        "required": True,
        "content": {"application/json": {
            "schema": {
                "type": "object", "required": ["model", *prompt],
                "properties": {
                    "model": {"type": "string"}, **prompt, bound: {"type": "integer", "minimum": 1},
                    **n, "stream": {"type": "boolean"},
                    "capture": {"anyOf": [{"$ref": "#/components/schemas/CaptureSpec"}, {"type": "null"}]}},
                "description": "vLLM's own body, every field of it, plus `capture`."},
            "example": {"model": "Qwen/Qwen3-0.6B", bound: 8, **example, "capture": _SPEC_EXAMPLE}}},
    }


_MESSAGE: Final[Schema] = {"type": "object", "required": ["role", "content"], "properties": {
    "role": {"type": "string", "enum": ["system", "user", "assistant"]}, "content": {"type": "string"}}}
_TOKENS: Final[Schema] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_BODIES: Final[dict[tuple[str, str], Schema]] = {
    ("post", "/v1/completions"): _generation({"prompt": {"anyOf": [
        {"type": "string"}, _TOKENS, {"type": "array", "minItems": 1, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "items": _TOKENS}]}}, {"prompt": "The capital of France is"}),
    ("post", "/v1/chat/completions"): _generation(
        {"messages": {"type": "array", "minItems": 1, "items": _MESSAGE}},
        {"messages": [{"role": "user", "content": "Hello"}]}),
    ("post", "/v1/responses"): _generation({"input": {"anyOf": [
        {"type": "string"}, {"type": "array", "minItems": 1, "items": _MESSAGE}]}}, {"input": "Hello"},
        "max_output_tokens", samples=False),
    ("post", "/v1/messages"): _generation(
        {"messages": {"type": "array", "minItems": 1, "items": _MESSAGE}},
        {"messages": [{"role": "user", "content": "Hello"}]}, samples=False),
    ("post", "/v1/captures/{ref}/map"): {
        "required": True, "content": {"application/octet-stream": {"schema": _BINARY}}},
}
_PASSED: Final[dict[str, Any]] = {
    "/v1/messages/count_tokens": {"model": "Qwen/Qwen3-0.6B", "messages": [{"role": "user", "content": "Hello"}]},
    "/tokenize": {"model": "Qwen/Qwen3-0.6B", "prompt": "Hello"},
    "/detokenize": {"model": "Qwen/Qwen3-0.6B", "tokens": [9707]},
}
_WHY: Final = {
    400: "The request cannot be honoured as it is.", 401: "No key in use came with the request.",
    403: "A foreign Host header, on a service without keys.", 404: "Nothing under that name.",
    408: "The body did not come in time.",
    406: "No format of the Accept header can be had.", 409: "The capture's id is taken, or the capture is held.",
    413: "Over a limit, which the message names.", 416: "Past everything that is there.",
    429: "Too much at once: ask again in a moment.", 500: "A fault of the service, or damaged bytes.",
    502: "The model server broke off.", 503: "Something that is needed is away.", 504: "The time to wait is over.",
}


def describe(app: FastAPI) -> None:
    """Makes ``app.openapi()`` answer the whole description."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    found["components"] = {
        "schemas": {"CaptureSpec": CaptureSpec.model_json_schema(), "Error": _ERROR},
        "securitySchemes": {"Bearer": {"type": "http", "scheme": "bearer"},
                            "Key": {"type": "apiKey", "in": "header", "name": "x-api-key"}},
    }
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            _describe(operation, method, path)
    return found


def _describe(operation: dict[str, Any], method: str, path: str) -> None:
    names = set(re.findall(r"\{([a-z]+)\}", path)) - {each["name"] for each in operation.get("parameters", ())}
    operation.setdefault("parameters", []).extend({"name": name, "in": "path", "required": True} for name in names)
    asked = "get" if method == "head" else method
    for parameter in operation["parameters"]:
        schema, example = _PARAMETERS[parameter["name"]]
        parameter["schema"] = schema = _NARROWER.get((asked, path, parameter["name"]), schema)
        example = schema.get("const", example)
        parameter["example"] = [example] if schema.get("type") == "array" and not isinstance(example, list) else example
    if path != "/healthz":
        operation["security"] = [{"Bearer": []}, {"Key": []}]
    if body := _BODIES.get((method, path)):
        operation["requestBody"] = body
    elif path in _PASSED:
        operation["requestBody"] = {"required": True, "content": {
            "application/json": {"schema": {"type": "object"}, "example": _PASSED[path]}}}
    errors: tuple[int | str, ...] = (401, 403, 429, 500, 503) if path != "/healthz" else ()
    if (asked, path) in _ANSWERS:
        content, more = _ANSWERS[asked, path]
        good: Schema = {"200": {"description": "The answer.", "content": content}}
        errors += more
        if path.endswith("/activations"):
            good |= {"206": {"description": "A part of it.", "content": content},
                     "304": {"description": "The slice is as it was."}}
    elif method == "delete" or path.endswith("/hold"):
        good, errors = {"204": {"description": "Done, durably."}}, (*errors, 404, 409)
    elif protocol := PROTOCOLS.get(path):
        answer = {"id": f"{protocol.id_prefix}{_ULID}", **_GENERATED[path], "capture": _FIELD}
        good = {"200": {"description": "vLLM's answer, plus `capture`.", "content": {
            **_json(answer), **_events(f"{protocol.ends[0].decode().strip()}\n\n")}}}
        errors += (400, 404, 408, 409, 413, 502)
    else:
        good = {"200": {"description": _OTHERS, "content": _json({"object": "list"})},
                "4XX": {"description": _OTHERS, "content": _json({"error": {"message": "…"}})}}
        errors += (408, 413, 502)
    operation["responses"] = {**good, **{str(status): {
        "description": _WHY.get(status, _OTHERS) if isinstance(status, int) else status,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}, "example": {"error": {
            "message": "limit = '0': valid: 1 to 1000", "type": "invalid_request_error", "param": "limit",
            "code": "invalid_parameter"}}}}} for status in sorted(errors, key=str)}}
    if method == "head":
        for answer in operation["responses"].values():
            answer.pop("content", None)
        del operation["responses"]["206"]
