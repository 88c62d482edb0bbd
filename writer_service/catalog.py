"""What the writer does to the catalog: apply journal entries, index frames, keep statuses true.

Everything here is a function of the journal alone and may be done twice: replaying a log or a segment changes nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from schemas import codecs, limits
from schemas.catalog import CATALOG_VERSION, DDL, find_capture, load_drops, load_extents, pack_layers
from schemas.control import Abandon, Bye, ClientFinish, Delete, Dropped, Finish, Frame, Hello, Hold, Open, Own
from schemas.coverage import Coverage, cover, status_of_cover
from schemas.errors import TapError
from schemas.frame import FLAG_DRAFT, FLAG_ERASED, RowTable
from schemas.ids import sample_id, split_capture_id, ulid_ms
from schemas.spec import parse_spec
from writer_service.control_log import Entry, Lost, OverQuota
from writer_service.scrubbing import content_of

after_all_seqs: Final = 2**62  # a drop of this number supersedes every row


@dataclass(frozen=True, slots=True)
class Indexed:
    """A frame that lies whole in a segment, as the catalog needs it."""

    stream: str
    epoch: int
    covered: int
    segment: int
    offset: int
    nbytes: int
    frame: Frame
    table: RowTable


@dataclass(frozen=True, slots=True)
class SegmentMade:
    """A segment that the catalog must know before its first frame."""

    number: int
    site: str
    codec: str
    dtype: str
    width: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class SegmentSealed:
    """A segment that is now a block."""

    number: int


@dataclass(frozen=True, slots=True)
class SegmentGone:
    """A segment that ended without a frame, or a block that was taken away."""

    number: int


@dataclass(frozen=True, slots=True)
class LogBegun:
    """The entries that follow lie in this control log."""

    number: int


@dataclass(frozen=True, slots=True)
class Erased:
    """Nothing of deleted captures is left in a block."""

    segment: int
    captures: list[str]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """A control log tells nothing of deleted captures any more."""

    log: int
    captures: list[str]


@dataclass(frozen=True, slots=True)
class Compacted:
    """A cold block that has taken over the rows of other blocks; these still lie there, and are taken away next."""

    made: SegmentMade
    replaces: list[int]
    frames: list[Indexed]


Change = Entry | Indexed | SegmentMade | SegmentSealed | SegmentGone | LogBegun | Erased | Scrubbed | Compacted


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


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing."""
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
    log = int((get_meta(db, "log") or "0").partition(":")[0]) if log is None else log
    for change in changes:
        match change:
            case Entry():
                touched |= _apply_entry(db, change)
                _note_log(db, change, log)
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
        coverage = Coverage(0, {}, {})
        if capture.finish_seq is not None:
            coverage = cover(capture, load_extents(db, capture_id), load_drops(db, capture_id))
        elif not capture.deleted:
            # Its status does not follow from its rows: reading all of them with every commit would cost ever more.
            total = max(total, capture.total_len)
        db.execute("UPDATE captures SET status = ?, total_len = ? WHERE id = ?",
                   (status_of_cover(capture, coverage), total, capture_id))


def note_streams(db: sqlite3.Connection, covered: Iterable[tuple[str, int, str, int]]) -> None:
    """Remember what of each (stream, epoch, role, number) is on the disk."""
    db.executemany(
        "INSERT INTO streams (stream, epoch, role, covered) VALUES (?, ?, ?, ?) ON CONFLICT (stream) DO UPDATE SET "
        "epoch = excluded.epoch, role = excluded.role, bye = CASE WHEN excluded.epoch > epoch THEN 0 ELSE bye END, "
        "covered = CASE WHEN excluded.epoch > epoch THEN excluded.covered ELSE max(covered, excluded.covered) END",
        covered,
    )


# ── entries ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _apply_entry(db: sqlite3.Connection, entry: Entry) -> set[str]:
    message = entry.message
    match message:
        case Hello():
            note_streams(db, [(message.stream, message.epoch, message.role, 0)])
            if message.engine is not None:
                db.execute("INSERT OR REPLACE INTO engines VALUES (?, ?, ?, ?, ?)", (
                    message.stream, message.epoch, message.rank, message.shard,
                    msgspec.json.encode(message.engine).decode()))
            return set()
        case Bye():
            db.execute("UPDATE streams SET bye = 1 WHERE stream = ? AND epoch = ?", (entry.stream, entry.epoch))
            return set()
        case Own():
            return _own(db, entry, message)
        case Open():
            return _open(db, entry, message)
        case Finish():
            db.execute(
                'UPDATE captures SET finish_seq = ?, finish_reason = ?, stop_reason = ?, output_tokens = ?, "end" = ?, '
                "recomputed = ?, lost = 0 WHERE id = ? AND stream = ? AND deleted = 0",
                (message.seq, message.reason, _json(message.stop_reason), message.output_token_ids, message.end,
                 message.recomputed, message.capture, entry.stream))
            return {message.capture}
        case Dropped():
            db.execute("INSERT OR REPLACE INTO drops SELECT id, ?, ?, ?, ?, ?, ? FROM captures WHERE id = ? AND "
                       "deleted = 0", (message.site, message.seq, pack_layers(message.layers), message.start,
                                       message.stop, message.reason, message.capture))
            return {message.capture}
        case ClientFinish():
            _insert(db, message.capture, "pending", ulid_ms(message.capture))
            db.execute("UPDATE captures SET client_reason = ?, client_stop = ?, client_tokens = ? "
                       "WHERE id = ? AND deleted = 0",
                       (message.reason, _json(message.stop_reason), message.output_token_ids, message.capture))
            return {message.capture}
        case Abandon():
            ids = _ids(db, message.capture)
            db.executemany("UPDATE captures SET failed = ? WHERE id = ? AND stream IS NULL",
                           [(message.reason, capture) for capture in ids])
            return set(ids)
        case Delete():
            ids = _ids(db, message.capture)
            for capture in ids:
                _forget(db, capture)
            return set(ids)
        case Hold():
            ids = _ids(db, message.capture)
            db.executemany("UPDATE captures SET hold = ? WHERE id = ?", [(int(message.on), capture) for capture in ids])
            return set()
        case OverQuota():
            db.execute("UPDATE captures SET quota = 1 WHERE id = ?", (message.capture,))
            known = find_capture(db, message.capture)
            resolved = json.loads(known.resolved)["layers"] if known is not None and known.resolved else {}
            db.executemany("INSERT OR REPLACE INTO drops VALUES (?, ?, ?, ?, 0, ?, 'quota')", [
                (message.capture, site, after_all_seqs, pack_layers(layers), limits.position_max + 1)
                for site, layers in resolved.items()])
            return {message.capture}
        case Lost():
            db.executemany("UPDATE captures SET lost = 1 WHERE id = ? AND finish_seq IS NULL",
                           [(capture,) for capture in message.captures])
            return set(message.captures)
    return set()


def _json(value: str | int | None) -> str | None:
    return None if value is None else json.dumps(value)


def _ids(db: sqlite3.Connection, capture: str) -> list[str]:
    """The captures that a record names: the exact one, or all samples of a ULID."""
    query = "SELECT id FROM captures WHERE (id = ? OR ulid = ?) AND deleted = 0"
    ids = [row["id"] for row in db.execute(query, (capture, capture))]
    return [capture] if capture in ids else ids


def _own(db: sqlite3.Connection, entry: Entry, own: Own) -> set[str]:
    tags = json.dumps(own.tags)
    made = set()
    for index in range(own.count):
        capture = sample_id(own.capture, index, own.count)
        db.execute(
            "INSERT INTO captures (id, ulid, sample, owner, status, created_ms, tags, own_stream, own_seq) VALUES "
            "(?, ?, ?, ?, 'pending', ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
            (capture, own.capture, index, own.owner, own.created_ms, tags, entry.stream, own.seq))
        made.add(capture)
    for alias in own.aliases:
        known = db.execute("SELECT 1 FROM aliases WHERE alias = ? AND owner = ? AND ulid = ?",
                           (alias, own.owner, own.capture)).fetchone()
        if known is None:
            db.execute("INSERT INTO aliases (alias, owner, ulid) VALUES (?, ?, ?)", (alias, own.owner, own.capture))
    return made


def _open(db: sqlite3.Connection, entry: Entry, opened: Open) -> set[str]:
    _insert(db, opened.capture, "running", opened.created_ms)
    db.execute("UPDATE captures SET tags = ? WHERE id = ? AND own_seq IS NULL AND tags = '{}'",
               (_asked_tags(opened.asked), opened.capture))
    db.execute(
        "UPDATE captures SET stream = ?, epoch = ?, request = ?, open_seq = ?, asked = ?, resolved = ?, "
        "prompt_len = ?, prompt_tokens = ?, cached = ?, adapter = ? WHERE id = ? AND stream IS NULL AND deleted = 0",
        (entry.stream, entry.epoch, opened.request, opened.seq, opened.asked,
         msgspec.json.encode(opened.resolved).decode(), opened.prompt_len, opened.prompt_token_ids, opened.cached,
         opened.adapter, opened.capture))
    return {opened.capture}


def _asked_tags(asked: str) -> str:
    """The tags of a spec that came without an announcement, as from a plain ``LLM``."""
    try:
        return json.dumps(parse_spec(asked).tags)
    except TapError:
        return "{}"


def _insert(db: sqlite3.Connection, capture: str, status: str, created_ms: int) -> None:
    """A capture that nobody announced, unless it is there already."""
    ulid, index = split_capture_id(capture) or (capture, None)
    # A sample that nobody announced belongs to whoever announced its siblings, never to everybody.
    sibling = db.execute("SELECT owner, tags FROM captures WHERE ulid = ? AND own_seq IS NOT NULL LIMIT 1",
                         (ulid,)).fetchone()
    owner, tags = (sibling["owner"], sibling["tags"]) if sibling else ("", "{}")
    db.execute("INSERT INTO captures (id, ulid, sample, owner, status, created_ms, tags) VALUES (?, ?, ?, ?, ?, ?, ?) "
               "ON CONFLICT (id) DO NOTHING", (capture, ulid, index or 0, owner, status, created_ms, tags))


def _forget(db: sqlite3.Connection, capture: str) -> None:
    """A tombstone: the id stays taken, what was known of the content goes."""
    db.execute(
        "UPDATE captures SET deleted = 1, status = 'deleted', asked = NULL, resolved = NULL, adapter = '', "
        "prompt_tokens = x'', output_tokens = x'', client_tokens = x'', tags = '{}', stop_reason = NULL, "
        "client_stop = NULL, total_len = prompt_len WHERE id = ?",
        (capture,))
    db.execute("INSERT OR IGNORE INTO doomed SELECT segment, capture FROM extents WHERE capture = ? UNION "
               "SELECT segment, capture FROM strays WHERE capture = ?", (capture, capture))
    db.execute("INSERT OR IGNORE INTO scrub SELECT log, capture FROM log_refs WHERE capture = ?", (capture,))
    for table in ("extents", "drops", "strays", "log_refs"):
        db.execute(f"DELETE FROM {table} WHERE capture = ?", (capture,))


def _note_log(db: sqlite3.Connection, entry: Entry, log: int) -> None:
    """Remember which log tells something of a capture, to be scrubbed once the capture is deleted."""
    named = content_of(entry)
    if named is None:
        return
    message = entry.message
    ids = ([sample_id(named, index, message.count) for index in range(message.count)] if isinstance(message, Own)
           else [named])
    for capture in ids:
        row = db.execute("SELECT deleted FROM captures WHERE id = ?", (capture,)).fetchone()
        if row is not None and row["deleted"]:
            db.execute("INSERT OR IGNORE INTO scrub VALUES (?, ?)", (log, capture))
        else:
            db.execute("INSERT OR IGNORE INTO log_refs VALUES (?, ?)", (capture, log))


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
    for index, capture in enumerate(frame.captures):
        rows = order[starts[index] : starts[index + 1]]
        rows = rows[table.flags[rows] & FLAG_ERASED == 0]
        if not len(rows):
            continue
        if not _indexable(db, item, capture):
            _note_stray(db, item, capture)
            continue
        db.execute("DELETE FROM strays WHERE capture = ? AND segment = ? AND offset = ?",
                   (capture, item.segment, item.offset))
        positions, flags = table.position[rows], table.flags[rows]
        columns = np.stack([positions, rows.astype(np.uint32), table.token_id[rows], flags], axis=1).astype("<u4")
        highest = int(positions[flags & FLAG_DRAFT == 0].max(initial=0))  # a draft may be of no length to come
        db.execute("INSERT OR REPLACE INTO extents VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (
            capture, frame.site, frame.seq, item.segment, item.offset, len(rows), int(positions.min()), highest, layers,
            columns.tobytes(), len(rows) * row_bytes))
        db.execute("UPDATE captures SET total_len = max(total_len, ?) WHERE id = ? AND finish_seq IS NULL",
                   (highest + 1, capture))
        touched.add(capture)
    return touched


def _note_stray(db: sqlite3.Connection, item: Indexed, capture: str) -> None:
    """Rows that are never served: they are erased with their capture, at once where it is deleted already."""
    row = db.execute("SELECT deleted OR quota AS doomed FROM captures WHERE id = ?", (capture,)).fetchone()
    if row is not None and row["doomed"]:
        db.execute("INSERT OR IGNORE INTO doomed VALUES (?, ?)", (item.segment, capture))
    else:
        db.execute("INSERT OR IGNORE INTO strays VALUES (?, ?, ?)", (capture, item.segment, item.offset))


def _indexable(db: sqlite3.Connection, item: Indexed, capture: str) -> bool:
    """Rows count from the stream that opened the capture, between its Open and its Finish."""
    row = db.execute("SELECT stream, epoch, open_seq, finish_seq, deleted OR quota AS refused FROM captures "
                     "WHERE id = ?", (capture,)).fetchone()
    return (
        row is not None and not row["refused"] and row["stream"] == item.stream and row["epoch"] == item.epoch
        and row["open_seq"] < item.frame.seq and (row["finish_seq"] is None or item.frame.seq < row["finish_seq"])
    )
