"""The catalog's file at a start: opened where it is whole, set aside and made anew where it is damaged."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from schemas.catalog.records import connect_write
from schemas.catalog.tables import CATALOG_VERSION
from writer_service import fs
from writer_service.catalog import catalog

DAMAGED, REBUILDING, REPLACED = "catalog.damaged", "catalog.rebuilding", "catalog.replaced"
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_IOERR_READ,
           sqlite3.SQLITE_IOERR_SHORT_READ)


def damaged(error: sqlite3.DatabaseError) -> bool:
    """Whether it says that the catalog is damaged. One that cannot be written now, as on a full disk, is as good as it
    was.
    """
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)  # none of what Python's module itself objects to
    return code in _DAMAGE or code & 0xFF in _DAMAGE


def open_catalog(store: Path, uuid: bytes) -> tuple[sqlite3.Connection, bool]:
    """The catalog, a new empty one where it is missing, damaged or of another store or version.

    sqlite3.Error where that cannot be told or done now: the disk is full, or somebody else holds the catalog.
    """
    path = store / "catalog.sqlite"
    if path.exists():
        try:
            db = connect_write(path)
            version, owner = catalog.get_meta(db, "version"), catalog.get_meta(db, "store")
            check = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if version == str(CATALOG_VERSION) and owner == uuid.hex() and check == "ok":
                return db, False
            db.close()
        except sqlite3.DatabaseError as error:
            if not damaged(error):
                raise
        set_aside(store, DAMAGED)
    return new_catalog(path, uuid), True


def new_catalog(path: Path, uuid: bytes) -> sqlite3.Connection:
    """An empty catalog in a new file."""
    fs.close(fs.open_new(path))  # nobody else may read it; SQLite gives its other files the same mode
    db = connect_write(path)
    catalog.create(db, uuid.hex())
    return db


def set_aside(store: Path, name: str) -> None:
    """Rename the catalog with what SQLite keeps beside it: readers that have it open go on with it."""
    for suffix in ("", "-wal", "-shm"):
        path = store / f"catalog.sqlite{suffix}"
        if path.exists():
            fs.rename(path, store / f"{name}{suffix}")


def remove_catalog(store: Path, name: str) -> None:
    """A catalog that is not in use any more goes, with what SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        if (store / f"{name}{suffix}").exists():
            fs.remove(store / f"{name}{suffix}")
