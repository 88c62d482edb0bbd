"""Check what the ranks of an engine say of the same rows: a token is one token, whoever names it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator

import numpy as np

from schemas.catalog.records import unpack_layers
from writer_service.tools.findings import Finding

__all__ = ["check_tokens"]


def check_tokens(db: sqlite3.Connection, file_of: Callable[[int], str]) -> Iterator[Finding]:
    """Rows of which a rank names another token than a rank before it does at the same position and step.

    ``file_of``: the file of a segment, as findings name it.
    """
    for (capture,) in db.execute("""SELECT id FROM captures WHERE "group" <> '' AND deleted = 0""").fetchall():
        extents = db.execute("SELECT * FROM extents WHERE capture = ? ORDER BY part, seq, site", (capture,)).fetchall()
        counts = [row["n"] for row in extents]
        extent = np.repeat(np.arange(len(extents)), counts)
        position, _, token, _ = np.frombuffer(b"".join(row["rows"] for row in extents), "<u4").reshape(-1, 4).T
        step = np.frombuffer(b"".join(row["steps"] for row in extents), "<u8")
        if len(step) != len(extent):
            continue  # the catalog does not match the frames: told already
        order = np.lexsort((extent, step, position))  # of the same row, the first rank's first
        position, step, token, extent = (column[order] for column in (position, step, token, extent))
        begins = np.append(True, (position[1:] != position[:-1]) | (step[1:] != step[:-1]))[: len(order)]
        first = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
        wrong = token != token[first]
        for number in np.unique(extent[wrong]).tolist():
            row, mine = extents[number], wrong & (extent == number)
            other = extents[extent[first[mine][0]]]["part"]
            yield Finding(f"rank {row['part']} names other tokens than rank {other} in the same steps",
                          file_of(row["segment"]), row["offset"], row["site"], capture, unpack_layers(row["layers"]),
                          tuple(position[mine].tolist()))
