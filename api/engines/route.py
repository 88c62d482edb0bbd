"""The way of a request to an engine: those that serve its model and can do what it asks, the best first.

Where there is one engine without a name, it is the way of every request, and nothing is asked of it beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request

from api.engines.choice import in_turn
from api.engines.upstreams import ENGINE_HEADER, Upstream, Upstreams
from api.errors import ApiError, BadParam, PartLost, as_api_error
from api.service import ApiService
from schemas.bucket.reader import AnyReader
from schemas.errors import StoreError, TapError
from schemas.wire.engine_info import EngineInfo

__all__ = ["NoEngineCan", "OnlyAwayCan", "Route", "all_that_can", "first_that_can", "not_served", "pinned", "route_of"]

T = TypeVar("T")

_MODELS_TOLD = 8  # of each engine, in an error's words
_AGAIN = {"Retry-After": "2"}


class NoEngineCan(ApiError):
    """Refusal of what no engine behind this service can do: each is named, with the field that it refuses."""


class OnlyAwayCan(ApiError):
    """Refusal, for now, of what only an engine can do that is away."""


@dataclass(slots=True)
class Route:
    """Engines that a request may go to, the best first: that one counts it as in flight until it ends."""

    left: list[Upstream]
    away: list[Upstream] = field(default_factory=list)  # that would serve it, but nothing is sent there now
    _counted: Upstream | None = None

    @property
    def upstream(self) -> Upstream:
        """The best engine that is left."""
        return self.left[0]

    def keep(self, able: Sequence[Upstream]) -> None:
        """Goes on with these alone."""
        self.left = list(able)
        self._count(self.left[0])

    def begin_with(self, upstream: Upstream) -> None:
        """Leaves out those before ``upstream``, which cannot do what is asked."""
        self.keep(self.left[self.left.index(upstream):])

    def refused(self, error: ApiError) -> None:
        """The best took no connection, so nothing was sent: the next one is the best. Raises ``error`` at the last."""
        lost = self.upstream
        if lost.name:
            lost.turn("it takes no connection")
        if len(self.left) == 1:
            raise error
        self.away.append(lost)
        self.keep(self.left[1:])

    def end(self) -> None:
        """The request has been answered, or not."""
        self._count(None)

    def _count(self, upstream: Upstream | None) -> None:
        if self._counted is not None:
            self._counted.in_flight -= 1
        if upstream is not None:
            upstream.in_flight += 1
        self._counted = upstream


async def route_of(service: ApiService, request: Request, model: object = None, prefix: bytes = b"", *,
                   any_model: bool = False) -> Route:
    """The way of a request for ``model``; ApiError where no engine serves that, none of them is up, or the one that the
    request names is not there. ``any_model``: the answer does not depend on it; else one must be named among several.
    """
    upstreams = service.upstreams
    if not upstreams.named:
        return Route([upstreams.only])
    one = pinned(request, upstreams)
    await upstreams.begun(one)
    if not (serving := _serving(upstreams, one, model)):
        await upstreams.look_anew()
        serving = _serving(upstreams, one, model)
    if not (any_model or _names(model)) and len({next(iter(each.models), "") for each in serving if each.models}) > 1:
        raise BadParam("model", model, f"engines serve different models: name one, or an engine ({ENGINE_HEADER})")
    if not (up := [each for each in serving if not each.away]):
        raise not_served(upstreams, one, model)
    route = Route([], [each for each in serving if each.away])
    route.keep(in_turn(up, prefix))
    request.state.at_end.callback(route.end)
    return route


def pinned(request: Request, upstreams: Upstreams) -> Upstream | None:
    """The engine that a request names, None where it names none; BadParam where there is none of that name."""
    name = request.headers.get(ENGINE_HEADER)
    if name is None or not upstreams.named:
        return None
    if (found := upstreams.get(name)) is None:
        raise BadParam(ENGINE_HEADER, name, f"no such engine; there are: {upstreams.names()}")
    return found


def _serving(upstreams: Upstreams, one: Upstream | None, model: object) -> list[Upstream]:
    """Engines that have a model; any is as good where none is named, which is theirs to refuse or to choose."""
    return [each for each in ([one] if one is not None else upstreams) if not _names(model) or model in each.models]


def _names(model: object) -> bool:
    """Whether a request names a model: vLLM takes its own where that is empty."""
    return isinstance(model, str) and model != ""


def not_served(upstreams: Upstreams, one: Upstream | None, model: object = None) -> ApiError:
    """Why a request can go nowhere: to come again (503) where an engine that is away has its model, or may have it."""
    asked = [one] if one is not None else list(upstreams)
    may = [each for each in asked
           if each.away and (not _names(model) or not each.models or model in each.models)]
    if may:
        what = f"model = {model!r}: " if _names(model) else ""
        return ApiError(503, "upstream_unavailable", what + "; ".join(f"{each} is away: {each.away}" for each in may),
                        headers=_AGAIN)
    lists = "; ".join(f"{each.name!r} serves {_some(list(each.models))}" for each in asked)
    return ApiError(404, "not_found", f"model = {str(model)[:200]!r}: no engine serves it; {lists}", "model")


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MODELS_TOLD
    return (", ".join(names[:_MODELS_TOLD]) or "none") + (f" and {more} more" if more > 0 else "")


# ── what engines can do ─────────────────────────────────────────────────────────────────────────────────────────


def first_that_can(route: Route, reader: AnyReader, work: Callable[[EngineInfo | None], T]
                   ) -> tuple[Upstream, T]:
    """The best engine of which ``work`` raises nothing, and what that gives; reads the store.

    Of the one without a name errors go on as they are. Of others NoEngineCan, with the status of the first refusal, or
    OnlyAwayCan 503 where only an engine that is away can do it.
    """
    failures: list[tuple[Upstream, ApiError]] = []
    for upstream in route.left:
        try:
            return upstream, work(_described(upstream, reader))
        except StoreError:
            raise
        except (ApiError, TapError) as error:
            if not upstream.name:
                raise
            failures.append((upstream, as_api_error(error)))
    for upstream in route.away:
        try:
            work(_described(upstream, reader))
        except StoreError:
            raise
        except (ApiError, TapError) as error:
            failures.append((upstream, as_api_error(error)))
        else:
            raise OnlyAwayCan(503, "upstream_unavailable", f"{upstream} could do this, and is away: {upstream.away}; "
                           f"{_told(failures)}", headers=_AGAIN)
    raise _refusal(failures)


def _described(upstream: Upstream, reader: AnyReader) -> EngineInfo | None:
    """The engine's description of itself; ApiError 503 where that is not known of one with a name."""
    found = reader.engine(upstream.name)
    if found is None and upstream.name:
        raise ApiError(503, "no_engine", "no engine of this name has connected to the writer, so what it can do is "
                                         "unknown; does it run with the plugin, VLLM_TAP_ENDPOINT and "
                                         f"VLLM_TAP_ENGINE={upstream.name}?",
                       headers=_AGAIN)
    return found


def all_that_can(route: Route, reader: AnyReader, work: Callable[[EngineInfo | None], None]
                 ) -> list[Upstream]:
    """The engines of which ``work`` raises nothing, as ``first_that_can`` where there is none."""
    first, _ = first_that_can(route, reader, work)
    able = [first]
    for upstream in route.left[route.left.index(first) + 1:]:
        try:
            work(_described(upstream, reader))
        except (ApiError, TapError):
            continue
        able.append(upstream)
    return able


def _refusal(failures: Sequence[tuple[Upstream, ApiError]]) -> ApiError:
    errors = [error for _, error in failures]
    # One whose rank has no sender could do it: what is asked for is not what is wrong.
    lost = next((error for error in errors if isinstance(error, PartLost)), None)
    first = lost or next((error for error in errors if error.status < 500), errors[0])
    kind = NoEngineCan if lost or first.status < 500 else ApiError
    return kind(first.status, first.code, _told(failures), first.param, first.headers)


def _told(failures: Sequence[tuple[Upstream, ApiError]]) -> str:
    """The refusals of engines, each reason once with the names of those that give it."""
    who: dict[str, list[str]] = {}
    for upstream, error in failures:
        who.setdefault(error.message, []).append(upstream.name)
    return "; ".join(f"engine {', '.join(names)}: {message}" for message, names in who.items())
