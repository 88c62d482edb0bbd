"""Effects of the control logs' entries on the catalog. Each may be applied twice."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Final

import msgspec
import xxhash

from schemas import limits
from schemas.catalog.records import find_capture, nonce_key, pack_layers
from schemas.catalog.tables import EVERY_PART
from schemas.errors import TapError
from schemas.ids import sample_id, split_capture_id, ulid_ms
from schemas.spec import parse_spec
from schemas.wire.identity import NONCE
from schemas.wire.messages import Bye, Hello
from schemas.wire.records import Abandon, ClientFinish, Delete, Dropped, Finish, Hold, Join, Open, Own, PartFinish
from writer_service.control_log import CapturesLost, LogEntry, PartsLost, RanksLost, RowsOverQuota, content_of

after_all_seqs: Final = 2**62  # a drop of this number supersedes every row
_GROUP: Final = 'SELECT "group" FROM engines WHERE stream = ?'


def apply_entry(db: sqlite3.Connection, entry: LogEntry) -> set[str]:
    """Apply one; the captures whose status may have changed."""
    message = entry.message
    match message:
        case Hello():
            _hello(db, message)
            return set()
        case Bye():
            db.execute("UPDATE streams SET bye = 1 WHERE stream = ? AND epoch = ?", (entry.stream, entry.epoch))
            return set()
        case Own():
            return _own(db, entry, message)
        case Open():
            return _open(db, entry, message)
        case Finish():
            return _finish(db, entry, message)
        case Join():
            return _join(db, entry, message)
        case PartFinish():
            db.execute("UPDATE parts SET finish_seq = ?, lost = 0, edits = ? WHERE capture = ? AND stream = ?",
                       (message.seq, message.edits or "", message.capture, entry.stream))
            return {message.capture}
        case Dropped():
            return _dropped(db, entry, message)
        case ClientFinish():
            return _client_finish(db, message)
        case Abandon():
            ids = _ids(db, message.capture)
            db.executemany("UPDATE captures SET failed = ? WHERE id = ? AND stream IS NULL",
                           [(message.reason, capture) for capture in ids])
            return set(ids)
        case Delete():
            ids = _ids(db, message.capture)
            for capture in ids:
                forget(db, capture)
            return set(ids)
        case Hold():
            ids = _ids(db, message.capture)
            db.executemany("UPDATE captures SET hold = ? WHERE id = ?", [(int(message.on), capture) for capture in ids])
            return set()
        case RowsOverQuota():
            return _over_quota(db, message)
        case CapturesLost():
            return _lost(db, entry, message)
        case PartsLost():
            db.executemany("INSERT OR IGNORE INTO parts SELECT id, ?, '', 0, 0, NULL, 1, '' FROM captures WHERE id = ? "
                           "AND deleted = 0", [(part, message.capture) for part in message.parts])
            return {message.capture}
        case RanksLost():
            db.execute('DELETE FROM lost_ranks WHERE "group" = ?', (message.group,))
            db.executemany("INSERT OR IGNORE INTO lost_ranks VALUES (?, ?)",
                           [(message.group, rank) for rank in message.ranks])
            return set()
    return set()


def note_streams(db: sqlite3.Connection, covered: Iterable[tuple[str, int, str, int]]) -> None:
    """Remember what of each (stream, epoch, role, number) is on the disk.

    A stream never goes back to an earlier epoch: what one commit takes of a stream that ends and of the same one begun
    again is told in either order.
    """
    db.executemany(
        "INSERT INTO streams (stream, epoch, role, covered) VALUES (?, ?, ?, ?) ON CONFLICT (stream) DO UPDATE SET "
        "epoch = excluded.epoch, role = excluded.role, bye = CASE WHEN excluded.epoch > epoch THEN 0 ELSE bye END, "
        "covered = CASE WHEN excluded.epoch > epoch THEN excluded.covered ELSE max(covered, excluded.covered) END "
        "WHERE excluded.epoch >= epoch",
        covered,
    )


def _hello(db: sqlite3.Connection, hello: Hello) -> None:
    note_streams(db, [(hello.stream, hello.epoch, hello.role, 0)])
    if hello.engine is not None:
        db.execute("INSERT OR REPLACE INTO engines VALUES (?, ?, ?, ?, ?, ?)", (
            hello.stream, hello.epoch, hello.rank, hello.shard, msgspec.json.encode(hello.engine).decode(),
            hello.engine.group))
    if hello.pid & NONCE:
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (nonce_key(hello.stream), str(hello.pid)))


def _json(value: str | int | None) -> str | None:
    return None if value is None else json.dumps(value)


def _ids(db: sqlite3.Connection, capture: str) -> list[str]:
    """The captures that a record names: the exact one, or all samples of a ULID."""
    query = "SELECT id FROM captures WHERE (id = ? OR ulid = ?) AND deleted = 0"
    ids = [row["id"] for row in db.execute(query, (capture, capture))]
    return [capture] if capture in ids else ids


def _own(db: sqlite3.Connection, entry: LogEntry, own: Own) -> set[str]:
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


def _open(db: sqlite3.Connection, entry: LogEntry, opened: Open) -> set[str]:
    _insert(db, opened.capture, "running", opened.created_ms)
    db.execute("UPDATE captures SET tags = ? WHERE id = ? AND own_seq IS NULL AND tags = '{}' AND deleted = 0",
               (_asked_tags(opened.asked), opened.capture))
    db.execute(
        "UPDATE captures SET stream = ?, epoch = ?, request = ?, open_seq = ?, asked = ?, resolved = ?, "
        "prompt_len = ?, prompt_tokens = ?, cached = ?, adapter = ?, edits = ?, "
        f'"group" = coalesce(({_GROUP}), \'\') '
        "WHERE id = ? AND stream IS NULL AND deleted = 0",
        (entry.stream, entry.epoch, opened.request, opened.seq, opened.asked,
         msgspec.json.encode(opened.resolved).decode(), opened.prompt_len, opened.prompt_token_ids, opened.cached,
         opened.adapter, opened.edits, entry.stream, opened.capture))
    return {opened.capture}


def _join(db: sqlite3.Connection, entry: LogEntry, joined: Join) -> set[str]:
    """A part of a capture; one that came first and whose Open is on its way is pending until then."""
    _insert(db, joined.capture, "pending", ulid_ms(joined.capture))
    db.execute(f'UPDATE captures SET "group" = ({_GROUP}) WHERE id = ? AND stream IS NULL', (entry.stream,
                                                                                             joined.capture))
    db.execute(
        "INSERT INTO parts SELECT c.id, e.rank, e.stream, ?, ?, NULL, 0, '' FROM captures c, engines e WHERE c.id = ? "
        "AND c.deleted = 0 AND e.stream = ? ON CONFLICT (capture, part) DO UPDATE SET stream = excluded.stream, "
        "epoch = excluded.epoch, open_seq = excluded.open_seq, lost = 0 WHERE stream = ''",
        (entry.epoch, joined.seq, joined.capture, entry.stream))
    return {joined.capture}


def _lost(db: sqlite3.Connection, entry: LogEntry, lost: CapturesLost) -> set[str]:
    """Captures of the stream that leads them are lost whole, of one that joined them its part alone."""
    for capture in lost.captures:
        part = db.execute("UPDATE parts SET lost = 1 WHERE capture = ? AND stream = ? AND finish_seq IS NULL",
                          (capture, entry.stream))
        if not part.rowcount:
            db.execute("UPDATE captures SET lost = 1 WHERE id = ? AND finish_seq IS NULL AND stream = ?",
                       (capture, entry.stream))
    return set(lost.captures)


def _asked_tags(asked: str) -> str:
    """The tags of a spec that came without an announcement, as from a plain ``LLM``."""
    try:
        return json.dumps(parse_spec(asked).tags)
    except TapError:
        return "{}"


def _finish(db: sqlite3.Connection, entry: LogEntry, finish: Finish) -> set[str]:
    db.execute(
        'UPDATE captures SET finish_seq = ?, finish_reason = ?, stop_reason = ?, output_tokens = ?, "end" = ?, '
        "recomputed = ?, edits = CASE ? WHEN '' THEN edits ELSE ? END, lost = 0 "
        "WHERE id = ? AND stream = ? AND deleted = 0",
        (finish.seq, finish.reason, _json(finish.stop_reason), finish.output_token_ids, finish.end, finish.recomputed,
         finish.edits, finish.edits, finish.capture, entry.stream))
    return {finish.capture}


def _dropped(db: sqlite3.Connection, entry: LogEntry, dropped: Dropped) -> set[str]:
    layers, seq = pack_layers(dropped.layers), dropped.seq
    if dropped.reason == "fenced":  # below zero it supersedes no row, and takes no number of what another copy says
        said = b"%d %d " % (dropped.start, dropped.stop) + layers
        seq = -1 - (xxhash.xxh3_64_intdigest(said) >> 2)
    db.execute("INSERT OR REPLACE INTO drops SELECT id, ?, coalesce((SELECT rank FROM engines WHERE stream = ?), 0), "
               "?, ?, ?, ?, ? FROM captures WHERE id = ? AND deleted = 0",
               (dropped.site, entry.stream, seq, layers, dropped.start, dropped.stop, dropped.reason,
                dropped.capture))
    return {dropped.capture}


def _client_finish(db: sqlite3.Connection, finish: ClientFinish) -> set[str]:
    _insert(db, finish.capture, "pending", ulid_ms(finish.capture))
    db.execute("UPDATE captures SET client_reason = ?, client_stop = ?, client_tokens = ? WHERE id = ? AND deleted = 0",
               (finish.reason, _json(finish.stop_reason), finish.output_token_ids, finish.capture))
    return {finish.capture}


def _over_quota(db: sqlite3.Connection, over: RowsOverQuota) -> set[str]:
    db.execute("UPDATE captures SET quota = 1 WHERE id = ?", (over.capture,))
    known = find_capture(db, over.capture)
    resolved = json.loads(known.resolved)["layers"] if known is not None and known.resolved else {}
    db.executemany("INSERT OR REPLACE INTO drops VALUES (?, ?, ?, ?, ?, 0, ?, 'quota')", [
        (over.capture, site, EVERY_PART, after_all_seqs, pack_layers(layers), limits.position_max + 1)
        for site, layers in resolved.items()])
    return {over.capture}


def _insert(db: sqlite3.Connection, capture: str, status: str, created_ms: int) -> None:
    """A capture that nobody announced, unless it is there already."""
    ulid, index = split_capture_id(capture) or (capture, None)
    # A sample that nobody announced belongs to whoever announced its siblings, never to everybody.
    sibling = db.execute("SELECT owner, tags FROM captures WHERE ulid = ? AND own_seq IS NOT NULL LIMIT 1",
                         (ulid,)).fetchone()
    owner, tags = (sibling["owner"], sibling["tags"]) if sibling else ("", "{}")
    db.execute("INSERT INTO captures (id, ulid, sample, owner, status, created_ms, tags) VALUES (?, ?, ?, ?, ?, ?, ?) "
               "ON CONFLICT (id) DO NOTHING", (capture, ulid, index or 0, owner, status, created_ms, tags))


def forget(db: sqlite3.Connection, capture: str) -> None:
    """A tombstone: the id stays taken, what was known of the content goes."""
    db.execute(
        "UPDATE captures SET deleted = 1, status = 'deleted', asked = NULL, resolved = NULL, adapter = '', edits = '', "
        "prompt_tokens = x'', output_tokens = x'', client_tokens = x'', tags = '{}', stop_reason = NULL, "
        "client_stop = NULL, total_len = prompt_len WHERE id = ?",
        (capture,))
    db.execute("INSERT OR IGNORE INTO doomed SELECT segment, capture FROM extents WHERE capture = ? UNION "
               "SELECT segment, capture FROM strays WHERE capture = ?", (capture, capture))
    db.execute("INSERT OR IGNORE INTO scrub SELECT log, capture FROM log_refs WHERE capture = ?", (capture,))
    for table in ("extents", "drops", "parts", "strays", "log_refs"):
        db.execute(f"DELETE FROM {table} WHERE capture = ?", (capture,))


def note_log(db: sqlite3.Connection, entry: LogEntry, log: int) -> None:
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
