"""How many bytes an owner has: whatever happens to its captures and their rows, the catalog's sum follows."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from schemas.catalog.records import connect_write
from schemas.catalog.tables import CAPTURE_BYTES
from schemas.ids import new_ulid, sample_id
from schemas.spec import Resolved
from schemas.wire.records import ClientFinish, Delete, Finish, Open, Own, Record
from writer_service.catalog import catalog
from writer_service.catalog.entries import forget
from writer_service.control_log import LogEntry


def put(db: sqlite3.Connection, capture: str, seq: int, nbytes: int) -> None:
    """As the writer indexes rows; a journal that is read again does it again."""
    db.execute("INSERT OR REPLACE INTO extents VALUES (?, 'resid_post', 0, ?, 1, 0, 1, 0, 0, x'', x'', x'', ?)",
               (capture, seq, nbytes))


def owners(db: sqlite3.Connection) -> dict[str, int]:
    """What is told, which must be what there is: of each capture that is not deleted, its rows and what is beside them.
    """
    told = {row["owner"]: row["bytes"] for row in db.execute("SELECT * FROM owners")}
    there: dict[str, int] = {}
    for row in db.execute("SELECT * FROM captures WHERE owner <> ''"):
        rows, = db.execute("SELECT total(bytes) FROM extents WHERE capture = ?", (row["id"],)).fetchone()
        beside = CAPTURE_BYTES + len((row["tags"] + (row["asked"] or "")).encode()) + sum(
            len(row[tokens]) for tokens in ("prompt_tokens", "output_tokens", "client_tokens"))
        there[row["owner"]] = there.get(row["owner"], 0) + int(rows) + (0 if row["deleted"] else beside)
    assert told == there
    return told


def made(folder: Path) -> sqlite3.Connection:
    db = connect_write(folder / "catalog.sqlite")
    catalog.create(db, "0" * 32)
    return db


def test_the_sum_follows_the_rows(tmp_path: Path) -> None:
    db = made(tmp_path)
    for capture, owner in (("a", "alice"), ("b", "alice"), ("c", "bob"), ("d", "")):
        db.execute("INSERT INTO captures (id, ulid, sample, owner, status, created_ms) "
                   "VALUES (?, ?, 0, ?, 'running', 1)", (capture, capture, owner))
    empty = CAPTURE_BYTES + len("{}")
    assert owners(db) == {"alice": 2 * empty, "bob": empty}
    for _ in range(2):
        for number, capture in enumerate("abcd", 1):
            put(db, capture, 1, 100 * number)
            put(db, capture, 2, 1000 * number)
    assert owners(db) == {"alice": 2 * empty + 3300, "bob": empty + 3300}
    put(db, "a", 2, 500)  # in place of what was there
    assert owners(db) == {"alice": 2 * empty + 2800, "bob": empty + 3300}
    db.execute("DELETE FROM extents WHERE segment = 1 AND seq = 1")  # as compaction does
    forget(db, "c")
    assert owners(db) == {"alice": 2 * empty + 2500, "bob": 0}
    with catalog.transaction(db):
        put(db, "c", 3, 7)
    assert owners(db) == {"alice": 2 * empty + 2500, "bob": 7}
    db.close()


def test_what_is_beside_the_rows_counts_in_every_sample(tmp_path: Path) -> None:
    """Tags, spec and token ids are stored once a sample: who asks for many of them without a row fills a disk too."""
    db = made(tmp_path)
    ulid, tags, asked = new_ulid(), {"run": "ä" * 512}, '{"sites":[],"tags":{"run":"ä"}}'
    tokens = b"\0" * 40
    capture = sample_id(ulid, 1, 3)
    for _ in range(2):  # a journal may be read again
        records: list[Record] = [
            Own(seq=1, capture=ulid, count=3, owner="alice", aliases=[], tags=tags, created_ms=1),
            Open(seq=2, capture=capture, request="r", asked=asked, prompt_len=10, prompt_token_ids=tokens, cached=0,
                 created_ms=1, resolved=Resolved({}, {}, "all", "allow")),
            Finish(seq=3, capture=capture, reason="stop", stop_reason=None, output_token_ids=tokens[:8], end=12),
            ClientFinish(seq=4, capture=capture, reason="stop", stop_reason=None, output_token_ids=tokens[:8])]
        catalog.apply(db, [LogEntry("s", 1, 1, 1, record) for record in records])
        beside = CAPTURE_BYTES + len(json.dumps(tags))
        assert owners(db) == {"alice": 3 * beside + len(asked.encode()) + 40 + 8 + 8}
    catalog.apply(db, [LogEntry("s", 1, 1, 1, Delete(seq=5, capture=capture))])
    assert owners(db) == {"alice": 2 * beside}
    catalog.apply(db, [LogEntry("s", 1, 1, 1, Delete(seq=6, capture=ulid))])
    assert owners(db) == {"alice": 0}
    db.close()
