"""Disk space: how much a store and a capture take, and the quota."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from schemas.objects.evicted import EvictedWatch, evicted_numbers
from schemas.store.paths import WRITER, journal_folder

BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own is


def disk_bytes(path: Path | os.DirEntry[str]) -> int:
    """Disk space of a file or folder. Erased pages do not count, nor does what XFS reserves behind the end of a file
    that grows. Files that vanish meanwhile count nothing.
    """
    try:
        info = path.stat()
        if not stat.S_ISDIR(info.st_mode):
            return min(info.st_blocks * BLOCK_BYTES, -(-info.st_size // info.st_blksize) * info.st_blksize)
        with os.scandir(path) as entries:
            return sum(map(disk_bytes, entries))
    except FileNotFoundError:
        return 0


class Usage:
    """The bytes of a store's rows on its disk; a sealed block is measured once, until something is erased in it or its
    rows are evicted.

    Control logs do not count: they are kept, so that no deletion gives them back.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._blocks: dict[str, int] = {}
        self._watch, self._evicted = EvictedWatch(store), set[int]()

    def forget(self, number: int) -> None:
        """A block has become smaller."""
        self._blocks.pop(f"{WRITER}-{number:08d}.zarr", None)

    def measure(self) -> int:
        """Bytes of all blocks and of the open segments."""
        measured, unnamed = {}, 0
        if self._watch.has_moved():
            now = evicted_numbers(self._store)
            for number in now | self._evicted:  # rows may have gone, or come back, since
                self.forget(number)
            self._evicted = now
        with contextlib.suppress(FileNotFoundError), os.scandir(self._store / "blocks") as entries:
            for entry in entries:
                if entry.name.startswith("."):  # being sealed, or taken away
                    unnamed += disk_bytes(entry)
                elif entry.name.startswith(f"{WRITER}-") and entry.name.endswith(".zarr"):
                    measured[entry.name] = self._blocks.get(entry.name) or disk_bytes(entry)
        self._blocks = measured
        unsealed = sum(disk_bytes(path) for path in (self._store / journal_folder()).glob("[0-9]*.open"))
        return sum(self._blocks.values()) + unnamed + unsealed


def oldest(db: sqlite3.Connection, before_ms: int) -> Iterator[str]:
    """Captures made before a time that may expire, oldest first: held ones and those that still run may not."""
    query = ("SELECT id FROM captures WHERE deleted = 0 AND hold = 0 AND created_ms < ? AND status <> 'running' "
             "ORDER BY created_ms")
    for row in db.execute(query, (before_ms,)):
        yield row["id"]


def capture_bytes(db: sqlite3.Connection, capture: str) -> int:
    """About how much erasing a capture gives back."""
    found = db.execute("SELECT total(bytes) FROM extents WHERE capture = ?", (capture,)).fetchone()
    return int(found[0])


class Quota:
    """A store over ``limit`` bytes (None: without one) takes no rows of captures that begin; all else goes on.

    Between two measurements what is appended is added up.
    """

    def __init__(self, limit: int | None, used: int) -> None:
        self.limit, self.used = limit, used
        self._since = 0  # appended since the measurement that runs began

    @property
    def over(self) -> bool:
        """Whether a capture that begins now gets no rows."""
        return self.limit is not None and self.used >= self.limit

    def appended(self, nbytes: int) -> None:
        """Count bytes that came since the last measurement."""
        self.used += nbytes
        self._since += nbytes

    def measuring(self) -> None:
        """A measurement begins: it may see what is appended meanwhile, or not."""
        self._since = 0

    def measured(self, nbytes: int) -> None:
        """Take the result of the measurement that ended."""
        self.used = nbytes + self._since
