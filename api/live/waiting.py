"""Waiting for captures: until they are final, until an engine has begun them, until rows are there."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import anyio

from api.service import ApiService
from schemas import manifest
from schemas.bucket.reader import AnyReader
from schemas.errors import NotFoundError, TapError

__all__ = ["FINAL", "poll", "settle", "status_of_all"]

T = TypeVar("T")

FINAL: Final = manifest.FINAL | {"deleted"}
_FIRST_S, _LAST_S = 0.01, 0.25  # the pauses between looks grow from one to the other
_APPEARS_S: Final = 0.5  # what is durable shows in the catalog within this time


async def poll(service: ApiService, look: Callable[[], T], enough: Callable[[T], bool], timeout_s: float) -> T:
    """The first ``look()`` that is ``enough``, else the last one before ``timeout_s`` seconds have passed.

    ``look`` runs in a thread; NotFoundError from it is raised only after a moment, since what is durable may not be in
    the catalog yet.
    """
    started_s, pause_s = time.monotonic(), _FIRST_S
    end_s = started_s + timeout_s
    while True:
        try:
            found = await anyio.to_thread.run_sync(look)
            if enough(found) or time.monotonic() >= end_s:
                return found
        except NotFoundError:
            if time.monotonic() >= min(end_s, started_s + _APPEARS_S):
                raise
        await anyio.sleep(min(pause_s, max(0.0, end_s - time.monotonic())))
        pause_s = min(_LAST_S, pause_s * 1.5)


async def status_of_all(service: ApiService, ids: Sequence[str], timeout_s: float) -> str:
    """One status for the captures of a request; waits until all are final, at most ``timeout_s`` seconds."""
    known: dict[str, str] = {}

    def look() -> str:
        reader = service.reader()
        for capture in ids:
            if known.get(capture) not in FINAL:
                known[capture] = _status(reader, capture)
        return combined(set(known.values()))

    try:
        return await poll(service, look, FINAL.__contains__, timeout_s)
    except (TapError, sqlite3.Error):
        return "pending"  # the answer of a generation does not fail because its capture cannot be looked up


def _status(reader: AnyReader, capture: str) -> str:
    try:
        return reader.capture(capture).status
    except NotFoundError:
        if not reader.is_deleted(capture):
            raise
        return "deleted"  # while it was generated


def combined(statuses: set[str]) -> str:
    """The status that says the most cautious true thing of several captures."""
    for status in ("pending", "running", "failed", "incomplete", "deleted", "complete"):
        if status in statuses:
            return status
    return "empty"


async def settle(service: ApiService, ids: Sequence[str], reason: str) -> None:
    """Closes captures that no engine begins within ``settle_s`` seconds, so that none stays pending for ever.

    The service closes what is still ``unsettled`` when it stops.
    """
    service.unsettled.update(dict.fromkeys(ids, reason))

    def look() -> list[str]:
        reader = service.reader()
        return [capture for capture in ids if reader.capture(capture).status == "pending"]

    with contextlib.suppress(TapError, sqlite3.Error):  # deleted meanwhile, or no store: nothing to close
        for capture in await poll(service, look, lambda found: not found, service.config.settle_s):
            service.abandon(capture, reason)
    for capture in ids:
        service.unsettled.pop(capture, None)
