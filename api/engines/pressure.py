"""The rate that captures in flight ask of the store, against what it takes: told before rows have to be dropped.

Nothing is refused or slowed for it, and nobody waits for it: it is arithmetic on numbers that are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from api.engines.speed import Speed
from api.engines.upstreams import Upstream, Upstreams
from api.metrics import Metrics
from schemas.wire.control_channel import ControlChannel

__all__ = ["Demand", "Pressure"]

log = logging.getLogger("vllm_tap.api")

_LOOK_S: Final = 2.0  # between two looks at the speed of engines, while captures are in flight
_ANSWER_S: Final = 2.0
_LOGGED_S: Final = 60.0
_WHEN_FULL: Final = {"drop": "rows are dropped, and named in the manifest", "wait": "generation waits"}


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes of rows that captures of one request make, on average, for each token of its prompts and each generated
    one. ``on_full``: what their engine does without room, "" where it did not say.
    """

    prompt_token_bytes: float = 0.0
    generated_token_bytes: float = 0.0
    on_full: str = ""


class Pressure:
    """The captures in flight of this process; ``spawn`` runs work beside its requests. Without a ``channel`` (a bucket
    is read) there are none.
    """

    def __init__(self, channel: ControlChannel | None, upstreams: Upstreams, metrics: Metrics,
                 spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._channel, self._upstreams, self._metrics, self._spawn = channel, upstreams, metrics, spawn
        self._in_flight: dict[str, tuple[Demand, str, str]] = {}  # by capture: what it asks, of which engine, and whose
        self._said: dict[str, dict[str, Any]] = {}
        self._speeds = {each.name: Speed() for each in upstreams}
        self._looking = False
        self._logged_s = float("-inf")

    def begin(self, capture: str, asked: Demand, engine: str, owner: str) -> Callable[[], None]:
        """Count a request's captures in until the function that this returns is called."""
        self._in_flight[capture] = asked, engine, owner
        if not self._looking:
            self._looking = True
            self._spawn(self._look())
        self._said.pop(capture, None)
        if (said := self.said(capture)) is not None:
            self._metrics.captures_pressed.inc()
            if time.monotonic() - self._logged_s > _LOGGED_S:
                self._logged_s = time.monotonic()
                log.warning("capture %s: all captures in flight make about %s MB of rows a second; %s", capture,
                            _mb(self.asked_bytes_s()), said["help"])
        return lambda: self._end(capture)

    def _end(self, capture: str) -> None:
        self._in_flight.pop(capture, None)
        self._said.pop(capture, None)

    def said(self, capture: str) -> dict[str, Any] | None:
        """The field ``pressure`` of a capture in flight: what was found when it began, or else is so now. None where
        the store takes what is asked, as far as that is known.
        """
        if capture not in self._said and (found := self._found(capture)) is not None:
            self._said[capture] = found
        return self._said.get(capture)

    def asked_bytes_s(self, of: str = "") -> float:
        """Bytes of rows a second that captures in flight make, of engines whose speed is known; of one owner alone."""
        total, speeds = 0.0, {name: speed.rates() for name, speed in self._speeds.items()}
        for asked, engine, owner in self._in_flight.values():
            if of in ("", owner) and (rates := speeds[engine]) is not None:
                total += asked.prompt_token_bytes * rates.prompt + asked.generated_token_bytes * rates.generated
        return total

    def store(self) -> dict[str, Any] | None:
        """The rate that the store takes and how it was measured, None where it is not known."""
        if self._channel is None:
            return None
        state = self._channel.store
        return {"bytes_s": round(state.bytes_s), "measured": state.measured} if state.bytes_s else None

    def tell(self) -> None:
        """Set the metrics that are known only when one looks."""
        self._metrics.asked_bytes.set(self.asked_bytes_s())

    def _found(self, capture: str) -> dict[str, Any] | None:
        asked, _, owner = self._in_flight.get(capture, (Demand(), "", ""))
        if self._channel is None:
            return None
        takes, asks = self._channel.store.bytes_s, self.asked_bytes_s()
        if not takes or asks <= takes or not asked.prompt_token_bytes + asked.generated_token_bytes:
            return None
        full_s = self._full_s(asks - takes)
        if owner:  # what the others ask is not told
            asks, full_s = self.asked_bytes_s(owner), None if full_s is None else float(f"{full_s:.0e}")
        full = "the ring is full some time" if full_s is None else f"the ring is full in about {full_s:,.1f} s"
        return {"asked_bytes_s": round(asks), "store_bytes_s": round(takes),
                "ring_full_in_s": None if full_s is None else round(full_s, 3),
                "help": f"{'your ' if owner else ''}captures in flight make about {_mb(asks)} MB of rows a second, and "
                        f"the store takes {_mb(takes)}{' of everybody' if owner else ''}: {full} if that goes on, and "
                        f"then {_WHEN_FULL.get(asked.on_full, ' or '.join(_WHEN_FULL.values()))}; a codec of fewer "
                        "bytes, fewer sites, layers or positions, or a faster disk would do"}

    def _full_s(self, excess: float) -> float | None:
        """Seconds until the rings are full that captures in flight use; None where an engine's is not known."""
        assert self._channel is not None
        rings, engines = self._channel.store.rings, {engine for _, engine, _ in self._in_flight.values()}
        if not self._upstreams.named:
            engines = set(rings)  # whatever the only one calls itself
        if not engines or not engines <= rings.keys():
            return None
        return sum(max(room - taken, 0) for room, taken in (rings[name] for name in engines)) / excess

    async def _look(self) -> None:
        """Look at the speed of engines as long as captures are in flight, and once more."""
        try:
            more = True
            while more:
                more = bool(self._in_flight)
                await asyncio.gather(*(self._look_at(each) for each in self._upstreams if not each.away))
                more = more or bool(self._in_flight)  # one may have begun meanwhile
                if more:
                    await asyncio.sleep(_LOOK_S)
        finally:
            self._looking = False

    async def _look_at(self, upstream: Upstream) -> None:
        with contextlib.suppress(Exception):  # then its speed is not known, whatever it was
            async with asyncio.timeout(_ANSWER_S):
                answer = await upstream.client.get("/metrics", timeout=_ANSWER_S)
            if answer.status_code == 200:
                self._speeds[upstream.name].take(answer.text, time.monotonic())


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f}" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g}"
