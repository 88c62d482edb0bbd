"""Recovery of journal files: the longest valid prefix of each stays and is indexed, the rest is cut off.

Frames that the catalog has are kept in any case: a damaged one among them costs itself alone.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from schemas.catalog.records import load_frames
from schemas.errors import StoreError
from schemas.store.map_file import map_file
from schemas.store.paths import journal_folder
from schemas.store.segment import FrameView, frames_end, newer_frame, whole_frames
from writer_service import fs, log
from writer_service.catalog import catalog
from writer_service.catalog.changes import SegmentGone
from writer_service.recover.sequences import Recovered, index_frames


def index_open_segments(db: sqlite3.Connection, store: Path, state: Recovered) -> set[str]:
    """Journal files: keep the longest valid prefix, cut the rest, and have them sealed."""
    touched: set[str] = set()
    journal = store / journal_folder()
    for path in sorted(journal.glob("[0-9]*.open")):
        number = int(path.stem)
        state.next_segment = max(state.next_segment, number + 1)
        data = map_file(path)
        known = [(offset, nbytes) for offset, nbytes in load_frames(db, number) if offset + nbytes <= len(data)]
        views: list[FrameView] = []
        for found in whole_frames(data, state.uuid, number, path, known):
            if isinstance(found, FrameView):
                views.append(found)
            else:
                log.warn("frame_damaged", f"the rows of a frame are lost: {found}", segment=number, error=str(found))
        end = frames_end(views, known)
        for at in (*(offset for offset, _ in known), end):
            if newer_frame(data, at, state.uuid):
                raise StoreError("read segment", path, f"a frame at byte {at} is of a newer version",
                                 "run the newer version; this one would cut the frame off")
        if views:  # before the catalog hears of them: what it knows is on the disk
            state.cut_bytes += fs.cut(path, end)
        gone = _forget_rows(db, number, {view.offset for view in views}, end)
        touched |= gone | index_frames(db, state, number, views)
        del data
        if views:
            del views
            state.to_seal.append(number)
        elif not known:  # acknowledged frames stay, however damaged
            state.cut_bytes += path.stat().st_size
            fs.remove(path)
            with catalog.transaction(db):
                catalog.apply(db, [SegmentGone(number)])
    return touched


def _forget_rows(db: sqlite3.Connection, number: int, whole: set[int], end: int) -> set[str]:
    """Take rows out of the index whose frames are not whole; their captures. Those below ``end`` stay in the file, to
    be erased with their captures."""
    lost = [(row["capture"], number, row["offset"]) for row in db.execute(
        "SELECT capture, offset FROM extents WHERE segment = ?", (number,)) if row["offset"] not in whole]
    with catalog.transaction(db):
        db.executemany("INSERT OR IGNORE INTO strays VALUES (?, ?, ?)", [place for place in lost if place[2] < end])
        db.executemany("DELETE FROM extents WHERE capture = ? AND segment = ? AND offset = ?", lost)
        db.execute("DELETE FROM frames WHERE segment = ? AND offset + bytes > ?", (number, end))
        db.executemany("UPDATE captures SET total_len = coalesce((SELECT max(pos_max) + 1 FROM extents "
                       "WHERE capture = captures.id), 0) WHERE id = ?", [(capture,) for capture, *_ in lost])
    return {capture for capture, *_ in lost}
