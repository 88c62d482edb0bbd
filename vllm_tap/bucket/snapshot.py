"""The catalog as a bucket has it: captures that are final and whole in sealed blocks, and where the blocks lie."""

from __future__ import annotations

import gzip
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from schemas.catalog.records import connect_read
from schemas.manifest import FINAL
from schemas.objects.layout import BLOCKS_DDL, Stored

__all__ = ["Ahead", "BlockAt", "Left", "ahead_of", "copy_catalog", "is_outdated", "newly_deleted", "pack_file",
           "restrict", "sealed", "waiting"]

_STEP_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class BlockAt:
    """The place of a block in the bucket, and its index."""

    key: str
    index: Stored


@dataclass(frozen=True, slots=True)
class Left:
    """The numbers of captures that are in a snapshot, and that are not yet."""

    taken: int
    left_out: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """The statements of a bucket that its store lacks: captures that this has not whole, and those deleted there alone.

    The first of each, and how many.
    """

    missing: int
    first_missing: str
    undeleted: list[str]


def ahead_of(store: Path, head: Path) -> Ahead:
    """The statements of a head's snapshot that the store's catalog lacks. A catalog forgets no id, not of a capture
    that was deleted either.
    """
    final = ", ".join(f"'{status}'" for status in sorted(FINAL))
    both = "FROM there.captures AS there LEFT JOIN captures AS here ON here.id = there.id WHERE "
    with closing(connect_read(store / "catalog.sqlite")) as db:
        db.execute("ATTACH ? AS there", (str(head),))
        missing, first = db.execute(
            f"SELECT COUNT(*), IFNULL(MIN(there.id), '') {both}here.id IS NULL OR (there.deleted = 0 AND "
            f"here.deleted = 0 AND here.status NOT IN ({final}))").fetchone()
        undeleted = db.execute(f"SELECT there.id {both}there.deleted <> 0 AND here.deleted = 0 ORDER BY there.id")
        return Ahead(missing, first, [row[0] for row in undeleted])


def copy_catalog(store: Path, out: Path) -> None:
    """Copy the catalog as it is at one moment."""
    out.unlink(missing_ok=True)
    with closing(connect_read(store / "catalog.sqlite")) as source, closing(sqlite3.connect(out)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")


def sealed(snapshot: Path) -> list[int]:
    """Numbers of the sealed segments that captures have rows in."""
    query = "SELECT number FROM segments WHERE sealed = 1 AND number IN (SELECT segment FROM extents) ORDER BY number"
    with closing(sqlite3.connect(snapshot)) as db:
        return [number for number, in db.execute(query)]


def waiting(snapshot: Path) -> bool:
    """Whether rows of deleted captures are still to be erased from blocks."""
    with closing(sqlite3.connect(snapshot)) as db:
        return bool(db.execute("SELECT EXISTS (SELECT 1 FROM doomed)").fetchone()[0])


def is_outdated(store: Path, snapshot: Path) -> bool:
    """Whether a capture of the snapshot was deleted since: its rows may be gone from a block that went up after it."""
    query = """SELECT EXISTS (SELECT 1 FROM taken.captures AS before LEFT JOIN captures AS now ON now.id = before.id
               WHERE before.deleted = 0 AND (now.id IS NULL OR now.deleted <> 0))"""
    with closing(connect_read(store / "catalog.sqlite")) as db:
        db.execute("ATTACH ? AS taken", (str(snapshot),))
        return bool(db.execute(query).fetchone()[0])


def restrict(snapshot: Path, blocks: Mapping[int, BlockAt]) -> Left:
    """Leave out of a copied catalog what is not final and whole in ``blocks``, and all that writers alone need.

    What is left out leaves no trace in the file.
    """
    final = ", ".join(f"'{status}'" for status in sorted(FINAL))
    with closing(sqlite3.connect(snapshot, isolation_level=None)) as db:
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA recursive_triggers = ON")
        db.execute("BEGIN")
        db.execute(BLOCKS_DDL)
        db.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?)", [
            (number, at.key, at.index.nbytes, at.index.xxh3) for number, at in sorted(blocks.items())])
        db.execute(f"""CREATE TEMP TABLE away AS SELECT id FROM captures WHERE deleted = 0 AND (
            status NOT IN ({final}) OR id IN (
                SELECT capture FROM extents WHERE segment NOT IN (SELECT segment FROM blocks)))""")
        left_out = db.execute("SELECT COUNT(*) FROM away").fetchone()[0]
        for table in ("extents", "drops", "parts"):
            db.execute(f"DELETE FROM {table} WHERE capture IN (SELECT id FROM away)")
        db.execute("DELETE FROM captures WHERE id IN (SELECT id FROM away)")
        db.execute("DELETE FROM aliases WHERE ulid NOT IN (SELECT ulid FROM captures)")
        db.execute("DELETE FROM segments WHERE number NOT IN (SELECT segment FROM blocks)")
        for table in ("frames", "strays", "doomed", "log_refs", "scrub"):
            db.execute(f"DELETE FROM {table}")
        db.execute("DELETE FROM meta WHERE key LIKE 'nonce %'")
        taken = db.execute("SELECT COUNT(*) FROM captures WHERE deleted = 0").fetchone()[0]
        db.execute("COMMIT")
        db.execute("VACUUM")
    return Left(taken, left_out)


def pack_file(path: Path, out: Path) -> None:
    """Compress a file with gzip."""
    with path.open("rb") as source, out.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as target:
        shutil.copyfileobj(source, target, _STEP_BYTES)


def newly_deleted(snapshot: Path, before: Path) -> bool:
    """Whether a snapshot says of captures that they are deleted which the one before did not; where that is not there,
    whether it says so of any.
    """
    with closing(sqlite3.connect(snapshot)) as db:
        query = "SELECT EXISTS (SELECT 1 FROM captures WHERE deleted <> 0"
        if before.exists():
            db.execute("ATTACH ? AS there", (str(before),))
            query += " AND id NOT IN (SELECT id FROM there.captures WHERE deleted <> 0)"
        return bool(db.execute(f"{query})").fetchone()[0])
