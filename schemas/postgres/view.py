"""A store's catalog in Postgres as readers have it open: always the push that was brought there last."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from schemas.catalog.database import Scanned
from schemas.catalog.view import Moment
from schemas.errors import CatalogError, StoreError
from schemas.objects.layout import Head, read_head
from schemas.postgres.connection import PUSH_IT, CatalogUrl, PostgresDatabase, installed
from schemas.postgres.layout import VERSION, schema_of

__all__ = ["PostgresView"]

_STATEMENT_S: Final = 30  # a query of a reader takes at most so long
# A transaction's own settings: they hold behind a pool of connections too.
_BEGIN: Final = """SELECT version, push, url, head, set_config('search_path', '{schema}, pg_catalog, pg_temp', true),
    set_config('statement_timeout', '{seconds}s', true) FROM {schema}.head"""


class PostgresView:
    """One connection for all threads; whoever uses it holds ``lock``. It connects again where its server was away.

    ``moved`` is called, inside the moment that is the first to see it, with the head of another push than before.
    """

    def __init__(self, place: CatalogUrl, store: str, moved: Callable[[Head], None] = lambda head: None) -> None:
        self.lock = threading.RLock()
        self.place, self._store, self._moved = place, store, moved
        self._begin = _BEGIN.format(schema=schema_of(store), seconds=_STATEMENT_S)
        self._open: PostgresDatabase | None = None
        self._push, self._version, self._closed, self._pid = "", 0, False, os.getpid()

    def another(self) -> PostgresView:
        """The same catalog by a connection of its own."""
        return PostgresView(self.place, self._store)

    @contextmanager
    def moment(self) -> Iterator[Moment]:
        """A block in which all reads are of one push; nobody else reads meanwhile. CatalogError."""
        with self.lock:
            if self._closed:
                raise StoreError("read", str(self.place), "this reader was closed", "open the store again")
            if self._is_forked():  # the connection is the other process's
                raise CatalogError("read", str(self.place), "this process was forked after the store was opened",
                                   "open it in the process that reads it")
            database, said = self._begun()
            try:
                self._check(said)
                yield Moment(database, self._version)
            finally:
                self._end(database)

    def scan(self, now: Moment, sql: str, args: Sequence[Any]) -> Scanned:
        """The answer to a query of a moment, some rows at a time."""
        assert isinstance(now.db, PostgresDatabase)
        return now.db.scan(sql, args)

    def close(self) -> None:
        """Release the connection."""
        with self.lock:
            self._closed = True
            self._drop()

    def _begun(self) -> tuple[PostgresDatabase, Any]:
        """A connection in a new transaction, and the row of its head; one that broke meanwhile is made anew, once."""
        while True:
            is_fresh = self._open is None
            self._pid = os.getpid()
            database = self._open = self._open or PostgresDatabase(self.place.connect(reads=True), str(self.place))
            try:
                return database, database.execute(self._begin).fetchone()
            except BaseException as error:
                self._end(database)
                if is_fresh or self._open is not None or not isinstance(error, CatalogError):
                    raise

    def _end(self, database: PostgresDatabase) -> None:
        with suppress(installed().Error):
            database.connection.rollback()
        if database.connection.closed:
            self._drop()

    def _is_forked(self) -> bool:
        return self._open is not None and self._pid != os.getpid()

    def _drop(self) -> None:
        if self._open is not None and not self._is_forked():
            self._open.connection.close()
        self._open = None

    def _check(self, said: Any) -> None:
        """CatalogError where what is there is of another version or store; tell of a push that was not seen before."""
        if said is None or said["version"] != VERSION:
            raise CatalogError("read", str(self.place), "its catalog is of version "
                               f"{said and said['version']}, this program knows {VERSION}",
                               f"{PUSH_IT}, by a vllm-tap of this version")
        if said["push"] == self._push:
            return
        head = read_head(said["head"].encode(), str(self.place))
        if head.store != self._store or head.push != said["push"]:
            raise CatalogError("read", str(self.place), f"its catalog is of store {head.store}, not {self._store}",
                               PUSH_IT)
        self._push, self._version = head.push, self._version + 1
        self._moved(head)
