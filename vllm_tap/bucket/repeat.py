"""``vllm-tap push --every``: what is new in a store goes up from time to time, for as long as the process runs."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from schemas.errors import BucketError, TapError
from schemas.objects.heads import fetch_head
from schemas.objects.objects import Objects
from schemas.store.pushing import Pushing, forget_pushing, write_pushing
from vllm_tap.bucket.push import Pushed, check_head
from vllm_tap.bucket.removal import Swept

__all__ = ["keep_pushing"]

State = tuple[object, ...]


def keep_pushing(store: Path, url: str, push: Callable[[], Pushed], every_s: float, stop: threading.Event,
                 told: Callable[[Pushed | Swept | Exception | None], None],
                 sweep: Callable[[], Swept] | None = None, sweep_every_s: float = 86_400.0) -> None:
    """Push every so many seconds until ``stop`` is set, and once more then; a turn in which nothing is new asks for the
    head alone.

    ``sweep`` is called every ``sweep_every_s``, first behind the first push that succeeds. ``told`` gets None before
    the first push, once the head is known to be this folder's; each push, and each sweep, that changed something; and
    what went wrong, once until something else does. A file in the store says how it goes
    (``schemas.store.pushing``). Raises before the first push what will not pass: FencedError, a URL that is none, a
    bucket with something else.
    """
    seen: State | None = None
    going, sweep_s = Pushing(url, every_s), float("-inf")
    try:
        check_head(store, url)
    except BucketError as error:
        if not error.passing:
            raise
        told(error)
        going = Pushing(url, every_s, failed=str(error))
    told(None)
    while True:
        is_last, begun_ms = stop.is_set(), time.time_ns() // 1_000_000
        try:
            state = _state(store, url)
            if state != seen:
                done = push()
                seen = state  # of before it: its own head is news too, and so is what it did not see any more
                if done.changed:
                    told(done)
            if sweep is not None and not is_last and time.monotonic() >= sweep_s:
                sweep_s = time.monotonic() + sweep_every_s
                if (swept := sweep()).objects:
                    told(swept)
            going = Pushing(url, every_s, begun_ms)
        except (TapError, OSError, sqlite3.Error) as error:
            if str(error) != going.failed:
                told(error)
            going = Pushing(url, every_s, going.pushed_ms, str(error))
        with suppress(OSError):  # a disk that is full is the writer's to tell
            if is_last:
                forget_pushing(store)
            else:
                write_pushing(store, going)
        if is_last:
            return
        stop.wait(every_s)


def _state(store: Path, url: str) -> State:
    """The catalog's files and the head's push: where both are as they were, a push would change nothing."""
    found: list[object] = []
    for name in ("catalog.sqlite", "catalog.sqlite-wal"):
        with suppress(FileNotFoundError):
            its = (store / name).stat()
            found += [its.st_ino, its.st_size, its.st_mtime_ns]
    objects = Objects(url)
    try:
        with suppress(FileNotFoundError):
            found.append(fetch_head(objects)[0].push)
    finally:
        objects.close()
    return tuple(found)
