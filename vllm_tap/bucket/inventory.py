"""Every object of a bucket, and which of them a head names: in a file, since there may be many."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from schemas.errors import BucketError
from schemas.objects.heads import fetch_head
from schemas.objects.layout import (
    CONDITIONS,
    HEAD,
    PUSH,
    RETIRED,
    Head,
    epoch_of,
    folder_of,
    retired_key,
)
from schemas.objects.objects import Objects

__all__ = ["Inventory", "read_heads", "retired_of"]

_OURS: Final = (HEAD, CONDITIONS, ".head.lock")
_DDL: Final = """CREATE TABLE objects (key TEXT PRIMARY KEY, folder TEXT NOT NULL, nbytes INTEGER NOT NULL,
    modified_ms INTEGER NOT NULL, epoch INTEGER, stranger INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX objects_folder ON objects (folder);
CREATE TABLE named (folder TEXT PRIMARY KEY) WITHOUT ROWID;"""
_ORPHANS: Final = "FROM objects WHERE epoch IS NOT NULL AND folder NOT IN (SELECT folder FROM named)"


class Inventory:
    """A listing in the file ``path``; folders are those of blocks, and the keys of snapshots."""

    def __init__(self, objects: Objects, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.executescript(_DDL)
        for page in objects.pages():
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?)", [
                (one.key, folder_of(one.key), one.nbytes, one.modified_ms, epoch := epoch_of(one.key),
                 epoch is None and one.key not in _OURS and retired_of(one.key) is None) for one in page])
            self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def total(self) -> tuple[int, int]:
        """The number of objects, and their bytes."""
        count, nbytes = self._db.execute("SELECT COUNT(*), IFNULL(SUM(nbytes), 0) FROM objects").fetchone()
        return int(count), int(nbytes)

    def nbytes(self, key: str) -> int | None:
        """The bytes of an object, None where there is none."""
        found = self._db.execute("SELECT nbytes FROM objects WHERE key = ?", (key,)).fetchone()
        return None if found is None else int(found[0])

    def retired(self) -> list[str]:
        """The pushes whose heads were retired."""
        keys = self._db.execute("SELECT key FROM objects WHERE key GLOB ? ORDER BY key", (f"{RETIRED}/*",))
        return [push for key, in keys if (push := retired_of(key))]

    def name(self, folders: Iterator[str]) -> None:
        """A head names these."""
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR IGNORE INTO named VALUES (?)", ((folder,) for folder in folders))
        self._db.execute("COMMIT")

    def name_snapshot(self, head: Head, snapshot: Path) -> None:
        """The head of this snapshot names it, and its blocks."""
        with closing(sqlite3.connect(snapshot)) as db:
            self.name(key for key, in db.execute("SELECT key FROM blocks"))
        self.name(iter([head.catalog_key]))

    def orphans(self) -> tuple[int, int, int]:
        """The objects of ours that no head names: how many, their bytes, and when the oldest was written."""
        count, nbytes, oldest = self._db.execute(
            f"SELECT COUNT(*), IFNULL(SUM(nbytes), 0), IFNULL(MIN(modified_ms), 0) {_ORPHANS}").fetchone()
        return int(count), int(nbytes), int(oldest)

    def removable(self, epoch: int, before_ms: int) -> Iterator[list[tuple[str, int]]]:
        """Keys and bytes of orphans of earlier epochs than ``epoch``, in folders last written to before ``before_ms``;
        a thousand at a time.
        """
        found = self._db.execute(
            f"""SELECT key, nbytes {_ORPHANS} AND epoch < ? AND folder IN (
                SELECT folder FROM objects GROUP BY folder HAVING MAX(modified_ms) <= ?) ORDER BY key""",
            (epoch, before_ms))
        while part := found.fetchmany(1000):
            yield part

    def strangers(self, most: int) -> tuple[int, list[str]]:
        """The number of objects that are not ours, and the first of them."""
        count, = self._db.execute("SELECT COUNT(*) FROM objects WHERE stranger").fetchone()
        return int(count), [key for key, in self._db.execute(
            "SELECT key FROM objects WHERE stranger ORDER BY key LIMIT ?", (most,))]


def retired_of(key: str) -> str | None:
    """The push whose retired head lies at a key, None of any other key."""
    push = key.removeprefix(f"{RETIRED}/").removesuffix(".json")
    return push if PUSH.fullmatch(push) and retired_key(push) == key else None


def read_heads(objects: Objects, pushes: list[str]) -> Iterator[tuple[str, Head | BucketError]]:
    """Retired heads by their pushes; the error where one cannot be read."""
    for push in pushes:
        try:
            yield push, fetch_head(objects, retired_key(push))[0]
        except BucketError as error:
            if error.passing:
                raise
            yield push, error
        except FileNotFoundError:
            continue  # forgotten meanwhile
