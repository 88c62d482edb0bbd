"""Captures of a store, out of its catalog: by any of their names, in lists, and as manifests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from schemas import limits
from schemas.catalog import aliases
from schemas.catalog.filters import CaptureFilter
from schemas.catalog.records import Capture, Drop, capture_of, engine_json, find_capture, load_drops
from schemas.catalog.view import CatalogView, View
from schemas.codecs import identified
from schemas.errors import LimitError, NotFoundError, StoreError
from schemas.ids import split_capture_id
from schemas.manifest import Manifest
from schemas.probes import Probe
from schemas.read.coverage_cache import CoverageCache, CoveredCapture
from schemas.read.manifests import aliases_by_ulid, aliases_of, manifest_of, shape_of
from schemas.sites import names_of
from schemas.spec import Resolved
from schemas.store.paths import NOT_A_FOLDER, url_of
from schemas.wire.engine_info import EngineInfo
from schemas.wire.layout import siblings

__all__ = ["CaptureRow", "CatalogReader", "Division", "ListPlace", "NamedCapture", "Progress", "progress_of",
           "read_store_uuid"]

ListPlace = tuple[int, str]  # of a capture in lists: when it was made, in milliseconds since 1970, and its id


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
    adapter: str = ""  # the LoRA adapter that the model ran with
    writer: int | None = None  # the number of this store's writer, where others have more of it


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a capture; rows are counted over all sites and layers, and are durable."""

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
    if (url := url_of(path)) is not None:
        raise StoreError("open store", url, NOT_A_FOLDER)
    try:
        document = json.loads(file.read_text())
        version, uuid = document["version"], bytes.fromhex(document["uuid"].replace("-", ""))
    except FileNotFoundError:
        what = "no store.json in it" if path.is_dir() else "no such folder"
        raise StoreError("open store", path, what, "name the folder given to the writer") from None
    except OSError as error:
        raise StoreError("open store", path, error.strerror, "name the folder given to the writer") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError("open store", file, f"malformed: {error!r}") from None
    if version not in range(1, limits.STORE_VERSION + 1) or len(uuid) != 16:
        raise StoreError("open store", file, f"version {version}, this program knows 1 to {limits.STORE_VERSION}")
    return uuid


class NamedCapture(NamedTuple):
    """A capture that a name stands for."""

    created_ms: int
    id: str
    owner: str
    deleted: bool


class Division(NamedTuple):
    """The part of a request's captures that one of several writers has: the ``places`` (site, layer) that were asked
    for and are sent to it, ``is_partial`` where others get more. ``request``: what was asked, the same in every store.
    """

    writer: int
    owner: str
    request: tuple[str | None, bytes]
    places: frozenset[tuple[str, int]]
    is_partial: bool


class CatalogReader:
    """A store's catalog opened read-only; safe to use from several threads.

    A ``ref`` is a capture id, or an alias (a response id, an X-Request-Id). ``owner`` restricts to one owner's
    captures, None means any. NotFoundError is raised for what is not there, is deleted or belongs to others.
    """

    def __init__(self, path: str | Path, *, uuid: bytes | None = None, catalog: View | None = None) -> None:
        self.path = Path(path)
        self.uuid = read_store_uuid(self.path) if uuid is None else uuid
        self._catalog: View = catalog or CatalogView(self.path / "catalog.sqlite")
        self._scanning: View | None = None
        self._coverage_cache = CoverageCache()

    def close(self) -> None:
        """Release files."""
        with self._catalog.lock:
            self._catalog.close()
            if self._scanning is not None:
                self._scanning.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def capture(self, ref: str, owner: str | None = None) -> CaptureRow:
        """One capture's line."""
        with self._catalog.moment() as now:
            capture = aliases.find(now.db, ref, owner)
            return _row(capture, aliases_of(now.db, capture))

    def is_deleted(self, capture_id: str) -> bool:
        """Whether there was such a capture and somebody deleted it."""
        with self._catalog.moment() as now:
            found = find_capture(now.db, capture_id)
        return found is not None and found.deleted

    def captures(
        self, owner: str | None = None, status: str | None = None, limit: int = 100, before: str | None = None
    ) -> list[CaptureRow]:
        """Newest first; ``before`` is the id that the previous page ended with. Deleted ones only where asked for."""
        return self.page(owner, status, limit, before)[0]

    def page(
        self, owner: str | None = None, status: str | None = None, limit: int = 100, before: str | None = None,
        wanted: CaptureFilter | None = None,
    ) -> tuple[list[CaptureRow], str | None]:
        """A page of ``captures`` that are ``wanted``, and the ``before`` of the next one; None where this is the last.

        At most ``limits.captures_scan_max`` are looked at: a page may hold few, or none, and yet not be the last.
        """
        below = None
        if before is not None and (below := self.moment_of(before, owner)) is None:
            raise aliases.no_capture(before)
        rows, seen = self.page_below(below, owner, status, limit, wanted)
        return rows, None if seen is None else seen[1]

    def moment_of(self, capture_id: str, owner: str | None = None) -> ListPlace | None:
        """When a capture was made, and its id: by these it stands in lists. None where there is none.

        It may have been deleted since that page: its tombstone still says where to go on.
        """
        with self._catalog.moment() as now:
            last = find_capture(now.db, capture_id)
        return None if last is None or owner not in (None, last.owner) else (last.created_ms, last.id)

    def page_below(
        self, below: ListPlace | None, owner: str | None = None, status: str | None = None, limit: int = 100,
        wanted: CaptureFilter | None = None, scan_max: int | None = None,
    ) -> tuple[list[CaptureRow], ListPlace | None]:
        """``page`` of what is older than ``below``, and how far it was looked, to the last included; None: to the end.
        ``scan_max`` in the place of ``limits.captures_scan_max``.
        """
        if not 0 < limit <= limits.captures_page_max:
            raise LimitError("captures in a page", limit, limits.captures_page_max)
        where: list[str] = ["deleted = 0" if status != "deleted" else "1 = 1"]
        args: list[str | int] = []
        if owner is not None:
            where.append("owner = ?")
            args.append(owner)
        if status is not None:
            where.append("status = ?")
            args.append("complete" if status == "empty" else status)
        if below is not None:
            where.append("(created_ms, id) < (?, ?)")
            args += below
        condition, more = ("", []) if wanted is None else wanted.condition()
        view = self._apart() if condition else self._catalog
        with view.moment() as now:
            query = f"SELECT * FROM captures WHERE {' AND '.join(where)} ORDER BY created_ms DESC, id DESC"
            scan = (scan_max or limits.captures_scan_max) if condition or status in ("complete", "empty") else limit
            asked = f"SELECT * FROM ({query} LIMIT {scan}) AS listed {condition}"
            given = [*args, *more]
            listed = view.scan(now, asked, given) if scan > limit else now.db.execute(asked, given)
            found = (capture for capture in map(capture_of, listed) if status in (None, capture.status))
            taken = list(islice(found, limit))
            listed.close()
            named = aliases_by_ulid(now.db, {capture.ulid for capture in taken})
            rows = [_row(capture, named.get(capture.ulid, [])) for capture in taken]
            if len(rows) == limit:
                return rows, (rows[-1].created_ms, rows[-1].id)
            edge = f"SELECT created_ms, id FROM ({query} LIMIT 1 OFFSET {scan - 1}) AS last"
            last = now.db.execute(edge, args).fetchone()
            return rows, None if last is None else (last["created_ms"], last["id"])

    def living(self, ulids: Iterable[str], owner: str | None = None) -> set[str]:
        """The ULIDs among these of captures that are not deleted."""
        theirs, args = ("", []) if owner is None else ("AND owner = ?", [owner])
        query = f"""SELECT DISTINCT ulid FROM captures WHERE ulid IN (SELECT key FROM json_each(?)) AND deleted = 0
                    {theirs}"""
        with self._catalog.moment() as now:
            return {str(row["ulid"]) for row in now.db.execute(query, (json.dumps(dict.fromkeys(ulids)), *args))}

    def division(self, ulid: str) -> Division | None:
        """The layers that this store has of a request's captures; None where no other store can have any of them."""
        query = "SELECT * FROM captures WHERE ulid = ? AND deleted = 0 AND resolved IS NOT NULL ORDER BY sample LIMIT 1"
        with self._catalog.moment() as now:
            row = now.db.execute(query, (ulid,)).fetchone()
        if row is None or not ((resolved := resolved_of(capture := capture_of(row))).elsewhere or resolved.writer):
            return None
        return Division(resolved.writer, capture.owner, (capture.asked, capture.prompt_tokens),
                        frozenset(resolved.here), bool(resolved.elsewhere))

    def divides(self) -> bool:
        """Whether any engine sent some layers here and others to other writers."""
        query = "SELECT EXISTS (SELECT 1 FROM engines WHERE json_extract(info, '$.divided') IS NOT NULL)"
        with self._catalog.moment() as now:
            return bool(now.db.execute(query).fetchone()[0])

    def newest_named(self, alias: str, owner: str | None = None) -> NamedCapture | None:
        """The newest capture that was given a name beside its id, deleted or not; None where there is none."""
        with self._catalog.moment() as now:
            found = aliases.newest(now.db, alias, owner)
        return None if found is None else NamedCapture(found.created_ms, found.id, found.owner, found.deleted)

    def _apart(self) -> View:
        """The catalog for what looks at thousands of captures: everybody else reads on meanwhile."""
        with self._catalog.moment():  # refused where this reader was closed
            if self._scanning is None:
                self._scanning = self._catalog.another()
            return self._scanning

    def owner_bytes(self, owner: str) -> int:
        """Bytes of an owner's captures, rows and what is beside them, as the catalog knows them; 0 of who has none."""
        with self._catalog.moment() as now:
            found = now.db.execute("SELECT bytes FROM owners WHERE owner = ?", (owner,)).fetchone()
        return 0 if found is None else int(found["bytes"])

    def request_bytes(self, owner: str, ulids: Sequence[str]) -> dict[str, int]:
        """Bytes of the captures of an owner's requests, by the requests' ULIDs."""
        query = """SELECT coalesce(sum(beside + (SELECT coalesce(sum(bytes), 0) FROM extents WHERE capture = id)), 0)
                   AS bytes FROM captures WHERE ulid = ? AND owner = ?"""
        with self._catalog.moment() as now:
            return {ulid: int(now.db.execute(query, (ulid, owner)).fetchone()["bytes"]) for ulid in ulids}

    def samples(self, ref: str, owner: str | None = None) -> list[str]:
        """The capture ids under a ULID or an alias, in the order of their numbers."""
        with self._catalog.moment() as now:
            return aliases.samples(now.db, ref, owner)

    def target(self, ref: str, owner: str | None = None) -> tuple[str, str]:
        """The name by which a record means ``ref``, one capture or all samples of a request, and the last of these.

        Without an ``owner`` NotFoundError where several owners have captures of that name: the newest may be another's
        than the one that is meant.
        """
        with self._catalog.moment() as now:
            if owner is None:
                aliases.of_one_owner(now.db, ref)
            samples = aliases.samples(now.db, ref, owner)
        if len(samples) == 1:
            return samples[0], samples[0]
        ulid, _ = split_capture_id(samples[0]) or ("", None)
        return ulid, samples[-1]

    def engine(self, name: str = "") -> EngineInfo | None:
        """The newest engine that the store knows: the one that came last, whatever the clock of its host says.

        With a ``name`` the newest of that name, None where none with it ever came.
        """
        found = self.engine_since(name)
        return None if found is None else found[1]

    def engine_since(self, name: str = "") -> tuple[int, EngineInfo] | None:
        """The engine of that name, and when it began, in milliseconds since 1970 by the clock of its host."""
        query = "SELECT epoch, info FROM engines {} ORDER BY rowid DESC LIMIT 1"
        with self._catalog.moment() as now:
            if name:
                named = query.format("WHERE json_extract(info, '$.name') = ?")
                row = now.db.execute(named, (name,)).fetchone()
            else:
                row = now.db.execute(query.format("")).fetchone()
        return None if row is None else (row["epoch"], msgspec.json.decode(row["info"], type=EngineInfo))

    def lost_ranks(self, group: str) -> list[int]:
        """The ranks of an engine (``EngineInfo.called``) whose senders are gone while others go on; none of "".

        Of data-parallel engines those of each: a request may go to any of them.
        """
        return sorted({rank for ranks in self.lost_of_server(group).values() for rank in ranks})

    def lost_of_server(self, group: str) -> dict[str, list[int]]:
        """Such ranks by the engine that they are of, as one calls it: "the engine", or "data-parallel engine 1"."""
        server, found = siblings(group), dict[str, list[int]]()
        lost = """SELECT "group", rank FROM lost_ranks WHERE "group" >= ? AND "group" < ? ORDER BY "group", rank"""
        newest = f"""SELECT DISTINCT coalesce(nullif("group", ''), json_extract(info, '$.instance'), '') AS name
                     FROM (SELECT * FROM engines ORDER BY rowid DESC LIMIT {limits.parts_max}) AS newest"""
        with self._catalog.moment() as now:
            rows = [row for row in now.db.execute(lost, (server, server + "\U0010ffff")) if group]
            alike = {row["name"] for row in now.db.execute(newest) if siblings(row["name"]) == server} if rows else {}
        alone = len(alike) < 2
        for row in rows:
            if siblings(row["group"]) == server:
                name = "the engine" if alone else f"data-parallel engine {row['group'].removeprefix(server)}"
                found.setdefault(name, []).append(int(row["rank"]))
        return found

    def engine_name(self, ref: str, owner: str | None = None) -> str | None:
        """The name that the engine of a capture gave itself, "" for none; None while no engine has begun it."""
        info = self._info(ref, owner)
        return info.get("name", "") if info else None

    def probes(self, ref: str, owner: str | None = None) -> dict[str, Probe]:
        """The probes that the capture's own engine has registered; none while no engine has begun it."""
        return msgspec.convert(self._info(ref, owner).get("armed", {}).get("probes", {}), dict[str, Probe])

    def names(self, ref: str, owner: str | None = None) -> dict[str, str]:
        """``Armed.names`` of the model that a capture is of; none while no engine has begun it."""
        return names_of(self._info(ref, owner))

    def _info(self, ref: str, owner: str | None) -> dict[str, Any]:
        with self._catalog.moment() as now:
            return engine_json(now.db, aliases.find(now.db, ref, owner).stream)

    def drops(self, capture: str, site: str, after: int) -> list[Drop]:
        """Drops of a capture at a site with numbers above ``after``, in order."""
        with self._catalog.moment() as now:
            found = [drop for drop in load_drops(now.db, capture) if drop.site == site and drop.seq > after]
        return sorted(found, key=lambda drop: drop.seq)

    def erasing(self) -> bool:
        """Whether something of deleted captures is still to be erased."""
        query = "SELECT EXISTS (SELECT 1 FROM doomed) OR EXISTS (SELECT 1 FROM scrub)"
        with self._catalog.moment() as now:
            return bool(now.db.execute(query).fetchone()[0])

    def manifest(self, ref: str, owner: str | None = None) -> Manifest:
        """The whole truth about one capture."""
        with self._catalog.moment() as now:
            return manifest_of(now.db, self._coverage_cache.of(now, ref, owner))

    def sole(self, ref: str, owner: str | None = None) -> Manifest | list[str]:
        """The manifest of the one capture that a name stands for; the ids of all where a request made several."""
        with self._catalog.moment() as now:
            samples = aliases.samples(now.db, ref, owner)
            return samples if len(samples) > 1 else manifest_of(now.db, self._coverage_cache.of(now, samples[0], owner))

    def progress(self, ref: str, owner: str | None = None) -> Progress:
        """Progress of one capture."""
        with self._catalog.moment() as now:
            covered = self._coverage_cache.of(now, ref, owner)
        return progress_of(covered)

    def covered(self, ref: str, owner: str | None = None) -> tuple[CoveredCapture, dict[str, int]]:
        """The rows of one capture at all its sites, and by site how many numbers a row is decoded to."""
        with self._catalog.moment() as now:
            covered = self._coverage_cache.of(now, ref, owner)
            codecs = {} if covered.resolved is None else covered.resolved.codec
            widths = {site: identified(codecs[site]).decoded_width(shape_of(now.db, covered, site)[1])
                      for site in covered.coverage.sites}
        return covered, widths

    def version(self) -> int:
        """A number that changes with the catalog."""
        with self._catalog.moment() as now:
            return now.version


def progress_of(covered: CoveredCapture) -> Progress:
    """The progress of a capture whose coverage is known at all its sites."""
    capture, coverage = covered.capture, covered.coverage
    groups = [group for groups in coverage.sites.values() for group in groups]
    expected = sum(group.expected * len(group.layers) for group in groups)
    captured = sum(len(group.rows.positions) * len(group.layers) for group in groups)
    return Progress(capture.id, capture.status, expected, captured, expected - captured, capture.prompt_len,
                    max(capture.total_len, coverage.end), capture.ended)


def _row(capture: Capture, names: list[str]) -> CaptureRow:
    resolved = None if capture.resolved is None else resolved_of(capture)
    writer = None if resolved is None or not (resolved.elsewhere or resolved.writer) else resolved.writer
    return CaptureRow(capture.id, capture.owner, capture.status, capture.created_ms, capture.tags,
                      names, [] if resolved is None else list(resolved.layers), capture.prompt_len, capture.total_len,
                      capture.ended, capture.hold, capture.adapter, writer)


def resolved_of(capture: Capture) -> Resolved:
    if capture.resolved is None:
        why = f"it failed: {capture.failed}" if capture.failed is not None else "no engine has started it yet"
        raise NotFoundError(f"capture {capture.id} has no rows: {why}")
    return msgspec.json.decode(capture.resolved, type=Resolved)
