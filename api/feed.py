"""Followers of captures, woken when these move: one look at the store for all, and none while nobody follows."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import anyio

from api.auth.limits import fits, share
from api.errors import ApiError
from schemas import limits
from schemas.bucket.reader import AnyReader
from schemas.errors import TapError

__all__ = ["Feed", "Moved"]

_LOOK_S: Final = 0.01  # between two looks at what was appended; a first row is allowed 100 ms
_CATALOG_LOOKS: Final = 3  # … of which every third is at the catalog


class Moved(asyncio.Event):
    """Set whenever captures that are followed may have moved; they gather until they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._captures = set[str]()

    def tell(self, capture: str) -> None:
        """Notes a capture that may have moved."""
        self._captures.add(capture)
        self.set()

    def take(self) -> set[str]:
        """Captures that may have moved since this was last asked; waits anew from now on."""
        self.clear()
        taken, self._captures = self._captures, set()
        return taken


class Feed:
    """Wakes followers; ``reader`` gives the store's reader as it is now."""

    def __init__(self, reader: Callable[[], AnyReader]) -> None:
        self._reader = reader
        self._followers: dict[str, set[Moved]] = {}
        self._pump: asyncio.Task[None] | None = None
        self._version = 0
        self._open = Counter[str]()

    @contextlib.contextmanager
    def follow(self, captures: Sequence[str], owner: str) -> Iterator[Moved]:
        """An event that is set whenever one of them may have moved; ApiError 429 where too many follow already."""
        if not fits(self._open, owner, 1, limits.followers_max):
            raise ApiError(429, "too_many_followers", f"{self._open.total()} streams of events are open, of yours "
                           f"{self._open[owner]}; limit {limits.followers_max}, for one key "
                           f"{share(limits.followers_max, owner)}; ask again in a moment", headers={"Retry-After": "1"})
        event = Moved()
        for capture in captures:
            self._followers.setdefault(capture, set()).add(event)
        self._open[owner] += 1
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._run())
        try:
            yield event
        finally:
            self._open[owner] -= 1
            for capture in captures:
                self._followers[capture].discard(event)
                if not self._followers[capture]:
                    del self._followers[capture]

    async def close(self) -> None:
        """Ends the looking."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)

    async def _run(self) -> None:
        looks = 0
        while self._followers:
            try:
                moved = await anyio.to_thread.run_sync(self._look, looks % _CATALOG_LOOKS == 0)
            except (TapError, sqlite3.Error, OSError):
                moved = None  # each of them finds out for itself what is wrong
            for capture in list(self._followers) if moved is None else moved & self._followers.keys():
                for event in self._followers[capture]:
                    event.tell(capture)
            looks += 1
            await asyncio.sleep(_LOOK_S)

    def _look(self, catalog: bool) -> set[str] | None:
        """The captures that moved, None for all."""
        reader = self._reader()
        moved = reader.appended()
        if catalog and (version := reader.version()) != self._version:
            self._version = version
            return None
        return moved
