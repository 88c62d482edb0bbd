"""Ranks that never join a capture which their leader finished: nothing else would end the wait for them."""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

from schemas.catalog.parts import load_parts
from schemas.catalog.records import find_capture
from schemas.spec import Resolved
from writer_service.control_log import PartsLost
from writer_service.journal.journal import Journal
from writer_service.sender_state import SenderState

__all__ = ["AbsentParts"]

_LOOK_S: Final = 0.5


class AbsentParts:
    """Captures that wait for ranks of a group, each since it was first seen to (monotonic seconds).

    A rank that joined is known to be gone by its stream; one that did not join for so long has no sender any more.
    """

    def __init__(self, db: sqlite3.Connection, journal: Journal, lost_after_s: float) -> None:
        self._db, self._journal, self._lost_after_s = db, journal, lost_after_s
        self._since: dict[str, float] = {}
        self._look_s = float("-inf")

    def forgive(self, seconds: float) -> None:
        """Add a standstill of this process to all deadlines: who joins may not have been heard."""
        self._since = {capture: since + seconds for capture, since in self._since.items()}

    def find(self, now: float) -> None:
        """Journal which ranks are given up."""
        if now < self._look_s + _LOOK_S:
            return
        self._look_s = now
        query = """SELECT id FROM captures WHERE "group" <> '' AND status = 'running' AND finish_seq IS NOT NULL"""
        waiting = {row["id"]: self._since.get(row["id"], now) for row in self._db.execute(query)}
        for capture, since in waiting.items():
            if now - since > self._lost_after_s and (absent := self._absent(capture)):
                self._journal.try_append(SenderState("", 0, "writer"), PartsLost(capture, absent))
                waiting[capture] = now  # the catalog hears of it in a moment
        self._since = waiting

    def _absent(self, capture_id: str) -> list[int]:
        capture = find_capture(self._db, capture_id)
        if capture is None or capture.resolved is None:
            return []
        parts = load_parts(self._db, capture)
        needed = parts.needed(msgspec.json.decode(capture.resolved, type=Resolved))
        return sorted(needed - parts.joined - parts.lost)
