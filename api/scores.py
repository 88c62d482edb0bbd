"""Scores of probes on their way to who asked for a generation: in events of its stream, or in its answer."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import anyio
import msgspec

from api.errors import ApiError, body, status_of
from api.follower import Follower
from api.generation import Plan
from api.service import Service
from api.slice_query import SiteQuery
from api.sse import last_event
from schemas import limits
from schemas.errors import TapError
from schemas.probes import Probe
from schemas.reader import LiveRows, StoreReader
from schemas.sites import PROBE

__all__ = ["ScoreEvents", "answer_scores"]

log = logging.getLogger("vllm_tap.api")

_PAUSE_S: Final = 0.03  # at least, between two looks at the store: what others capture wakes a stream too
_BROKEN: Final = (TapError, sqlite3.Error, OSError)


@dataclass(slots=True)
class ScoreEvents:
    """The score events of one streamed generation; every frame of every capture and probe is sent once."""

    service: Service
    planned: Plan
    owner: str
    _followers: list[Follower] = field(default_factory=list)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)  # set when there may be more
    _waits: list[asyncio.Future[Any]] = field(default_factory=list)
    _head: dict[str, Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _broken: bool = False

    def __post_init__(self) -> None:
        self._followers = [
            Follower(capture, self.owner, SiteQuery([(f"{PROBE}{name}", None)], []), 0,
                     partial(self._event, index, capture, name, probe))
            for index, capture in enumerate(self.planned.ids) for name, probe in self.planned.probes.items()]

    async def __aenter__(self) -> ScoreEvents:
        if self._followers:
            try:
                self._moved = self._stack.enter_context(self.service.feed.follow(self.planned.ids, self.owner))
            except ApiError as error:  # too many follow: all come at the end
                log.warning("scores of %s come at the end of their stream: %s", self.planned.ulid, error.message)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stack.close()
        for task in self._waits:
            task.cancel()
        with anyio.CancelScope(shield=True):  # a second cancellation would keep upstream's connection from closing
            await asyncio.gather(*self._waits, return_exceptions=True)

    async def beside(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """``chunks`` as they come and, where there are probes, b"" whenever there may be scores to send."""
        if not self._followers:
            async for chunk in chunks:
                yield chunk
            return
        coming, moved = self._waits = [asyncio.ensure_future(_next(chunks)), asyncio.ensure_future(self._next_move())]
        while True:
            await asyncio.wait((coming, moved), return_when=asyncio.FIRST_COMPLETED)
            if moved.done():
                self._moved.clear()
                moved = self._waits[1] = asyncio.ensure_future(self._next_move())
                yield b""
            if coming.done():
                following = coming.result()
                if following is None:
                    return
                coming = self._waits[0] = asyncio.ensure_future(_next(chunks))
                yield following

    async def _next_move(self) -> None:
        await asyncio.sleep(_PAUSE_S)
        await self._moved.wait()

    async def take(self, tail: bytes) -> AsyncIterator[bytes]:
        """What has come since; ``tail`` is the end of the stream so far, whose chunks tell model and time."""
        if self._broken:
            return
        last = last_event(tail)
        self._head = {"id": self.planned.response_id, "object": "capture.scores",
                      "created": last.get("created", int(time.time())), "model": last.get("model", ""), "choices": []}
        try:
            for follower in self._followers:
                await self.service.read(follower.look)
                while follower.todo:
                    if taken := await self.service.read(follower.take):
                        yield taken
        except _BROKEN as error:  # the generation goes on; the scores are in the store
            self._broken = True
            log.warning("scores of %s are streamed no more: %s", self.planned.ulid, error)
            yield _sse({**self._head, "scores": _refused(error)})

    def _event(self, index: int, capture: str, name: str, probe: Probe, _site: str, rows: LiveRows) -> bytes:
        return _sse({**self._head, "scores": {
            "capture": capture, "index": index, "probe": name, "layer": probe.layer, "names": probe.names,
            "positions": rows.positions.tolist(), "token_ids": rows.token_ids.tolist(), "flags": rows.flags.tolist(),
            "durable": rows.durable, "values": rows.values[0].tolist()}})


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


async def answer_scores(service: Service, planned: Plan, owner: str) -> list[dict[str, Any]]:
    """The field ``scores`` of an answer: by capture and probe its scores, or where they can be read.

    Scores of more than ``limits.answer_scores_max`` numbers together have a ``url`` in the place of their numbers.
    """
    def read(reader: StoreReader) -> list[dict[str, Any]]:
        room, found = limits.answer_scores_max, []
        for index, capture in enumerate(planned.ids):
            rows = {row.site: row.captured for row in reader.manifest(capture, owner).rows}
            for name, probe in planned.probes.items():
                about = {"capture": capture, "index": index, "probe": name, "layer": probe.layer, "names": probe.names}
                room -= rows.get(f"{PROBE}{name}", 0) * len(probe.names)
                if room < 0:
                    found.append({**about, "url": f"/v1/captures/{capture}/activations?site={PROBE}{name}"})
                    continue
                part = reader.slice(capture, f"{PROBE}{name}", [probe.layer], owner=owner)
                found.append({**about, "positions": part.positions.tolist(), "token_ids": part.token_ids.tolist(),
                              "flags": part.flags.tolist(), "values": part.values()[0].tolist(),
                              "missing": msgspec.to_builtins(part.missing)})
        return found

    try:
        return await service.read(read)
    except _BROKEN as error:  # the generation is answered all the same; its scores can be read as slices
        return [_refused(error)]


def _refused(error: Exception) -> dict[str, Any]:
    if isinstance(error, TapError):
        return body(*status_of(error), str(error))
    return body(503, "store_unavailable", f"the store cannot be read now: {error}")


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
