"""Ranks of a group whose own sender is gone while the others go on: captures that need them lack rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable
from typing import Final

from writer_service import log
from writer_service.control_log import RanksLost
from writer_service.journal.journal import Journal
from writer_service.sender_state import SenderState

__all__ = ["LostRanks"]

_LOOK_S: Final = 0.5


class LostRanks:
    """Ranks that are lost, by group, as the journal was last told.

    A rank is lost where it was last heard so many seconds before the last of its group, and is not where it is heard
    again. An engine that ended, or that nobody hears, has none that are lost; one that comes back from standing still
    as a whole is heard rank by rank, and gets the time for that.
    """

    def __init__(self, db: sqlite3.Connection, journal: Journal, senders: Iterable[SenderState], lost_after_s: float
                 ) -> None:
        self._db, self._journal, self._senders, self._lost_after_s = db, journal, senders, lost_after_s
        self._told: dict[str, list[int]] = {}
        self._since: dict[str, float] = {}  # from when on a group's ranks are waited for (monotonic)
        self._newest: dict[str, float] = {}  # when the last of a group was heard, as of the look before
        self._began: float | None = None  # the first look (monotonic)
        self._cleared = False  # whether groups that nobody greeted as since then are no longer told of
        self._look_s = float("-inf")
        self.count = 0  # of groups that go on

    def forgive(self, seconds: float) -> None:
        """Add a standstill of this process to all deadlines."""
        self._since = {group: since + seconds for group, since in self._since.items()}
        self._newest = {group: heard + seconds for group, heard in self._newest.items()}

    def forget(self) -> None:
        """Drop what was told, after a commit that failed: the catalog has what counts."""
        self._told = {}

    def find(self, now: float) -> None:
        """Journal what has changed."""
        if now < self._look_s + _LOOK_S:
            return
        self._look_s = now
        groups: dict[str, list[SenderState]] = {}
        for state in self._senders:
            if state.group:
                groups.setdefault(state.group, []).append(state)
        newest = {group: max(state.last_seen for state in states) for group, states in groups.items()}
        self._since = {group: self._since[group] if newest[group] - self._newest.get(group, float("-inf"))
                       <= self._lost_after_s else now for group in groups}
        self._newest = newest
        self._told = {group: self._told[group] if group in self._told else self._known(group) for group in groups}
        count = 0
        for group, states in groups.items():
            goes_on = now - newest[group] <= self._lost_after_s and not all(state.ended for state in states)
            lost = self._lost(group, states, now) if goes_on else []
            count += len(lost)
            if lost != self._told[group]:
                self._tell(group, lost)
        self.count = count
        self._clear_unheard(now, groups)

    def _tell(self, group: str, lost: list[int]) -> bool:
        if not self._journal.try_append(SenderState("", 0, "writer"), RanksLost(group, lost)):
            return False
        log.warn("ranks_lost", f"ranks {lost} of the engine {group} have lost their senders; restart the engine"
                 if lost else f"all ranks of the engine {group} have senders again", group=group, ranks=lost)
        self._told[group] = lost
        return True

    def _clear_unheard(self, now: float, groups: Collection[str]) -> None:
        """Once, when whoever is there has greeted: engines that ended while no writer ran have no lost ranks."""
        if self._began is None:
            self._began = now
        if self._cleared or now - self._began <= self._lost_after_s:
            return
        told = [row[0] for row in self._db.execute('SELECT DISTINCT "group" FROM lost_ranks')]
        self._cleared = all([self._tell(group, []) for group in told if group not in groups])

    def _known(self, group: str) -> list[int]:
        """What a writer before this one told."""
        query = 'SELECT rank FROM lost_ranks WHERE "group" = ? ORDER BY rank'
        return [row["rank"] for row in self._db.execute(query, (group,))]

    def _lost(self, group: str, states: list[SenderState], now: float) -> list[int]:
        """Those of a group. Who was forgiven a silence of ours counts as heard just now, like who was not silent; who
        was lost before it began to be waited for is lost until it is heard.
        """
        since = self._since[group]
        heard = dict.fromkeys(range(len(states[0].layout)), float("-inf"))
        for rank in {state.rank for state in states}:
            heard[rank] = min(now, max(state.last_seen for state in states if state.rank == rank))
        newest = max(heard.values())
        return [rank for rank, heard_s in heard.items() if newest - max(heard_s, since) > self._lost_after_s
                or (heard_s <= since and rank in self._told[group])]
