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
from pathlib import Path
from typing import Final

from schemas import limits
from schemas.bucket.places import Stores, is_url
from schemas.bucket.segments import BucketSegments
from schemas.bucket.several import SeveralReader
from schemas.bucket.snapshots import fetch_snapshot, knows_deleted, matches, read_blocks
from schemas.bucket.unfollowed import Unfollowed
from schemas.errors import ArgumentError, BucketError, NoHeadError, StoreError, TapError
from schemas.objects.block_objects import BlockObjects
from schemas.objects.chunk_cache import ChunkCache, Sparing, default_cache, make_private
from schemas.objects.layout import BLOCK_KEY, HEAD, PUSH, Head, Stored, read_head, retired_key
from schemas.objects.objects import Objects
from schemas.read.reader import StoreReader
from schemas.read.row_reader import RowReader

__all__ = ["AnyReader", "BucketReader", "OneReader", "open_reader", "several_reader", "share_of",
           "stores_of"]

_CUT_S: Final = 86_400  # a fetch that wrote nothing for so long was killed
_SNAPSHOTS_KEPT: Final = 2  # of a store, in its cache: this reader's, and one that another may read


class BucketReader(Unfollowed, RowReader):
    """A store in a bucket opened read-only, as of its head when it was opened or refreshed; safe for threads.

    ``URL#PUSH`` opens a head that was taken over from, as it was. ``cache`` is a folder on a local disk, which has at
    most ``cache_bytes`` (4 GiB) of rows and small arrays, and beside them the catalog. BucketError where there is no
    store, or the bucket does not answer; TapError without obstore. ``answer_s``: seconds that a read waits at most.
    ``sweepers``: this is one of so many that go over many rows, each once, and share the cache's room.
    """

    def __init__(self, url: str, cache: str | Path | None = None, cache_bytes: int | None = None,
                 answer_s: float | None = None, sweepers: int = 0) -> None:
        cache = default_cache() if cache is None else Path(cache)
        cache_bytes = limits.bucket_cache_bytes if cache_bytes is None else cache_bytes
        if cache_bytes < limits.bucket_cache_bytes_min:
            raise ArgumentError("cache_bytes", cache_bytes, f"at least {limits.bucket_cache_bytes_min:,}")
        where, _, retired = url.partition("#")
        if "#" in url and not PUSH.fullmatch(retired):
            raise ArgumentError("URL", url, "behind '#' the 32 hex digits of a head that was taken over from")
        self._objects, self._head_key = Objects(where, answer_s=answer_s), retired_key(retired) if retired else HEAD
        try:
            self.head = _head(self._objects, self._head_key)
            self._place = cache / self.head.store
            make_private(self._place)  # what is stored is what users said
            self._chunks = ChunkCache(self._place / "chunks", cache_bytes)
            catalog = _snapshot(self._objects, self.head, self._place)
            _drop_deleted(catalog, self._chunks)
            self._sparing = Sparing(self._chunks.room // sweepers) if sweepers else None
            uuid = bytes.fromhex(self.head.store)
            super().__init__(self._place, uuid=uuid, catalog=catalog,
                             maps=BucketSegments(self._place, uuid, self._block))
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
        head = _head(self._objects, self._head_key)
        if head.push == self.head.push:
            return False
        if head.store != self.head.store:
            raise BucketError("refresh", self.url, f"holds another store now, {head.store}", "open it anew")
        catalog = _snapshot(self._objects, head, self._place)
        with self._catalog.lock:
            self.head = head
            self._catalog.move_to(catalog)
            if self._scanning is not None:
                self._scanning.move_to(catalog)
            self._maps.close()  # a block of the same number may lie elsewhere
        _drop_deleted(catalog, self._chunks)
        return True

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


def open_reader(store: Stores, cache: str | Path | None = None, cache_bytes: int | None = None
                ) -> AnyReader:
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


def several_reader(store: Stores, cache: str | Path | None = None, cache_bytes: int | None = None,
                   answer_s: float | None = None) -> SeveralReader[OneReader]:
    """Stores that are not looked for yet; what each is opened with."""

    def open_one(place: str, count: int) -> OneReader:
        kind = BucketReader if is_url(place) else StoreReader
        return kind(place, cache, share_of(cache_bytes, count), answer_s)

    if cache_bytes is not None and cache_bytes < limits.bucket_cache_bytes_min:
        raise ArgumentError("cache_bytes", cache_bytes, f"at least {limits.bucket_cache_bytes_min:,}")
    return SeveralReader([store] if isinstance(store, str | Path) else store, open_one, answer_s)


def share_of(cache_bytes: int | None, count: int) -> int | None:
    """Bytes of the cache that each of ``count`` stores may have; None: those by default."""
    return cache_bytes if count == 1 else max(limits.bucket_cache_bytes_min,
                                              (cache_bytes or limits.bucket_cache_bytes) // count)


def stores_of(reader: AnyReader, places: Stores) -> list[str]:
    """Where the stores lie that a reader of ``places`` reads."""
    if isinstance(reader, SeveralReader):
        return list(reader.stores)
    return [str(place) for place in ([places] if isinstance(places, str | Path) else places)]


def _head(objects: Objects, key: str) -> Head:
    try:
        data, _ = objects.get(key, limits.bucket_head_bytes_max)
    except FileNotFoundError:
        if key != HEAD:
            raise BucketError("open store", objects.url, f"no {key} in it",
                              "was it removed? vllm-tap push --take-over says what it retires") from None
        raise NoHeadError("open store", objects.url, f"no {key} in it", "vllm-tap push STORE URL brings a store there"
                          ) from None
    return read_head(data, objects.url)


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
