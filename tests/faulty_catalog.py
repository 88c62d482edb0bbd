"""The writer with a catalog that never takes a commit, as on a full disk, once it has started."""

from __future__ import annotations

import sqlite3
import sys

from schemas.catalog import connect_write
from writer_service import commits, server
from writer_service.__main__ import main


def connect_full(path: object) -> sqlite3.Connection:
    db = connect_write(path)  # type: ignore[arg-type]
    db.execute("PRAGMA query_only = 1")
    return db


if __name__ == "__main__":
    commits.connect_write = connect_full
    server.settle_s = 1.0  # that it ends is the point
    sys.exit(main())
