"""The catalog as readers have it open: always the file that lies there now, and moments of it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from schemas.catalog.database import Database, Scanned
from schemas.catalog.records import ReadConnection, connect_read
from schemas.errors import StoreError

__all__ = ["CatalogView", "Moment", "View"]


class Moment(NamedTuple):
    """The catalog as it is in one transaction; ``version`` is another once anything in it has changed."""

    db: Database
    version: int


class View(Protocol):
    """A catalog as readers have it open, wherever it lies; ``lock`` is held by whoever reads of it."""

    @property
    def lock(self) -> threading.RLock: ...

    def moment(self) -> AbstractContextManager[Moment]:
        """A block in which all reads are of one moment."""

    def scan(self, now: Moment, sql: str, args: Sequence[Any]) -> Scanned:
        """The answer to a query of a moment, of which but a part may be taken."""

    def another(self) -> View:
        """The same catalog by a connection of its own."""

    def close(self) -> None:
        """Release what is open."""


class CatalogView:
    """One connection for all threads; whoever uses it holds ``lock``."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.RLock()
        self.path = path
        self._connection, self._seen = self._open()
        self._reopened = 0
        self._closed = False

    def _open(self) -> tuple[ReadConnection, tuple[int, ...]]:
        """A connection, and what it stands for until that changes."""
        # Before it is opened: what changes meanwhile is a change. Where there is none, opening says so.
        seen = self._look(everything=True) if self.path.exists() else ()
        connection = connect_read(self.path)
        return connection, seen if connection.immutable else seen[:1]

    def _look(self, everything: bool) -> tuple[int, ...]:
        """Identity of the catalog's file; with ``everything``, another once it was written to."""
        stat = self.path.stat()
        if not everything:
            return (stat.st_ino,)
        log = self.path.with_name(f"{self.path.name}-wal")
        try:
            beside = log.stat()
        except FileNotFoundError:
            return (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        return (stat.st_ino, stat.st_mtime_ns, stat.st_size, beside.st_mtime_ns, beside.st_size)

    @property
    def db(self) -> sqlite3.Connection:
        """The catalog's connection, opened anew where the file has changed.

        That happens where a writer found the catalog damaged and put another in its place. It also happens where a
        catalog that nobody wrote to, on media that are read-only from here, has a writer again.
        """
        try:
            seen = self._look(self._connection.immutable)
        except FileNotFoundError:
            return self._connection
        if seen != self._seen and not self._connection.in_transaction:
            (fresh, self._seen), stale = self._open(), self._connection
            self._connection = fresh
            stale.close()
            self._reopened += 1
        return self._connection

    def move_to(self, path: Path) -> None:
        """Show another file from now on."""
        with self.lock:
            self.path = path

    def another(self) -> CatalogView:
        """The same file by a connection of its own."""
        return CatalogView(self.path)

    def scan(self, now: Moment, sql: str, args: Sequence[Any]) -> Scanned:
        """The answer to a query of a moment, of which but a part may be taken."""
        return now.db.execute(sql, args)

    @contextmanager
    def moment(self) -> Iterator[Moment]:
        """A block in which all reads are of one moment; nobody else reads meanwhile."""
        with self.lock:
            if self._closed:
                raise StoreError("read", self.path.parent, "this reader was closed", "open the store again: that of a "
                                 "recording is open until its end")
            db = self.db
            db.execute("BEGIN")
            try:
                counted = int(db.execute("PRAGMA data_version").fetchone()[0])  # by this connection
                yield Moment(db, self._reopened << 32 | counted)
            finally:
                db.execute("ROLLBACK")

    def close(self) -> None:
        """Release the file."""
        with self.lock:
            self._closed = True
            self._connection.close()
