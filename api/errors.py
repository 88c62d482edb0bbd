"""Every error as JSON in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

    ApiError                 an answer decided on in this package, with its status
    ├── BadParam             a query parameter or body field: 400, naming field, value and what would be valid
    └── OverQuota            the caller's captures would take more bytes than its key allows: 413
    schemas.errors.TapError  mapped by ``status_of``
    └── NotCaptured          a site or layer that the capture does not have: 404
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from schemas.errors import (
    ArgumentError,
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

__all__ = ["BROKEN", "ApiError", "BadParam", "Json", "NotCaptured", "OverQuota", "body_of", "error_response", "install",
           "several_captures", "stopped"]

log = logging.getLogger("vllm_tap.api")

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
    """The answer where one capture is needed, and a name stands for several."""
    shown = ", ".join(captures[:8]) + (", …" if len(captures) > 8 else "")
    return ApiError(400, "several_captures", f"{ref!r} names {len(captures)} captures; ask for one: {shown}",
                    param="ref")


def stopped() -> ApiError:
    """The answer where this service is being stopped."""
    return ApiError(503, "stopping", "the service is being stopped", headers={"Retry-After": "5"})


class OverQuota(ApiError):
    """Refusal of captures that an owner's quota has no room for; not 429, since asking again changes little."""

    def __init__(self, owner: str, used: int, coming: int, more: int, quota: int) -> None:
        """Bytes that there are, that requests in flight may yet add, that this one's captures would take."""
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
    """The error object of what is in ``BROKEN``, where it is a part of an answer that has begun."""
    if isinstance(error, ApiError):
        return body(error.status, error.code, error.message, error.param)
    if isinstance(error, TapError):
        return body(*status_of(error), str(error), _param_of(error))
    return body(503, "store_unavailable", f"the store cannot be read now: {error}")


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
