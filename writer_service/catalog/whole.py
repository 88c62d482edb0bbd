"""Captures of which every row came, once and in order: nearly all, and each is found with a fraction of the work that a
full look at its coverage takes. Readers wait for it, since a capture ends with it.
"""

from __future__ import annotations

import sqlite3

import msgspec
import numpy as np

from schemas.catalog.records import Capture, pack_layers
from schemas.read.coverage import clip
from schemas.spec import Resolved, intervals
from schemas.wire.row_table import FLAG_DRAFT


def is_whole(db: sqlite3.Connection, capture: Capture) -> bool:
    """Whether a finished capture is complete, as far as its rows alone say so; False means that nothing is known.

    Whatever takes a decision is left to ``schemas.read.coverage``: drafts, rows that were computed again, rows that
    were dropped, prefix caches, ranks, and requests whose tokens go on after their rows.
    """
    if capture.deleted or capture.group or capture.resolved is None or capture.end != capture.expected_end:
        return False
    if db.execute("SELECT 1 FROM drops WHERE capture = ? LIMIT 1", (capture.id,)).fetchone() is not None:
        return False
    resolved = msgspec.json.decode(capture.resolved, type=Resolved)
    if resolved.elsewhere:
        return False
    tables: dict[tuple[str, bytes], list[bytes]] = {}
    query = "SELECT site, layers, rows FROM extents WHERE capture = ? ORDER BY site, part, seq"  # as the table has them
    for site, layers, rows in db.execute(query, (capture.id,)):
        tables.setdefault((site, layers), []).append(rows)
    ranges = clip(intervals(resolved.positions, capture.prompt_len), capture.end)
    count = sum(stop - start for start, stop in ranges)
    asked = {(site, pack_layers(layers)) for site, layers in resolved.layers.items() if layers}
    if tables.keys() != asked or any(16 * count != sum(map(len, parts)) for parts in tables.values()):
        return False
    if not asked:
        return True
    wanted = np.concatenate([np.arange(start, stop) for start, stop in ranges] or [np.empty(0, np.int64)])
    for parts in tables.values():
        table = np.frombuffer(b"".join(parts), "<u4").reshape(-1, 4)
        if (table[:, 3] & FLAG_DRAFT).any() or not np.array_equal(table[:, 0], wanted):
            return False
    return True
