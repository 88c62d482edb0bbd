"""Scores of probes, sent to a client that streams a generation: events between its tokens, which never wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import anyio
import msgspec
import numpy as np
import numpy.typing as npt
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from api.errors import BROKEN, ApiError, body_of
from api.feed import Moved
from api.generate.done_finder import last_event
from api.generate.generation import Plan
from api.live.follower import Follower
from api.live.score_lists import about, rows_of
from api.service import ApiService
from api.slices.query import SiteQuery
from schemas import limits
from schemas.bucket.reader import AnyReader
from schemas.probes import Probe
from schemas.read.reader import LiveRows
from schemas.sites import PROBE
from schemas.wire.row_table import FLAG_DRAFT

__all__ = ["ScoreEvents"]

log = logging.getLogger("vllm_tap.api")

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
Columns = tuple[U32, U32, U32, F32]  # positions, token ids, flags; scores [n, k]

_PAUSE_S: Final = 0.03  # at least, between two looks at the store: what others capture wakes a stream too
_SHARE: Final = 4  # a look that took long is followed by a pause that is longer by so much, …
_PAUSE_S_MAX: Final = 0.5  # … up to this


class _Scored:
    """The scores of one capture and probe. Scores of drafts wait until it is known whether the sequence took the
    drafts.

    The first row of a step is no draft. Its position is where the last accepted draft ended. So the drafts that wait
    before it were accepted, and those at it or after it were not. For drafts of the last step this is known once the
    capture is final.
    """

    def __init__(self, events: ScoreEvents, index: int, capture: str, name: str) -> None:
        self.index, self.capture, self.name, self.site = index, capture, name, f"{PROBE}{name}"
        self._events = events
        self._probe: Probe | None = None
        self._waiting: dict[int, tuple[int, int, Any]] = {}  # by position: token id, flags and scores
        self._drops = 0  # number of the last that was told
        self.follower = Follower(capture, events.owner, SiteQuery(site=[self.site]), 0, self._event)

    def look(self, reader: AnyReader) -> None:
        """Finds what there is to send."""
        self.follower.look(reader)
        if self._probe is None and self.follower.site:
            self._probe = reader.probes(self.capture, self._events.owner).get(self.name)

    def dropped(self, reader: AnyReader) -> bytes:
        """Event that names scores that will not come, as is known by now."""
        if not self.follower.site or not (drops := reader.drops(self.capture, self.site, self._drops)):
            return b""
        self._drops = drops[-1].seq
        return self._events.event({**about(self.index, self.capture, self.name, self._probe), "missing": [
            {"start": drop.start, "stop": drop.stop, "reason": drop.reason} for drop in drops]})

    def end(self, reader: AnyReader) -> bytes:
        """Event of waiting drafts that were accepted; to be called when the capture is final."""
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return b""
        part = reader.slice(self.capture, self.site, self.follower.layers, min(waiting), max(waiting) + 1,
                            self._events.owner)
        which = np.isin(part.positions, list(waiting))
        return self._told(part.positions[which], part.token_ids[which], part.flags[which], part.values()[0][which],
                          durable=True)

    def _event(self, _site: str, rows: LiveRows) -> bytes:
        columns = rows.positions, rows.token_ids, rows.flags, rows.values[0]
        if self._waiting or (rows.flags & FLAG_DRAFT).any():
            columns = self._known(rows)
        return self._told(*columns, durable=rows.durable)

    def _known(self, rows: LiveRows) -> Columns:
        """The columns of the rows that are known to be the sequence's own by now."""
        found: list[tuple[int, int, int, Any]] = []
        for position, token, flags, values in zip(rows.positions.tolist(), rows.token_ids.tolist(),
                                                  rows.flags.tolist(), rows.values[0], strict=True):
            if flags & FLAG_DRAFT:
                self._waiting[position] = token, flags, values
                continue
            found += [(at, *self._waiting[at]) for at in sorted(self._waiting) if at < position]
            self._waiting.clear()
            found.append((position, token, flags, values))
        positions, tokens, flags = (np.array([row[n] for row in found], np.uint32) for n in range(3))
        return positions, tokens, flags, np.array([row[3] for row in found], np.float32)

    def _told(self, positions: U32, token_ids: U32, flags: U32, values: F32, durable: bool) -> bytes:
        if not len(positions):
            return b""
        return self._events.event({**about(self.index, self.capture, self.name, self._probe),
                                   **rows_of(positions, token_ids, flags, values), "durable": durable})


@dataclass(slots=True)
class ScoreEvents:
    """The score events of one streamed generation, made by a task beside it; each row is sent once.

    At most ``limits.score_lists_streamed_max`` lists are followed, in the order of captures and probes.
    """

    service: ApiService
    planned: Plan
    owner: str
    _lists: list[_Scored] = field(default_factory=list)
    _moved: Moved = field(default_factory=Moved)
    _head: dict[str, Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _ending: bool = False
    _filled: asyncio.Event = field(default_factory=asyncio.Event)  # set when there is something to send
    _full: MemoryObjectSendStream[bytes] = field(init=False)
    _ready: MemoryObjectReceiveStream[bytes] = field(init=False)
    _tasks: list[asyncio.Future[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        wanted = [(index, capture, name) for index, capture in enumerate(self.planned.ids)
                  for name in self.planned.probes]
        self._lists = [_Scored(self, *each) for each in wanted[:limits.score_lists_streamed_max]]
        self._full, self._ready = anyio.create_memory_object_stream[bytes](1)

    async def __aenter__(self) -> ScoreEvents:
        if self._lists:
            try:
                captures = list(dict.fromkeys(each.capture for each in self._lists))
                self._moved = self._stack.enter_context(self.service.feed.follow(captures, self.owner))
            except ApiError as error:  # too many follow: all come at the end
                log.warning("scores of %s come at the end of their stream: %s", self.planned.ulid, error.message)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stack.close()
        for task in self._tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):  # a second cancellation would keep upstream's connection from closing
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in self._tasks[2:]:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("scores of %s were not streamed to their end", self.planned.ulid, exc_info=error)
        self._full.close()
        self._ready.close()

    async def beside(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """``chunks`` as they come and, where there are probes, b"" whenever ``ready`` may have something."""
        if not self._lists:
            async for chunk in chunks:
                yield chunk
            return
        coming, filled = asyncio.ensure_future(_next(chunks)), asyncio.ensure_future(self._filled.wait())
        self._tasks += coming, filled
        while True:
            await asyncio.wait((coming, filled), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                following = coming.result()
                if following is None:
                    return
                self._tasks[0] = coming = asyncio.ensure_future(_next(chunks))
                yield following
            if filled.done():
                self._filled.clear()
                self._tasks[1] = filled = asyncio.ensure_future(self._filled.wait())
                yield b""

    def ready(self, tail: bytes) -> bytes:
        """Events to be sent now; ``tail`` is the end of the stream so far, whose chunks tell model and time."""
        if not self._lists:
            return b""
        self._begin(tail)
        try:
            return self._ready.receive_nowait()
        except (anyio.WouldBlock, anyio.EndOfStream):
            return b""

    async def rest(self, tail: bytes) -> AsyncIterator[bytes]:
        """Events that have not been sent; to be asked for once, when the captures are final."""
        if not self._lists:
            return
        self._begin(tail)
        self._ending = True
        self._moved.set()
        async for events in self._ready:
            yield events

    def event(self, scores: dict[str, Any]) -> bytes:
        """One event."""
        return self.planned.protocol.event("capture.scores", {**self._head, "scores": scores}, msgspec.json.encode)

    def _begin(self, tail: bytes) -> None:
        """Starts the task with the stream's first event: those of scores look like it."""
        if self._head:
            return
        last = last_event(tail)
        self._head = {"id": self.planned.response_id, "object": "capture.scores",
                      "created": last.get("created", int(time.time())), "model": last.get("model", ""), "choices": []}
        self._tasks.append(asyncio.ensure_future(self._follow()))

    async def _follow(self) -> None:
        """Look at the lists whose captures moved, and at all of them at first and at last. A slow receiver is waited
        for.
        """
        with self._full:
            looked = self._lists
            try:
                while True:
                    began_s, last = time.monotonic(), self._ending
                    looked = self._lists if last else looked
                    await self._send(await self.service.read(partial(_look, looked)))
                    while any(each.follower.todo for each in looked):
                        await self._send(await self.service.read(partial(_take, looked)))
                    if last:
                        await self._send(await self.service.read(partial(_end, looked)))
                        return
                    spent_s = time.monotonic() - began_s
                    await asyncio.sleep(min(max(_PAUSE_S, _SHARE * spent_s), _PAUSE_S_MAX))
                    await self._moved.wait()
                    moved = self._moved.take()
                    looked = [each for each in self._lists if each.capture in moved]
            except BROKEN as error:  # the generation goes on; the scores are in the store
                log.warning("scores of %s are streamed no more: %s", self.planned.ulid, error)
                await self._send(self.event(body_of(error)))

    async def _send(self, events: bytes) -> None:
        if events:
            await self._full.send(events)
            self._filled.set()


def _look(lists: list[_Scored], reader: AnyReader) -> bytes:
    """Look at all lists, and return the first events that were found."""
    for each in lists:
        each.look(reader)
    return _take(lists, reader)


def _take(lists: list[_Scored], reader: AnyReader) -> bytes:
    """The next events of all lists, of a megabyte or two."""
    events, size = list[bytes](), 0
    for each in lists:
        events.append(each.dropped(reader))
        if size < limits.live_event_bytes_max:
            events.append(each.follower.take(reader))
            size += len(events[-1])
    return b"".join(events)


def _end(lists: list[_Scored], reader: AnyReader) -> bytes:
    return b"".join([each.end(reader) for each in lists])


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)
