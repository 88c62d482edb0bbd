"""``vllm-tap push --catalog``: the catalog of the head goes to Postgres too, for readers that fetch no snapshot.

The catalog there follows the head and never leads it. A push changes it in one transaction, behind a lock of the
store's, and only if the bucket still has the head of this push. A push that is outrun leaves the catalog to the other
push. The new snapshot is compared with that of the push whose catalog is there, so that only changed rows travel.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from schemas.bucket.snapshots import fetch_snapshot
from schemas.errors import BucketError, CatalogError
from schemas.objects.heads import fetch_head
from schemas.objects.layout import Head, read_head
from schemas.objects.objects import Objects
from schemas.postgres.connection import CatalogUrl, escaped, told
from schemas.postgres.layout import VERSION, Table, functions, head_table, indexes, quoted, schema_of, tables

__all__ = ["Brought", "PostgresCatalog"]

_KEYS: Final = 10_000  # that are deleted in one statement
# The server lets go of a push whose host is gone, and a push of another that does not come to its end.
_LIVELY: Final = """SET LOCAL tcp_keepalives_idle = 15; SET LOCAL tcp_keepalives_interval = 5;
    SET LOCAL tcp_keepalives_count = 3; SET LOCAL lock_timeout = '15min'"""


@dataclass(frozen=True, slots=True)
class Brought:
    """The result of a push in the catalog at ``place``: rows that it sent, and that it removed or replaced.

    ``whole``: all rows were sent. ``outrun``: another push was first, and brings its own.
    """

    place: str
    sent: int = 0
    removed: int = 0
    whole: bool = False
    outrun: bool = False


@dataclass(frozen=True, slots=True)
class _There:
    """The row of the head."""

    version: int
    url: str
    push: str
    head: str


class PostgresCatalog:
    """The catalog of one store in a database."""

    def __init__(self, url: str, store: str, objects: Objects) -> None:
        """``store``: its uuid in hex; ``objects``: the bucket that the catalog is of."""
        self.place, self._store, self._objects = CatalogUrl(url), store, objects
        self._schema = schema_of(store)

    def check(self) -> None:
        """Raise CatalogError where the catalog cannot be brought, before anything is sent to the bucket."""
        with closing(self.place.connect(reads=True)) as connection, told("push to", str(self.place)):
            if self._there(connection) is None:
                may = connection.execute(
                    "SELECT has_database_privilege(current_database(), 'CREATE') OR to_regnamespace(%s) IS NOT NULL",
                    (self._schema,)).fetchone()
                if may != (True,):
                    raise CatalogError("push to", str(self.place), "this role may not make a schema there",
                                       "GRANT CREATE ON DATABASE … TO the role that pushes")

    def bring(self, head: Head, snapshot: Path, before: Path, before_push: str | None) -> Brought:
        """Make the catalog that of ``head``, whose snapshot is ``snapshot``, unless the bucket has another head by now.

        ``before``: the snapshot of ``before_push``. CatalogError: then the catalog is as it was.
        """
        with closing(self.place.connect(reads=False)) as connection, told("push to", str(self.place)):
            with connection.transaction():
                connection.execute(_LIVELY)
                # Whoever waits here sees what the one before has committed.
                connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (self._schema,))
                if self._current() != head.push:
                    return Brought(str(self.place), outrun=True)
                there = self._there(connection)
                if there is not None and there.version == VERSION and there.push == head.push:
                    return Brought(str(self.place))
                base = None if there is None else self._base(there, before, before_push)
                if there is None or there.version != VERSION:
                    self._make(connection, there)
                connection.execute(f"SET LOCAL search_path = {self._schema}, pg_catalog, pg_temp")
                sent, removed = _bring(connection, snapshot, base)
                if there is None or there.version != VERSION:
                    for statement in indexes():
                        connection.execute(statement)
                self._tell(connection, head)
            with suppress(CatalogError):  # what deleted captures said does not wait for the server's own round
                self._vacuum(connection, [name for name in removed if removed[name] or base is None])
        return Brought(str(self.place), sent, sum(removed.values()), base is None)

    def _current(self) -> str | None:
        try:
            return fetch_head(self._objects)[0].push
        except FileNotFoundError:
            return None

    def _there(self, connection: Any) -> _There | None:
        """The catalog that is there; CatalogError where it belongs to another bucket."""
        if connection.execute("SELECT to_regclass(%s)", (f"{self._schema}.head",)).fetchone() == (None,):
            return None
        found = connection.execute(f"SELECT version, url, push, head FROM {self._schema}.head").fetchone()
        there = None if found is None else _There(*found)
        if there is not None and there.url != self._objects.url:
            raise CatalogError("push to", str(self.place), f"it has this store's catalog of {there.url}, not of "
                               f"{self._objects.url}", "a database has one of a store: name another, or DROP SCHEMA "
                               f"{self._schema} CASCADE where the other bucket is given up")
        return there

    def _base(self, there: _There, before: Path, before_push: str | None) -> Path | None:
        """The snapshot of what is there, None where it cannot be had: then everything is sent."""
        if there.version != VERSION:
            return None
        if there.push == before_push and before.exists():
            return before
        base = before.with_name("catalog-there.sqlite")
        try:
            fetch_snapshot(self._objects, read_head(there.head.encode(), str(self.place)), base)
        except BucketError as error:
            if error.passing:
                raise
            return None
        return base

    def _make(self, connection: Any, there: _There | None) -> None:
        """Empty tables. The schema stays where it is: rights in it were given to roles."""
        if there is None:
            connection.execute(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
        for name in ("head", *(table.name for table in tables())):
            connection.execute(f"DROP TABLE IF EXISTS {self._schema}.{name}")
        for table in tables():
            connection.execute(table.ddl(self._schema))
        for statement in (head_table(self._schema), *functions(self._schema)):
            connection.execute(statement)

    def _vacuum(self, connection: Any, names: list[str]) -> None:
        connection.autocommit = True
        for name in names:
            with told("vacuum", str(self.place)):
                connection.execute(f"VACUUM (ANALYZE) {self._schema}.{name}")

    def _tell(self, connection: Any, head: Head) -> None:
        connection.execute(
            "INSERT INTO head VALUES (true, %s, %s, %s, %s) ON CONFLICT (one) DO UPDATE SET "
            "version = excluded.version, url = excluded.url, push = excluded.push, head = excluded.head",
            (VERSION, self._objects.url, head.push, msgspec.json.encode(head).decode()))


def _bring(connection: Any, snapshot: Path, base: Path | None) -> tuple[int, dict[str, int]]:
    """Rows that were sent, and that were removed from each table."""
    sent, removed = 0, {table.name: 0 for table in tables()}
    with closing(sqlite3.connect(snapshot)) as db:
        if base is not None:
            db.execute("ATTACH ? AS base", (str(base),))
        for table in tables():
            columns = quoted([*table.columns], "a.")
            if base is None:  # not TRUNCATE: readers go on with what they see
                removed[table.name] = connection.execute(f"DELETE FROM {table.name}").rowcount
                rows = db.execute(f"SELECT {columns} FROM {table.name} AS a")
            else:
                removed[table.name] = _delete_stale(connection, db, table)
                rows = db.execute(f"SELECT {columns} FROM fresh JOIN {table.name} AS a ON {_same_key(table, 'fresh')}")
            sent += _copy(connection, table, rows)
    return sent, removed


def _same_key(table: Table, other: str) -> str:
    return " AND ".join(f'a."{name}" = {other}."{name}"' for name in table.key)


def _delete_stale(connection: Any, db: sqlite3.Connection, table: Table) -> int:
    """Remove rows that the snapshot lacks, or has with other values. The table ``fresh`` gets the keys of rows that are
    new or changed.
    """
    name, same, columns = table.name, _same_key(table, "b"), [*table.columns]
    key, differ = quoted(table.key, "a."), f"({quoted(columns, 'a.')}) IS NOT ({quoted(columns, 'b.')})"
    db.execute("DROP TABLE IF EXISTS temp.fresh")
    db.execute(f"CREATE TEMP TABLE fresh AS SELECT {key}, b.{quoted(table.key[:1])} IS NOT NULL AS was "
               f"FROM main.{name} AS a LEFT JOIN base.{name} AS b ON {same} WHERE {differ}")
    stale = db.execute(f"SELECT {key} FROM base.{name} AS a WHERE NOT EXISTS (SELECT 1 FROM main.{name} AS b WHERE "
                       f"{same}) UNION ALL SELECT {quoted(table.key)} FROM fresh WHERE was")
    removed = 0
    while keys := list(islice(stale, _KEYS)):
        removed += _delete(connection, table, keys)
    return removed


def _delete(connection: Any, table: Table, keys: list[tuple[Any, ...]]) -> int:
    types = [table.columns[name].split()[0] for name in table.key]
    gone = ", ".join(f"%s::{kind}[]" for kind in types)
    equal = " AND ".join(f't."{name}" = gone."{name}"' for name in table.key)
    columns = [[escaped(value) for value in column] for column in zip(*keys, strict=True)]
    done = connection.execute(
        f"DELETE FROM {table.name} AS t USING unnest({gone}) AS gone ({quoted(table.key)}) WHERE {equal}", columns)
    return int(done.rowcount)


def _copy(connection: Any, table: Table, rows: Iterator[tuple[Any, ...]]) -> int:
    count = 0
    with connection.cursor().copy(f"COPY {table.name} ({quoted([*table.columns])}) FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types([kind.split()[0] for kind in table.columns.values()])
        for row in rows:
            copy.write_row([escaped(value) for value in row])
            count += 1
    return count
