"""Group commit: sync every file that was written to, then say so; the catalog follows in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from schemas.catalog.records import connect_write
from writer_service import fs
from writer_service.catalog import catalog
from writer_service.catalog.catalog_file import DAMAGED, damaged, set_aside
from writer_service.catalog.changes import Change, Erased, Scrubbed
from writer_service.catalog.entries import note_streams
from writer_service.control_log import ControlLog
from writer_service.journal.open_segments import OpenSegment

sync_threads: Final = 4
catalog_backlog_max: Final = 64  # commits that the catalog may lag behind
_UNTIDY_S: Final = 0.5  # between attempts to empty SQLite's log of what was deleted


@dataclass(slots=True)
class Batch:
    """Appends since the last commit; numbered from 1."""

    number: int
    changes: list[Change] = field(default_factory=list)
    nbytes: int = 0
    payload_bytes: int = 0  # of rows
    full: bool = False  # due because of its size
    started: float = 0.0  # when its first change came, 0 while it is empty
    wrote: float = 0.0  # when the first of its frames began to be written, 0 where none was
    urgent: bool = False  # somebody may wait for a record
    ends: bool = False  # it has the end of a capture
    covered: dict[str, tuple[int, str, int]] = field(default_factory=dict)  # stream → epoch, role, number
    log_position: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class SyncResult:
    """Result of a file's sync up to ``tail``."""

    file: OpenSegment | ControlLog
    tail: int
    error: OSError | None
    seconds: float
    over: float  # time.perf_counter() of its end


class Waker:
    """Wakes the poll of the main loop from other threads."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        """Wake the main loop; safe from any thread."""
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are waiting already
            os.write(self._write_fd, b"x")

    def drain(self) -> None:
        """Take the wake-ups that came."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.read_fd, 4096):
                pass


class Syncer:
    """Syncs one commit at a time, its files side by side, while the main loop goes on receiving."""

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        self._pool = ThreadPoolExecutor(sync_threads, thread_name_prefix="sync")
        self._running: list[Future[SyncResult]] = []
        self.batch: Batch | None = None
        self._began = 0.0  # of the commit that was started last, time.perf_counter()
        self.seconds = 0.0  # in which a commit was synced, of those that ended

    def start(self, batch: Batch, files: list[OpenSegment | ControlLog]) -> None:
        """Begin to sync; ``finished`` tells when it is over."""
        self.batch = batch
        self._began = time.perf_counter()
        self._running = [self._pool.submit(_sync, file, file.tail) for file in files]
        for future in self._running:
            future.add_done_callback(lambda _: self._waker.wake())
        if not self._running:
            self._waker.wake()

    def finished(self) -> tuple[Batch, list[SyncResult]] | None:
        """The commit that ended, once; None while it runs or nothing runs."""
        if self.batch is None or not all(future.done() for future in self._running):
            return None
        batch, self.batch = self.batch, None
        results = [future.result() for future in self._running]
        self.seconds += max((result.over for result in results), default=self._began) - self._began
        return batch, results

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _sync(file: OpenSegment | ControlLog, tail: int) -> SyncResult:
    began = time.perf_counter()
    failed = None
    try:
        fs.datasync(file.fd)
    except OSError as error:
        failed = error
    over = time.perf_counter()
    return SyncResult(file, tail, failed, over - began, over)


class CatalogThread:
    """Applies commits to the catalog in order, a transaction each; waits and tries again while the disk is full."""

    def __init__(self, path: Path, waker: Waker) -> None:
        self._path, self._waker = path, waker
        self._queue: queue.Queue[Batch | None] = queue.Queue(catalog_backlog_max)
        self.done: deque[Batch] = deque()
        self.failed: Exception | None = None
        self.trouble: str | None = None
        self._closing = False
        self._untidy = False  # SQLite's log may still hold what was deleted
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Number of commits that wait, the one being applied included."""
        return self._queue.unfinished_tasks

    @property
    def full(self) -> bool:
        """Whether another commit would have to wait."""
        return self._queue.full()

    def put(self, batch: Batch) -> None:
        """Hand over a commit that is on the disk."""
        self._queue.put(batch)

    def close(self) -> None:
        """Apply what is waiting and end; what cannot be applied now is read from the journal at the next start."""
        self._closing = True
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=0.1)
                break
        self._thread.join()

    def _run(self) -> None:
        try:
            db = connect_write(self._path)
            while (batch := self._next(db)) is not None:
                self._retry(lambda batch=batch: _apply(db, batch))  # type: ignore[misc]
                self.done.append(batch)
                self._queue.task_done()
                self._waker.wake()
                self._untidy |= any(isinstance(change, Erased | Scrubbed) for change in batch.changes)
                if self._untidy and self._queue.empty():
                    self._untidy = not _empty_wal(db)
            with contextlib.suppress(sqlite3.OperationalError):  # the disk is full: the next start reads the log
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.close()
        except Exception as error:  # the main loop must end, whatever it was
            if isinstance(error, sqlite3.DatabaseError) and damaged(error):  # the next start makes it anew
                with contextlib.suppress(OSError):
                    set_aside(self._path.parent, DAMAGED)
            self.failed = error
            self._waker.wake()

    def _next(self, db: sqlite3.Connection) -> Batch | None:
        """The next commit; meanwhile SQLite's log is emptied as soon as no reader is in the middle of it."""
        while self._untidy:
            try:
                return self._queue.get(timeout=_UNTIDY_S)
            except queue.Empty:
                self._untidy = not _empty_wal(db)
        return self._queue.get()

    def _retry(self, work: Callable[[], None]) -> None:
        while True:
            try:
                work()
            except sqlite3.OperationalError as error:  # disk full, I/O error, locked by a stranger
                self.trouble = str(error)
                if self._closing:
                    raise
                time.sleep(0.2)
            else:
                self.trouble = None
                return


def _empty_wal(db: sqlite3.Connection) -> bool:
    """Cut SQLite's log to nothing; False where a reader is in the middle of it, or the disk is full: the log stays."""
    db.execute("PRAGMA busy_timeout=100")
    try:
        return not db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    except sqlite3.OperationalError:
        return False
    finally:
        db.execute("PRAGMA busy_timeout=30000")


def _apply(db: sqlite3.Connection, batch: Batch) -> None:
    with catalog.transaction(db):
        touched = catalog.apply(db, batch.changes)
        catalog.refresh(db, touched)
        note_streams(db, [(stream, *rest) for stream, rest in batch.covered.items()])
        if batch.log_position[0]:
            catalog.set_meta(db, "log", f"{batch.log_position[0]}:{batch.log_position[1]}")
