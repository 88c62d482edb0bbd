"""Read a store from disk: captures, manifests and slices. Needs no server, and works while the writer is down.

>>> store = StoreReader("captures")                                              # doctest: +SKIP
>>> store.slice("01J...", "resid_post", [12], 0, 10).values().shape              # doctest: +SKIP
(1, 10, 4096)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, cast

import msgspec
import numpy as np

from schemas import limits, lookup
from schemas.catalog import Capture, Drop, Segment, capture_of, engine_json, find_capture, load_drops, load_segment
from schemas.catalog_view import CatalogView, Moment
from schemas.control import EngineInfo
from schemas.coverage import LayerGroup
from schemas.covered import Covered, Coverings
from schemas.errors import LimitError, NotFoundError, SpecError, StoreError
from schemas.ids import split_capture_id
from schemas.live_rows import LiveRows, live_of
from schemas.located import Located, UnsettledError, copy_rows, joined, locate
from schemas.manifest import Manifest
from schemas.manifest_of import aliases_of, manifest_of, shape_of
from schemas.mapping import SegmentMaps
from schemas.probes import Probe
from schemas.sieve import Sieve
from schemas.sites import parse_site
from schemas.slices import Kind, Part, Places, RowsAt, Slice, Which, check_layers, common_rows, missing_of
from schemas.spec import Resolved
from schemas.tail import FrameAt, JournalTail
from schemas.zarr_layout import redo_name

__all__ = ["CaptureRow", "LiveRows", "Places", "Progress", "RowsAt", "Slice", "StoreReader", "read_store_uuid"]

T = TypeVar("T")
settle_s_max: Final = 5.0  # a read waits at most so long for rows of others to be erased


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
        self._catalog = CatalogView(self.path)
        self._coverings = Coverings()

    def close(self) -> None:
        """Release files; slices taken before stay valid."""
        with self._catalog.lock:
            self._catalog.close()
            self._maps.close()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── what is there ───────────────────────────────────────────────────────────────────────────────────────────

    def capture(self, ref: str, owner: str | None = None) -> CaptureRow:
        """One capture's line."""
        with self._catalog.moment() as now:
            return _row(now, lookup.find(now.db, ref, owner))

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
        with self._catalog.moment() as now:
            if before is not None:
                # It may have been deleted since that page: its tombstone still says where to go on.
                last = find_capture(now.db, before)
                if last is None or owner not in (None, last.owner):
                    raise lookup.no_capture(before)
                where.append("(created_ms, id) < (?, ?)")
                args += [last.created_ms, last.id]
            condition = " AND ".join(where)
            query = f"SELECT * FROM captures WHERE {condition} ORDER BY created_ms DESC, id DESC"
            sifted, more = ("", []) if sieve is None else sieve.condition()
            scan = limits.captures_scan_max if sifted else limit
            listed = f"SELECT * FROM ({query} LIMIT {scan}) AS listed {sifted} LIMIT {limit}"
            rows = [_row(now, capture_of(row)) for row in now.db.execute(listed, [*args, *more])]
            if len(rows) == limit:
                return rows, rows[-1].id
            last_looked_at = now.db.execute(f"SELECT id FROM ({query} LIMIT 1 OFFSET {scan - 1})", args).fetchone()
            return rows, None if last_looked_at is None else last_looked_at["id"]

    def owner_bytes(self, owner: str) -> int:
        """Bytes of an owner's captures, rows and what is beside them, as the catalog knows them; 0 of who has none."""
        with self._catalog.moment() as now:
            found = now.db.execute("SELECT bytes FROM owners WHERE owner = ?", (owner,)).fetchone()
        return 0 if found is None else int(found["bytes"])

    def request_bytes(self, owner: str, ulids: Sequence[str]) -> dict[str, int]:
        """Of requests of an owner, by their ULIDs, how many of its bytes are their captures'."""
        query = """SELECT total(beside + (SELECT total(bytes) FROM extents WHERE capture = id)) AS bytes
                   FROM captures WHERE ulid = ? AND owner = ?"""
        with self._catalog.moment() as now:
            return {ulid: int(now.db.execute(query, (ulid, owner)).fetchone()["bytes"]) for ulid in ulids}

    def samples(self, ref: str, owner: str | None = None) -> list[str]:
        """The capture ids under a ULID or an alias, in the order of their numbers."""
        with self._catalog.moment() as now:
            return lookup.samples(now.db, ref, owner)

    def target(self, ref: str, owner: str | None = None) -> tuple[str, str]:
        """What a record calls ``ref``, be it one capture or all samples of a request, and the last of these.

        Without an ``owner`` NotFoundError where several owners have captures of that name: the newest may be another's
        than the one that is meant.
        """
        with self._catalog.moment() as now:
            if owner is None:
                lookup.of_one_owner(now.db, ref)
            samples = lookup.samples(now.db, ref, owner)
        if len(samples) == 1:
            return samples[0], samples[0]
        ulid, _ = split_capture_id(samples[0]) or ("", None)
        return ulid, samples[-1]

    def engine(self) -> EngineInfo | None:
        """The newest engine that the store knows: the one that came last, whatever the clock of its host says."""
        with self._catalog.moment() as now:
            row = now.db.execute("SELECT info FROM engines ORDER BY rowid DESC LIMIT 1").fetchone()
        return None if row is None else msgspec.json.decode(row["info"], type=EngineInfo)

    def probes(self, ref: str, owner: str | None = None) -> dict[str, Probe]:
        """The probes that the capture's own engine has registered; none while no engine has begun it."""
        with self._catalog.moment() as now:
            info = engine_json(now.db, lookup.find(now.db, ref, owner).stream)
        return msgspec.convert(info.get("armed", {}).get("probes", {}), dict[str, Probe])

    def drops(self, capture: str, site: str, after: int) -> list[Drop]:
        """What was dropped of a capture at a site, of numbers above ``after``, in order."""
        with self._catalog.moment() as now:
            return [drop for drop in load_drops(now.db, capture) if drop.site == site and drop.seq > after]

    def erasing(self) -> bool:
        """Whether something of deleted captures is still to be erased."""
        query = "SELECT EXISTS (SELECT 1 FROM doomed) OR EXISTS (SELECT 1 FROM scrub)"
        with self._catalog.moment() as now:
            return bool(now.db.execute(query).fetchone()[0])

    def manifest(self, ref: str, owner: str | None = None) -> Manifest:
        """The whole truth about one capture."""
        with self._catalog.moment() as now:
            return manifest_of(now.db, self._coverings.of(now, ref, owner))

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

    def rows_at(self, rows: Sequence[tuple[str, int]], site: str, layers: Sequence[int], owner: str | None = None
                ) -> RowsAt:
        """Any rows, each named by its capture and position, of some layers of a site.

        NotFoundError names the first that is not there; SpecError where not all are stored in one way. LimitError and
        CorruptError as ``slice``. Faster by far than a slice a row: rows of a segment are copied together.
        """
        site = parse_site(site, "site")[0]
        return self._settled(lambda: self._rows_at(rows, site, layers, owner))

    def _settled(self, read: Callable[[], T]) -> T:
        """What ``read`` gives, or its error once that is no passing one.

        The writer may erase rows, and move or remove segments, at any moment of a read. A read that met it begins
        anew: then it sees the store after it.
        """
        deadline, waits = time.monotonic() + settle_s_max, iter((0.002, 0.01, 0.05))
        while True:
            try:
                return read()
            except UnsettledError as error:
                erasing = (self.path / redo_name(error.segment)).exists()
                wait = 0.005 if erasing else next(waits, None)
                if wait is None:
                    raise error.cause from None
                if time.monotonic() > deadline:
                    raise StoreError("read slice", self.path, f"rows beside these in segment {error.segment} are being "
                                     "erased", "a writer that was killed in the middle of it ends it at its next start"
                                     ) from None
                self._forget(error.segment)
            time.sleep(wait)

    def _forget(self, segment: int) -> None:
        """Look at a segment anew: its rows are others, or elsewhere."""
        with self._catalog.lock:
            self._maps.forget(segment)
            self._coverings.forget(segment)

    def _slice(
        self, ref: str, site: str, layers: Sequence[int], start: int, stop: int | None, owner: str | None,
        rejected: bool,
    ) -> Slice:
        with self._catalog.moment() as now:
            covered = self._coverings.of(now, ref, owner, site)
            kind = _kind(now, covered, site, layers)
        groups, end = covered.coverage.sites[site], covered.coverage.end
        first = max(start, 0)
        if rejected:  # guesses reach past the end
            end = max((int(group.rejected.positions.max(initial=-1)) + 1 for group in groups), default=0)
        last = max(end if stop is None else min(stop, end), first)
        clipped = start < 0 or (stop is not None and stop > end)
        positions, picks = common_rows(groups, layers, first, last, rejected)
        kind.check_bytes(len(layers) * len(positions))
        parts = []
        for group, members, which in picks:
            located = self._located(covered, site, kind, group, which, rejected)
            copied = copy_rows(self._maps, covered.segments, located, kind.streams, [layers[i] for i in members])
            parts.append(Part(members, None, copied))
        missing = [] if rejected else missing_of(groups, layers, first, last)
        return Slice(covered.capture.id, site, list(layers), kind.codec, kind.dtype, kind.width, first, last,
                     positions.astype(np.uint32), located.token_ids, located.flags,
                     kind.assembled(len(layers), len(positions), parts), missing, clipped)

    def _rows_at(self, rows: Sequence[tuple[str, int]], site: str, layers: Sequence[int], owner: str | None) -> RowsAt:
        wanted: dict[str, list[int]] = {}  # by capture: which of the rows
        for number, (ref, _) in enumerate(rows):
            wanted.setdefault(ref, []).append(number)
        with self._catalog.moment() as now:
            found = {ref: self._coverings.of(now, ref, owner, site) for ref in wanted}
            kinds, checked = set[Kind](), set[str | None]()
            for covered in found.values():
                if covered.capture.resolved not in checked or covered.kind is None:  # most were asked for alike
                    checked.add(covered.capture.resolved)
                    _kind(now, covered, site, layers)
                kinds.add(cast(Kind, covered.kind))
        if len(kinds) != 1:
            ways = "; ".join(sorted(f"{kind.codec}, {kind.dtype}, {kind.width}" for kind in kinds)) or "none at all"
            raise SpecError("rows", len(rows), f"name rows that are stored in one way, not {ways}")
        kind, = kinds
        kind.check_bytes(len(layers) * len(rows))
        alike: dict[tuple[int, ...], list[tuple[Located, list[int]]]] = {}  # by which of the layers they have
        for ref, numbers in wanted.items():
            covered, asked = found[ref], np.asarray([rows[number][1] for number in numbers], np.int64)
            groups = covered.coverage.sites[site]
            there, picks = common_rows(groups, layers, 0, covered.coverage.end, False)
            at = np.searchsorted(there, asked)
            known = there.take(at, mode="clip") == asked if len(there) else at < 0
            if not known.all():
                raise _no_row(covered, site, layers, int(asked[~known][0]))
            for group, members, which in picks:
                chosen = at + which.start if isinstance(which, slice) else which[at]
                alike.setdefault(tuple(members), []).append(
                    (self._located(covered, site, kind, group, chosen, False), numbers))
        segments = {number: segment for covered in found.values() for number, segment in covered.segments.items()}
        token_ids, flags = np.empty((2, len(rows)), np.uint32)
        parts = []
        for together, places in alike.items():
            order = np.concatenate([numbers for _, numbers in places])
            located, at = joined([part for part, _ in places])[np.argsort(order)], np.sort(order)
            token_ids[at], flags[at] = located.token_ids, located.flags
            copied = copy_rows(self._maps, segments, located, kind.streams, [layers[i] for i in together])
            parts.append(Part(list(together), None if len(at) == len(rows) else at, copied))
        return RowsAt(site, list(layers), kind.codec, kind.dtype, kind.width, token_ids, flags,
                      kind.assembled(len(layers), len(rows), parts))

    def _located(self, covered: Covered, site: str, kind: Kind, group: LayerGroup, which: Which, rejected: bool
                 ) -> Located:
        """Where rows of a group of layers lie; of a capture that has ended that is found out once, for all of them."""
        rows, extents = group.rejected if rejected else group.rows, covered.coverage.extents[site]
        if (kept := covered.located.get(rows)) is None and covered.capture.finish_seq is not None:
            try:
                kept = covered.located[rows] = locate(self._maps, covered.segments, extents, rows, kind.streams)
            except UnsettledError:
                kept = None  # a frame is damaged, or being erased from: who asks for no row of it need not know
        if kept is not None:
            return kept[which]
        return locate(self._maps, covered.segments, extents, rows[which], kind.streams)

    def places(self, ref: str, site: str, layers: Sequence[int], owner: str | None = None) -> Places:
        """Where the rows of a capture lie; NotFoundError where it has no such site or layer."""
        site = parse_site(site, "site")[0]
        with self._catalog.moment() as now:
            covered = self._coverings.of(now, ref, owner, site)
            kind = _kind(now, covered, site, layers)
        positions, picks = common_rows(covered.coverage.sites[site], layers, 0, covered.coverage.end, False)
        extents = covered.coverage.extents[site]
        segments = np.asarray([extent.segment for extent in extents], np.int64)
        offsets = np.asarray([extent.offset for extent in extents], np.int64)
        segment, offset, row = np.zeros((3, len(layers), len(positions)), np.int64)
        if len(positions):
            for group, members, which in picks:
                rows = group.rows[which]
                segment[members], offset[members], row[members] = segments[rows.extent], offsets[rows.extent], rows.row
        return Places(covered.capture.id, kind.codec, kind.dtype, kind.width, positions.astype(np.uint32), segment,
                      offset, row)

    def segment(self, number: int) -> Segment:
        """A segment as the catalog has it now."""
        with self._catalog.moment() as now:
            found = load_segment(now.db, number)
        if found is None:
            raise StoreError("read segment", self.path, f"segment {number} is not in the catalog",
                             "start the writer once: it repairs the catalog")
        return found

    # ── while it is made ────────────────────────────────────────────────────────────────────────────────────────

    def progress(self, ref: str, owner: str | None = None) -> Progress:
        """How far one capture is."""
        with self._catalog.moment() as now:
            covered = self._coverings.of(now, ref, owner)
        capture, coverage = covered.capture, covered.coverage
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
        return self._catalog.version()

    def frames(self, capture: str, site: str, after: int) -> list[FrameAt]:
        """The frames with rows of a capture at a site whose number is above ``after``, in order.

        Those of them that are durable, and what ``appended`` has found beyond.
        """
        with self._catalog.moment() as now:
            query = "SELECT seq, segment, offset FROM extents WHERE capture = ? AND site = ? AND seq > ?"
            rows = now.db.execute(query, (capture, site, after)).fetchall()
            segments = {number: load_segment(now.db, number) for number in {row["segment"] for row in rows}}
        found = {row["seq"]: FrameAt(row["seq"], segment, row["offset"], True) for row in rows
                 if (segment := segments[row["segment"]]) is not None}
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
            return live_of(frame, self._tail.read(frame), capture, layers, first, lambda *_: None)
        try:
            view = self._maps.frame(frame.segment, frame.offset, verify=False)
            return live_of(frame, view, capture, layers, first, partial(self._maps.verify, frame.segment, view))
        except StoreError as error:
            raise UnsettledError(frame.segment.number, error) from None

    def _durable_end(self, segment: int) -> int:
        """The offset up to which the catalog has the frames of a segment."""
        query = "SELECT MAX(offset + bytes) FROM frames WHERE segment = ?"
        with self._catalog.moment() as now:
            return int(now.db.execute(query, (segment,)).fetchone()[0] or 0)


def _row(now: Moment, capture: Capture) -> CaptureRow:
    sites = list(_resolved(capture).layers) if capture.resolved is not None else []
    return CaptureRow(capture.id, capture.owner, capture.status, capture.created_ms, capture.tags,
                      aliases_of(now.db, capture), sites, capture.prompt_len, capture.total_len,
                      capture.client_reason or capture.finish_reason, capture.hold)


def _resolved(capture: Capture) -> Resolved:
    if capture.resolved is None:
        why = f"it failed: {capture.failed}" if capture.failed is not None else "no engine has started it yet"
        raise NotFoundError(f"capture {capture.id} has no rows: {why}")
    return msgspec.json.decode(capture.resolved, type=Resolved)


def _kind(now: Moment, covered: Covered, site: str, layers: Sequence[int]) -> Kind:
    """How a capture's rows at a site are stored; NotFoundError where it has no such site or layers."""
    resolved = covered.resolved or _resolved(covered.capture)
    check_layers(covered.capture.id, resolved, site, layers)
    if covered.kind is None:
        covered.kind = Kind(resolved.codec[site], *shape_of(now.db, covered, site))
    return covered.kind


def _no_row(covered: Covered, site: str, layers: Sequence[int], position: int) -> NotFoundError:
    gaps = missing_of(covered.coverage.sites[site], layers, position, position + 1)
    why = gaps[0].reason if gaps else f"its positions end at {covered.coverage.end}, or it was not asked for"
    return NotFoundError(f"capture {covered.capture.id} has no row of {site} at position {position}: {why}")
