"""Read a store from a bucket: captures, manifests and slices, as StoreReader does from a disk.

>>> reader = BucketReader("s3://bucket/prefix")                                  # doctest: +SKIP
>>> reader.slice("01J...", "resid_post", [12], 0, 512).values().shape            # doctest: +SKIP
(1, 512, 4096)
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from schemas import limits
from schemas.bucket.places import Stores, is_url, places_of, shown_places
from schemas.bucket.segments import BucketSegments
from schemas.bucket.several import SeveralReader
from schemas.bucket.snapshots import fetch_snapshot, knows_deleted, matches, read_blocks
from schemas.bucket.unfollowed import Unfollowed
from schemas.catalog.database import Database
from schemas.catalog.view import CatalogView
from schemas.errors import ArgumentError, BucketError, CatalogError, NoHeadError, StoreError, TapError
from schemas.objects.block_objects import BlockObjects
from schemas.objects.chunk_cache import ChunkCache, Sparing, default_cache, make_private
from schemas.objects.heads import fetch_head
from schemas.objects.layout import BLOCK_KEY, HEAD, PUSH, Head, Stored, retired_key
from schemas.objects.objects import Objects
from schemas.postgres.connection import PUSH_IT, CatalogUrl
from schemas.postgres.view import PostgresView
from schemas.read.reader import StoreReader
from schemas.read.row_reader import RowReader

__all__ = ["AnyReader", "BucketReader", "Cataloged", "OneReader", "Source", "open_reader", "several_reader",
           "share_of", "shown", "stores_of"]

_MOMENTS: Final = 5  # in which a head is read, and then its snapshot
_CUT_S: Final = 86_400  # a fetch that wrote nothing for so long was killed
_WAITS_S: Final = (0, 0.1, 0.4, 1.5, 0)  # for a catalog in Postgres, which a push brings a moment after the head
_SNAPSHOTS_KEPT: Final = 2  # of a store, in its cache: this reader's, and one that another may read


class BucketReader(Unfollowed, RowReader):
    """A store in a bucket opened read-only, as of its head when it was opened or refreshed; safe for threads.

    ``URL#PUSH`` opens a head that was taken over from, as it was. ``cache`` is a folder on a local disk. It holds at
    most ``cache_bytes`` (4 GiB) of rows and small arrays, and beside them the catalog. BucketError where there is no
    store, or the bucket does not answer; TapError without obstore. ``answer_s``: seconds that a read waits at most.
    ``sweepers``: the number of readers, this one included, that share the cache's room and go over many rows, each
    once; 0: it is none of these.

    ``catalog`` is the URL of a Postgres database that ``vllm-tap push --catalog`` keeps a copy of the catalog in. Then
    nothing of the catalog is fetched or kept here, and every read is of the last push. CatalogError where the database
    does not answer, or lags behind.
    """

    def __init__(self, url: str, cache: str | Path | None = None, cache_bytes: int | None = None,
                 answer_s: float | None = None, sweepers: int = 0, catalog: str | None = None) -> None:
        cache = default_cache() if cache is None else Path(cache)
        cache_bytes = limits.bucket_cache_bytes if cache_bytes is None else cache_bytes
        if cache_bytes < limits.bucket_cache_bytes_min:
            raise ArgumentError("cache_bytes", cache_bytes, f"at least {limits.bucket_cache_bytes_min:,}")
        where, _, retired = url.partition("#")
        if "#" in url and not PUSH.fullmatch(retired):
            raise ArgumentError("URL", url, "behind '#' the 32 hex digits of a head that was taken over from")
        if retired and catalog is not None:
            raise ArgumentError("URL", url, "a head that was taken over from has its snapshot alone: leave out catalog")
        place = None if catalog is None else CatalogUrl(catalog)
        self._objects, self._head_key = Objects(where, answer_s=answer_s), retired_key(retired) if retired else HEAD
        self._followed = ""
        try:
            self.head = _head(self._objects, self._head_key)
            self._place = cache / self.head.store
            make_private(self._place)  # what is stored is what users said
            self._chunks = ChunkCache(self._place / "chunks", cache_bytes)
            if place is None:
                self.head, snapshot = self._current(self.head)
                view: CatalogView | PostgresView = CatalogView(snapshot)
            else:
                view = PostgresView(place, self.head.store, self._move)
            self._sparing = Sparing(self._chunks.room // sweepers) if sweepers else None
            uuid = bytes.fromhex(self.head.store)
            super().__init__(self._place, uuid=uuid, catalog=view,
                             maps=BucketSegments(self._place, uuid, self._block))
            if isinstance(view, CatalogView):
                _drop_deleted(view.path, self._chunks)
            else:
                try:
                    self._follow(view, self.head)
                except BaseException:
                    self.close()
                    raise
        except OSError as error:
            raise TapError(f"cache = {str(cache)!r}: {error}") from None

    @property
    def url(self) -> str:
        """The bucket and the prefix in it."""
        return self._objects.url

    @property
    def requests(self) -> int:
        """Requests to the bucket so far."""
        return self._objects.requests

    @property
    def pushes(self) -> tuple[str, ...]:
        """The push whose head is read."""
        return (self.head.push,)

    def refresh(self) -> bool:
        """Look for a newer head, and see the store as that says from now on; whether there was one."""
        if isinstance(self._catalog, PostgresView):
            return self._follow(self._catalog, _head(self._objects, self._head_key))
        head = _head(self._objects, self._head_key)
        if head.push == self.head.push:
            return False
        if head.store != self.head.store:
            raise BucketError("refresh", self.url, f"holds another store now, {head.store}", "open it anew")
        head, catalog = self._current(head)
        with self._catalog.lock:
            self.head = head
            for view in (self._catalog, self._scanning):
                if isinstance(view, CatalogView):
                    view.move_to(catalog)
            self._maps.close()  # a block of the same number may lie elsewhere
        _drop_deleted(catalog, self._chunks)
        return True

    def _current(self, head: Head) -> tuple[Head, Path]:
        """The catalog of a head, or of the one that has taken its place: a deletion takes away what told of it."""
        for again in range(_MOMENTS):
            try:
                return head, _snapshot(self._objects, head, self._place)
            except BucketError:
                now = _head(self._objects, self._head_key)
                if now.push == head.push or now.store != head.store or again == _MOMENTS - 1:
                    raise
                head = now
        raise AssertionError

    def _move(self, head: Head) -> None:
        """The catalog in Postgres is of another push: called inside the moment that sees it first."""
        self.head = head
        self._maps.close()

    def _follow(self, view: PostgresView, head: Head) -> bool:
        """Whether the catalog in Postgres is another than when this was last asked; CatalogError where it is of another
        push than the bucket's head, which was just read.
        """
        for wait_s in _WAITS_S:
            if head.store != self.uuid.hex():
                raise BucketError("refresh", self.url, f"holds another store now, {head.store}", "open it anew")
            with view.moment():  # a push brings it here after the head
                is_same = self.head.push == head.push
            if is_same and self._followed == head.push:
                return False
            if is_same:
                self._followed = head.push
                with view.moment() as now:
                    _drop_unnamed(now.db, self._place, self._chunks)
                return True
            time.sleep(wait_s)
            head = _head(self._objects, self._head_key)
        raise CatalogError("read", str(view.place), f"its catalog is of push {self.head.push}, generation "
                           f"{self.head.generation}, and the head of {self.url} is generation {head.generation}",
                           f"a push brings it there last: try again in a moment; else {PUSH_IT}")

    def close(self) -> None:
        """Release files and connections; slices taken before stay valid."""
        super().close()
        self._objects.close()

    def _block(self, number: int) -> BlockObjects:
        with self._catalog.moment() as now:
            found = now.db.execute("SELECT * FROM blocks WHERE segment = ?", (number,)).fetchone()
        if found is None:
            raise StoreError("open block", self.url, f"its catalog names no block of segment {number}")
        if not BLOCK_KEY.fullmatch(found["key"]):
            raise BucketError("open block", self.url, f"its catalog names {found['key']!r}, which is no block's folder")
        return BlockObjects(self._objects, self._chunks, found["key"],
                            Stored(found["index_bytes"], found["index_xxh3"]), self._sparing)


OneReader = StoreReader | BucketReader  # of a store in a folder, or in a bucket
AnyReader = OneReader | SeveralReader[OneReader]


@dataclass(frozen=True, slots=True)
class Cataloged:
    """Stores in a bucket whose catalogs are in one Postgres database; its text is theirs."""

    stores: Stores
    catalog: str = field(repr=False)  # it may hold a password

    def __post_init__(self) -> None:
        for place in places_of(self.stores):
            if not is_url(place):
                raise ArgumentError("catalog", str(CatalogUrl(self.catalog)),
                                    f"it is of a bucket, and {place} is a folder")

    def __str__(self) -> str:
        return shown_places(self.stores)


Source = Stores | Cataloged


def shown(source: Source) -> str:
    """Stores in words, without where their catalog is."""
    return str(source) if isinstance(source, Cataloged) else shown_places(source)


def open_reader(store: Source, cache: str | Path | None = None, cache_bytes: int | None = None) -> AnyReader:
    """The store in a folder, or at the URL of a bucket; of several, or of ``URL/*``, all of them as one.

    ``cache_bytes`` are shared out evenly among several, at least 16 MiB for each.
    """
    several = several_reader(store, cache, cache_bytes)
    try:
        several.look()
        for error in several.failed.values():
            raise error
    except BaseException:
        several.close()
        raise
    return several.alone or several


def several_reader(store: Source, cache: str | Path | None = None, cache_bytes: int | None = None,
                   answer_s: float | None = None) -> SeveralReader[OneReader]:
    """Stores that are not looked for yet; what each is opened with."""
    stores, catalog = (store.stores, store.catalog) if isinstance(store, Cataloged) else (store, None)

    def open_one(place: str, count: int) -> OneReader:
        share = share_of(cache_bytes, count)
        if is_url(place):
            return BucketReader(place, cache, share, answer_s, catalog=catalog)
        return StoreReader(place, cache, share, answer_s)

    if cache_bytes is not None and cache_bytes < limits.bucket_cache_bytes_min:
        raise ArgumentError("cache_bytes", cache_bytes, f"at least {limits.bucket_cache_bytes_min:,}")
    return SeveralReader(places_of(stores), open_one, answer_s)


def share_of(cache_bytes: int | None, count: int) -> int | None:
    """Bytes of the cache that each of ``count`` stores may have; None: those by default."""
    return cache_bytes if count == 1 else max(limits.bucket_cache_bytes_min,
                                              (cache_bytes or limits.bucket_cache_bytes) // count)


def stores_of(reader: AnyReader, places: Stores) -> list[str]:
    """The places of the stores that a reader of ``places`` reads."""
    if isinstance(reader, SeveralReader):
        return list(reader.stores)
    return [str(place) for place in places_of(places)]


def _head(objects: Objects, key: str) -> Head:
    try:
        return fetch_head(objects, key)[0]
    except FileNotFoundError:
        if key != HEAD:
            raise BucketError("open store", objects.url, f"no {key} in it",
                              "was it removed? vllm-tap push --take-over says what it retires") from None
        raise NoHeadError("open store", objects.url, f"no {key} in it", "vllm-tap push STORE URL brings a store there"
                          ) from None


def _drop_deleted(catalog: Path, chunks: ChunkCache) -> None:
    """Drop what the cache has of captures that ``catalog`` says are deleted: catalogs before it, and pages of blocks
    that none of those left names.
    """
    left = [catalog]
    for other in catalog.parent.glob("*.sqlite"):
        if other == catalog:
            continue
        with suppress(OSError, sqlite3.DatabaseError):
            if knows_deleted(other, catalog):
                other.unlink()
            else:
                left.append(other)
    folders: set[str] = set()
    for one in left:
        with suppress(sqlite3.DatabaseError):  # another reader has removed it
            folders.update(key for key, _ in read_blocks(one).values())
    chunks.keep(folders)


def _drop_unnamed(db: Database, place: Path, chunks: ChunkCache) -> None:
    """The same, where the catalog is in Postgres: ``place`` may have snapshots of others that read without it."""
    folders = {row["key"] for row in db.execute("SELECT key FROM blocks").fetchall()}
    for one in (place / "catalogs").glob("*.sqlite"):
        with suppress(OSError, sqlite3.DatabaseError):
            folders.update(key for key, _ in read_blocks(one).values())
    chunks.keep(folders)


def _snapshot(objects: Objects, head: Head, place: Path) -> Path:
    """The catalog of a head on the local disk; it is fetched where it is not there whole."""
    folder = place / "catalogs"
    make_private(folder)
    path = folder / f"{head.catalog.xxh3}.sqlite"
    if not matches(path, head.catalog):
        fresh = folder / f"{secrets.token_hex(8)}.new"
        try:
            fetch_snapshot(objects, head, fresh)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    path.touch()
    with suppress(OSError):  # of another reader that does the same
        for cut in folder.glob("*.new"):
            if cut.stat().st_mtime < time.time() - _CUT_S:
                cut.unlink()
        for old in sorted(folder.glob("*.sqlite"), key=lambda one: one.stat().st_mtime_ns)[:-_SNAPSHOTS_KEPT]:
            old.unlink()
    return path
