"""Check of a catalog in Postgres, row for row, against the bucket's head: ``vllm-tap fsck --bucket URL --catalog …``.

Both are read in the order of their keys, some rows at a time, so memory does not grow with them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from schemas.errors import BucketError
from schemas.objects.layout import Head, read_head
from schemas.postgres.connection import PUSH_IT, CatalogUrl, escaped, told
from schemas.postgres.layout import VERSION, Table, quoted, schema_of, tables

__all__ = ["catalog_faults"]

_ROWS: Final = 1000  # that are fetched at a time
Row = tuple[Any, ...]


@dataclass(slots=True)
class _Differences:
    """Counts of a table's rows that the catalog lacks, has too many, or has with other values; ``first`` is the key of
    the first of them.
    """

    missing: int = 0
    extra: int = 0
    other: int = 0
    first: Row = ()

    def __str__(self) -> str:
        counts = (f"{self.missing:,} rows are missing" * (self.missing > 0),
                  f"{self.extra:,} are too many" * (self.extra > 0), f"{self.other:,} differ" * (self.other > 0))
        return ", ".join(filter(None, counts)) + f"; the first is {' '.join(map(repr, self.first))[:200]}"


def catalog_faults(place: CatalogUrl, url: str, head: Head, snapshot: Path, tell: Callable[[int], None]) -> list[str]:
    """Lines that say how the catalog at ``place`` differs from the ``snapshot`` of the current head of ``url``.

    ``tell`` is called with numbers of rows that were compared. CatalogError where the server does not answer.
    """
    with closing(place.connect(reads=True)) as connection, told("check", str(place)):
        if (fault := _other_head(connection, url, head)) is not None:
            return [fault]
        connection.execute(f"SET LOCAL search_path = {schema_of(head.store)}, pg_catalog, pg_temp")
        with closing(sqlite3.connect(snapshot)) as db:
            db.create_function("escaped", 1, escaped, deterministic=True)
            return [f"{table.name}: {found}; DROP SCHEMA {schema_of(head.store)} CASCADE, then {PUSH_IT} whole"
                    for table in tables()
                    if (found := _compared(_of_head(db, table), _of_catalog(connection, table), len(table.key), tell))]


def _other_head(connection: Any, url: str, head: Head) -> str | None:
    """The reason why the catalog is not that of this head at all."""
    schema = schema_of(head.store)
    if connection.execute("SELECT to_regclass(%s)", (f"{schema}.head",)).fetchone() == (None,):
        return f"it has no catalog of this store; {PUSH_IT}"
    found = connection.execute(f"SELECT version, url, push, head FROM {schema}.head").fetchone()
    if found is None:
        return f"its catalog of this store has no head; {PUSH_IT}"
    version, its_url, push, text = found
    if its_url != url:
        return f"it has this store's catalog of {its_url}, not of {url}"
    if version != VERSION:
        return f"its catalog is of version {version}, this program knows {VERSION}; {PUSH_IT}"
    if push == head.push:
        return None
    try:
        generation = str(read_head(text.encode(), "its head").generation)
    except BucketError:
        generation = "?"
    return (f"its catalog is of generation {generation}, and the head is of generation {head.generation} (a push that "
            f"runs now brings it in a moment); else {PUSH_IT}")


def _compared(ours: Iterator[Row], theirs: Iterator[Row], width: int, tell: Callable[[int], None]
              ) -> _Differences | None:
    """The differences of rows that come in the order of their keys, the first ``width`` values of each."""
    found, rows = _Differences(), 0
    mine, its = next(ours, None), next(theirs, None)
    while mine is not None or its is not None:
        rows += 1
        if rows % _ROWS == 0:
            tell(_ROWS)
        if its is None or (mine is not None and mine[:width] < its[:width]):
            found.missing, odd, mine = found.missing + 1, mine, next(ours, None)
        elif mine is None or its[:width] < mine[:width]:
            found.extra, odd, its = found.extra + 1, its, next(theirs, None)
        else:
            found.other, odd = found.other + (mine != its), mine if mine != its else None
            mine, its = next(ours, None), next(theirs, None)
        if odd is not None:
            found.first = found.first or odd[:width]
    tell(rows % _ROWS)
    return found if found.first else None


def _columns(table: Table) -> list[str]:
    """Names of the columns, the key's first."""
    return [*table.key, *(name for name in table.columns if name not in table.key)]


def _of_head(db: sqlite3.Connection, table: Table) -> Iterator[Row]:
    """The snapshot's rows as Postgres has them, in the order in which it sorts their keys."""
    order = ", ".join(f'escaped("{name}")' for name in table.key)
    for row in db.execute(f"SELECT {quoted(_columns(table))} FROM {table.name} ORDER BY {order}"):
        yield tuple(escaped(value) for value in row)


def _of_catalog(connection: Any, table: Table) -> Iterator[Row]:
    """The rows in Postgres, as they are there."""
    with connection.cursor(name="held", binary=True) as cursor:
        cursor.itersize = _ROWS
        cursor.execute(f"SELECT {quoted(_columns(table))} FROM {table.name} ORDER BY {quoted(table.key)}")
        yield from cursor
