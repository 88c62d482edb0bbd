"""The model servers behind this service, and which of them serve: who is gone is left out until it answers again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from api.config import Config
from api.metrics import Metrics

__all__ = ["ENGINE_HEADER", "Upstream", "Upstreams", "new_client"]

log = logging.getLogger("vllm_tap.api")

ENGINE_HEADER: Final = "X-VLLM-Tap-Engine"
_ANSWER_S: Final = 10.0  # within which a server must answer a look
_AGAIN_S: Final = 0.5  # between two looks that requests cause
_WAIT_S: Final = 1.0  # that a request waits for a look: one engine that stands still holds up none that are well
_MODELS_MAX: Final = 4096  # of one server
_UNSEEN: Final = "it was not looked at yet"


def new_client(base_url: str, connect_s: float, transport: httpx.AsyncBaseTransport | None = None
               ) -> httpx.AsyncClient:
    """A client without a read time-out, since a generation may take long; through ``transport`` where that is given.

    Idle connections are dropped before the server (5 s in vLLM) does, so that no request is lost on a closing one.
    """
    return httpx.AsyncClient(
        base_url=base_url, timeout=httpx.Timeout(None, connect=connect_s, write=60.0),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0), trust_env=False, follow_redirects=False,
        transport=transport,
    )


@dataclass(slots=True, eq=False)
class Upstream:
    """A model server. Only one that has a name is looked at; the one without is asked whatever was known of it."""

    name: str  # that its engine was started with; "" where it is the only one
    url: str
    client: httpx.AsyncClient
    in_flight: int = 0  # requests of this process
    away: str = ""  # why nothing is sent there now; "" where requests go there
    misnamed: str | None = None  # the name that captures tell the engine there to have, where it is another
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # that it lists, by id; the last known
    looked_s: float = 0.0  # when it was last looked at
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    doubted: asyncio.Event = field(default_factory=asyncio.Event)  # set: to be looked at now

    def __str__(self) -> str:
        return f"engine {self.name!r} at {self.url}" if self.name else f"the model server at {self.url}"

    async def look(self, again_s: float = 0.0) -> None:
        """Asks whether it serves, and which models; not where it was asked less than ``again_s`` seconds ago."""
        async with self.looking:
            if time.monotonic() - self.looked_s < again_s:
                return
            away = await self._why_away()
            if not away and self.misnamed is not None:
                away = (f"its captures say that it is engine {self.misnamed!r}" if self.misnamed
                        else "its captures say that it was started without VLLM_TAP_ENGINE")
            self.turn(away)
            self.looked_s = time.monotonic()

    def turn(self, away: str) -> None:
        """Takes it out, with the reason, or in again."""
        if away and self.away != away:
            log.warning("%s is left out: %s", self, away)
        elif self.away and not away:
            log.info("%s serves %s", self, ", ".join(self.models) or "no model")
        self.away = away

    async def _why_away(self) -> str:
        try:
            async with asyncio.timeout(_ANSWER_S):  # of all: an answer may come byte by byte
                health = await self.client.get("/health", timeout=_ANSWER_S)
                if health.status_code != 200:
                    return f"/health answers {health.status_code}"
                listed = await self.client.get("/v1/models", timeout=_ANSWER_S)
            if listed.status_code != 200:
                return f"/v1/models answers {listed.status_code}"
            found = {str(each["id"]): dict(each) for each in listed.json()["data"][:_MODELS_MAX]}
        except httpx.ConnectError as error:
            self.misnamed = None  # nobody is there: whatever comes back may be another
            return f"no answer ({str(error) or type(error).__name__})"
        except (httpx.HTTPError, TimeoutError) as error:
            return f"no answer ({str(error) or type(error).__name__})"
        except (ValueError, KeyError, TypeError, RecursionError):
            return "/v1/models answers no list of models"
        except Exception as error:  # looking goes on whatever it was
            log.exception("a look at %s failed", self)
            return f"it cannot be looked at ({error!r})"
        self.models = found
        return ""


class Upstreams:
    """All model servers, in the order in which they were given."""

    def __init__(self, config: Config, metrics: Metrics, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._all = [Upstream(name, url, new_client(url, config.upstream_connect_s, transport),
                              away=_UNSEEN if name else "") for name, url in config.engines.items()]
        self.named = bool(self._all and self._all[0].name)
        self._metrics, self._look_s = metrics, config.upstream_look_s

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self._all)

    @property
    def only(self) -> Upstream:
        """The one that has no name."""
        return self._all[0]

    def get(self, name: str) -> Upstream | None:
        """The one of a name."""
        return next((each for each in self._all if each.name == name), None)

    def names(self) -> str:
        """All names, for an error's words."""
        return ", ".join(each.name for each in self._all)

    async def look(self) -> None:
        """Looks at those that are up, for a moment, unless that has just been done; who is away may be slow to say so.
        """
        await _for_a_moment([each for each in self._all if self.named and not each.away])

    async def look_anew(self) -> None:
        """``look``, but not before a look says something new: what was asked for may just have been loaded."""
        newest = max((each.looked_s for each in self._all if not each.away), default=0.0)
        await asyncio.sleep(max(0.0, newest + _AGAIN_S - time.monotonic()))
        await self.look()

    async def begun(self, one: Upstream | None = None) -> None:
        """Waits, for a moment, until each was looked at once, or ``one``."""
        await _for_a_moment([each for each in ([one] if one is not None else self._all) if each.away == _UNSEEN])

    async def watch(self) -> None:
        """Looks at each from time to time, and at once where it is in doubt; for ever."""

        async def one(upstream: Upstream) -> None:
            while True:
                upstream.doubted.clear()
                await upstream.look()
                try:
                    await asyncio.wait_for(upstream.doubted.wait(), self._look_s)
                except TimeoutError:
                    continue
                await asyncio.sleep(_AGAIN_S)  # however many requests break off

        await asyncio.gather(*(one(each) for each in self._all))

    def tell(self) -> None:
        """Sets the metrics that are known only when one looks."""
        if self.named:
            for each in self._all:
                self._metrics.engine_up.labels(each.name).set(not each.away)
                self._metrics.engine_in_flight.labels(each.name).set(each.in_flight)

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(each.client.aclose() for each in self._all))


async def _for_a_moment(several: list[Upstream]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_WAIT_S):
            await asyncio.gather(*(each.look(_AGAIN_S) for each in several))
