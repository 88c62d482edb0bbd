"""Looks after what is stored, beside the main loop: erases what was deleted, takes whole blocks away.

The thread only touches sealed blocks and closed logs, and tells the main loop what it did; the main loop journals it.
The next round starts when the catalog has heard of the last one.
"""

from __future__ import annotations

import sqlite3
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from schemas.catalog import connect_read
from schemas.errors import StoreError
from writer_service import removal
from writer_service.catalog import Erased, Scrubbed, SegmentGone
from writer_service.commits import Waker
from writer_service.erasing import erase
from writer_service.scrubbing import scrub_log

retire_rounds: Final = 2  # so that deletes one after the other do not make a block each
failed_rounds: Final = 30
KeeperChange = Erased | Scrubbed | SegmentGone


@dataclass(slots=True)
class Round:
    """What one round found and did."""

    changes: list[KeeperChange] = field(default_factory=list)
    retire: set[int] = field(default_factory=set)  # open segments that hold rows to erase
    rotate_log: bool = False  # the log being written has something to scrub
    erased_rows: int = 0
    removed_blocks: int = 0
    failures: int = 0


class Keeper:
    """``step`` starts a round where one is due; ``take`` gives what came of it, once."""

    def __init__(self, store: Path, uuid: bytes, round_s: float, waker: Waker) -> None:
        self._store, self._uuid, self._round_s, self._waker = store, uuid, round_s, waker
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keep")
        self._running: Future[Round] | None = None
        self._due = 0.0
        self._after_batch = 0
        self._seen: dict[int, float] = {}  # open segments with rows to erase, since when
        self.failures = 0

    def step(self, now: float, applied: int) -> None:
        """Start a round where the last one is over, told, and long enough ago; ``applied`` is the catalog's commit."""
        if self._running is None and now >= self._due and applied >= self._after_batch:
            self._running = self._pool.submit(self.round)
            self._running.add_done_callback(lambda _: self._waker.wake())

    def take(self, now: float, batch: int) -> Round | None:
        """The round that ended; its changes go into commit ``batch``."""
        if self._running is None or not self._running.done():
            return None
        future, self._running = self._running, None
        if error := future.exception():
            self._complain("look after the store", error)
            self._due = now + failed_rounds * self._round_s
            return None
        done = future.result()
        self._due = now + (failed_rounds if done.failures else 1) * self._round_s
        if done.changes:
            self._after_batch = batch
        self._seen = {number: self._seen.get(number, now) for number in done.retire}
        done.retire = {number for number, since in self._seen.items() if now - since >= retire_rounds * self._round_s}
        return done

    def close(self) -> None:
        """End the thread; what it did not get to is done after the next start."""
        self._pool.shutdown()

    def round(self) -> Round:
        """One round, here and now."""
        done = Round()
        db = connect_read(self._store / "catalog.sqlite")
        try:
            db.execute("BEGIN")  # one moment: what is journaled later is the next round's
            self._erase(db, done)
            self._scrub(db, done)
        finally:
            db.close()
        return done

    def _erase(self, db: sqlite3.Connection, done: Round) -> None:
        doomed: dict[int, list[str]] = {}
        for row in db.execute("SELECT DISTINCT segment, capture FROM doomed"):
            doomed.setdefault(row["segment"], []).append(row["capture"])
        sealed = {row["number"] for row in db.execute("SELECT number FROM segments WHERE sealed = 1")} if doomed else {}
        whole = [number for number in doomed if number in sealed and removal.removable(db, number)]
        if whole:
            removal.remember_streams(self._store, db)
        for number, captures in sorted(doomed.items()):
            if number not in sealed:
                done.retire.add(number)
                continue
            try:
                if number in whole:
                    removal.remove_block(self._store, number)
                    done.changes.append(SegmentGone(number))
                    done.removed_blocks += 1
                else:
                    done.erased_rows += erase(self._store, self._uuid, number, captures)
                    done.changes.append(Erased(number, captures))
            except (OSError, StoreError, ValueError, KeyError) as error:
                done.failures += 1
                self._complain(f"erase in segment {number}", error)

    def _scrub(self, db: sqlite3.Connection, done: Round) -> None:
        logs: dict[int, set[str]] = {}
        for row in db.execute("SELECT s.log, s.capture, c.ulid, NOT EXISTS (SELECT 1 FROM captures o WHERE "
                              "o.ulid = c.ulid AND NOT o.deleted) AS whole FROM scrub s JOIN captures c "
                              "ON c.id = s.capture"):
            logs.setdefault(row["log"], set()).update([row["capture"], row["ulid"]] if row["whole"]
                                                      else [row["capture"]])
        current = int((db.execute("SELECT value FROM meta WHERE key = 'log'").fetchone() or ["0"])[0].partition(":")[0])
        for number, captures in sorted(logs.items()):
            if number >= current:
                done.rotate_log = True
                continue
            try:
                scrub_log(self._store, self._uuid, number, captures)
                done.changes.append(Scrubbed(number, sorted(captures)))
            except (OSError, StoreError) as error:
                done.failures += 1
                self._complain(f"scrub log {number}", error)

    def _complain(self, what: str, error: BaseException) -> None:
        self.failures += 1
        wait = failed_rounds * self._round_s
        print(f"writer: {what}: {error} (tried again in {wait:g} s)", file=sys.stderr, flush=True)
