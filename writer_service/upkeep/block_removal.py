"""Take whole blocks out of the store, and remember what only they said.

A block's frames prove how far the store holds each stream; without them a catalog made again would ask engines for what
they have long forgotten. So before a block goes, ``covered.json`` says it for all streams, and which numbers were used.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any, Final

import xxhash

from schemas.errors import StoreError
from schemas.store.paths import WRITER, block_name, journal_folder, redo_name
from writer_service import fs
from writer_service.upkeep import evicted_blocks

COVERED: Final = "covered.json"


def removable(db: sqlite3.Connection, number: int) -> bool:
    """Whether no live capture has a row in a sealed segment, and every frame in it is covered."""
    if db.execute("SELECT 1 FROM extents WHERE segment = ? LIMIT 1", (number,)).fetchone():
        return False
    return is_covered(db, number)


def is_covered(db: sqlite3.Connection, number: int) -> bool:
    """Whether every frame in a segment is among what its stream is covered to: what comes next comes after it."""
    query = ("SELECT 1 FROM frames f LEFT JOIN streams s ON s.stream = f.stream WHERE f.segment = ? AND "
             "(s.stream IS NULL OR (s.epoch = f.epoch AND f.seq > s.covered)) LIMIT 1")
    return db.execute(query, (number,)).fetchone() is None


def remember_streams(store: Path, db: sqlite3.Connection) -> None:
    """Write down what the catalog knows of streams and numbers."""
    known = read_covered(store)
    streams = {row[0]: row for row in known["streams"]}
    for row in db.execute("SELECT stream, epoch, role, covered FROM streams"):
        streams[row["stream"]] = [row["stream"], row["epoch"], row["role"], row["covered"]]
    highest = db.execute("SELECT coalesce(max(number), 0) FROM segments").fetchone()[0]
    document = {"streams": sorted(streams.values()), "next_segment": max(known["next_segment"], highest + 1)}
    document["xxh3"] = _digest(document)
    fs.write_durable(store / journal_folder() / COVERED, json.dumps(document).encode())


def read_covered(store: Path) -> dict[str, Any]:
    """``streams``: [stream, epoch, role, covered]; ``next_segment``. Empty where no block was ever removed.

    StoreError where it is damaged: a wrong number there would drop rows that were never stored.
    """
    path = store / journal_folder() / COVERED
    if not path.exists():
        return {"streams": [], "next_segment": 1}
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        whole = document.pop("xxh3") == _digest(document)
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise StoreError("read how far streams have come", path, "it does not match its checksum",
                         "put a good copy of it in its place")
    return document


def _digest(document: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps([document["streams"], document["next_segment"]]).encode())


def remove_block(store: Path, number: int) -> None:
    """The block is not there any more; done again, nothing happens."""
    source, target = store / block_name(number), removed_name(store, number)
    if source.exists():
        fs.rename(source, target)
    if (redo := store / redo_name(number)).exists():  # of an erasure that failed: there is nothing to erase in any more
        fs.remove(redo)
    if target.exists():
        fs.remove_tree(target)
        fs.sync_dir(target.parent)
    evicted_blocks.forget(store, number)


def removed_name(store: Path, number: int) -> Path:
    """Path of a block while its files are removed one after the other."""
    return store / "blocks" / f".removed-{WRITER}-{number:08d}"


def finish_removals(store: Path) -> None:
    """Remove what a crash left of removed blocks."""
    for folder in (store / "blocks").glob(f".removed-{WRITER}-*"):
        fs.remove_tree(folder)
    evicted_blocks.forget_gone(store)
