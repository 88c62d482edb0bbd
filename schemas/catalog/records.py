"""The catalog: one SQLite file that says where every row lies. A cache: journals and blocks rebuild it."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from schemas.catalog.database import Database
from schemas.catalog.tables import CATALOG_VERSION
from schemas.errors import StoreError
from schemas.spec import Resolved, intervals

__all__ = ["Capture", "connect_read", "connect_write", "engine_json", "find_capture", "remedy"]

_NO_SPACE: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE,
                    sqlite3.SQLITE_IOERR_SHMOPEN)
_UNWRITABLE: Final = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)  # primary codes


def connect_write(path: Path) -> sqlite3.Connection:
    """The writer's connection; sqlite3.DatabaseError where the file is damaged."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute("PRAGMA secure_delete=ON")  # what a deleted capture said must not stay in free pages
    db.execute("PRAGMA recursive_triggers=ON")  # else a row that is replaced is not counted as deleted
    return db


class ReadConnection(sqlite3.Connection):
    """A reader's connection; one that is ``immutable`` shows the catalog as it was when it was opened, for ever."""

    immutable: bool = False


def connect_read(path: Path) -> ReadConnection:
    """A reader's connection; it changes nothing in the catalog and works where nothing can be written."""
    if not path.exists():
        raise StoreError("open catalog", path, "no such file", "a writer makes the catalog at its start")
    error: sqlite3.Error | None = None
    # immutable: a store on read-only media whose WAL index cannot be made; it was left clean or is as of its last
    # checkpoint.
    for mode in ("mode=ro", "immutable=1"):
        quoted = str(path.resolve()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        uri = f"file:{quoted}?{mode}"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=10,
                             factory=ReadConnection)
        db.row_factory = sqlite3.Row
        db.immutable = mode == "immutable=1"
        try:
            row = db.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        except sqlite3.Error as caught:
            error = caught
            db.close()
            if getattr(caught, "sqlite_errorcode", 0) & 0xFF in _UNWRITABLE:
                continue
            break
        if row is None or row["value"] != str(CATALOG_VERSION):
            found = None if row is None else row["value"]
            db.close()
            raise StoreError("open catalog", path, f"version {found}, this reader knows {CATALOG_VERSION}",
                             "start the writer once: it rebuilds the catalog")
        return db
    raise StoreError("open catalog", path, error, remedy(error))


def remedy(error: sqlite3.Error | None) -> str:
    """Advice about a catalog that cannot be opened or written."""
    if getattr(error, "sqlite_errorcode", 0) in _NO_SPACE:
        return "the disk is full: the catalog is as good as it was, and goes on when there is space"
    return "start the writer once: it repairs or rebuilds the catalog"


@dataclass(frozen=True, slots=True)
class Extent:
    """Rows of a capture in one frame; ``table`` has of one after the other its position, row in the frame, token id and
    flags as little-endian uint32.
    """

    site: str
    seq: int
    segment: int
    offset: int
    layers: tuple[int, ...]
    table: bytes
    part: int = 0  # of the group that the capture is of, which sent them
    steps: bytes = b""  # of a group: of each row, the engine's step that computed it, as little-endian uint64

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The table as uint32 ``[n, 4]``."""
        return np.frombuffer(self.table, "<u4").reshape(-1, 4)


@dataclass(frozen=True, slots=True)
class Drop:
    """A range of positions that the engine did not keep."""

    site: str
    seq: int
    layers: tuple[int, ...]
    start: int
    stop: int
    reason: str
    part: int = 0  # that says so


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment's place and contents; ``main`` names the codec's main stream, ``cold`` a compacted block."""

    number: int
    sealed: bool
    site: str
    codec: str
    dtype: str
    width: int
    main: str
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Capture:
    """A row of ``captures``, decoded."""

    id: str
    ulid: str
    sample: int
    owner: str
    status: str
    created_ms: int
    tags: dict[str, str]
    stream: str | None
    asked: str | None
    resolved: str | None
    adapter: str
    edits: str
    prompt_len: int
    prompt_tokens: bytes
    cached: int
    finish_seq: int | None
    finish_reason: str | None
    stop_reason: str | int | None
    output_tokens: bytes
    end: int | None
    recomputed: int
    client_reason: str | None
    total_len: int
    lost: bool
    failed: str | None
    deleted: bool
    hold: bool = False
    group: str = ""  # of ranks that send its rows, "" where one does

    @property
    def ended(self) -> str | None:
        """Reason of the end for the client, where known: a stop string looks like an abort inside the engine."""
        return self.client_reason or self.finish_reason

    @property
    def expected_end(self) -> int:
        """End of a finished capture's rows: nothing follows the last token, so the model is not run on it."""
        return max(self.end or 0, self.prompt_len + len(self.output_tokens) // 4 - 1)


def pack_layers(layers: list[int]) -> bytes:
    """Layers as little-endian uint16."""
    return np.asarray(layers, "<u2").tobytes()


@lru_cache(maxsize=1024)
def unpack_layers(data: bytes) -> tuple[int, ...]:
    """The inverse."""
    return tuple(np.frombuffer(data, "<u2").tolist())


def capture_of(row: Any) -> Capture:
    """A Capture of a row of ``SELECT * FROM captures``."""
    stop, tokens, end = row["stop_reason"], row["output_tokens"], row["end"]
    by_string = (row["client_stop"] or "").startswith('"')
    if row["client_reason"] == "stop" and (by_string or row["finish_reason"] in (None, "abort")):
        # A stop string is known to the front end alone: the engine saw an abort, or an end of its own in the same step,
        # maybe after tokens that the final sequence does not have.
        stop = row["client_stop"] or stop
        if tokens.startswith(row["client_tokens"]) or row["finish_reason"] is None:
            tokens = row["client_tokens"]
            end = None if end is None else min(end, row["prompt_len"] + len(tokens) // 4)
    capture = Capture(
        id=row["id"], ulid=row["ulid"], sample=row["sample"], owner=row["owner"], status=row["status"],
        created_ms=row["created_ms"], tags=json.loads(row["tags"]), stream=row["stream"], asked=row["asked"],
        resolved=row["resolved"], adapter=row["adapter"], edits=row["edits"], prompt_len=row["prompt_len"],
        prompt_tokens=row["prompt_tokens"], cached=row["cached"], finish_seq=row["finish_seq"],
        finish_reason=row["finish_reason"],
        stop_reason=None if stop is None else json.loads(stop), output_tokens=tokens, end=end,
        recomputed=row["recomputed"], client_reason=row["client_reason"], total_len=row["total_len"],
        lost=bool(row["lost"]), failed=row["failed"], deleted=bool(row["deleted"]),
        hold=bool(row["hold"]), group=row["group"],
    )
    return replace(capture, status="empty") if capture.status == "complete" and not _names_rows(capture) else capture


def _names_rows(capture: Capture) -> bool:
    """Whether one that is finished asked for any row that its generation has.

    The catalog itself says `complete` of one that did not: nothing is missing, as in stores of earlier versions.
    """
    if capture.resolved is None:
        return True
    resolved = msgspec.json.decode(capture.resolved, type=Resolved)
    return any(resolved.layers.values()) and any(
        start < capture.expected_end and stop > 0 for start, stop in intervals(resolved.positions, capture.prompt_len))


def find_capture(db: Database, capture: str) -> Capture | None:
    """The capture of exactly this id."""
    row = db.execute("SELECT * FROM captures WHERE id = ?", (capture,)).fetchone()
    return None if row is None else capture_of(row)


def load_extents(db: Database, capture: str, site: str | None = None) -> list[Extent]:
    """The extents of a capture, part after part, oldest first; of one site where it is given."""
    where, args = ("AND site = ?", (capture, site)) if site else ("", (capture,))
    query = ('SELECT site, seq, segment, "offset", layers, rows, part, steps FROM extents '
             f"WHERE capture = ? {where} ORDER BY part, seq, site")
    return [
        Extent(r["site"], r["seq"], r["segment"], r["offset"], unpack_layers(r["layers"]), r["rows"], r["part"],
               r["steps"])
        for r in db.execute(query, args)
    ]


def load_drops(db: Database, capture: str) -> list[Drop]:
    """The ranges that were dropped of a capture, part after part, oldest first."""
    query = "SELECT * FROM drops WHERE capture = ? ORDER BY part, seq, site"
    return [Drop(r["site"], r["seq"], unpack_layers(r["layers"]), r["start"], r["stop"], r["reason"], r["part"])
            for r in db.execute(query, (capture,))]


def load_frames(db: Database, segment: int) -> list[tuple[int, int]]:
    """Offset and bytes of each frame that the catalog has of a segment, in order."""
    query = "SELECT offset, bytes FROM frames WHERE segment = ? ORDER BY offset"
    return [(row["offset"], row["bytes"]) for row in db.execute(query, (segment,))]


def load_segment(db: Database, number: int) -> Segment | None:
    """A segment by its number."""
    r = db.execute("SELECT * FROM segments WHERE number = ?", (number,)).fetchone()
    if r is None:
        return None
    return Segment(r["number"], bool(r["sealed"]), r["site"], r["codec"], r["dtype"], r["width"], r["main"],
                   bool(r["cold"]))


def nonce_key(stream: str) -> str:
    """Key under which the catalog keeps the nonce of a stream's last Hello."""
    return f"nonce {stream}"


def nonce_of(db: Database, stream: str) -> int:
    """Nonce of a stream's last Hello, 0 where there is none."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (nonce_key(stream),)).fetchone()
    return int(row[0]) if row else 0


def engine_json(db: Database, stream: str | None) -> dict[str, Any]:
    """Description that the engine of a stream gave of itself; ``{}`` where nothing is known."""
    row = db.execute("SELECT info FROM engines WHERE stream = ?", (stream or "",)).fetchone()
    return json.loads(row["info"]) if row else {}
