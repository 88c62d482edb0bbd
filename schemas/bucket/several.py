"""Several stores read as one, each with a writer of its own.

A capture is in one store, which is looked for by its id at every read; one of an engine whose ranks sent to several
writers is divided among their stores (divided.py). What is numbered in each store anew (segments,
versions of a catalog, feeds) never leaves the store's own reader; lists are put together by time and id.
"""

from __future__ import annotations

import copy
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, Generic, Self, TypeVar

from schemas import limits
from schemas.bucket.divided import DividedReader
from schemas.bucket.joined_rows import join_rows
from schemas.bucket.places import (
    Place,
    check_places,
    every_store,
    folders_below,
    holds_stores,
    lost_its_head,
    prefix_of,
)
from schemas.bucket.unfollowed import Unfollowed
from schemas.catalog.aliases import no_capture
from schemas.catalog.filters import CaptureFilter
from schemas.catalog.records import Drop
from schemas.errors import BucketError, ConflictError, LimitError, NoHeadError, NotFoundError, TapError
from schemas.ids import split_capture_id
from schemas.manifest import Manifest
from schemas.probes import Probe
from schemas.read.captures import CaptureRow, ListPlace, NamedCapture, Progress
from schemas.read.coverage_cache import CoveredCapture
from schemas.read.row_reader import RowReader
from schemas.read.slices import RowsAt, Slice
from schemas.wire.engine_info import EngineInfo

__all__ = ["SeveralReader"]

R = TypeVar("R", bound=RowReader)
_AT_ONCE: Final = 16  # stores that are opened, or looked at
_ROWS_MIN: Final = 16  # lines that a list takes from a store at a time


class SeveralReader(Unfollowed, Generic[R]):
    """Stores at ``places``, read as one store with the functions of a RowReader; safe for threads.

    ``look`` opens them; ``open_one`` is told how many there are. What needs a store that could not be opened raises why
    it could not. ConflictError where two stores have one capture, or are one store.
    """

    def __init__(self, places: Sequence[Place], open_one: Callable[[str, int], R], answer_s: float | None = None
                 ) -> None:
        check_places(places)
        self._places, self._open_one, self._answer_s = [*map(str, places)], open_one, answer_s
        self._stores: dict[str, R] = {}
        self.failed: Mapping[str, TapError] = {}  # by place, why the last look at it failed
        self._listed = set[str]()  # places below which stores were found once
        self._looking = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stores(self) -> Mapping[str, R]:
        """The stores that are open, by where they lie."""
        return self._stores

    @property
    def alone(self) -> R | None:
        """The one store that was named; None where several were, or all below a prefix."""
        return self._stores.get(self._places[0]) if len(self._places) == 1 else None

    @property
    def url(self) -> str:
        """The places, as they were named."""
        return ", ".join(self._places)

    @property
    def path(self) -> Path:
        """The same, as errors name what is read."""
        return Path(self.url)

    @property
    def requests(self) -> int:
        """Requests to buckets so far."""
        return sum(getattr(reader, "requests", 0) for reader in self._stores.values())

    @property
    def pushes(self) -> tuple[str, ...]:
        """The pushes whose heads are read."""
        return tuple(push for reader in self._stores.values() for push in reader.pushes)

    def close(self) -> None:
        """Release files and connections; slices taken before stay valid."""
        for reader in self._stores.values():
            reader.close()

    def tidy(self) -> None:
        """Same as for each store."""
        for reader in self._stores.values():
            reader.tidy()

    # ── which stores there are ──────────────────────────────────────────────────────────────────────────────────

    def look(self) -> bool:
        """Open stores that were not open yet, and see what was pushed to the others; whether anything is new.

        ``failed`` says what could not be read. A store that was open stays so, as it was.
        """
        with self._looking:
            failed: dict[str, TapError] = {}
            new = self._look_at_all(failed)
            if self._find_prefixes(failed):
                new |= self._look_at_all(failed)
            for place in self._places:
                if (prefix := prefix_of(place)) is not None and not failed and not self._any_below(prefix):
                    failed[place] = NoHeadError("open stores", place, "no store is one level below it",
                                                "vllm-tap push STORE URL/NAME brings one there")
            self.failed = failed
            return new

    def refresh(self) -> bool:
        """See what was pushed since, to stores that are new too; whether there was any. What could not be read is
        raised, once all stores were looked at.
        """
        new = self.look()
        for error in self.failed.values():
            raise error
        return new

    def _look_at_all(self, failed: dict[str, TapError]) -> bool:
        named = self._named(failed)

        def look_at(name: str) -> R | bool | TapError:
            try:
                return self._look_at(name, named[name], len(named))
            except (TapError, OSError, sqlite3.Error) as error:
                return error if isinstance(error, TapError) else TapError(f"{name}: {error}")

        new = False
        with ThreadPoolExecutor(_AT_ONCE, "vllm-tap-stores") as pool:
            for name, found in zip(named, pool.map(look_at, named), strict=True):
                if isinstance(found, TapError):
                    failed[name] = found
                else:
                    new |= found if isinstance(found, bool) else self._add(name, found, failed)
        return new

    def _named(self, failed: dict[str, TapError]) -> dict[str, bool]:
        """The places of stores; True for places that may be stores."""
        named: dict[str, bool] = {}
        for place in self._places:
            if (prefix := prefix_of(place)) is None:
                named[place] = False  # it has to be there, also where it is listed too
                continue
            try:
                for folder in folders_below(prefix, self._answer_s):
                    named.setdefault(folder, True)
                self._listed.add(place)
            except TapError as error:
                failed[place] = error
        named |= dict.fromkeys(self._stores, False)  # also one that is not listed any more
        if len(named) > limits.stores_max:
            failed[self.url] = LimitError("stores that are read as one", len(named), limits.stores_max)
            named = dict.fromkeys(self._stores, False)
        return named

    def _look_at(self, name: str, may_lie: bool, count: int) -> R | bool:
        """The store that was opened; of one that was open, whether it is new. False where nothing has to be there."""
        if (known := self._stores.get(name)) is not None:
            return known.refresh()
        try:
            return self._open_one(name, count)
        except NoHeadError:
            if not may_lie:
                raise
            if lost_its_head(name, self._answer_s):
                raise NoHeadError("open store", name, "it has catalogs of a store, and no head.json", "its first push "
                                  "is ending, or its head was removed: push that store again") from None
            return False

    def _find_prefixes(self, failed: dict[str, TapError]) -> bool:
        """Name all stores below those places that have no store, and below which there are some; whether any has."""
        found = False
        for number, place in enumerate(self._places):
            if isinstance(failed.get(place), NoHeadError) and prefix_of(place) is None and holds_stores(
                    place, self._answer_s):
                self._places[number] = every_store(place)
                del failed[place]
                found = True
        return found

    def _any_below(self, prefix: str) -> bool:
        return any(name.rpartition("/")[0] == prefix for name in self._stores)

    def _add(self, name: str, reader: R, failed: dict[str, TapError]) -> bool:
        twin = next((other for other, each in self._stores.items() if each.uuid == reader.uuid), None)
        if twin is not None:
            reader.close()
            failed[name] = ConflictError(f"{name} and {twin} are one store, {reader.uuid.hex()}, or copies of it: name "
                                         "one of them")
            return False
        self._stores = {**self._stores, name: reader}
        return True

    def beside(self, place: str, reader: R) -> Self:
        """These stores and another one, which stays its owner's to close, for what is read now. Where one of these is
        the same store, or a copy of it, the other one is read. Places where nothing was pushed yet have no captures.
        """
        made = copy.copy(self)
        made._places = [place, *self._places]
        made._stores = {place: reader, **{name: each for name, each in self._stores.items()
                                          if each.uuid != reader.uuid}}
        made.failed = {at: error for at, error in self.failed.items()
                       if not (isinstance(error, NoHeadError) and at in self._places)}
        return made

    # ── which of them has a capture ─────────────────────────────────────────────────────────────────────────────

    def home(self, ref: str, owner: str | None = None) -> R | DividedReader:
        """The store that has the capture, or the newest capture, of that name; all that have some of its layers."""
        names = self._homes([ref], owner)[ref]
        return self._reader_of(names)

    def places_of(self, ref: str, owner: str | None = None) -> list[str]:
        """The places of the stores that have it: one, unless the capture is divided."""
        return list(self._homes([ref], owner)[ref])

    def _homes(self, refs: Iterable[str], owner: str | None) -> dict[str, tuple[str, ...]]:
        """The stores that have each capture, by name; NotFoundError of the first that none has."""
        ulids = {ref: _ulid(ref) or _ulid(self._newest(ref, owner).id) for ref in refs}
        has = self._which(set(ulids.values()), owner)
        for ref, ulid in ulids.items():
            if ulid not in has:
                self._check_all_are_open()
                raise no_capture(ref)
        homes = {ulid: self._together(ulid, has[ulid]) for ulid in set(ulids.values())}
        return {ref: homes[ulid] for ref, ulid in ulids.items()}

    def _reader_of(self, names: tuple[str, ...]) -> R | DividedReader:
        return self._stores[names[0]] if len(names) == 1 else DividedReader([self._stores[name] for name in names])

    def _together(self, ulid: str, names: Sequence[str]) -> tuple[str, ...]:
        """The stores of a request's captures, of which an owner may read what ``names`` have: one, or those that it is
        divided among, in the order of their writers. ConflictError where it is in several otherwise.
        """
        first = self._stores[names[0]].division(ulid)
        if first is None:
            _check_one(ulid, names)
            return names[0],
        found = {name: each for name in self._which({ulid}, None).get(ulid, names)
                 if ((each := self._stores[name].division(ulid)) is not None and not each.owner) or name in names}
        parts = [each for each in found.values() if each is not None]  # an engine's other writers hear of no owner
        places = [place for part in parts for place in part.places]
        if len(parts) < len(found) or len(set(places)) < len(places) or len({part.request for part in parts}) > 1:
            _check_one(ulid, list(found))
        return tuple(sorted(found, key=lambda name: found[name].writer))  # type: ignore[union-attr]

    def _newest(self, alias: str, owner: str | None) -> NamedCapture:
        """The newest capture that any store knows by a name; NotFoundError where that is deleted, as in one store."""
        found = [named for reader in self._every() if (named := reader.newest_named(alias, owner)) is not None]
        newest = max(found, default=None)
        if newest is None or newest.deleted:
            raise no_capture(alias)
        return newest

    def _every(self) -> list[R]:
        """All stores, for what needs all of them."""
        self._check_all_are_open()
        return list(self._stores.values())

    def _check_all_are_open(self) -> None:
        for place, error in self.failed.items():
            is_away = isinstance(error, BucketError) and error.passing and place in self._listed  # it stays as it was
            if place not in self._stores and not is_away:
                told = copy.copy(error)  # one that is raised again and again would grow
                if isinstance(told, BucketError):
                    told.passing = True  # it is tried again at the next look
                raise told

    # ── captures ────────────────────────────────────────────────────────────────────────────────────────────────

    def captures(self, owner: str | None = None, status: str | None = None, limit: int = 100,
                 before: str | None = None) -> list[CaptureRow]:
        """Same as for one store."""
        return self.page(owner, status, limit, before)[0]

    def page(self, owner: str | None = None, status: str | None = None, limit: int = 100, before: str | None = None,
             wanted: CaptureFilter | None = None) -> tuple[list[CaptureRow], str | None]:
        """Same as for one store: newest first over all of them. A page by status may hold few where captures are
        divided, whose status no store knows alone.
        """
        if not 0 < limit <= limits.captures_page_max:
            raise LimitError("captures in a page", limit, limits.captures_page_max)
        stores = self._every()
        below = None if before is None else self._line_of(before, owner)[1]
        step = min(limit, max(_ROWS_MIN, 2 * limit // len(stores))) if stores else limit
        scan_max = max(step, limits.captures_scan_max // max(1, len(stores)))
        lists = [_List(reader, below, partial(self._follows, name, owner=owner))
                 for name, reader in self._stores.items()]
        alone = None if status != "deleted" and any(reader.divides() for reader in stores) else status
        while True:
            for each in lists:
                each.read_on(owner, alone, step, wanted, scan_max)
            seen = max((each.seen for each in lists if each.seen is not None), default=None)  # by all of them
            rows = sorted((row for each in lists for row in each.rows if seen is None or _place(row) >= seen),
                          key=_place, reverse=True)
            following = rows[limit - 1].id if len(rows) >= limit else None if seen is None else seen[1]
            if following is not None and len(rows) < limit and self._line_of(following, owner)[1] != seen:
                following = rows[-1].id if rows else ""  # a divided capture, listed where its first store has it
            last = seen is None or any(each.is_cut and each.seen == seen for each in lists)
            if len(rows) >= limit or (last and following != ""):
                break
            for each in lists:
                each.is_due = each.seen == seen
        return [row for row in self._once(rows[:limit], owner) if status in (None, row.status)], following

    def _line_of(self, capture_id: str, owner: str | None) -> tuple[str, ListPlace]:
        """The store whose line of a capture is the one in lists, and its place there. Of a divided one that is the
        first writer's. NotFoundError where none has it; it may be deleted.
        """
        ulid, found = _ulid(capture_id), list[tuple[int, ListPlace, str]]()
        for name, reader in self._stores.items():
            if (place := reader.moment_of(capture_id, owner)) is not None:
                division = reader.division(ulid)
                found.append((0 if division is None else -division.writer, place, name))
        if not found:
            raise no_capture(capture_id)
        _, place, name = max(found)
        return name, place

    def _once(self, rows: Sequence[CaptureRow], owner: str | None) -> Iterator[CaptureRow]:
        """Each capture as all of its stores have it; ConflictError where two have one."""
        has = self._which({_ulid(row.id) for row in rows}, owner)
        for row in rows:
            names = has.get(_ulid(row.id), [])
            if (len(names) < 2 and row.writer is None) or not names:
                yield row
            else:
                yield self._reader_of(self._together(_ulid(row.id), names)).capture(row.id, owner)

    def _follows(self, name: str, row: CaptureRow, owner: str | None) -> bool:
        """Whether another store's line is the one in lists, of a capture that is divided, or deleted."""
        return (row.writer is not None or row.status == "deleted") and self._line_of(row.id, owner)[0] != name

    def _which(self, ulids: set[str], owner: str | None) -> dict[str, list[str]]:
        """The stores that have captures of each ULID which are not deleted."""
        has: dict[str, list[str]] = {}
        for name, reader in self._stores.items():
            for ulid in reader.living(ulids, owner):
                has.setdefault(ulid, []).append(name)
        return has

    def capture(self, ref: str, owner: str | None = None) -> CaptureRow:
        """Same as for one store, and so are those below."""
        return self.home(ref, owner).capture(ref, owner)

    def is_deleted(self, capture_id: str) -> bool:
        return not self._which({_ulid(capture_id)}, None) and any(
            reader.is_deleted(capture_id) for reader in self._every())

    def samples(self, ref: str, owner: str | None = None) -> list[str]:
        return self.home(ref, owner).samples(ref, owner)

    def target(self, ref: str, owner: str | None = None) -> tuple[str, str]:
        """Same as for one store; NotFoundError where stores know captures of several owners by that name."""
        if owner is None and not _ulid(ref):
            named = [found for reader in self._every() if (found := reader.newest_named(ref)) is not None]
            if len({each.owner for each in named if not each.deleted}) > 1:
                raise NotFoundError(f"{ref} names captures of several owners; ask for one by its id: "
                                    + ", ".join(f"{each.id} (of {each.owner or 'nobody'})" for each in named))
        return self.home(ref, owner).target(ref, owner)

    def manifest(self, ref: str, owner: str | None = None) -> Manifest:
        return self.home(ref, owner).manifest(ref, owner)

    def sole(self, ref: str, owner: str | None = None) -> Manifest | list[str]:
        return self.home(ref, owner).sole(ref, owner)

    def progress(self, ref: str, owner: str | None = None) -> Progress:
        return self.home(ref, owner).progress(ref, owner)

    def covered(self, ref: str, owner: str | None = None) -> tuple[CoveredCapture, dict[str, int]]:
        return self.home(ref, owner).covered(ref, owner)

    def drops(self, capture: str, site: str, after: int) -> list[Drop]:
        return self.home(capture).drops(capture, site, after)

    def engine_name(self, ref: str, owner: str | None = None) -> str | None:
        return self.home(ref, owner).engine_name(ref, owner)

    def probes(self, ref: str, owner: str | None = None) -> dict[str, Probe]:
        return self.home(ref, owner).probes(ref, owner)

    def names(self, ref: str, owner: str | None = None) -> dict[str, str]:
        return self.home(ref, owner).names(ref, owner)

    # ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────

    def slice(self, ref: str, site: str, layers: Sequence[int], start: int = 0, stop: int | None = None,
              owner: str | None = None, rejected: bool = False) -> Slice:
        return self.home(ref, owner).slice(ref, site, layers, start, stop, owner, rejected)

    def rows_at(self, rows: Sequence[tuple[str, int]], site: str, layers: Sequence[int], owner: str | None = None
                ) -> RowsAt:
        """Same as for one store: rows of captures in any of them."""
        homes = self._homes(dict.fromkeys(ref for ref, _ in rows), owner)
        by_store: dict[tuple[str, ...], list[int]] = {}
        for number, (ref, _) in enumerate(rows):
            by_store.setdefault(homes[ref], []).append(number)
        if not rows:
            return self._every()[0].rows_at(rows, site, layers, owner)
        parts = [(numbers, self._reader_of(names).rows_at([rows[number] for number in numbers], site, layers, owner))
                 for names, numbers in by_store.items()]
        return parts[0][1] if len(parts) == 1 else join_rows(parts, len(rows))

    # ── of all together ─────────────────────────────────────────────────────────────────────────────────────────

    def owner_bytes(self, owner: str) -> int:
        """Bytes of an owner's captures in all stores."""
        return sum(reader.owner_bytes(owner) for reader in self._every())

    def request_bytes(self, owner: str, ulids: Sequence[str]) -> dict[str, int]:
        """Same as for one store."""
        told = [reader.request_bytes(owner, ulids) for reader in self._every()]
        return {ulid: sum(each[ulid] for each in told) for ulid in ulids}

    def erasing(self) -> bool:
        """Whether something of deleted captures is still to be erased in any of them."""
        return any(reader.erasing() for reader in self._every())

    def engine(self, name: str = "") -> EngineInfo | None:
        """The engine that began last, by the clocks of their hosts."""
        found = [since for reader in self._every() if (since := reader.engine_since(name)) is not None]
        return max(found, key=lambda since: since[0])[1] if found else None

    def lost_ranks(self, group: str) -> list[int]:
        """Same as for one store."""
        return sorted({rank for ranks in self.lost_of_server(group).values() for rank in ranks})

    def lost_of_server(self, group: str) -> dict[str, list[int]]:
        """Same as for one store: all ranks of an engine send to one writer."""
        return {name: ranks for reader in self._every() for name, ranks in reader.lost_of_server(group).items()}

    def version(self) -> int:
        """A number that changes with any catalog."""
        return sum(reader.version() for reader in self._stores.values())


class _List(Generic[R]):
    """The part of a store's list that was read: all of its ``rows`` down to ``seen``, None where that is its end, but
    those that ``follow`` others.
    """

    def __init__(self, reader: R, below: ListPlace | None, follow: Callable[[CaptureRow], bool]) -> None:
        self._reader, self._below, self._follow = reader, below, follow
        self.rows: list[CaptureRow] = []
        self.seen: ListPlace | None = None
        self.is_due, self.is_cut = True, False  # whether to read on; whether a page ended before its rows were found

    def read_on(self, owner: str | None, status: str | None, limit: int, wanted: CaptureFilter | None, scan_max: int
                ) -> None:
        """Read the next lines, where that is due."""
        if self.is_due:
            rows, self.seen = self._reader.page_below(self._below, owner, status, limit, wanted, scan_max)
            self.rows += [row for row in rows if not self._follow(row)]
            self._below, self.is_cut = self.seen, len(rows) < limit
            self.is_due = False


def _place(row: CaptureRow) -> ListPlace:
    return row.created_ms, row.id


def _ulid(ref: str) -> str:
    """The ULID of a capture id; "" of an alias."""
    return (split_capture_id(ref) or ("", None))[0]


def _check_one(ulid: str, stores: Sequence[str]) -> None:
    if len(stores) > 1:
        raise ConflictError(f"capture {ulid} is in several stores, {' and '.join(stores)}: read one of them alone, or "
                            "delete it in the others (vllm-tap rm)")
