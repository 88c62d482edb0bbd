"""Ranks whose own sender is gone while others of their engine or server go on: captures that need them lack rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from schemas.wire.layout import siblings
from writer_service import log
from writer_service.control_log import RanksLost
from writer_service.journal.journal import Journal
from writer_service.sender_state import SenderState

__all__ = ["LostRanks"]

_LOOK_S: Final = 0.5


class LostRanks:
    """Ranks that are lost, by their group or the engine that is in none, as the journal was last told.

    A rank is lost if it was last heard more than ``lost_after_s`` seconds before the last of its server. It is not lost
    any more once it is heard again. A server that ended, or that nobody hears, has no lost ranks; nor has an engine
    that ended. A server that stood still as a whole is heard rank by rank when it comes back, and gets the time for
    that. If all living engines of a server follow others of their names, the server was started again. Engines that
    were last heard before are then of a start that is over.
    """

    def __init__(self, db: sqlite3.Connection, journal: Journal, senders: Iterable[SenderState], lost_after_s: float
                 ) -> None:
        self._db, self._journal, self._senders, self._lost_after_s = db, journal, senders, lost_after_s
        self._told: dict[str, list[int]] = {}
        self._since: dict[str, float] = {}  # from when on a group's ranks are waited for (monotonic)
        self._newest: dict[str, float] = {}  # when the last of a server was heard, as of the look before
        self._began: float | None = None  # the first look (monotonic)
        self._left: dict[str, list[int]] = {}  # told by a writer before, of groups that nobody greeted as since
        self._look_s = float("-inf")
        self.count = 0  # of groups that go on

    def forgive(self, seconds: float) -> None:
        """Add a standstill of this process to all deadlines."""
        self._since = {group: since + seconds for group, since in self._since.items()}
        self._newest = {server: heard + seconds for server, heard in self._newest.items()}

    def forget(self) -> None:
        """Drop what was told, after a commit that failed: the catalog has what counts."""
        self._told = {}

    def find(self, now: float) -> None:
        """Journal what has changed."""
        if now < self._look_s + _LOOK_S:
            return
        self._look_s = now
        groups, newest = dict[str, dict[int, SenderState]](), dict[str, float]()
        for state in self._senders:
            if state.instance:
                ranks = groups.setdefault(state.instance, {})
                if state.rank not in ranks or ranks[state.rank].last_seen < state.last_seen:
                    ranks[state.rank] = state  # of streams that followed each other
                server = siblings(state.instance)
                newest[server] = max(newest.get(server, float("-inf")), state.last_seen)
        stood = {server for server, heard in newest.items()
                 if heard - self._newest.get(server, float("-inf")) > self._lost_after_s}
        self._since = {group: now if group not in self._since or siblings(group) in stood else self._since[group]
                       for group in groups}
        self._newest = newest
        self._told = {group: self._told[group] if group in self._told else self._known(group) for group in groups}
        count, begun = 0, self._begun_again(now)
        for group, ranks in groups.items():
            heard = newest[siblings(group)]
            before = max(state.last_seen for state in ranks.values()) < begun.get(siblings(group), float("-inf"))
            goes_on = now - heard <= self._lost_after_s and not (before or all(state.ended for state in ranks.values()))
            lost = self._lost(group, ranks, min(now, heard)) if goes_on else []
            count += len(lost)
            if lost != self._told[group]:
                self._tell(group, lost)
        self.count = count + self._absent(now, groups, newest)

    def _begun_again(self, now: float) -> dict[str, float]:
        """The begin of the first living engine of each server that was started again under its name."""
        begun = dict[str, float]()
        named = [state for state in self._senders if state.instance]
        for state in named:
            if not state.ended and now - state.last_seen <= self._lost_after_s:
                follows = any((other.instance, other.rank) == (state.instance, state.rank) and other.begun < state.begun
                              for other in named)
                server = siblings(state.instance)
                begun[server] = min(begun.get(server, float("inf")), state.begun if follows else float("-inf"))
        return begun

    def _tell(self, group: str, lost: list[int]) -> bool:
        if not self._journal.try_append(SenderState("", 0, "writer"), RanksLost(group, lost)):
            return False
        log.warn("ranks_lost", f"ranks {lost} of the engine {group} have lost their senders; restart the engine"
                 if lost else f"all ranks of the engine {group} have senders again", group=group, ranks=lost)
        self._told[group] = lost
        return True

    def _absent(self, now: float, groups: Collection[str], newest: Mapping[str, float]) -> int:
        """Ranks of engines none of whose ranks greeted this writer: lost as a writer before told, while others of their
        server are heard. Engines that ended while no writer ran have none, once whoever is there has greeted.
        """
        if self._began is None:
            self._began = now
            told = [row[0] for row in self._db.execute('SELECT DISTINCT "group" FROM lost_ranks')]
            self._left = {group: self._known(group) for group in told}
        over = now - self._began > self._lost_after_s
        for group in list(self._left):
            unheard = now - newest.get(siblings(group), float("-inf")) > self._lost_after_s
            if group in groups or (over and unheard and self._tell(group, [])):
                del self._left[group]
        return sum(map(len, self._left.values()))

    def _known(self, group: str) -> list[int]:
        """The lost ranks that a writer before this one told."""
        query = 'SELECT rank FROM lost_ranks WHERE "group" = ? ORDER BY rank'
        return [row["rank"] for row in self._db.execute(query, (group,))]

    def _lost(self, group: str, ranks: Mapping[int, SenderState], newest: float) -> list[int]:
        """The lost ranks of a group, the last of whose server was heard at ``newest``.

        A rank that was forgiven a silence of ours counts as heard just now, like one that was not silent. A rank that
        was lost before it began to be waited for is lost until it is heard.
        """
        since = self._since[group]
        count = max(1, *(len(state.layout) for state in ranks.values()))
        heard = {rank: min(newest, ranks[rank].last_seen) if rank in ranks else float("-inf") for rank in range(count)}
        return [rank for rank, heard_s in heard.items() if newest - max(heard_s, since) > self._lost_after_s
                or (heard_s <= since and rank in self._told[group])]
