"""Stores in buckets as this service sees them: opened once, and moved on to newer heads as they come."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import anyio

from api.bucket.deletes import Deletes
from api.config import Config
from api.errors import ApiError
from api.metrics import BucketMetrics
from schemas.bucket.places import is_url, prefix_of
from schemas.bucket.reader import AnyReader, BucketReader, Cataloged, OneReader, several_reader
from schemas.bucket.several import SeveralReader
from schemas.errors import BucketError, ConflictError, StartError, TapError
from schemas.objects.objects import Objects
from schemas.postgres.connection import CatalogUrl
from schemas.read.reader import StoreReader

__all__ = ["FollowedBuckets", "check_bucket"]

log = logging.getLogger("vllm_tap.api")
T = TypeVar("T")

_UNSEEN: Final = "it was not looked at yet"


def check_bucket(setting: str, url: str) -> None:
    """StartError where a setting's URL cannot name a bucket, or the client of buckets is not installed; nothing is
    asked. A folder may come later.
    """
    if not is_url(url):
        raise StartError(f"{setting} = {url!r}: valid: the URL of a bucket, such as s3://BUCKET/PREFIX or "
                         "s3://BUCKET/PREFIX/*")
    if url.startswith("file://"):
        return
    try:
        Objects(prefix_of(url) or url.partition("#")[0]).close()
    except TapError as error:
        raise StartError(f"{setting} = {url!r}: {error}") from None


class FollowedBuckets:
    """The newest heads of stores in buckets that could be read; ``failed`` says why the last look at some failed, "" if
    none did.

    Only a look opens a store, so no request waits for a bucket that does not answer. ``local`` has the store of this
    host, if they are read beside one. Safe for threads.
    """

    def __init__(self, urls: Sequence[str], config: Config, metrics: BucketMetrics,
                 local: Callable[[], StoreReader] | None = None) -> None:
        self.failed, self._local = _UNSEEN, local
        stores = Cataloged(urls, config.catalog) if config.catalog else urls
        self._stores = several_reader(stores, config.cache, config.cache_bytes, config.bucket_answer_s)
        self._config, self._metrics = config, metrics
        self._deletes = Deletes(config.catalog) if config.deletes else None
        self._counted = 0

    @property
    def url(self) -> str:
        """The URLs."""
        return self._stores.url

    def reader(self) -> AnyReader:
        """The stores as of their newest heads; BucketError while none could be read yet, and from what needs one of
        several that could not.
        """
        if self._local is not None:
            return self._stores.beside(str(self._config.store), self._local())
        if not self._stores.stores:
            raise BucketError("open store", self.url, self.failed or _UNSEEN, "it is tried again", passing=True)
        return self._stores.alone or self._stores

    def read(self, call: Callable[[AnyReader], T]) -> T:
        """``call(reader)``; once more where a push has meanwhile removed what the head before named."""
        reader = self.reader()
        seen = reader.pushes
        try:
            return call(reader)
        except BucketError as error:
            if not error.passing:
                self.look()
            if reader.pushes == seen:
                raise
        return call(self.reader())

    def look(self) -> None:
        """Open the stores, or move on to newer heads where there are some; what fails is noted, and logged once."""
        try:
            self._stores.look()
            failed = "; ".join(map(str, self._stores.failed.values()))
        except (TapError, OSError, sqlite3.Error) as error:
            failed = str(error)
        before, self.failed = self.failed, failed
        if failed and failed != before:
            log.warning("%s cannot be read: %s", self.url, failed)
        elif not failed and before not in ("", _UNSEEN):
            log.info("%s is read again", self.url)

    def delete(self, ref: str, owner: str) -> None:
        """Delete a capture, with all its samples, in the buckets that have it; what follows sees none of them. What
        this host's store has of it stays.

        NotFoundError; ConflictError: it is on hold, or layers of it are in stores that are not read; BucketError and
        CatalogError, as of what deletes.
        """
        reader = self.reader()
        samples, urls = reader.samples(ref, owner), [self._stores.url]
        if isinstance(reader, SeveralReader):
            urls = [place for place in reader.places_of(ref, owner) if place != str(self._config.store)]
        for sample in samples:
            if lacks := reader.manifest(sample).resolved.get("elsewhere"):
                raise ConflictError(f"capture {sample} has layers in a store that is not read here ({lacks}): wait for "
                                    "the next push of its node, or use vllm-tap rm with a --store for each")
        if self._deletes is None:
            raise ApiError(403, "read_only", f"the capture is in {', '.join(urls)}, and this service was started "
                           "without --deletes; delete it there, or with vllm-tap rm CAPTURE --store URL")
        for url in urls:
            self._deletes.delete(url, samples)
        self.look()

    async def follow(self) -> None:
        """Look from time to time; for ever."""
        while True:
            await asyncio.sleep(self._config.bucket_look_s)
            await anyio.to_thread.run_sync(self.look)

    def told(self) -> dict[str, Any]:
        """The statements of capabilities: the buckets, and of each store which of its heads is read."""
        stores = [{"url": url, "failed": None, **_told(reader)} for url, reader in self._stores.stores.items()]
        known = {each["url"]: each for each in stores}
        for url, error in self._stores.failed.items():
            known.setdefault(url, {"url": url, **_told(None)})["failed"] = str(error)
        catalog = self._config.catalog
        return {"url": self.url, "deletes": self._config.deletes, "failed": self.failed or None,
                "catalog": str(CatalogUrl(catalog)) if catalog else None, **_told(self._stores.alone),
                "stores": list(known.values())}

    def tell(self) -> None:
        """Set the metrics."""
        heads = [reader.head for reader in self._stores.stores.values() if isinstance(reader, BucketReader)]
        self._metrics.up.set(not self.failed)
        self._metrics.stores.set(len(heads))
        if heads:
            self._metrics.generation.set(sum(head.generation for head in heads))
            self._metrics.pushed.set(max(head.pushed_ms for head in heads) / 1000)
            requests = self._stores.requests
            self._metrics.requests.inc(max(requests - self._counted, 0))
            self._counted = requests

    def close(self) -> None:
        """Release files and connections."""
        self._stores.close()


def _told(reader: OneReader | None) -> dict[str, Any]:
    head = reader.head if isinstance(reader, BucketReader) else None
    return {name: getattr(head, name, None) for name in ("generation", "push", "pushed_ms")}
