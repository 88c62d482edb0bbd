"""Compaction: the rows of sealed blocks that still count become one cold block (schemas/store/cold_block.py).

 1. rows are copied into blocks/.compacting-…, synced, and read back against the checksums that they came with
                                                                      (a crash: the folder is thrown away)
 2. the folder is renamed to its name: the commit point. Its attribute ``replaces`` names the blocks that it stands for
                                                                      (a crash: the next start goes on with 3)
 3. the catalog is told; 4. the old blocks are taken away             (a crash: the next start does it again)

Readers find the old blocks or the new one, whichever the catalog names. Rows that are never served stay behind: those
of deleted captures, and those of captures that nobody opened.
"""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from schemas import codecs, limits
from schemas.catalog.records import connect_write
from schemas.errors import StoreError
from schemas.read.reader import read_store_uuid
from schemas.store.block_files import is_stub
from schemas.store.cold_block import cold_attributes
from schemas.store.paths import block_name, main_chunk
from writer_service import fs
from writer_service.catalog import catalog
from writer_service.catalog.changes import Compacted
from writer_service.recover.recovery import recover
from writer_service.upkeep import block_removal
from writer_service.upkeep.cold_block_writer import is_compressible
from writer_service.upkeep.cold_blocks import build, remove_replaced

block_bytes_target: Final = limits.segment_bytes_target  # of rows: erasing from a cold block makes it anew

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(slots=True)
class Compaction:
    """Result of ``compact``; ``failed`` says of blocks why they were left as they are."""

    blocks: int = 0
    cold: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    failed: list[str] = field(default_factory=list)


def compact(store: Path, older_days: float | None = None, progress: Progress = lambda done, total: None,
            compress: bool = False) -> Compaction:
    """Compact every sealed block whose captures were all made more than ``older_days`` ago (None: every one).

    ``compress``: those with rows as they are become compressed (schemas.store.compressed), cold ones of before too.

    StartError where a writer has the store; OSError leaves the store as it was, or with fewer blocks to compact.
    """
    uuid = read_store_uuid(store)
    state = recover(store)
    db = connect_write(store / "catalog.sqlite")
    try:
        made = Compaction()
        number = state.next_segment
        planned = groups(store, db, older_days, compress)
        total, done = sum(nbytes for _, nbytes in planned), 0
        waiting = deque(planned)
        while waiting:
            numbers, nbytes = waiting.popleft()
            progress(done, total)
            try:
                change = build(store, uuid, db, number, numbers, compress=compress)
            except (StoreError, ValueError, KeyError) as error:
                if len(numbers) > 1:  # those that are whole become cold without the one that is not
                    waiting.extendleft(([old], nbytes // len(numbers)) for old in numbers)
                    continue
                made.failed.append(str(error) if isinstance(error, StoreError)
                                   else f"block {numbers[0]} cannot be read: {error!r}")
            else:
                made.bytes_before += sum(_size(store / block_name(old)) for old in numbers)
                replace(store, db, change)
                made.bytes_after += _size(store / block_name(number))
                made.blocks += len(numbers)
                made.cold += 1
                number += 1
            done += nbytes
        progress(total, total)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return made
    finally:
        db.close()
        fs.close(state.lock)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def groups(store: Path, db: sqlite3.Connection, older_days: float | None, compress: bool = False
           ) -> list[tuple[list[int], int]]:
    """Groups of blocks that become one, of about ``block_bytes_target``, each with its bytes of rows."""
    before_ms = float("inf") if older_days is None else time.time_ns() / 1e6 - older_days * 86_400_000
    found: list[tuple[list[int], int]] = []
    last: dict[tuple[Any, ...], int] = {}  # by what blocks must have in common: the group that is being filled
    for row in db.execute("SELECT * FROM segments WHERE sealed = 1 ORDER BY number").fetchall():
        if row["cold"] and not (compress and _is_compressible(store, row)):
            continue
        query = ("SELECT max(created_ms) FROM captures WHERE id IN (SELECT capture FROM extents WHERE segment = ?)")
        youngest_ms = db.execute(query, (row["number"],)).fetchone()[0]
        main = store / block_name(row["number"]) / main_chunk(row["main"])
        if youngest_ms is None or youngest_ms > before_ms or not block_removal.is_covered(db, row["number"]) \
                or not main.exists():
            continue
        if is_stub(main):  # its rows are evicted
            continue
        nbytes = main.stat().st_size
        key = tuple(row[name] for name in ("site", "codec", "dtype", "width", "fingerprint"))
        if key in last and found[last[key]][1] + nbytes <= block_bytes_target:
            numbers, before = found[last[key]]
            found[last[key]] = [*numbers, row["number"]], before + nbytes
        else:
            last[key] = len(found)
            found.append(([row["number"]], nbytes))
    return found


def _is_compressible(store: Path, row: sqlite3.Row) -> bool:
    """Whether a cold block would be smaller, and is not compressed yet."""
    try:
        attributes = cold_attributes(store / block_name(row["number"]))
    except (OSError, ValueError, KeyError):
        return False  # fsck says what is lost
    plain = attributes is not None and attributes.get("compression") is None
    return plain and is_compressible(codecs.streams(row["codec"], row["width"], row["dtype"]))


def replace(store: Path, db: sqlite3.Connection, change: Compacted) -> None:
    """Let the catalog look into a cold block, and take away those that it stands for; done again, nothing happens."""
    block_removal.remember_streams(store, db)
    with catalog.transaction(db):
        catalog.refresh(db, catalog.apply(db, [change]))
    remove_replaced(store, db, change.replaces)
