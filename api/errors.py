"""Every error as JSON in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

    ApiError                 an answer decided on in this package, with its status.
    ├── BadParam             a query parameter or body field: 400, naming field, value and what would be valid.
    ├── PartLost             a capture that needs a rank whose sender is gone: 503.
    └── OverQuota            the caller's captures would take more bytes than its key allows: 413.
    schemas.errors.TapError  mapped by ``status_of``.
    └── NotCaptured          a site or layer that the capture does not have: 404.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from schemas.errors import (
    ArgumentError,
    BucketError,
    CatalogError,
    ConflictError,
    CorruptError,
    EditError,
    LimitError,
    NotArmedError,
    NotFoundError,
    ProtocolError,
    SpecError,
    StoreError,
    TapError,
    shown,
)

__all__ = ["BROKEN", "CODES", "ApiError", "BadParam", "Json", "NotCaptured", "OverQuota", "PartLost", "as_api_error",
           "body_of", "error_response", "install", "several_captures", "stopped"]

log = logging.getLogger("vllm_tap.api")

class Code(NamedTuple):
    """A code's entry in docs/reference/errors.md: its status, when it comes, and what helps."""

    status: int  # 0: of several
    when: str
    cure: str


CODES: Final[dict[str, Code]] = {
    "malformed_json": Code(400, "The body is not a JSON object.", "Send a JSON object."),
    "invalid_capture": Code(400, "The spec has a field or value that is not valid, or that this model cannot serve.",
                            "Change what the message names."),
    "invalid_edit": Code(400, "The edits are not valid, or this model cannot make them. If only the engine can detect "
                         "the fault, the answer has vLLM's own code, and `param`. The same holds if there is no room "
                         "for rows of edits. The message then says whether to ask again.",
                         "Change what the message names."),
    "not_armed": Code(400, "The engine was started without this tap, or without this place armed for edits.",
                      "Ask for armed sites (`GET /v1/capabilities`), or start the engine with more in `--arm` or "
                      "`--edit`."),
    "invalid_parameter": Code(400, "A query parameter or a field of the body is unknown, or has a value that it cannot "
                              "have.", "Use a value that the message lists."),
    "several_captures": Code(400, "The name stands for several captures, and the route reads one.",
                             "Ask for one of the ids in the message."),
    "invalid_key": Code(401, "No key in use came with the request.",
                        "Send `Authorization: Bearer KEY` or `x-api-key: KEY`; `vllm-tap keys ls` lists keys."),
    "read_only": Code(403, "The service reads a bucket, and the request needs a writer or an engine, or deletes "
                      "without `--deletes`.", "Ask the service beside the writer."),
    "foreign_host": Code(403, "The service has no keys, and the request came from another machine, or from another "
                         "page in a browser (`Host`, `Origin`).", "Ask from this machine, or make a key."),
    "not_found": Code(404, "No such capture, site, layer, row, vector or route, or it belongs to another key. Or no "
                      "engine serves the model.", "Check the name; `GET /v1/captures` and `GET /v1/models` list them."),
    "no_such_key": Code(404, "The capture is there, and its Zarr view has no such key.",
                        "Open the hierarchy's root; its metadata names every array."),
    "method_not_allowed": Code(405, "The route has other methods.", "Use one that the header `Allow` lists."),
    "http_error": Code(0, "Any other refusal of the web framework.", "Read the message."),
    "not_acceptable": Code(406, "No format of the `Accept` header can be had.", "Give `format`, or another `Accept`."),
    "too_slow": Code(408, "The body did not come in time (`--body-s`).", "Send it faster, or in a smaller request."),
    "conflict": Code(409, "The capture id is taken; or the capture is held, not final, or in stores that this "
                     "service does not read; or the vector's name has other numbers.", "Choose another id or name; "
                     "release the hold; wait for the end; name all stores."),
    "gone": Code(410, "A chunk of a capture that is not there, or no longer.", "Open the capture anew."),
    "changed": Code(412, "`If-Match` names something else than what is there.", "Read it again."),
    "over_quota": Code(413, "The captures of the key would take more bytes than its quota.",
                       "Delete captures, ask for fewer rows, or raise the quota (`vllm-tap keys set`). Waiting helps "
                       "only if requests in flight end with less than they might have taken."),
    "too_large": Code(413, "Over a limit, decided before memory is taken.",
                      "Ask for less; `GET /v1/capabilities` has the limits."),
    "out_of_range": Code(416, "`start` or `Range` lies past everything that is there.",
                         "`Content-Range` says how much there is."),
    "too_many_slices": Code(429, "Slices being sent take too much memory. With keys, one key has half of it at most.",
                            "Ask again after `Retry-After`."),
    "too_many_followers": Code(429, "Too many streams of events are open. With keys, one key has half of them at most.",
                               "Ask again after `Retry-After`; one stream can follow many captures (`also`)."),
    "too_many_requests": Code(429, "More requests of one key are in flight than `--requests-in-flight-max`.",
                              "Ask again after `Retry-After`."),
    "too_many_generations": Code(429, "More generations of one key are in flight than `--generations-in-flight-max`.",
                                 "Ask again after `Retry-After`."),
    "corrupt": Code(500, "Stored bytes do not match their checksum.", "Run `vllm-tap fsck`; it names every bad row."),
    "internal": Code(500, "A fault of the service.", "Its log says which; report it."),
    "upstream_broken": Code(502, "The model server broke off, or its answer was not JSON.",
                            "See the engine's log; a generation may have begun."),
    "no_engine": Code(503, "No engine has connected to the writer, so nobody knows what it can do.",
                      "Wait for the engine's start. It needs the plugin and `VLLM_TAP_ENDPOINT`."),
    "upstream_unavailable": Code(503, "No connection to the model server.", "Ask again after `Retry-After`."),
    "missing_rows": Code(409, "A query of attention lacks rows, which the message names.",
                         "Ask with `missing=leave_out`: it leaves these queries out."),
    "store_unavailable": Code(503, "The writer is away, or the store cannot be read now.",
                              "Ask again; then see the writer's log."),
    "bucket_unavailable": Code(503, "The bucket refuses, does not answer in time, or has lost what its head names. The "
                               "message says which.",
                               "Ask again after `Retry-After`; then run `vllm-tap fsck --bucket`."),
    "catalog_unavailable": Code(503, "The Postgres server with the bucket's catalog refuses or does not answer, or its "
                                "catalog lags behind the bucket. The message says which.",
                                "Ask again after `Retry-After`; then run `vllm-tap push --catalog`."),
    "writer_refused": Code(503, "The writer refused a record of the service.", "See both logs; report it."),
    "part_lost": Code(503, "A rank of the engine that the capture needs has lost its sender. The message names "
                      "the rank, and what can still be asked for.", "Start the engine again; waiting does not help."),
    "captures_unavailable": Code(503, "On vLLM's own port: the service could not be started.",
                                 "Mend the reason in the message, and start vLLM again."),
    "not_ready": Code(503, "`GET /readyz`: the writer, the engine or the model server is not ready.",
                      "Wait for what the message names."),
    "stopping": Code(503, "The service is being stopped.", "Ask again after `Retry-After`."),
    "timeout": Code(504, "`wait` took longer than `timeout`.", "Ask again, or with a larger `timeout`."),
}

# The first class that fits wins, so a subclass stands before its base.
_STATUS: tuple[tuple[type[TapError], int, str], ...] = (
    (NotArmedError, 400, "not_armed"),
    (EditError, 400, "invalid_edit"),
    (ArgumentError, 400, "invalid_parameter"),
    (SpecError, 400, "invalid_capture"),
    (ConflictError, 409, "conflict"),
    (NotFoundError, 404, "not_found"),
    (LimitError, 413, "too_large"),
    (CorruptError, 500, "corrupt"),
    (StoreError, 503, "store_unavailable"),
    (BucketError, 503, "bucket_unavailable"),
    (CatalogError, 503, "catalog_unavailable"),
    (ProtocolError, 503, "writer_refused"),
)


class NotCaptured(NotFoundError):
    """A site or layer that a capture does not have; ``param`` is the parameter that names it."""

    def __init__(self, param: str, value: str, has: str) -> None:
        super().__init__(f"{param} = {value}: {has}")
        self.param = param


class ApiError(Exception):
    """An error answer; ``message`` says what is wrong and what would help."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.headers = dict(headers or {})


class BadParam(ApiError):
    """A parameter with a value that it cannot have."""

    def __init__(self, param: str, value: object, valid: str) -> None:
        super().__init__(400, "invalid_parameter", f"{param} = {shown(value)}: {valid}", param)


def several_captures(ref: str, captures: Sequence[str]) -> ApiError:
    """The answer to a request that needs one capture and gives a name that several have."""
    shown = ", ".join(captures[:8]) + (", …" if len(captures) > 8 else "")
    return ApiError(400, "several_captures", f"{ref!r} names {len(captures)} captures; ask for one: {shown}",
                    param="ref")


def stopped() -> ApiError:
    """The answer where this service is being stopped."""
    return ApiError(503, "stopping", "the service is being stopped", headers={"Retry-After": "5"})


class PartLost(ApiError):
    """Refusal of a capture that needs rows of a rank whose sender is gone: only a new start of its engine helps."""

    def __init__(self, message: str, param: str = "capture") -> None:
        super().__init__(503, "part_lost", message, param)


class OverQuota(ApiError):
    """Refusal of captures that an owner's quota has no room for; not 429, since asking again changes little."""

    def __init__(self, owner: str, used: int, coming: int, more: int, quota: int) -> None:
        """``used``: bytes that there are. ``coming``: bytes that requests in flight may add. ``more``: bytes that this
        request's captures would take.
        """
        others = f"requests in flight may yet add {coming}, " if coming else ""
        super().__init__(413, "over_quota", f"the captures of {owner!r} take {used} bytes, {others}this request's "
                         f"would take about {more}, quota {quota}; delete some, or ask for fewer rows or a larger "
                         "quota (vllm-tap keys set); without a capture the request is served", "capture")


def status_of(error: TapError) -> tuple[int, str]:
    """HTTP status and code of one of the shared errors."""
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            return status, code
    return 500, "internal"


def body(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


BROKEN: Final = (ApiError, TapError, sqlite3.Error, OSError)  # what reading the store may end with


def body_of(error: Exception) -> dict[str, Any]:
    """The error object of an error in ``BROKEN``, for an answer that has begun."""
    if isinstance(error, ApiError | TapError):
        told = as_api_error(error)
        return body(told.status, told.code, told.message, told.param)
    return body(503, "store_unavailable", f"the store cannot be read now: {error}")


def as_api_error(error: ApiError | TapError) -> ApiError:
    """The answer to an error of any kind."""
    return error if isinstance(error, ApiError) else ApiError(*status_of(error), str(error), _param_of(error))


def _param_of(error: TapError) -> str | None:
    if isinstance(error, SpecError):
        return error.name_of(error.field)
    return error.param if isinstance(error, NotCaptured) else None


class Json(Response):
    """JSON in ASCII: callers and upstream may send halves of surrogate pairs, which UTF-8 cannot hold."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def error_response(status: int, code: str, message: str, param: str | None = None,
                   headers: Mapping[str, str] | None = None) -> Json:
    """The error object as an answer."""
    return Json(body(status, code, message, param), status, headers=dict(headers or {}))


def tap_response(error: TapError) -> Json:
    """Any shared error as an answer."""
    status, code = status_of(error)
    headers = {"Retry-After": "1"} if status == 503 else None
    return error_response(status, code, str(error), _param_of(error), headers)


def _methods(request: Request) -> list[str]:
    """Methods of the path, by any of its routes; the framework names those of the first alone."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods)


def refused_parameter(request: Request, error: dict[str, Any]) -> Json:
    """The answer to the first of pydantic's errors about a query: the parameter's description says what is valid."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, TapError):  # of a check of our own
        return tap_response(cause)
    name, value = str(error["loc"][1]), error["input"]
    fields = {name: field for each in request.scope["route"].dependant.query_params
              for name, field in each.field_info.annotation.model_fields.items()}
    refusal = BadParam(name, value, f"valid: {fields[name].description}" if name in fields else
                       f"unknown parameter; valid: {', '.join(fields)}")
    return error_response(refusal.status, refusal.code, refusal.message, refusal.param)


def install(app: FastAPI) -> None:
    """Gives every error of ``app``, the framework's own included, this shape."""

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> Json:
        return error_response(error.status, error.code, error.message, error.param, error.headers)

    @app.exception_handler(TapError)
    async def _tap(request: Request, error: TapError) -> Json:
        if status_of(error)[0] >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, error)
        return tap_response(error)

    @app.exception_handler(sqlite3.Error)
    async def _sqlite(request: Request, error: sqlite3.Error) -> Json:
        log.warning("%s %s: catalog: %r", request.method, request.url.path, error)
        return error_response(503, "store_unavailable", f"the catalog cannot be read now: {error}",
                              headers={"Retry-After": "1"})

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Json:
        path = request.url.path[:200]
        message, code = {
            404: (f"nothing is served at {path!r}; see /openapi.json", "not_found"),
            405: (f"{request.method} is not possible at {path!r}", "method_not_allowed"),
        }.get(error.status_code, (str(error.detail), "http_error"))
        headers = {"Allow": ", ".join(_methods(request))} if error.status_code == 405 else error.headers
        return error_response(error.status_code, code, message, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> Json:
        return refused_parameter(request, error.errors()[0])

    @app.exception_handler(Exception)
    async def _any(request: Request, error: Exception) -> Json:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(500, "internal", "the service failed on this request; its log says why")
