"""Looks after what is stored, beside the main loop: erases what was deleted, finds what is too old or too much.

The thread only touches sealed blocks and closed logs, and tells the main loop what it did; the main loop journals it.
The next round starts when the catalog has heard of the last one.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from schemas.catalog.records import connect_read
from schemas.errors import StoreError
from schemas.objects.evicted import read_evicted
from schemas.store.cold_block import open_cold
from schemas.store.paths import block_name, journal_folder
from writer_service import log
from writer_service.catalog.catalog import current_log
from writer_service.catalog.changes import Compacted, Erased, Scrubbed, SegmentGone
from writer_service.control_log import log_numbers
from writer_service.journal.group_commit import Waker
from writer_service.journal.journal import Journal
from writer_service.upkeep import block_removal, cold_blocks, evicted_blocks, log_merging
from writer_service.upkeep.erasing import erase
from writer_service.upkeep.scrubbing import scrub_log
from writer_service.upkeep.usage import Usage, capture_bytes, disk_bytes, oldest

retire_rounds: Final = 2  # so that deletes one after the other do not make a block each
failed_rounds: Final = 30
rewrite_rest: Final = 9  # times as long as making a cold block anew took, before the next
expired_at_once: Final = 500
owed_share: Final = 4  # where more than a fourth was deleted and did not come back, nothing is deleted for that
UpkeepChange = Erased | Scrubbed | SegmentGone | Compacted


@dataclass(slots=True)
class Round:
    """Result of one round."""

    changes: list[UpkeepChange] = field(default_factory=list)
    retire: set[int] = field(default_factory=set)  # open segments that hold rows to erase
    expired: list[str] = field(default_factory=list)  # captures to delete: too old, or one too many
    used_bytes: int | None = None  # what the store takes; None where it could not be measured
    put_off: bool = False  # something that is doomed waits for a later round
    rotate_log: bool = False  # the log being written has something to scrub
    erased_rows: int = 0
    removed_blocks: int = 0
    failures: int = 0


class Upkeep:
    """``step`` starts a round where one is due; ``take`` gives what came of it, once."""

    def __init__(
        self, store: Path, uuid: bytes, waker: Waker, round_s: float = 1.0, retain_days: float | None = None,
        retain_bytes: int | None = None, take_number: Callable[[], int] | None = None,
    ) -> None:
        self._store, self._uuid, self._waker, self._round_s = store, uuid, waker, round_s
        self._retain_days, self._retain_bytes = retain_days, retain_bytes
        self._take_number = take_number or (lambda: cold_blocks.free_number(store))
        self._usage = Usage(store)
        self._db: sqlite3.Connection | None = None  # between two rounds
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keep")
        self._running: Future[Round] | None = None
        self._due = 0.0
        self._rest_until = 0.0
        self._after_batch = 0
        self._seen: dict[int, float] = {}  # open segments with rows to erase, since when
        self._asked: set[str] = set()  # captures that were one too many, as of the last time that some were
        self._owed = 0  # about what deleting them should have given back and has not
        self._in_vain = self._told_evicting = False
        self._damaged_logs: set[int] = set()
        self.failures = 0

    def step(self, now: float, applied: int) -> bool:
        """Start a round where the last one is over, told, and long enough ago; whether one began.

        ``applied`` is the last commit that the catalog has.
        """
        if self._running is not None or now < self._due or applied < self._after_batch:
            return False
        self._running = self._pool.submit(self.round)
        self._running.add_done_callback(lambda _: self._waker.wake())
        return True

    def take(self, now: float, journal: Journal) -> Round | None:
        """The round that ended; its changes are handed to the journal."""
        if self._running is None or not self._running.done():
            return None
        future, self._running = self._running, None
        if error := future.exception():
            self._complain("look after the store", error)
            self._due = now + failed_rounds * self._round_s
            return None
        done = future.result()
        self._due = now + (failed_rounds if done.failures else 1) * self._round_s
        self._seen = {number: self._seen.get(number, now) for number in done.retire}
        journal.segments.retire_numbers(
            {number for number, since in self._seen.items() if now - since >= retire_rounds * self._round_s})
        for change in done.changes:
            journal.change(change)
        if (done.rotate_log and journal.rotate_log()) or done.changes:  # else the next round would rotate once more
            self._after_batch = journal.batch_number
        journal.counters.rows_erased += done.erased_rows
        journal.counters.erasures_failed += done.failures
        journal.counters.blocks_removed += done.removed_blocks
        if done.changes or done.expired:
            log.info("upkeep", "rows of deleted captures erased", rows=done.erased_rows,
                     blocks_removed=done.removed_blocks, expired=len(done.expired), failures=done.failures)
        return done

    def close(self) -> None:
        """End the thread; what it did not get to is done after the next start."""
        self._pool.shutdown()
        if self._db is not None:
            self._db.close()

    def round(self) -> Round:
        """Do one round, here and now."""
        done = Round()
        db, self._db = self._db or connect_read(self._store / "catalog.sqlite"), None
        try:
            db.execute("BEGIN")  # one moment: what is journaled later is the next round's
            for what, part in (("erase rows", self._erase), ("scrub logs", self._scrub), ("merge logs", self._merge),
                               ("measure the store", self._measure), ("find what expires", self._expire)):
                try:
                    part(db, done)
                except (OSError, StoreError) as error:  # what was done is journaled all the same
                    done.failures += 1
                    self._complain(what, error)
            db.execute("ROLLBACK")
            self._db = db  # one that is new reads the whole schema first, most of what an idle round takes
        finally:
            if self._db is None:
                db.close()
        return done

    def _erase(self, db: sqlite3.Connection, done: Round) -> None:
        doomed: dict[int, list[str]] = {}
        for row in db.execute("SELECT DISTINCT segment, capture FROM doomed"):
            doomed.setdefault(row["segment"], []).append(row["capture"])
        sealed = {row["number"]: bool(row["cold"]) for row in db.execute(
            "SELECT number, cold FROM segments WHERE sealed = 1")} if doomed else {}
        whole = [number for number in doomed if number in sealed and block_removal.removable(db, number)]
        if whole:
            block_removal.remember_streams(self._store, db)
        silent = set[str]()  # buckets that do not answer, which takes minutes to find out
        for number, captures in sorted(doomed.items()):
            if number not in sealed:
                done.retire.add(number)
                continue
            block = self._store / block_name(number)
            before, at = disk_bytes(block), None
            try:
                at = None if number in whole else read_evicted(self._store, number)
                if at is not None and at.url in silent:
                    done.put_off = True
                    continue
                with evicted_blocks.locked(self._store):
                    if number in whole:
                        block_removal.remove_block(self._store, number)
                        done.changes.append(SegmentGone(number))
                        done.removed_blocks += 1
                    elif sealed[number]:
                        self._rewrite(db, number, done)
                    else:
                        evicted_blocks.recall(self._store, number)
                        done.erased_rows += erase(self._store, self._uuid, number, captures)
                        self._usage.forget(number)
                        done.changes.append(Erased(number, captures))
                self._owed = max(self._owed - max(before - disk_bytes(block), 0), 0)
            except (OSError, StoreError, ValueError, KeyError) as error:
                done.failures += 1
                self._complain(f"erase in segment {number}", error)
                if at is not None and isinstance(error, evicted_blocks.SilentBucketError):
                    silent.add(at.url)

    def _rewrite(self, db: sqlite3.Connection, number: int, done: Round) -> None:
        """A cold block without its doomed rows takes its place; the next round takes the old one away whole.

        That is a whole block written for however few rows, so between two of them is time for everything else.
        """
        began = time.monotonic()
        if began < self._rest_until:
            done.put_off = True
            return
        if evicted_blocks.recall(self._store, number):
            self._usage.forget(number)
        before = len(open_cold(self._store / block_name(number)).present)
        change = cold_blocks.build(self._store, self._uuid, db, self._take_number(), [number], strict=False)
        done.erased_rows += before - sum(len(frame.table.position) for frame in change.frames)
        done.changes.append(change)
        self._owed += disk_bytes(self._store / block_name(change.made.number))  # what the old one gives back too much
        self._rest_until = time.monotonic() + rewrite_rest * (time.monotonic() - began)

    def _measure(self, db: sqlite3.Connection, done: Round) -> None:
        done.used_bytes = self._usage.measure()

    def _expire(self, db: sqlite3.Connection, done: Round) -> None:
        now_ms = time.time_ns() // 1_000_000
        if self._retain_days is not None:
            done.expired += islice(oldest(db, now_ms - int(self._retain_days * 86_400_000)), expired_at_once)
        if done.used_bytes is None or self._retain_bytes is None:
            return
        if evicted_blocks.was_evicting(self._store):  # deleted rows come back from the bucket first, which takes room
            if not self._told_evicting:
                self._told_evicting = True
                log.warn("retention_is_off", "--retain-bytes deletes nothing, because rows of this store were evicted "
                         "to a bucket; limit the disk with vllm-tap push --local-bytes")
            return
        if done.expired or done.changes or done.retire or done.put_off:
            return  # what is being erased comes back first
        excess = done.used_bytes - self._retain_bytes
        in_vain = excess > 0 and self._owed > self._retain_bytes // owed_share
        if in_vain and not self._in_vain:
            log.warn("retention_in_vain", f"rows take {done.used_bytes} bytes, and --retain-bytes is "
                     f"{self._retain_bytes}; deleted captures freed {self._owed} bytes less than their size, and no "
                     "more captures are deleted in place of these "
                     "bytes", used_bytes=done.used_bytes, missing_bytes=self._owed)
        self._in_vain = in_vain
        if in_vain:
            excess -= self._owed  # it may come back with the rest of its blocks; what is new makes room as ever
        asked, self._asked = self._asked, set()
        for capture in islice(oldest(db, now_ms), expired_at_once):
            if excess <= 0:
                return
            done.expired.append(capture)
            self._asked.add(capture)
            nbytes = capture_bytes(db, capture)
            excess -= nbytes
            self._owed += 0 if capture in asked else nbytes

    def _scrub(self, db: sqlite3.Connection, done: Round) -> None:
        logs: dict[int, set[str]] = {}
        for row in db.execute("SELECT s.log, s.capture, c.ulid, NOT EXISTS (SELECT 1 FROM captures o WHERE "
                              "o.ulid = c.ulid AND NOT o.deleted) AS whole FROM scrub s JOIN captures c "
                              "ON c.id = s.capture"):
            logs.setdefault(row["log"], set()).update([row["capture"], row["ulid"]] if row["whole"]
                                                      else [row["capture"]])
        if not logs:
            return
        log_merging.finish_merges(self._store, self._uuid)  # what another log has too is not scrubbed
        there, current = log_numbers(self._store / journal_folder()), current_log(db)
        files: dict[int, list[int]] = {}  # by the log that has their records now
        for number in sorted(logs):
            if number >= current:
                done.rotate_log = True
            else:
                found = log_merging.log_of(there, number)
                files.setdefault(number if found is None else found, []).append(number)
        for file, numbers in files.items():
            try:
                scrub_log(self._store, self._uuid, file, set().union(*(logs[number] for number in numbers)))
                done.changes += [Scrubbed(number, sorted(logs[number])) for number in numbers]
            except (OSError, StoreError) as error:
                done.failures += 1
                self._complain(f"scrub log {file}", error)

    def _merge(self, db: sqlite3.Connection, done: Round) -> None:
        """Logs of which all is in the catalog and that are small become one: else each round would leave one."""
        if numbers := log_merging.mergeable(self._store, current_log(db), self._damaged_logs):
            try:
                log_merging.finish_merges(self._store, self._uuid)
                log_merging.merge(self._store, self._uuid, numbers)
            except log_merging.DamagedLogError as error:
                self._damaged_logs.add(error.number)  # fsck names it

    def _complain(self, what: str, error: BaseException) -> None:
        self.failures += 1
        wait = failed_rounds * self._round_s
        log.warn("upkeep_failed", f"{what}: {error} (tried again in {wait:g} s)", what=what, error=str(error))
