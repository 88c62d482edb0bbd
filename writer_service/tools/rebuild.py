"""Make the catalog again from journals and blocks alone, and say how it differs from the one that it replaces."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from schemas.catalog.tables import CATALOG_VERSION
from schemas.read.reader import read_store_uuid
from writer_service import fs
from writer_service.catalog.catalog_file import REBUILDING, REPLACED, new_catalog, remove_catalog, set_aside
from writer_service.recover.recovery import mend
from writer_service.recover.sequences import Recovered
from writer_service.recover.store_lock import take_lock


@dataclass(slots=True)
class Rebuilt:
    """``differences``: table → rows that only the old catalog had, and rows that only the new one has.

    ``compared`` is False where there was no old catalog that could be read. ``state`` holds the store's lock.
    """

    state: Recovered
    compared: bool
    captures: int
    differences: dict[str, tuple[int, int]] = field(default_factory=dict)


def rebuild(store: Path) -> Rebuilt:
    """The new catalog takes the old one's place in one rename; StartError where a writer has the store."""
    uuid = read_store_uuid(store)
    lock, epoch = take_lock(store)
    try:
        return _rebuild(store, uuid, lock, epoch)
    except BaseException:
        fs.close(lock)
        raise


def _rebuild(store: Path, uuid: bytes, lock: int, epoch: int) -> Rebuilt:
    for name in (REBUILDING, REPLACED):
        remove_catalog(store, name)
    state = mend(store, uuid, lock, epoch, new_catalog(store / REBUILDING, uuid), True)
    db = sqlite3.connect(store / REBUILDING)
    db.execute("PRAGMA journal_mode=DELETE")  # one file: what SQLite keeps beside it goes by the file's name
    captures = db.execute("SELECT count(*) FROM captures WHERE deleted = 0").fetchone()[0]
    db.close()
    differences = compare(store / "catalog.sqlite", store / REBUILDING)
    set_aside(store, REPLACED)
    fs.rename(store / REBUILDING, store / "catalog.sqlite")
    remove_catalog(store, REPLACED)
    return Rebuilt(state, differences is not None, captures, differences or {})


_COMPARED: Final = {
    # How far a log was read, and what was found past a gap, is no statement about the store.
    "meta": "WHERE key NOT IN ('log', 'ahead')",
    # A frame may lie twice, from before a power loss. Once a compaction has taken the newer copy, a catalog that goes
    # on knows of no other, and one that is made anew finds the older, whose rows are strays in both.
    "frames": "WHERE (segment, offset) NOT IN (SELECT segment, offset FROM {0}.strays)",
}


def compare(old: Path, new: Path) -> dict[str, tuple[int, int]] | None:
    """Tables that differ; None where ``old`` is not there, cannot be read or is of another version."""
    if not old.exists():
        return None
    db = sqlite3.connect(new)
    try:
        db.execute("ATTACH ? AS old", (str(old),))
        version = db.execute("SELECT value FROM old.meta WHERE key = 'version'").fetchone()
        if version is None or version[0] != str(CATALOG_VERSION):
            return None
        query = "SELECT name FROM main.sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        found = {}
        for (table,) in db.execute(query).fetchall():
            rows = _COMPARED.get(table, "")
            # A log that was merged with later ones goes by its old number in a catalog of before.
            columns = "capture" if table in ("log_refs", "scrub") else "*"
            gone, come = (
                db.execute(f"SELECT count(*) FROM (SELECT {columns} FROM {a}.{table} {rows.format(a)} EXCEPT "
                           f"SELECT {columns} FROM {b}.{table})").fetchone()[0]
                for a, b in (("old", "main"), ("main", "old")))
            if gone or come:
                found[table] = (gone, come)
        return found
    except sqlite3.DatabaseError:
        return None
    finally:
        db.close()
