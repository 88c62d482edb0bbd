"""What a store must be after whatever was done to it, and its catalog as plain rows to compare."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from writer_service import fs
from writer_service.tools.fsck import fsck
from writer_service.tools.rebuild import rebuild


def dump(store: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Everything in the catalog but where a log is read on."""
    db = sqlite3.connect(store / "catalog.sqlite")
    tables = {}
    for (table,) in db.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    ).fetchall():
        columns = "DISTINCT capture" if table in ("log_refs", "scrub") else "*"  # a merged log has another number
        rows = db.execute(f"SELECT {columns} FROM {table}").fetchall()
        tables[table] = sorted((row for row in rows if row[0] not in ("log", "ahead")), key=repr)
    db.close()
    return tables


def assert_rebuilt_equal(store: Path) -> None:
    """Journals and blocks alone make the same catalog again; no writer may run."""
    before = dump(store)
    done = rebuild(store)
    fs.close(done.state.lock)
    assert done.differences == {} and dump(store) == before


def assert_consistent(store: Path) -> None:
    """Every byte is as it should be, and the catalog follows from the rest."""
    assert fsck(store).bad == []
    assert_rebuilt_equal(store)
