"""Seals segments in the background, one at a time; what fails is tried again.

While frames queue up it waits, so that a burst has disk, memory and processors for itself; what waits is bounded.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from schemas.catalog.records import load_frames
from schemas.store.paths import open_name
from writer_service import fs, log
from writer_service.catalog.changes import SegmentGone, SegmentSealed
from writer_service.journal.checksum_cache import FrameChecksums
from writer_service.journal.group_commit import Waker
from writer_service.journal.journal import Journal
from writer_service.seal.sealing import finish_cut, seal

ENGINE_FIELDS: Final = ("model", "revision", "tokenizer", "vllm_version", "tap_version", "n_layers")
engines_named_max: Final = 64
patience_max: Final = 16  # segments that wait for a burst to end: 4 GiB
backlog_max: Final = 64  # segments that wait: more of them, and nothing is received until there are fewer
retry_s_first: Final = 1.0  # doubled with every failure of the same segment
retry_s_max: Final = 64.0


class Sealer:
    """Sealing of the segments that ``submit`` names, each wholly on the disk; ``step`` tells the journal of blocks."""

    def __init__(self, store: Path, uuid: bytes, epoch: int, db: sqlite3.Connection, waker: Waker,
                 journal: Journal) -> None:
        self._store, self._uuid, self._epoch, self._db, self._waker = store, uuid, epoch, db, waker
        self._journal = journal
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._waiting: deque[int] = deque()
        self._running: tuple[Future[bool], int] | None = None
        self._again: dict[int, float] = {}  # number → when to try again
        self._delay: dict[int, float] = {}  # number → how long was waited last

    @property
    def backlog(self) -> int:
        """Number of segments that wait or are being sealed."""
        return len(self._waiting) + (self._running is not None)

    def submit(self, numbers: Iterable[int]) -> None:
        """Seal journal files when their turn comes; until then nothing is held for them."""
        self._waiting.extend(numbers)

    def step(self, now: float, busy: bool = False) -> None:
        """Hand in the segment that has become a block, or was empty. Then begin with the next one, unless ``busy`` asks
        for patience; what failed and is due at ``now`` waits again.
        """
        if self._running is not None and self._running[0].done():
            (future, number), self._running = self._running, None
            if error := future.exception():
                # The journal file stays, wherever it got to, and is readable; the next start seals it at the latest.
                self._delay[number] = min(2 * self._delay.get(number, retry_s_first / 2), retry_s_max)
                self._again[number] = time.monotonic() + self._delay[number]
                log.warn("seal_failed", f"sealing segment {number}: {error}", segment=number, error=str(error))
            else:
                self._delay.pop(number, None)
                self._journal.checksums.forget(number)
                self._journal.change(SegmentSealed(number) if future.result() else SegmentGone(number))
                self._journal.counters.sealed += 1
                log.info("sealed", "a segment became a block", segment=number)
        for number in [number for number, due in self._again.items() if due <= now]:
            del self._again[number]
            self._waiting.append(number)
        if self._running is None and self._waiting and (not busy or len(self._waiting) > patience_max):
            number = self._waiting.popleft()
            known, cached = load_frames(self._db, number), self._journal.checksums.get(number)
            self._running = self._pool.submit(self._seal, number, self._engines(), known, cached), number
            self._running[0].add_done_callback(lambda _: self._waker.wake())

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _seal(
        self, number: int, engines: Mapping[str, Mapping[str, Any]], known: Sequence[tuple[int, int]],
        cached: Mapping[int, FrameChecksums],
    ) -> bool:
        if finish_cut(self._store, number):
            return True
        fd = fs.open_existing(self._store / open_name(number))
        try:
            return seal(self._store, self._uuid, number, fd, self._epoch, engines, known, cached)
        finally:
            fs.close(fd)

    def _engines(self) -> dict[str, dict[str, Any]]:
        """The newest engines, by stream, as blocks name them: of a rank of a group with what it sends."""
        query = 'SELECT stream, rank, "group", info FROM engines ORDER BY rowid DESC LIMIT ?'
        named: dict[str, dict[str, Any]] = {}
        for row in self._db.execute(query, (engines_named_max,)):
            info = json.loads(row["info"])
            named[row["stream"]] = {key: info.get(key) for key in ENGINE_FIELDS}
            if row["group"]:
                named[row["stream"]]["shares"] = info["layout"][row["rank"]]["shares"]
        return named
