"""The clerk: asks the store what became of captures that have ended, and makes room for those to come."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from schemas.errors import NotFoundError
from schemas.manifest import FINAL
from schemas.read.reader import StoreReader
from schemas.wire.control_channel import ControlChannel
from schemas.wire.records import Delete

_FINAL_S: Final = 60.0


@dataclass(slots=True)
class Account:
    """Rows of captures, as their manifests have them."""

    stored: int = 0
    missing: Counter[str] = field(default_factory=Counter)  # by reason


class Clerk:
    """A thread that takes captures as they end. Beyond ``room`` rows those that came first are deleted, all that began
    together at once: so whole blocks go. ``room`` None: somebody else sees to that.
    """

    def __init__(self, store: Path, endpoint: str, room: int | None) -> None:
        self._store, self._endpoint, self._room = store, endpoint, room
        self._waiting: queue.Queue[list[str] | None] = queue.Queue()
        self._kept: deque[tuple[list[str], int]] = deque()
        self._error: BaseException | None = None
        self.account = Account()
        self._thread = threading.Thread(target=self._run, name="clerk", daemon=True)
        self._thread.start()

    def take(self, captures: list[str]) -> None:
        """Captures that began together and have ended."""
        self._waiting.put(captures)

    def settle(self) -> Account:
        """What all that were taken since the last call have come to."""
        self._waiting.join()
        if self._error is not None:
            raise self._error
        found, self.account = self.account, Account()
        return found

    def close(self) -> None:
        """End the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        channel = ControlChannel(self._endpoint, "cli")
        with StoreReader(self._store) as reader:
            while (captures := self._waiting.get()) is not None:
                try:
                    if self._error is None:
                        self._kept.append((captures, self._count(reader, captures)))
                        self._make_room(channel)
                except BaseException as error:  # told by ``settle``
                    self._error = error
                self._waiting.task_done()
        channel.close()

    def _count(self, reader: StoreReader, captures: list[str]) -> int:
        """Add captures to the account; rows of them."""
        rows, until = 0, time.monotonic() + _FINAL_S
        for capture in captures:
            while True:
                try:
                    manifest = reader.manifest(capture)
                    if manifest.status in FINAL:
                        break
                except NotFoundError:  # the catalog follows
                    pass
                if time.monotonic() > until:
                    raise RuntimeError(f"capture {capture} has not ended in the store after {_FINAL_S:.0f} s")
                time.sleep(0.05)
            rows += manifest.captured
            for entry in manifest.rows:
                for missing in entry.missing:
                    self.account.missing[missing.reason] += missing.rows
        self.account.stored += rows
        return rows

    def _make_room(self, channel: ControlChannel) -> None:
        while self._room is not None and len(self._kept) > 1 and sum(rows for _, rows in self._kept) > self._room:
            for capture in self._kept.popleft()[0]:
                channel.post(lambda seq, capture=capture: Delete(seq, capture))
