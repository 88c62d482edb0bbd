"""Seals segments in the background, one at a time."""

from __future__ import annotations

import json
import sqlite3
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from schemas.zarr_layout import open_name
from writer_service import fs
from writer_service.catalog import SegmentGone, SegmentSealed
from writer_service.commits import Waker
from writer_service.sealing import seal

ENGINE_FIELDS: Final = ("model", "revision", "tokenizer", "vllm_version", "tap_version", "n_layers")
engines_named_max: Final = 16


class Sealer:
    """``submit`` hands a segment's descriptor over; ``take`` tells what became of those that are done."""

    def __init__(self, store: Path, uuid: bytes, epoch: int, db: sqlite3.Connection, waker: Waker) -> None:
        self._store, self._uuid, self._epoch, self._db, self._waker = store, uuid, epoch, db, waker
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._running: list[tuple[Future[bool], int, int]] = []
        self.failures = 0

    @property
    def busy(self) -> bool:
        """Whether something is being sealed."""
        return bool(self._running)

    def submit(self, number: int, fd: int | None = None) -> None:
        """Seal a journal file that is wholly on the disk."""
        fd = fs.open_existing(self._store / open_name(number)) if fd is None else fd
        future = self._pool.submit(seal, self._store, self._uuid, number, fd, self._epoch, self._engines())
        self._running.append((future, number, fd))
        future.add_done_callback(lambda _: self._waker.wake())

    def take(self) -> list[SegmentSealed | SegmentGone]:
        """What has become a block, or was empty, since the last call."""
        done = [item for item in self._running if item[0].done()]
        self._running = [item for item in self._running if item not in done]
        changes: list[SegmentSealed | SegmentGone] = []
        for future, number, fd in done:
            fs.close(fd)
            if error := future.exception():
                # The journal file stays, wherever it got to, and is readable; the next start seals it.
                self.failures += 1
                print(f"writer: sealing segment {number}: {error}", file=sys.stderr, flush=True)
            else:
                changes.append(SegmentSealed(number) if future.result() else SegmentGone(number))
        return changes

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _engines(self) -> dict[str, dict[str, Any]]:
        """The newest engines, by stream, as blocks name them."""
        rows = self._db.execute("SELECT stream, info FROM engines ORDER BY epoch DESC LIMIT ?", (engines_named_max,))
        known = {row["stream"]: json.loads(row["info"]) for row in rows}
        return {stream: {key: info.get(key) for key in ENGINE_FIELDS} for stream, info in known.items()}
