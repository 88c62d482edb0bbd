"""The writer with a catalog that cannot be written as it should, once it has started.

CATALOG=closed: it never takes a commit. CATALOG=full: commits go into SQLite's log, which cannot be put into the file:
as on a disk that is full to the last page.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

from schemas.catalog.records import connect_write
from writer_service import server
from writer_service.__main__ import main
from writer_service.journal import group_commit


class Full:
    """A connection whose checkpoints fail."""

    def __init__(self, path: Path) -> None:
        self._db = connect_write(path)
        self.execute("PRAGMA wal_autocheckpoint=0")

    def execute(self, query: str, *args: Any) -> sqlite3.Cursor:
        if "wal_checkpoint" in query:
            raise sqlite3.OperationalError("database or disk is full")
        return self._db.execute(query, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def closed(path: Path) -> sqlite3.Connection:
    db = connect_write(path)
    db.execute("PRAGMA query_only = 1")
    return db


if __name__ == "__main__":
    group_commit.connect_write = {"closed": closed, "full": Full}[os.environ["CATALOG"]]
    server.settle_s = 1.0  # that it ends is the point
    sys.exit(main())
