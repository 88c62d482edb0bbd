"""How many bytes an owner has: whatever happens to the rows of its captures, the catalog's sum follows."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from schemas.catalog import connect_write
from writer_service import catalog


def put(db: sqlite3.Connection, capture: str, seq: int, nbytes: int) -> None:
    """As the writer indexes rows; a journal that is read again does it again."""
    db.execute("INSERT OR REPLACE INTO extents VALUES (?, 'resid_post', ?, 1, 0, 1, 0, 0, x'', x'', ?)",
               (capture, seq, nbytes))


def owners(db: sqlite3.Connection) -> dict[str, int]:
    """What is told, which must be what there is."""
    told = {row["owner"]: row["bytes"] for row in db.execute("SELECT * FROM owners")}
    there = {row["owner"]: row["n"] for row in db.execute(
        "SELECT owner, total(bytes) AS n FROM captures LEFT JOIN extents ON capture = id WHERE owner <> '' "
        "GROUP BY owner")}
    assert told == there
    return told


def test_the_sum_follows_the_rows(tmp_path: Path) -> None:
    db = connect_write(tmp_path / "catalog.sqlite")
    catalog.create(db, "0" * 32)
    for capture, owner in (("a", "alice"), ("b", "alice"), ("c", "bob"), ("d", "")):
        db.execute("INSERT INTO captures (id, ulid, sample, owner, status, created_ms) "
                   "VALUES (?, ?, 0, ?, 'running', 1)", (capture, capture, owner))
    assert owners(db) == {"alice": 0, "bob": 0}
    for _ in range(2):
        for number, capture in enumerate("abcd", 1):
            put(db, capture, 1, 100 * number)
            put(db, capture, 2, 1000 * number)
    assert owners(db) == {"alice": 3300, "bob": 3300}
    put(db, "a", 2, 500)  # in place of what was there
    assert owners(db) == {"alice": 2800, "bob": 3300}
    db.execute("DELETE FROM extents WHERE segment = 1 AND seq = 1")  # as compaction does
    catalog._forget(db, "c")
    assert owners(db) == {"alice": 2500, "bob": 0}
    with catalog.transaction(db):
        put(db, "c", 3, 7)
    assert owners(db) == {"alice": 2500, "bob": 7}
    db.close()
