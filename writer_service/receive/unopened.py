"""Captures that ranks joined and their leader never opened: nothing else would end the wait for it."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from typing import Final

from schemas.wire.layout import LEADER
from schemas.wire.records import Abandon
from writer_service import log
from writer_service.journal.journal import Journal
from writer_service.receive.capture_rules import CaptureRules
from writer_service.receive.record_checks import RefusedError
from writer_service.receive.senders import Senders
from writer_service.sender_state import SenderState

__all__ = ["Unopened"]

_LOOK_S: Final = 0.5
_SILENT: Final = 4  # times as long as an engine may be silent: a leader on another host may come back and open it


@dataclass(slots=True)
class _Wait:
    """The time since which a capture has waited (monotonic), and the number below which its leader's Open must be."""

    since_s: float
    below: tuple[str, int] | None = None  # the leader's stream, and a number


class Unopened:
    """Captures that wait for their Open, each since it was first seen to.

    A leader opens a capture in the same step in which others join it. So no Open comes any more where the leader ended,
    or has been silent for long. Nor does one come after everything has arrived that waited at the leader some time
    after the Join.
    """

    def __init__(self, db: sqlite3.Connection, journal: Journal, rules: CaptureRules, senders: Senders,
                 lost_after_s: float) -> None:
        self._db, self._journal, self._rules, self._senders = db, journal, rules, senders
        self._lost_after_s = lost_after_s
        self._waits: dict[str, _Wait] = {}
        self._look_s = float("-inf")

    def forgive(self, seconds: float) -> None:
        """Add a standstill of this process to all deadlines."""
        for wait in self._waits.values():
            wait.since_s += seconds

    def find(self, now: float) -> None:
        """Close as failed what is given up."""
        if now < self._look_s + _LOOK_S:
            return
        self._look_s = now
        query = """SELECT id, "group" FROM captures WHERE status = 'pending' AND "group" <> ''"""
        groups = {row["id"]: row["group"] for row in self._db.execute(query)}
        self._waits = {capture: self._waits.get(capture) or _Wait(now) for capture in groups}
        for capture, wait in self._waits.items():
            if now - wait.since_s > self._lost_after_s and (why := self._over(groups[capture], wait, now)):
                self._give_up(capture, why)
                wait.since_s, wait.below = now, None  # the catalog hears of it in a moment

    def _over(self, group: str, wait: _Wait, now: float) -> str:
        """Why the leader of a group opens no such capture any more; "" where it may."""
        leaders = [state for state in self._senders if state.group == group and state.rank == LEADER]
        leader = max(leaders, key=lambda state: state.last_seen, default=None)
        if leader is not None and leader.ended:
            return f"rank {LEADER} of its engine ended"
        if leader is None or now - leader.last_seen > self._lost_after_s:
            since = max(wait.since_s, float("-inf") if leader is None else leader.last_seen)
            gone = now - since > _SILENT * self._lost_after_s
            return f"rank {LEADER} of its engine has no sender any more" if gone else ""
        if leader.tap is None:
            return ""
        below = leader.received + leader.tap.waiting
        if wait.below is not None and wait.below[0] == leader.stream:
            below = min(below, wait.below[1])
        wait.below = leader.stream, below
        return f"rank {LEADER} of its engine did not open it: too much waited for the writer, or it was refused" if (
            leader.received >= below) else ""

    def _give_up(self, capture: str, why: str) -> None:
        record = Abandon(0, capture, f"other ranks joined it, but {why}")
        with contextlib.suppress(RefusedError):  # it was opened, or deleted, and the catalog lags
            effect = self._rules.accept("", 0, record)
            if self._journal.try_append(SenderState("", 0, "writer"), record):
                effect()
                log.warn("never_opened", f"capture {capture} failed: {record.reason}", capture=capture)
