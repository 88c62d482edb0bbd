"""Read a store from disk: captures, manifests and slices. Needs no server, and works while the writer is down.

>>> store = StoreReader("captures")                                              # doctest: +SKIP
>>> store.slice("01J...", "resid_post", [12], 0, 10).values().shape              # doctest: +SKIP
(1, 10, 4096)
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from schemas import codecs, limits
from schemas import manifest as manifests
from schemas.catalog import (
    Capture,
    ReadConnection,
    Segment,
    capture_of,
    connect_read,
    engine_json,
    find_capture,
    load_drops,
    load_extents,
    load_segment,
)
from schemas.control import EngineInfo
from schemas.coverage import Coverage, LayerGroup, cover
from schemas.errors import CorruptError, LimitError, NotFoundError, SpecError, StoreError
from schemas.frame import FLAG_ERASED
from schemas.ids import split_capture_id
from schemas.manifest import Manifest, Missing
from schemas.mapping import SegmentMaps, View
from schemas.sieve import Sieve
from schemas.sites import is_probe, parse_site, site_named
from schemas.spec import Resolved
from schemas.tail import FrameAt, JournalTail
from schemas.zarr_layout import block_name, open_name, redo_name

__all__ = ["CaptureRow", "LiveRows", "Places", "Progress", "Slice", "StoreReader", "read_store_uuid"]

Array = npt.NDArray[Any]
T = TypeVar("T")
settle_s_max: Final = 5.0  # a read waits at most so long for rows of others to be erased
_INDEXED = re.compile(r"(.+)\.(0|[1-9][0-9]{0,5})", re.ASCII)


class _UnsettledError(Exception):
    """A read that may have met the writer moving or erasing rows of a segment."""

    def __init__(self, segment: int, cause: StoreError) -> None:
        super().__init__(str(cause))
        self.segment, self.cause = segment, cause


@dataclass(frozen=True, slots=True)
class CaptureRow:
    """One line of a listing; lengths are in tokens."""

    id: str
    owner: str
    status: str
    created_ms: int
    tags: dict[str, str]
    aliases: list[str]
    sites: list[str]
    prompt_len: int
    total_len: int
    finish_reason: str | None
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows ``[start, stop)`` of some layers of a site, as stored.

    ``pieces[stream]`` is ``[layers, n, *stream.shape]``; ``positions``, ``token_ids`` and ``flags`` (schemas.frame:
    generated, recomputed, an accepted draft) are uint32 ``[n]``. A
    position is a row only if every asked layer has it; the others are in ``missing``. ``clipped`` says that the range
    asked for reached past the end. ``codec`` is the identity; ``codecs.identified`` tells what its numbers are.
    """

    capture: str
    site: str
    layers: list[int]
    codec: str
    dtype: str
    width: int
    start: int
    stop: int
    positions: npt.NDArray[np.uint32]
    token_ids: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint32]
    pieces: dict[str, Array]
    missing: list[Missing]
    clipped: bool

    def values(self) -> npt.NDArray[np.float32]:
        """Decoded rows, float32 ``[layers, n, decoded width]``: k numbers a row where the codec projects."""
        return codecs.decode(self.codec, self.pieces, self.width, self.dtype)

    def kept_energy(self) -> npt.NDArray[np.float32] | None:
        """Share of each row's energy that was kept, ``[layers, n]``; None where the codec keeps every column."""
        return codecs.kept_energy(self.pieces)


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows of some layers of a site lie, for who reads very many: no row is touched to find out.

    ``positions`` uint32 ``[n]``, ascending: those that every asked layer has. Row i of layer l is row ``row[l, i]`` of
    the frame at byte ``offset[l, i]`` of segment ``segment[l, i]``, int64 ``[layers, n]``.
    """

    capture: str
    codec: str
    dtype: str
    width: int
    positions: npt.NDArray[np.uint32]
    segment: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a capture is; rows are counted over all sites and layers, and are durable."""

    id: str
    status: str
    expected: int
    captured: int
    missing: int
    prompt_len: int
    total_len: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class LiveRows:
    """Rows of a capture out of one frame, as they came: ``values`` is float32 ``[layers, n, decoded width]``.

    ``seq`` grows from frame to frame. A position may come again, computed anew: the later one counts. ``durable`` says
    that the rows survive a loss of power, ``more`` that the frame has others after them; ``flags`` are schemas.frame's,
    uint32 ``[n]``.
    """

    seq: int
    durable: bool
    more: bool
    layers: list[int]
    positions: npt.NDArray[np.uint32]
    token_ids: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float32]


def read_store_uuid(path: Path) -> bytes:
    """The 16 bytes that name the store; StoreError where ``path`` is no store of a known version."""
    file = path / "store.json"
    try:
        document = json.loads(file.read_text())
        version, uuid = document["version"], bytes.fromhex(document["uuid"].replace("-", ""))
    except FileNotFoundError:
        raise StoreError("open store", path, "no store.json in it", "name the folder given to the writer") from None
    except OSError as error:
        raise StoreError("open store", path, error.strerror, "name the folder given to the writer") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError("open store", file, f"malformed: {error!r}") from None
    if version != limits.STORE_VERSION or len(uuid) != 16:
        raise StoreError("open store", file, f"version {version}, this program knows {limits.STORE_VERSION}")
    return uuid


class StoreReader:
    """A store opened read-only; safe to use from several threads.

    A ``ref`` is a capture id, or an alias (a response id, an X-Request-Id). ``owner`` restricts to one owner's
    captures, None means any. NotFoundError is raised for what is not there, is deleted or belongs to others.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        uuid = read_store_uuid(self.path)
        self._maps = SegmentMaps(self.path, uuid)
        self._tail = JournalTail(self.path, uuid, self._durable_end)
        self._lock = threading.RLock()
        self._catalog = self.path / "catalog.sqlite"
        self._connection, self._seen = self._open()
        self._reopened = 0

    def _open(self) -> tuple[ReadConnection, tuple[int, ...]]:
        """A connection, and what it stands for until that changes."""
        # Before it is opened: what changes meanwhile is a change. Where there is none, opening says so.
        seen = self._look(everything=True) if self._catalog.exists() else ()
        connection = connect_read(self._catalog)
        return connection, seen if connection.immutable else seen[:1]

    def _look(self, everything: bool) -> tuple[int, ...]:
        """What tells one catalog from another; with ``everything``, one that was written to from what it was."""
        stat = self._catalog.stat()
        if not everything:
            return (stat.st_ino,)
        log = self._catalog.with_name(f"{self._catalog.name}-wal")
        try:
            beside = log.stat()
        except FileNotFoundError:
            return (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        return (stat.st_ino, stat.st_mtime_ns, stat.st_size, beside.st_mtime_ns, beside.st_size)

    @property
    def _db(self) -> sqlite3.Connection:
        """The catalog as it lies there now: a writer that found it damaged has put another in its place, and one that
        nobody wrote to, on media that are read-only from here, has a writer again."""
        try:
            seen = self._look(self._connection.immutable)
        except FileNotFoundError:
            return self._connection
        if seen != self._seen and not self._connection.in_transaction:
            (fresh, self._seen), stale = self._open(), self._connection
            self._connection = fresh
            stale.close()
            self._reopened += 1
        return self._connection

    def close(self) -> None:
        """Release files; slices taken before stay valid."""
        with self._lock:
            self._connection.close()
            self._maps.close()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── what is there ───────────────────────────────────────────────────────────────────────────────────────────

    def capture(self, ref: str, owner: str | None = None) -> CaptureRow:
        """One capture's line."""
        with self._lock:
            return self._row(self._find(ref, owner))

    def captures(
        self, owner: str | None = None, status: str | None = None, limit: int = 100, before: str | None = None
    ) -> list[CaptureRow]:
        """Newest first; ``before`` is the id that the previous page ended with. Deleted ones only where asked for."""
        return self.page(owner, status, limit, before)[0]

    def page(
        self, owner: str | None = None, status: str | None = None, limit: int = 100, before: str | None = None,
        sieve: Sieve | None = None,
    ) -> tuple[list[CaptureRow], str | None]:
        """A page of ``captures`` that pass the sieve, and the ``before`` of the next one; None where this is the last.

        At most ``limits.captures_scan_max`` are looked at: a page may hold few, or none, and yet not be the last.
        """
        if not 0 < limit <= limits.captures_page_max:
            raise LimitError("captures in a page", limit, limits.captures_page_max)
        where: list[str] = ["deleted = 0" if status != "deleted" else "1"]
        args: list[str | int] = []
        if owner is not None:
            where.append("owner = ?")
            args.append(owner)
        if status is not None:
            where.append("status = ?")
            args.append(status)
        with self._lock:
            if before is not None:
                # It may have been deleted since that page: its tombstone still says where to go on.
                last = find_capture(self._db, before)
                if last is None or owner not in (None, last.owner):
                    raise _no_capture(before)
                where.append("(created_ms, id) < (?, ?)")
                args += [last.created_ms, last.id]
            condition = " AND ".join(where)
            query = f"SELECT * FROM captures WHERE {condition} ORDER BY created_ms DESC, id DESC"
            sifted, more = ("", []) if sieve is None else sieve.condition()
            scan = limits.captures_scan_max if sifted else limit
            listed = f"SELECT * FROM ({query} LIMIT {scan}) AS listed {sifted} LIMIT {limit}"
            rows = [self._row(capture_of(row)) for row in self._db.execute(listed, [*args, *more])]
            if len(rows) == limit:
                return rows, rows[-1].id
            last_looked_at = self._db.execute(f"SELECT id FROM ({query} LIMIT 1 OFFSET {scan - 1})", args).fetchone()
            return rows, None if last_looked_at is None else last_looked_at["id"]

    def samples(self, ref: str, owner: str | None = None) -> list[str]:
        """The capture ids under a ULID or an alias, in the order of their numbers."""
        with self._lock:
            if split_capture_id(ref) is None:
                ref = self._resolve_alias(ref, owner)
            ulid, index = split_capture_id(ref) or ("", None)
            if index is not None:
                return [self._find(ref, owner).id]
            return [capture.id for capture in self._under(ulid, owner)]

    def target(self, ref: str, owner: str | None = None) -> tuple[str, str]:
        """What a record calls ``ref``, be it one capture or all samples of a request, and the last of these.

        Without an ``owner`` NotFoundError where several owners have captures of that name: the newest may be another's
        than the one that is meant.
        """
        if owner is None:
            self._refuse_shared(ref)
        samples = self.samples(ref, owner)
        if len(samples) == 1:
            return samples[0], samples[0]
        ulid, _ = split_capture_id(samples[0]) or ("", None)
        return ulid, samples[-1]

    def _refuse_shared(self, alias: str) -> None:
        match = _INDEXED.fullmatch(alias)
        query = ("SELECT DISTINCT ulid, owner FROM aliases JOIN captures USING (ulid, owner) WHERE alias IN (?, ?) "
                 "AND deleted = 0 ORDER BY n")
        with self._lock:
            found = self._db.execute(query, (alias, match[1] if match else alias)).fetchall()
        if len({row["owner"] for row in found}) > 1:
            ids = ", ".join(f"{row['ulid']} (of {row['owner'] or 'nobody'})" for row in found)
            raise NotFoundError(f"{alias} names captures of several owners; ask for one by its id: {ids}")

    def engine(self) -> EngineInfo | None:
        """The newest engine that the store knows."""
        with self._lock:
            row = self._db.execute("SELECT info FROM engines ORDER BY epoch DESC LIMIT 1").fetchone()
        return None if row is None else msgspec.json.decode(row["info"], type=EngineInfo)

    def erasing(self) -> bool:
        """Whether something of deleted captures is still to be erased."""
        query = "SELECT EXISTS (SELECT 1 FROM doomed) OR EXISTS (SELECT 1 FROM scrub)"
        with self._lock:
            return bool(self._db.execute(query).fetchone()[0])

    def manifest(self, ref: str, owner: str | None = None) -> Manifest:
        """The whole truth about one capture."""
        with self._lock, self._snapshot():
            capture = self._find(ref, owner)
            coverage = cover(capture, load_extents(self._db, capture.id), load_drops(self._db, capture.id))
            return self._manifest(capture, coverage)

    # ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────

    def slice(
        self, ref: str, site: str, layers: Sequence[int], start: int = 0, stop: int | None = None,
        owner: str | None = None, rejected: bool = False,
    ) -> Slice:
        """Rows at positions ``[start, stop)`` of some layers of a site, clipped to what the capture can have.

        ``rejected``: instead of the sequence's own rows, those of drafts (speculative decoding) that were not accepted,
        by position and, where one was guessed at more than once, oldest first; ``token_ids`` are the guesses.

        LimitError over ``limits.slice_bytes_max`` of stored bytes; CorruptError where stored bytes do not match.
        """
        site = parse_site(site, "site")[0]
        return self._settled(lambda: self._slice(ref, site, layers, start, stop, owner, rejected))

    def _settled(self, read: Callable[[], T]) -> T:
        """What ``read`` gives, or its error once that is no passing one.

        The writer may erase rows, and move or remove segments, at any moment of a read. A read that met it begins
        anew: then it sees the store after it.
        """
        deadline, waits = time.monotonic() + settle_s_max, iter((0.002, 0.01, 0.05))
        while True:
            try:
                return read()
            except _UnsettledError as error:
                erasing = (self.path / redo_name(error.segment)).exists()
                wait = 0.005 if erasing else next(waits, None)
                if wait is None:
                    raise error.cause from None
                if time.monotonic() > deadline:
                    raise StoreError("read slice", self.path, f"rows beside these in segment {error.segment} are being "
                                     "erased", "a writer that was killed in the middle of it ends it at its next start"
                                     ) from None
                self._maps.forget(error.segment)
            time.sleep(wait)

    def _slice(
        self, ref: str, site: str, layers: Sequence[int], start: int, stop: int | None, owner: str | None,
        rejected: bool,
    ) -> Slice:
        with self._lock, self._snapshot():
            capture = self._find(ref, owner)
            resolved = _resolved(capture)
            wanted = _check_layers(capture, resolved, site, layers)
            coverage = cover(capture, load_extents(self._db, capture.id, site), load_drops(self._db, capture.id))
            dtype, width = self._shape(capture, coverage, site)
            segments = self._segments(coverage, site)
        first = max(start, 0)
        end = coverage.end
        if rejected:  # guesses reach past the end
            end = max((int(group.rejected.positions.max(initial=-1)) + 1 for group in coverage.sites[site]), default=0)
        last = max(end if stop is None else min(stop, end), first)
        clipped = start < 0 or (stop is not None and stop > end)
        positions, picks = _common_rows(coverage.sites[site], wanted, first, last, rejected)
        declared = codecs.streams(resolved.codec[site], width, dtype)
        nbytes = len(wanted) * len(positions) * sum(stream.nbytes for stream in declared)
        if nbytes > limits.slice_bytes_max:
            raise LimitError("bytes of a slice", nbytes, limits.slice_bytes_max, "ask for fewer layers or positions")
        pieces: dict[str, Array] = {
            stream.name: np.empty((len(wanted), len(positions), *stream.shape), stream.dtype) for stream in declared
        }
        token_ids, flags = np.zeros(len(positions), np.uint32), np.zeros(len(positions), np.uint32)
        for group_layers, extent_of, row_of in picks:
            for index in np.unique(extent_of):
                extent = coverage.extents[site][index]
                segment = segments[extent.segment]
                if segment is None:
                    raise StoreError("read slice", self.path, f"segment {extent.segment} is not in the catalog",
                                     "start the writer once: it repairs the catalog")
                at = np.flatnonzero(extent_of == index)
                try:
                    token_ids[at], flags[at] = self._copy(segment, extent.offset, declared,
                                                          [wanted[i] for i in group_layers], row_of[at], pieces,
                                                          np.ix_(np.asarray(group_layers), at))
                except StoreError as error:
                    raise _UnsettledError(segment.number, error) from None
        missing = [] if rejected else _missing_of(coverage.sites[site], wanted, first, last)
        return Slice(capture.id, site, list(layers), resolved.codec[site], dtype, width, first, last,
                     positions.astype(np.uint32), token_ids, flags, pieces, missing, clipped)

    def places(self, ref: str, site: str, layers: Sequence[int], owner: str | None = None) -> Places:
        """Where the rows of a capture lie; NotFoundError where it has no such site or layer."""
        site = parse_site(site, "site")[0]
        with self._lock, self._snapshot():
            capture = self._find(ref, owner)
            resolved = _resolved(capture)
            wanted = _check_layers(capture, resolved, site, layers)
            coverage = cover(capture, load_extents(self._db, capture.id, site), load_drops(self._db, capture.id))
            dtype, width = self._shape(capture, coverage, site)
        positions, picks = _common_rows(coverage.sites[site], wanted, 0, coverage.end, False)
        extents = coverage.extents[site]
        segments = np.asarray([extent.segment for extent in extents], np.int64)
        offsets = np.asarray([extent.offset for extent in extents], np.int64)
        segment, offset, row = np.zeros((3, len(wanted), len(positions)), np.int64)
        if len(positions):
            for members, extent_of, row_of in picks:
                segment[members], offset[members], row[members] = segments[extent_of], offsets[extent_of], row_of
        return Places(capture.id, resolved.codec[site], dtype, width, positions.astype(np.uint32), segment, offset, row)

    def segment(self, number: int) -> Segment:
        """A segment as the catalog has it now."""
        with self._lock:
            found = load_segment(self._db, number)
        if found is None:
            raise StoreError("read segment", self.path, f"segment {number} is not in the catalog",
                             "start the writer once: it repairs the catalog")
        return found

    def _copy(
        self, segment: Segment, offset: int, declared: tuple[codecs.Stream, ...], layers: list[int],
        rows: npt.NDArray[np.int64], pieces: dict[str, Array], target: tuple[Array, ...],
    ) -> tuple[Array, Array]:
        """Copy rows of a frame to ``target`` of every array of ``pieces``; their token ids and flags."""
        view = self._maps.frame(segment, offset, verify=False)
        if view.declared != declared:
            raise CorruptError("read slice", f"{open_name(segment.number)} at byte {offset}",
                               f"rows in {view.frame.codec} of width {view.frame.width}, the capture says otherwise")
        source = view.pieces(np.searchsorted(view.frame.layers, layers), rows)
        copied = [view.section(number)[source] for number in range(len(declared))]
        for stream, found in zip(declared, copied, strict=True):
            array = pieces[stream.name]
            array.view(np.uint8).reshape(*array.shape[:2], stream.nbytes)[target] = found
        self._maps.verify(segment, view, layers, rows, copied)
        flags = view.table.flags[rows]
        if (flags & FLAG_ERASED).any():
            raise StoreError("read slice", self.path, f"rows of segment {segment.number} were erased",
                             "start the writer once: it repairs the catalog")
        return view.table.token_id[rows], flags

    # ── while it is made ────────────────────────────────────────────────────────────────────────────────────────

    def progress(self, ref: str, owner: str | None = None) -> Progress:
        """How far one capture is."""
        with self._lock, self._snapshot():
            capture = self._find(ref, owner)
            coverage = cover(capture, load_extents(self._db, capture.id), load_drops(self._db, capture.id))
        groups = [group for groups in coverage.sites.values() for group in groups]
        expected = sum(group.expected * len(group.layers) for group in groups)
        captured = sum(len(group.rows.positions) * len(group.layers) for group in groups)
        return Progress(capture.id, capture.status, expected, captured, expected - captured, capture.prompt_len,
                        max(capture.total_len, coverage.end), capture.client_reason or capture.finish_reason)

    def appended(self) -> set[str]:
        """The captures that have got rows since this was last asked, be they durable or not yet."""
        return self._tail.look()

    def version(self) -> int:
        """A number that changes with the catalog."""
        with self._lock:
            counted = int(self._db.execute("PRAGMA data_version").fetchone()[0])  # by this connection
            return self._reopened << 32 | counted

    def frames(self, capture: str, site: str, after: int) -> list[FrameAt]:
        """The frames with rows of a capture at a site whose number is above ``after``, in order.

        Those of them that are durable, and what ``appended`` has found beyond.
        """
        with self._lock:
            query = "SELECT seq, segment, offset FROM extents WHERE capture = ? AND site = ? AND seq > ? ORDER BY seq"
            found: dict[int, FrameAt] = {}
            for row in self._db.execute(query, (capture, site, after)):
                segment = load_segment(self._db, row["segment"])
                if segment is not None:
                    found[row["seq"]] = FrameAt(row["seq"], segment, row["offset"], True)
        for frame in self._tail.frames(capture, site):
            if frame.seq > after:
                found.setdefault(frame.seq, frame)
        return [found[seq] for seq in sorted(found)]

    def live_rows(self, frame: FrameAt, capture: str, layers: Sequence[int], first: int = 0) -> LiveRows | None:
        """The rows of a capture in a frame, of those of ``layers`` that it has; None where there are none.

        From the capture's row number ``first`` in it on, at most ``limits.live_event_bytes_max`` of them. CorruptError
        where the frame is not whole: one that is not durable may be so in a moment, or come again.
        """
        return self._settled(lambda: self._live_rows(frame, capture, layers, first))

    def _live_rows(self, frame: FrameAt, capture: str, layers: Sequence[int], first: int) -> LiveRows | None:
        if not frame.durable:
            # It may be cut off at this moment, so it is not mapped; and other bytes may take its place.
            return _live_of(frame, self._tail.read(frame), capture, layers, first, lambda *_: None)
        try:
            view = self._maps.frame(frame.segment, frame.offset, verify=False)
            return _live_of(frame, view, capture, layers, first, partial(self._maps.verify, frame.segment, view))
        except StoreError as error:
            raise _UnsettledError(frame.segment.number, error) from None

    def _durable_end(self, segment: int) -> int:
        """The offset up to which the catalog has the frames of a segment."""
        with self._lock:
            row = self._db.execute("SELECT MAX(offset + bytes) FROM frames WHERE segment = ?", (segment,)).fetchone()
        return int(row[0] or 0)

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Everything read inside is of one moment."""
        db = self._db
        db.execute("BEGIN")
        try:
            yield
        finally:
            db.execute("ROLLBACK")

    def _segments(self, coverage: Coverage, site: str) -> dict[int, Segment | None]:
        numbers = {extent.segment for extent in coverage.extents.get(site, ())}
        return {number: load_segment(self._db, number) for number in numbers}

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _under(self, ulid: str, owner: str | None) -> list[Capture]:
        rows = self._db.execute("SELECT * FROM captures WHERE ulid = ? AND deleted = 0 ORDER BY sample", (ulid,))
        found = [capture for capture in map(capture_of, rows) if owner is None or capture.owner == owner]
        if not found:
            raise _no_capture(ulid)
        return found

    def _find(self, ref: str, owner: str | None) -> Capture:
        capture_id = ref if split_capture_id(ref) is not None else self._resolve_alias(ref, owner)
        capture = find_capture(self._db, capture_id)
        if capture is None:
            ulid, index = split_capture_id(capture_id) or ("", None)
            capture = find_capture(self._db, ulid) if index == 0 else None
            if index is None:
                under = self._under(ulid, owner)
                if len(under) > 1:
                    raise NotFoundError(f"{ref} has {len(under)} samples; ask for {under[0].id} … {under[-1].id}")
                capture = under[0]
        if capture is None or capture.deleted or (owner is not None and capture.owner != owner):
            raise _no_capture(ref)
        return capture

    def _resolve_alias(self, alias: str, owner: str | None) -> str:
        query = "SELECT ulid FROM aliases WHERE alias = ? AND (? IS NULL OR owner = ?) ORDER BY n DESC LIMIT 1"
        row = self._db.execute(query, (alias, owner, owner)).fetchone()
        if row is not None:
            return str(row["ulid"])
        if match := _INDEXED.fullmatch(alias):
            row = self._db.execute(query, (match[1], owner, owner)).fetchone()
            if row is not None:
                return f"{row['ulid']}.{match[2]}"
        raise _no_capture(alias)

    def _row(self, capture: Capture) -> CaptureRow:
        sites = list(_resolved(capture).layers) if capture.resolved is not None else []
        return CaptureRow(capture.id, capture.owner, capture.status, capture.created_ms, capture.tags,
                          self._aliases(capture), sites, capture.prompt_len, capture.total_len,
                          capture.client_reason or capture.finish_reason, capture.hold)

    def _aliases(self, capture: Capture) -> list[str]:
        rows = self._db.execute("SELECT alias FROM aliases WHERE ulid = ? ORDER BY n", (capture.ulid,))
        return [row["alias"] for row in rows]

    def _shape(self, capture: Capture, coverage: Coverage, site: str) -> tuple[str, int]:
        """dtype and width of a site: what was stored, else what the engine said it would be."""
        for extent in coverage.extents.get(site, ()):
            segment = load_segment(self._db, extent.segment)
            if segment is not None:
                return segment.dtype, segment.width
        engine = engine_json(self._db, capture.stream)
        dtype = "float32" if is_probe(site) else str(engine.get("model_dtype", "float32"))
        return dtype, int(engine.get("widths", {}).get(site, 0))

    def _manifest(self, capture: Capture, coverage: Coverage) -> Manifest:
        resolved = json.loads(capture.resolved) if capture.resolved else {}
        engine = engine_json(self._db, capture.stream)
        sites, rows = [], []
        for site, groups in coverage.sites.items():
            codec = resolved["codec"][site]
            dtype, width = self._shape(capture, coverage, site)
            extents = []
            segments = self._segments(coverage, site)
            for extent in coverage.extents[site]:
                segment = segments[extent.segment]
                sealed = segment is not None and segment.sealed
                block = block_name(extent.segment) if sealed else open_name(extent.segment)
                positions = extent.rows[:, 0]
                extents.append(manifests.Extent(block, extent.offset, len(positions), int(positions.min()),
                                                int(positions.max())))
            meaning = engine.get("meaning", {}).get(site) or site_named(site).meaning
            lens = next(iter(site_named(site).lens), None)
            known = codecs.identified(codec)
            sites.append(manifests.SiteInfo(
                site=site, width=width, decoded_width=known.decoded_width(width), codec=codec, family=known.family.name,
                parameters=known.parameters, decoded=known.family.decoded, formula=known.family.formula, dtype=dtype,
                streams=_declared(known, width, dtype), error_bound=known.family.error, meaning=meaning,
                transformer_lens=lens, extents=extents,
            ))
            rows += [
                manifests.SiteLayer(site, layer, codec, group.expected, len(group.rows.positions), group.missing,
                                    len(group.rejected.positions))
                for group in groups for layer in group.layers
            ]
        rows.sort(key=lambda entry: (list(coverage.sites).index(entry.site), entry.layer))
        return Manifest(
            id=capture.id, aliases=self._aliases(capture), status=capture.status,
            asked=json.loads(capture.asked) if capture.asked else {}, resolved=resolved, tags=capture.tags,
            created_ms=capture.created_ms, engine=engine, adapter=capture.adapter,
            prompt_len=capture.prompt_len, total_len=capture.total_len,
            end=coverage.end if capture.end is None else capture.end,
            prompt_token_ids=np.frombuffer(capture.prompt_tokens, "<u4").tolist(),
            output_token_ids=np.frombuffer(capture.output_tokens, "<u4").tolist(),
            finish_reason=capture.finish_reason, client_finish_reason=capture.client_reason,
            stop_reason=capture.stop_reason, cached=capture.cached, recomputed=capture.recomputed,
            sites=sites, rows=rows, hold=capture.hold,
        )


Verify = Callable[[list[int], npt.NDArray[np.int64], list[npt.NDArray[np.uint8]]], None]


def _live_of(frame: FrameAt, view: View, capture: str, layers: Sequence[int], first: int, verify: Verify
             ) -> LiveRows | None:
    """``live_rows`` of a frame that was read; ``verify`` is given what was copied of it: layers, rows, pieces."""
    header = view.frame
    wanted = [layer for layer in layers if layer in header.layers]
    if capture not in header.captures or not wanted:
        return None
    mine = view.table.capture == header.captures.index(capture)
    there = np.flatnonzero(mine & (view.table.flags & FLAG_ERASED == 0))
    row_bytes = 4 * len(wanted) * codecs.identified(header.codec).decoded_width(header.width)
    rows = there[first : first + max(1, limits.live_event_bytes_max // row_bytes)]
    if not len(rows):
        return None
    source = view.pieces([header.layers.index(layer) for layer in wanted], rows)
    copied = [view.section(number)[source] for number in range(len(view.declared))]
    verify(wanted, rows, copied)
    pieces = {stream.name: found.view(stream.dtype).reshape(len(wanted), len(rows), *stream.shape)
              for stream, found in zip(view.declared, copied, strict=True)}
    values = codecs.decode(header.codec, pieces, header.width, header.dtype)
    return LiveRows(frame.seq, frame.durable, first + len(rows) < len(there), wanted, view.table.position[rows],
                    view.table.token_id[rows], view.table.flags[rows], values)


def _declared(codec: codecs.Codec, width: int, dtype: str) -> list[dict[str, Any]]:
    """The streams as manifests show them; none where the codec does not fit the width, so that no row was stored."""
    try:
        streams = codec.streams(width, dtype) if width else ()
    except SpecError:
        return []
    return [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape), "view": s.view, "fill": s.fill} for s in streams]


def _no_capture(ref: str) -> NotFoundError:
    """The same words whether there is none, it is deleted or it is another's."""
    return NotFoundError(f"no capture {ref[:limits.alias_chars_max]!r}")


def _resolved(capture: Capture) -> Resolved:
    if capture.resolved is None:
        why = f"it failed: {capture.failed}" if capture.failed is not None else "no engine has started it yet"
        raise NotFoundError(f"capture {capture.id} has no rows: {why}")
    return msgspec.json.decode(capture.resolved, type=Resolved)


def _check_layers(capture: Capture, resolved: Resolved, site: str, layers: Sequence[int]) -> list[int]:
    if site not in resolved.layers:
        raise NotFoundError(f"capture {capture.id} has no site {site}; it has: {', '.join(resolved.layers) or 'none'}")
    if absent := sorted(set(layers) - set(resolved.layers[site])):
        raise NotFoundError(f"capture {capture.id} has no layer {absent} of {site}; it has: {resolved.layers[site]}")
    if not layers or len(set(layers)) != len(layers):
        raise NotFoundError(f"layers = {list(layers)}: name at least one layer, each once; "
                            f"captured: {resolved.layers[site]}")
    return list(layers)


Pick = tuple[list[int], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _common_rows(groups: list[LayerGroup], wanted: list[int], start: int, stop: int, rejected: bool
                 ) -> tuple[Array, list[Pick]]:
    """Positions that every wanted layer has, and for each group of layers where their rows lie.

    Of ``rejected`` drafts a position may have several: they are the same where they lie in the same row of a frame.
    """
    used = [(group, [i for i, layer in enumerate(wanted) if layer in group.layers]) for group in groups]
    used = [(group, members) for group, members in used if members]
    chosen = [group.rejected if rejected else group.rows for group, _ in used]
    keys = [rows.extent << 32 | rows.row if rejected else rows.positions for rows in chosen]
    common = keys[0]
    for more in keys[1:]:
        common = np.intersect1d(common, more, assume_unique=True)
    first = chosen[0][np.isin(keys[0], common)]
    inside = (first.positions >= start) & (first.positions < stop)
    picks = []
    for (_, members), rows, key in zip(used, chosen, keys, strict=True):
        here = rows[np.isin(key, common)][inside]
        picks.append((members, here.extent, here.row))
    return first.positions[inside], picks


def _missing_of(groups: list[LayerGroup], wanted: list[int], start: int, stop: int) -> list[Missing]:
    """Missing ranges of any wanted layer within ``[start, stop)``; where layers differ, the first's reason."""
    used = [group for group in groups if set(group.layers) & set(wanted)]
    if len(used) == 1:
        clipped = [Missing(max(m.start, start), min(m.stop, stop), m.reason) for m in used[0].missing]
        return [m for m in clipped if m.start < m.stop]
    found = [Missing(max(m.start, start), min(m.stop, stop), m.reason) for group in used for m in group.missing]
    found = [m for m in found if m.start < m.stop]
    edges = sorted({edge for m in found for edge in (m.start, m.stop)})
    at = {edge: index for index, edge in enumerate(edges)}
    reasons: list[str | None] = [None] * len(edges)  # from each edge to the next
    for m in found:
        for index in range(at[m.start], at[m.stop]):
            reasons[index] = reasons[index] or m.reason
    merged: list[Missing] = []
    for index, reason in enumerate(reasons):
        if reason is None:
            continue
        if merged and merged[-1].stop == edges[index] and merged[-1].reason == reason:
            merged[-1] = Missing(merged[-1].start, edges[index + 1], reason)
        else:
            merged.append(Missing(edges[index], edges[index + 1], reason))
    return merged

