"""Changes of the catalog: apply what was journaled, index frames, keep statuses true.

Everything here is a function of the journal alone and may be done twice: replaying a log or a segment changes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from schemas import codecs
from schemas.catalog.parts import load_parts
from schemas.catalog.records import find_capture, load_drops, load_extents, pack_layers
from schemas.catalog.tables import CATALOG_VERSION, DDL
from schemas.read.coverage import Coverage, cover, status_of_cover
from schemas.wire.layout import LEADER
from schemas.wire.row_table import FLAG_DRAFT, FLAG_ERASED, steps_of
from writer_service.catalog.changes import (
    Change,
    Compacted,
    Erased,
    Indexed,
    LogBegun,
    Scrubbed,
    SegmentGone,
    SegmentMade,
    SegmentSealed,
)
from writer_service.catalog.entries import apply_entry, note_log
from writer_service.catalog.whole import is_whole
from writer_service.control_log import LogEntry

_THIRTEEN = ", ".join("?" * 13)  # an extent


def create(db: sqlite3.Connection, uuid: str) -> None:
    """Tables of an empty catalog."""
    db.executescript(f"BEGIN; {DDL} COMMIT;")
    set_meta(db, "version", str(CATALOG_VERSION))
    set_meta(db, "store", uuid)


def set_meta(db: sqlite3.Connection, key: str, value: str) -> None:
    """Remember a value."""
    db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))


def get_meta(db: sqlite3.Connection, key: str) -> str | None:
    """A value remembered before."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row["value"])


def current_log(db: sqlite3.Connection) -> int:
    """The log that is being written, as far as the catalog has heard: it has all of those before."""
    return int((get_meta(db, "log") or "0").partition(":")[0])


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Do the block in one transaction, all or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def apply(db: sqlite3.Connection, changes: Iterable[Change], log: int | None = None) -> set[str]:
    """Apply changes in order inside a transaction; the captures whose status may have changed.

    ``log`` is the control log of the entries, where the changes do not say it themselves.
    """
    touched: set[str] = set()
    log = current_log(db) if log is None else log
    for change in changes:
        match change:
            case LogEntry():
                touched |= apply_entry(db, change)
                note_log(db, change, log)
            case LogBegun():
                log = change.number
            case Erased():
                for capture in change.captures:
                    db.execute("DELETE FROM doomed WHERE segment = ? AND capture = ?", (change.segment, capture))
            case Scrubbed():
                for capture in change.captures:
                    db.execute("DELETE FROM scrub WHERE log = ? AND capture = ?", (change.log, capture))
            case Indexed():
                touched |= _index(db, change)
            case SegmentMade():
                _make_segment(db, change, sealed=False, cold=False)
            case Compacted():
                touched |= _compact(db, change)
            case SegmentSealed():
                db.execute("UPDATE segments SET sealed = 1 WHERE number = ?", (change.number,))
            case SegmentGone():
                db.execute("DELETE FROM segments WHERE number = ?", (change.number,))
                for table in ("frames", "strays", "doomed"):
                    db.execute(f"DELETE FROM {table} WHERE segment = ?", (change.number,))
    return touched


def refresh(db: sqlite3.Connection, captures: Iterable[str]) -> None:
    """Make status and length of captures what follows from the rest of the catalog."""
    for capture_id in captures:
        capture = find_capture(db, capture_id)
        if capture is None:
            continue
        total = capture.prompt_len + len(capture.output_tokens) // 4
        if capture.finish_seq is None:
            # Its status does not follow from its rows: reading all of them with every commit would cost ever more.
            total = total if capture.deleted else max(total, capture.total_len)
            status = status_of_cover(capture, Coverage(0, {}, {}))
        elif is_whole(db, capture):
            status = "complete"
        else:
            status = status_of_cover(capture, cover(capture, load_extents(db, capture_id), load_drops(db, capture_id),
                                                    load_parts(db, capture)))
        if (status, total) != (capture.status, capture.total_len):
            db.execute("UPDATE captures SET status = ?, total_len = ? WHERE id = ?", (status, total, capture_id))


# ── frames ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _make_segment(db: sqlite3.Connection, made: SegmentMade, sealed: bool, cold: bool) -> None:
    main = codecs.streams(made.codec, made.width, made.dtype)[0].name
    db.execute("INSERT OR IGNORE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
               (made.number, int(sealed), made.site, made.codec, made.dtype, made.width, made.fingerprint, main,
                int(cold)))


def _compact(db: sqlite3.Connection, change: Compacted) -> set[str]:
    """Rows of the block are where the catalog looks for them from now on; of what it replaces, nothing is left but
    what is doomed there.
    """
    _make_segment(db, change.made, sealed=True, cold=True)
    for number in change.replaces:
        for table in ("extents", "strays"):
            db.execute(f"DELETE FROM {table} WHERE segment = ?", (number,))
    touched = set()
    for item in change.frames:  # frames of a cold block prove nothing of a stream: covered.json does
        touched |= _index_rows(db, item)
    return touched


def _index(db: sqlite3.Connection, item: Indexed) -> set[str]:
    db.execute("INSERT OR REPLACE INTO frames VALUES (?, ?, ?, ?, ?, ?, ?)", (
        item.stream, item.epoch, item.frame.seq, item.segment, item.offset, item.nbytes, item.covered))
    return _index_rows(db, item)


def _index_rows(db: sqlite3.Connection, item: Indexed) -> set[str]:
    frame, table = item.frame, item.table
    touched = set()
    layers = pack_layers(frame.layers)
    row_bytes = len(frame.layers) * sum(
        stream.nbytes for stream in codecs.streams(frame.codec, frame.width, frame.dtype))
    order = np.argsort(table.capture, kind="stable")
    starts = np.searchsorted(table.capture[order], np.arange(len(frame.captures) + 1))
    steps = steps_of(frame)
    strays = db.execute("SELECT 1 FROM strays LIMIT 1").fetchone() is not None
    for index, capture in enumerate(frame.captures):
        rows = order[starts[index] : starts[index + 1]]
        rows = rows[table.flags[rows] & FLAG_ERASED == 0]
        if not len(rows):
            continue
        part = _part(db, item, capture)
        if part is None:
            _note_stray(db, item, capture)
            continue
        if strays:
            db.execute("DELETE FROM strays WHERE capture = ? AND segment = ? AND offset = ?",
                       (capture, item.segment, item.offset))
        positions, flags = table.position[rows], table.flags[rows]
        columns = np.stack([positions, rows.astype(np.uint32), table.token_id[rows], flags], axis=1).astype("<u4")
        highest = int(positions[flags & FLAG_DRAFT == 0].max(initial=0))  # a draft may be of no length to come
        extent = (capture, frame.site, part, frame.seq, item.segment, item.offset, len(rows), int(positions.min()),
                  highest, layers, columns.tobytes(), b"" if steps is None else steps[rows].astype("<u8").tobytes(),
                  len(rows) * row_bytes)
        if not db.execute(f"INSERT OR IGNORE INTO extents VALUES ({_THIRTEEN})", extent).rowcount:
            # It may lie here twice, from before a power loss: the other copy is erased with its capture.
            db.execute("INSERT OR IGNORE INTO strays SELECT capture, segment, offset FROM extents "
                       "WHERE capture = ? AND site = ? AND part = ? AND seq = ? AND (segment, offset) <> (?, ?)",
                       extent[:6])
            db.execute(f"INSERT OR REPLACE INTO extents VALUES ({_THIRTEEN})", extent)
        if not db.execute("UPDATE captures SET total_len = max(total_len, ?) WHERE id = ? AND finish_seq IS NULL",
                          (highest + 1, capture)).rowcount:
            touched.add(capture)  # of one that runs, rows change no more than that
    return touched


def _note_stray(db: sqlite3.Connection, item: Indexed, capture: str) -> None:
    """Rows that are never served: they are erased with their capture, at once where it is deleted already."""
    row = db.execute("SELECT deleted OR quota AS doomed FROM captures WHERE id = ?", (capture,)).fetchone()
    if row is not None and row["doomed"]:
        db.execute("INSERT OR IGNORE INTO doomed VALUES (?, ?)", (item.segment, capture))
    else:
        db.execute("INSERT OR IGNORE INTO strays VALUES (?, ?, ?)", (capture, item.segment, item.offset))


def _part(db: sqlite3.Connection, item: Indexed, capture: str) -> int | None:
    """The part whose rows these are; None where they do not count.

    Rows count from the stream that opened the capture, between its Open and its Finish. They count from streams that
    joined it, between their Join and their PartFinish.
    """
    row = db.execute('SELECT stream, epoch, open_seq, finish_seq, deleted OR quota AS refused, "group" FROM captures '
                     "WHERE id = ?", (capture,)).fetchone()
    if row is None or row["refused"]:
        return None
    part = LEADER
    if row["group"] and row["stream"] != item.stream:
        query = "SELECT part, stream, epoch, open_seq, finish_seq FROM parts WHERE capture = ? AND stream = ?"
        row = db.execute(query, (capture, item.stream)).fetchone()
        part = LEADER if row is None else row["part"]
    counts = (row is not None and row["stream"] == item.stream and row["epoch"] == item.epoch
              and row["open_seq"] < item.frame.seq
              and (row["finish_seq"] is None or item.frame.seq < row["finish_seq"]))
    return part if counts else None
