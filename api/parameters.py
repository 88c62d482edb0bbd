"""Parameters of the routes as FastAPI checks and describes them: a model of each query, and the types they share.

A parameter's description says what is valid: the refusal of a value quotes it (``errors.refused_parameter``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final, get_origin

from fastapi import Path
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from api.errors import BadParam
from api.service import check_ref
from schemas import limits
from schemas.errors import ArgumentError
from schemas.sites import BY_MODEL, SITES, ask_site

__all__ = ["ULID", "EventId", "OneSite", "Parameters", "Position", "RangeParameters", "Ref", "Route", "Seconds",
           "Sites", "digits"]

ULID: Final = "01KBJ8Z6X4R2T0N5QW3E7M9YHC"  # of examples

_LENS: Final = [name for site in SITES.values() for name in site.lens] + [
    name for named in BY_MODEL.values() for name in named.lens]
_SUFFIXES: Final = sorted({re.escape(name.removeprefix("blocks.{l}.")) for name in _LENS if "{l}" in name})
_LAYERED: Final = "|".join(name for name, site in SITES.items() if site.per_layer)
SITE_SCHEMA: Final[dict[str, Any]] = {"anyOf": [
    {"type": "string", "pattern": r"^probe\.[A-Za-z0-9][A-Za-z0-9_-]{0,63}(\.[0-9]{1,4})?$"},
    {"type": "string", "enum": sorted({*SITES, *(name for name in _LENS if "{l}" not in name)})},
    {"type": "string", "pattern": rf"^({_LAYERED})\.[0-9]{{1,4}}$"},
    {"type": "string", "pattern": rf"^blocks\.[0-9]{{1,4}}\.({'|'.join(_SUFFIXES)})$"}]}
REF_SCHEMA: Final[dict[str, Any]] = {
    "type": "string", "minLength": 1, "maxLength": limits.alias_chars_max,
    "pattern": r"^[A-Za-z0-9_:@+=~-][A-Za-z0-9._:@+=~-]*$", "examples": [ULID]}


class Route(APIRoute):
    """A route that takes the request, names in its path and one model of its query, which pydantic checks.

    FastAPI describes it; its own way to an endpoint takes 0.1 ms more, 5 % of a slice of one row.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint, names = self.endpoint, self.dependant.path_params
        models = {field.name: field.field_info.annotation for field in self.dependant.query_params}
        lists = {name for model in models.values() if model is not None for name, field in model.model_fields.items()
                 if get_origin(field.annotation) is list}

        async def handle(request: Request) -> Response:
            values = {field.name: field.validate(request.path_params[field.alias], {}, loc=("path", field.alias))[0]
                      for field in names}
            if models:
                given = _given(request.query_params, lists)
                values |= {name: _checked(model, given) for name, model in models.items()}
            answer: Response = await endpoint(request, **values)
            return answer

        return handle


def _given(params: QueryParams, lists: set[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name in params:
        values = params.getlist(name)
        if len(values) > 1 and name not in lists:
            raise BadParam(name, values, "given more than once")
        given[name] = values if name in lists else values[0]
    return given


def _checked(model: Any, given: dict[str, Any]) -> Any:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("query", *each["loc"])} for each in error.errors()]) from None


class Parameters(BaseModel):
    """The query of a route; a parameter that is no field is refused."""

    model_config = ConfigDict(extra="forbid")


def digits(value: object) -> object:
    """``value`` if it is a number in plain ASCII digits, or no text; ValueError where pydantic might take it as one."""
    if isinstance(value, str) and not (value.isascii() and value.isdecimal() and len(value) <= 18):
        raise ValueError("must be a whole number")
    return value


def _known_sites(names: list[str]) -> list[str]:
    """Each name alone; ArgumentError for one that is no site's."""
    found = [part.strip() for name in names for part in name.split(",")]
    if len(found) > limits.spec_sites_max:
        raise BadParam("site", f"{len(found)} of them", f"at most {limits.spec_sites_max}")
    for name in found:
        ask_site(name, "site", ArgumentError)
    return found


_Site = Annotated[str, WithJsonSchema(SITE_SCHEMA)]
Ref = Annotated[str, AfterValidator(check_ref), Path(description="A capture's id, a response id or an X-Request-Id.",
                                                     json_schema_extra=REF_SCHEMA)]
Position = Annotated[int, Field(ge=0, le=limits.position_max), BeforeValidator(digits)]
EventId = Annotated[int, Field(ge=0, le=10**18 - 1), BeforeValidator(digits)]
Seconds = Annotated[float, Field(ge=0, le=limits.wait_timeout_s_max, allow_inf_nan=False, examples=[5],
                                 description=f"seconds to wait at most, 0 to {limits.wait_timeout_s_max}")]
Sites = Annotated[list[_Site], AfterValidator(_known_sites), Field(
    max_length=limits.spec_sites_max, examples=[["resid_post"]],
    description="site or TransformerLens name, or several by commas; repeatable")]
OneSite = Annotated[list[_Site], AfterValidator(_known_sites), Field(
    max_length=1, examples=[["resid_post"]], description="one site or TransformerLens name, not given more than once")]


class RangeParameters(Parameters):
    """Positions ``[start, stop)``; ``stop`` None means to the end."""

    start: Position = Field(default=0, description=f"first position, 0 to {limits.position_max}", examples=[0])
    stop: Position | None = Field(
        default=None, description=f"position past the last one, greater than start, at most {limits.position_max}",
        examples=[16])

    @model_validator(mode="after")
    def _check_range(self) -> RangeParameters:
        if self.stop is not None and self.start >= self.stop:
            raise BadParam("stop", self.stop, f"must be greater than start = {self.start}; a range is [start, stop)")
        return self
