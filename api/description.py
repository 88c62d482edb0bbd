"""``GET /openapi.json``: FastAPI knows routes and parameters; answers, errors and bodies are told here."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from api.parameters import ULID
from api.protocols import Protocol
from schemas import limits
from schemas.edits.spec import EditSpec
from schemas.spec import CaptureSpec

__all__ = ["DONE", "REFUSED", "answers", "body", "describe", "event_content", "generation_answers", "generation_body",
           "json_content"]

Schema = dict[str, Any]

_ERROR: Final[Schema] = {
    "type": "object", "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"], "properties": {
        "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "integer", "null"]}}}},
    "example": {"error": {"message": "limit = '0': valid: 1 to 1000", "type": "invalid_request_error",
                          "param": "limit", "code": "invalid_parameter"}},
}
_EVENT: Final[Schema] = {"description": "Of one event.", "type": "object", "properties": {
    "event": {"type": "string"}, "id": {"type": "string"}, "data": {"type": "string"}}}
_WHY: Final = {
    400: "The request cannot be honoured as it is.", 401: "No key in use came with the request.",
    403: "A foreign Host header, on a service without keys.", 404: "Nothing under that name.",
    406: "No format of the Accept header can be had.", 408: "The body did not come in time.",
    409: "The capture's id is taken, the capture is held or not final, or the vector's name has other numbers.",
    410: "Gone: there is no such capture, or no longer.", 412: "Not what If-Match names.",
    413: "Over a limit, which the message names.",
    416: "Past everything that is there.", 429: "Too much at once: ask again in a moment.",
    500: "A fault of the service, or damaged bytes.", 502: "The model server broke off.",
    503: "Something that is needed is away.", 504: "The time to wait is over.",
}


def json_content(example: Any) -> Schema:
    """The content of an answer in JSON."""
    return {"application/json": {"schema": {"type": "object"}, "example": example}}


def event_content(example: str) -> Schema:
    """The content of an answer in server-sent events."""
    return {"text/event-stream": {"schema": _EVENT, "example": example}}


def _refusals(*statuses: int) -> dict[int | str, Schema]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _WHY[status], "content": error} for status in statuses}


def answers(content: Schema, *refused: int) -> dict[int | str, Schema]:
    """The ``responses`` of a route: a good answer's content, and the errors beside those of every route."""
    return {200: {"description": "The answer.", "content": content}, **_refusals(*refused)}


REFUSED: Final = _refusals(401, 403, 429, 500, 503)  # by every route
DONE: Final = {204: {"description": "Done, durably."}, **_refusals(404, 409)}

_MESSAGES: Final[Schema] = {"type": "array", "minItems": 1, "items": {
    "type": "object", "required": ["role", "content"], "properties": {
        "role": {"type": "string", "enum": ["system", "user", "assistant"]}, "content": {"type": "string"}}}}
_TOKENS: Final[Schema] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT: Final[Schema] = {"type": "string"}
_HELLO: Final = [{"role": "user", "content": "Hello"}]
_SAID: Final = [{"type": "text", "text": " Paris"}]
# By route: the prompt's field, its schema and an example, and what an answer holds.
_GENERATIONS: Final[dict[str, tuple[str, Schema, Any, Schema]]] = {
    "/v1/completions": (
        "prompt", {"anyOf": [_TEXT, _TOKENS, *({"type": "array", "minItems": 1, "items": each}
                                               for each in (_TEXT, _TOKENS))]}, "The capital of France is",
        {"object": "text_completion", "choices": [{"index": 0, "text": " Paris"}]}),
    "/v1/chat/completions": ("messages", _MESSAGES, _HELLO, {"object": "chat.completion", "choices": [
        {"index": 0, "message": {"role": "assistant", "content": " Paris"}}]}),
    "/v1/responses": ("input", {"anyOf": [_TEXT, _MESSAGES]}, "Hello", {"object": "response", "output": [
        {"type": "message", "role": "assistant", "content": _SAID}]}),
    "/v1/messages": ("messages", _MESSAGES, _HELLO, {"type": "message", "role": "assistant", "content": _SAID}),
}


def body(schema: Schema, example: Any) -> Schema:
    """The ``openapi_extra`` of a route with a body in JSON."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


def generation_body(protocol: Protocol) -> Schema:
    """The ``openapi_extra`` of a route that generates."""
    prompt, schema, example, _ = _GENERATIONS[protocol.path]
    bound = protocol.bounds[-1]
    count: Schema = {"n": {"type": "integer", "minimum": 1}} if protocol.samples else {}
    return body({
        "type": "object", "required": ["model", prompt],
        "properties": {"model": _TEXT, prompt: schema, bound: {"type": "integer", "minimum": 1}, **count,
                       "stream": {"type": "boolean"},
                       "capture": {"anyOf": [{"$ref": "#/components/schemas/CaptureSpec"}, {"type": "null"}]},
                       "edit": {"anyOf": [{"type": "array", "maxItems": limits.edits_of_rows_max,
                                           "items": {"$ref": "#/components/schemas/EditSpec"}}, {"type": "null"}]}},
        "description": "vLLM's own body, every field of it, plus `capture` and `edit`.",
    }, {"model": "Qwen/Qwen3-0.6B", bound: 8, prompt: example,
        "capture": {"sites": ["resid_post"], "layers": "::4", "positions": "all", "tags": {"run": "a"}}})


def generation_answers(protocol: Protocol) -> dict[int | str, Schema]:
    """The ``responses`` of a route that generates."""
    field = {"id": ULID, "ids": [ULID], "status": "complete", "manifest_url": f"/v1/captures/{ULID}",
             "activations_url": f"/v1/captures/{ULID}/activations"}
    answer = {"id": f"{protocol.id_prefix}{ULID}", **_GENERATIONS[protocol.path][3], "capture": field}
    return answers({**json_content(answer), **event_content(f"{protocol.ends[0].decode().strip()}\n\n")},
                   400, 404, 408, 409, 413, 502)


def describe(app: FastAPI) -> None:
    """Makes ``app.openapi()`` answer the whole description."""

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schemas(model: type[BaseModel]) -> Schema:
    """A model's schema and those of its parts, by name: a reference is looked up in the whole description."""
    found = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**found.pop("$defs", {}), model.__name__: found}


def _described(app: FastAPI) -> Schema:
    found = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    found["components"] = {
        "schemas": {**_schemas(CaptureSpec), **_schemas(EditSpec), "Error": _ERROR},
        "securitySchemes": {"Bearer": {"type": "http", "scheme": "bearer"},
                            "Key": {"type": "apiKey", "in": "header", "name": "x-api-key"}},
    }
    found["security"] = [{"Bearer": []}, {"Key": []}]
    for operations in found["paths"].values():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)  # FastAPI's own, which is 400 here
            for parameter in operation.get("parameters", ()):
                given = [each for each in parameter["schema"].get("anyOf", ()) if each != {"type": "null"}]
                if len(given) == 1:  # what may be left out cannot be sent as null
                    del parameter["schema"]["anyOf"]
                    parameter["schema"] |= given[0]
            if method == "head":
                for answer in operation["responses"].values():
                    answer.pop("content", None)
    return found
