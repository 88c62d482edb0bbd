"""``vllm-tap fsck --bucket``: is all there that the heads of a bucket name, and what is there that none does?"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from schemas import limits
from schemas.bucket.snapshots import fetch_snapshot, hash_pieces
from schemas.errors import BucketError, OutrunError
from schemas.objects.heads import fetch_head
from schemas.objects.layout import BLOCK_KEY, HEAD, INDEX, Head, Stored, digest, unpack_index
from schemas.objects.objects import Objects, Version, keeps_versions
from schemas.postgres.connection import CatalogUrl
from vllm_tap.bucket.catalog_check import catalog_faults
from vllm_tap.bucket.inventory import Inventory, read_heads

__all__ = ["BucketReport", "Fault", "Lost", "check", "current_head", "examine"]

_MOMENTS: Final = 3  # where the head changes meanwhile
Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of an object that the head ``head`` names; None: the current one."""

    key: str
    what: str
    head: str | None


@dataclass(frozen=True, slots=True)
class Lost:
    """A capture with rows in blocks that are not whole: at most so many tokens of its sites, in so many blocks."""

    capture: str
    tokens: int
    blocks: int
    head: str | None


@dataclass(slots=True)
class BucketReport:
    """Counts of what was looked at; ``lost`` and ``strangers`` are the first ones, and the counts say how many there
    are.
    """

    url: str
    head: Head
    is_versioned: bool = False  # the bucket keeps what is deleted or replaced
    bad: list[Fault] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    lost_captures: int = 0
    captures: int = 0
    blocks: int = 0
    retired: list[str] = field(default_factory=list)
    objects: int = 0
    nbytes: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    oldest_orphan_ms: int = 0  # when it was written, in milliseconds since 1970
    strangers: int = 0
    first_strangers: list[str] = field(default_factory=list)
    removed: int = 0
    removed_bytes: int = 0
    catalog: str = ""  # the database that was held against the head
    catalog_rows: int = 0


def check(url: str, deep: bool = False, tell: Tell = lambda done, total: None, catalog: str | None = None
          ) -> BucketReport:
    """Look at a bucket, reading only; ``deep``: every byte, otherwise indexes, and of rows that they are there.

    ``catalog``: URL of a Postgres database whose catalog must be the head's. BucketError where there is no head, or the
    bucket does not answer; CatalogError where the database does not; OutrunError where heads follow each other too
    fast. The listing is in a file, and of objects one block's index is in memory.
    """
    place = None if catalog is None else CatalogUrl(catalog)
    objects = Objects(url)
    try:
        for _ in range(_MOMENTS):
            head, version = current_head(objects)
            with tempfile.TemporaryDirectory(prefix="vllm-tap-fsck-") as work, closing(
                    Inventory(objects, Path(work) / "objects.sqlite")) as inventory:
                report = examine(objects, head, inventory, Path(work), deep, tell, place)
            report.is_versioned = keeps_versions(version)
            if not report.bad or current_head(objects)[0] == head:
                return report
        raise OutrunError("check", objects.url, f"its head has changed {_MOMENTS} times meanwhile", "try again")
    finally:
        objects.close()


def current_head(objects: Objects) -> tuple[Head, Version]:
    """The head, and what a write in its place names it by."""
    try:
        return fetch_head(objects)
    except FileNotFoundError:
        raise BucketError("check", objects.url, f"no {HEAD} in it: nothing says what is in use",
                          "vllm-tap push STORE URL brings a store there") from None


def examine(objects: Objects, head: Head, inventory: Inventory, work: Path, deep: bool, tell: Tell,
            catalog: CatalogUrl | None = None) -> BucketReport:
    """Hold all heads against the listing, which names what they name from then on."""
    report = BucketReport(objects.url, head, retired=inventory.retired())
    report.objects, report.nbytes = inventory.total()
    done = _Done(tell, report.nbytes if deep else 0)
    _examine_head(_Part(objects, inventory, work, deep, done, report, None, catalog), head)
    for push, found in read_heads(objects, report.retired):
        if isinstance(found, BucketError):
            report.bad.append(Fault(f"retired/{push}.json", str(found.reason), push))
        elif found.store != head.store:
            report.bad.append(Fault(f"retired/{push}.json", f"is of another store, {found.store}", push))
        else:
            _examine_head(_Part(objects, inventory, work, deep, done, report, push), found)
    report.orphans, report.orphan_bytes, report.oldest_orphan_ms = inventory.orphans()
    report.strangers, report.first_strangers = inventory.strangers(limits.bucket_shown_max)
    return report


@dataclass(slots=True)
class _Done:
    tell: Tell
    total: int
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.tell(self.nbytes, max(self.total, self.nbytes))


@dataclass(slots=True)
class _Part:
    """One head's part of a check; ``push`` is that of a retired one."""

    objects: Objects
    inventory: Inventory
    work: Path
    deep: bool
    done: _Done
    report: BucketReport
    push: str | None
    catalog: CatalogUrl | None = None

    def bad(self, key: str, what: str) -> None:
        self.report.bad.append(Fault(key, what, self.push))


def _examine_head(part: _Part, head: Head) -> None:
    snapshot = part.work / f"{part.push or 'head'}.sqlite"
    part.inventory.name(iter([head.catalog_key]))
    try:
        fetch_snapshot(part.objects, head, snapshot)
    except BucketError as error:
        if error.passing:
            raise
        part.bad(head.catalog_key, f"{error.reason}: which captures this head has cannot be said")
        return
    part.inventory.name_snapshot(head, snapshot)
    with closing(sqlite3.connect(snapshot, isolation_level=None)) as db:
        db.execute("CREATE TEMP TABLE damaged (segment INTEGER PRIMARY KEY)")
        if part.push is None:
            part.report.captures, = db.execute("SELECT COUNT(*) FROM captures WHERE deleted = 0").fetchone()
        for number, key, nbytes, xxh3 in db.execute("SELECT segment, key, index_bytes, index_xxh3 FROM blocks"):
            part.report.blocks += part.push is None
            before = len(part.report.bad)
            _examine_block(part, key, Stored(nbytes, xxh3))
            if len(part.report.bad) > before:
                db.execute("INSERT INTO damaged VALUES (?)", (number,))
        _tell_lost(part, db)
    if part.catalog is not None:
        _examine_catalog(part, part.catalog, head, snapshot)
    snapshot.unlink()


def _examine_catalog(part: _Part, place: CatalogUrl, head: Head, snapshot: Path) -> None:
    """The catalog in Postgres against the snapshot."""
    def tell(rows: int) -> None:
        part.report.catalog_rows += rows

    part.report.catalog = str(place)
    for fault in catalog_faults(place, part.objects.url, head, snapshot, tell):
        part.bad(str(place), fault)


def _examine_block(part: _Part, key: str, index: Stored) -> None:
    """The index against the snapshot, every object against the index."""
    where = f"{key}/{INDEX}"
    if not BLOCK_KEY.fullmatch(key) or not 0 < index.nbytes <= limits.bucket_index_bytes_max:
        part.bad(key[:200], "the catalog names it, and it is no block's folder")
        return
    try:
        data, _ = part.objects.get(where, index.nbytes)
        if Stored(len(data), digest(data)) != index:
            part.bad(where, "it does not match its checksum")
            return
        _, objects = unpack_index(data, where)
    except FileNotFoundError:
        part.bad(where, "it is not there")
        return
    except BucketError as error:
        if error.passing:
            raise
        part.bad(where, str(error.reason))
        return
    part.done.add(index.nbytes)
    for name, stored in objects.items():
        found = part.inventory.nbytes(f"{key}/{name}")
        if found is None:
            part.bad(f"{key}/{name}", "it is not there")
        elif found != stored.nbytes:
            part.bad(f"{key}/{name}", f"{found:,} bytes, {stored.nbytes:,} were sent")
        elif part.deep:
            _examine_bytes(part, f"{key}/{name}", stored)


def _examine_bytes(part: _Part, key: str, stored: Stored) -> None:
    try:
        if part.objects.stream(key, stored.nbytes, hash_pieces) != stored:
            part.bad(key, "it does not match its checksum")
    except FileNotFoundError:
        part.bad(key, "it is not there")
    part.done.add(stored.nbytes)


def _tell_lost(part: _Part, db: sqlite3.Connection) -> None:
    """The captures with rows in damaged blocks."""
    rows = db.execute("""SELECT capture, SUM(n), COUNT(DISTINCT segment) FROM extents
                         WHERE segment IN (SELECT segment FROM damaged) GROUP BY capture ORDER BY capture""")
    for capture, tokens, blocks in rows:
        part.report.lost_captures += 1
        if len(part.report.lost) < limits.bucket_shown_max:
            part.report.lost.append(Lost(capture, tokens, blocks, part.push))
