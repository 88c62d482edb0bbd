"""A store in a bucket as this service sees it: opened once, and moved on to newer heads as they come."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from typing import Final

import anyio

from api.config import Config
from api.metrics import BucketMetrics
from schemas.bucket.reader import BucketReader
from schemas.errors import BucketError, StartError, TapError
from schemas.objects.objects import Objects
from schemas.postgres.connection import Place

__all__ = ["FollowedBucket", "check_bucket"]

log = logging.getLogger("vllm_tap.api")

_UNSEEN: Final = "it was not looked at yet"


def check_bucket(url: str) -> None:
    """StartError where a URL cannot name a bucket, or the client of buckets is not installed; nothing is asked.

    A folder may come later.
    """
    if url.startswith("file://"):
        return
    try:
        Objects(url.partition("#")[0]).close()
    except TapError as error:
        raise StartError(f"store = {url!r}: {error}") from None


class FollowedBucket:
    """The newest head of a bucket that could be read; ``failed`` says why the last look at it failed, "" if it did not.

    Only a look opens the store, so no request waits for a bucket that does not answer. Safe for threads.
    """

    def __init__(self, config: Config, metrics: BucketMetrics) -> None:
        self.url, self.failed = config.bucket, _UNSEEN
        self._config, self._metrics = config, metrics
        self._found: BucketReader | None = None
        self._looking = threading.Lock()
        self._counted = 0

    def reader(self) -> BucketReader:
        """The store as of the newest head; BucketError while none could be read yet."""
        if self._found is None:
            raise BucketError("open store", self.url, self.failed or _UNSEEN, "it is tried again", passing=True)
        return self._found

    def look(self) -> None:
        """Open the store, or move on to a newer head where there is one; what fails is noted, and logged once."""
        with self._looking:
            try:
                if self._found is None:
                    config = self._config
                    self._found = BucketReader(config.bucket, config.cache, config.cache_bytes, config.bucket_answer_s,
                                               catalog=config.catalog or None)
                else:
                    self._found.refresh()
            except (TapError, OSError, sqlite3.Error) as error:
                if self.failed != str(error):
                    log.warning("%s cannot be read: %s", self.url, error)
                self.failed = str(error)
                return
            if self.failed not in ("", _UNSEEN):
                log.info("%s is read again", self.url)
            self.failed = ""

    async def follow(self) -> None:
        """Look from time to time; for ever."""
        while True:
            await asyncio.sleep(self._config.bucket_look_s)
            await anyio.to_thread.run_sync(self.look)

    def told(self) -> dict[str, str | int | None]:
        """What capabilities say: the bucket, and which of its heads is read."""
        catalog = self._config.catalog
        told: dict[str, str | int | None] = {"url": self.url, "catalog": str(Place(catalog)) if catalog else None,
                                             "failed": self.failed or None, "generation": None, "push": None,
                                             "pushed_ms": None}
        if self._found is not None:
            head = self._found.head
            told |= {"generation": head.generation, "push": head.push, "pushed_ms": head.pushed_ms}
        return told

    def tell(self) -> None:
        """Set the metrics."""
        self._metrics.up.set(not self.failed)
        if self._found is not None:
            self._metrics.generation.set(self._found.head.generation)
            self._metrics.pushed.set(self._found.head.pushed_ms / 1000)
            requests = self._found.requests
            self._metrics.requests.inc(max(requests - self._counted, 0))
            self._counted = requests

    def close(self) -> None:
        """Release files and connections."""
        if self._found is not None:
            self._found.close()
