"""What the ranks of one engine say in the state machine: each its share, at its own pace, and some of them die."""

from __future__ import annotations

import random
from typing import Any

from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.faults.ranks.model import RANKS, SITES, RankCapture, Told, check_ranks
from tests.support.ranks import LAYERS, Rank, info_of
from tests.support.store_helpers import Sender

RANK_WORDS = ("ranks_open", "ranks_open", "rank_joins", "ranks_compute", "ranks_compute", "ranks_compute",
              "ranks_finish", "rank_finishes", "rank_holds_back", "rank_lets_go", "rank_says_it_twice", "ranks_delete",
              "rank_dies")


class Player(Sender):
    """A sender that can hold messages back, and remembers every word it said."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.said: list[list[bytes]] = []
        self.held_back: list[list[bytes]] | None = None
        super().__init__(*args, **kwargs)

    def send(self, message: Any, *parts: bytes) -> int:
        if self.held_back is None:
            seq = super().send(message, *parts)
        else:
            socket, self.socket = self.socket, _Silent()  # type: ignore[assignment]
            seq = super().send(message, *parts)
            self.socket = socket
            self.held_back.append(self.kept[seq])
        self.said.append(self.kept[seq])
        return seq

    def let_go(self, rng: random.Random) -> None:
        """Say what was held back, in any order."""
        words, self.held_back = self.held_back or [], None
        rng.shuffle(words)
        for word in words:
            self.socket.send_multipart(word)


class _Silent:
    def send_multipart(self, _: list[bytes]) -> None:
        """Say nothing."""


class RankPlayer(Player, Rank):
    """One of the ranks."""


class RankWords:
    """The words; ``pick`` and ``number`` as the machine draws them."""

    api: Player
    endpoint: str

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[RankPlayer] = []
        self.rank_captures: list[RankCapture] = []
        self.step = 0

    def settle(self) -> None:
        raise NotImplementedError

    def _ranks(self) -> list[RankPlayer]:
        if not self.ranks:
            info = info_of(RANKS)
            self.ranks = [RankPlayer(self.endpoint, rank, info) for rank in range(RANKS)]
            for rank in self.ranks:
                rank.hello()
        return self.ranks

    def _one_of_ranks(self, pick: int, done: bool = False) -> RankCapture | None:
        """One that its leader has not finished, or whose others have not, with ``done``."""
        found = [c for c in self.rank_captures if not c.deleted and 0 not in c.lost and (0 in c.finished) == done
                 and self.ranks and self._of_this_group(c)]
        return found[pick % len(found)] if found else None

    def _of_this_group(self, capture: RankCapture) -> bool:
        return capture.number >= self.group_began

    group_began = 0  # the number of the first capture of the ranks of now

    def ranks_open(self, pick: int, number: int) -> None:
        """The leader opens; who joins does so before it or after it, and some not yet."""
        ranks, rng = self._ranks(), random.Random(pick)
        capture = RankCapture(new_ulid(), 100 + len(self.rank_captures), 1 + number)
        self.rank_captures.append(capture)
        order = [rank for rank in ranks if rank.rank == 0 or rng.random() < 0.8]
        rng.shuffle(order)
        for rank in order:
            if rank.rank == 0:
                rank.open(capture.id, capture.prompt_len, {site: LAYERS for site in SITES})
            else:
                rank.join(capture.id)
            capture.joined.add(rank.rank)

    def rank_joins(self, pick: int, number: int) -> None:
        """One that did not join yet."""
        capture = self._one_of_ranks(pick, done=bool(number % 2))
        if capture is not None and 0 < number < RANKS and number not in capture.joined:
            self.ranks[number].join(capture.id)
            capture.joined.add(number)
            capture.lost.discard(number)

    def ranks_compute(self, pick: int, number: int) -> None:
        """A step: of new positions or of those of before; now and then a rank drops its rows, or is not there."""
        capture, rng = self._one_of_ranks(pick), random.Random(pick)
        if capture is None:
            return
        self.step += 1
        start = rng.choice([capture.reach, capture.reach, capture.reach // 2, capture.reach + 1])
        stop = start + 1 + number
        silent = 0.1 if start < capture.reach else 0.01  # what it sent of these positions before must not stand in
        for rank in rng.sample(self.ranks, RANKS):
            if rank.rank not in capture.joined or rank.rank in capture.lost | capture.finished or rng.random() < silent:
                continue
            for site in SITES:
                if rng.random() < 0.03:
                    rank.drop(capture.id, site, start, stop, rank.share(site))
                    capture.say(rank.rank, site, Told(start, stop))
                else:
                    rank.rows(capture.id, capture.number, site, range(start, stop), self.step,
                              version=self.step % 7)
                    capture.say(rank.rank, site, Told(start, stop, self.step))

    def ranks_finish(self, pick: int, number: int) -> None:
        """The leader and some of the others; the rest later."""
        capture, rng = self._one_of_ranks(pick), random.Random(pick)
        if capture is None:
            return
        capture.end = max(capture.reach - (2 if number == 1 else 0), 0)
        capture.output = max(capture.end + 1 + (3 if number == 2 else 0) - capture.prompt_len, 0)
        capture.reason = "abort" if number in (2, 3) else "stop"
        self.ranks[0].finish(capture.id, capture.end, capture.output, capture.reason)
        capture.finished.add(0)
        for rank in range(1, RANKS):
            if rng.random() < 0.7:
                self._part_finish(capture, rank)

    def rank_finishes(self, pick: int, number: int) -> None:
        """One that is late."""
        capture = self._one_of_ranks(pick, done=True)
        if capture is not None and 0 < number < RANKS:
            self._part_finish(capture, number)

    def _part_finish(self, capture: RankCapture, rank: int) -> None:
        if rank in capture.joined - capture.lost - capture.finished:
            self.ranks[rank].part_finish(capture.id)
            capture.finished.add(rank)

    def rank_holds_back(self, pick: int, number: int) -> None:
        rank = self._ranks()[number % RANKS]
        if rank.held_back is None:
            rank.held_back = []

    def rank_lets_go(self, pick: int, number: int) -> None:
        self._ranks()[number % RANKS].let_go(random.Random(pick))

    def rank_says_it_twice(self, pick: int, number: int) -> None:
        rank = self._ranks()[number % RANKS]
        for word in random.Random(pick).sample(rank.said, min(len(rank.said), 3)):
            rank.socket.send_multipart(word)

    def ranks_delete(self, pick: int, number: int) -> None:
        """And one of them still sends rows of it."""
        capture = self._one_of_ranks(pick, done=bool(number % 2))
        if capture is not None and number < 2:
            self.settle()
            self.api.delete(capture.id)
            self.api.wait()
            capture.deleted = True
            self.ranks[1].rows(capture.id, 999, "q", range(2), self.step)

    def rank_dies(self, pick: int, number: int) -> None:
        """Its part of what it joined is lost, of the leader all; another sender takes its place."""
        self._ranks()
        self.settle()
        rank, before = number % RANKS, self.ranks[number % RANKS]
        if pick % 2:
            before.bye()
            before.sync()
        before.close()
        again = {} if pick % 2 else {"stream": before.stream, "epoch": before.epoch + 1}
        self.ranks[rank] = RankPlayer(self.endpoint, rank, before.engine, **again)
        self.ranks[rank].hello()
        for capture in self.rank_captures:
            if self._of_this_group(capture) and not capture.deleted and rank in capture.joined - capture.finished:
                capture.lost.add(rank)

    def all_ranks_fell_silent(self) -> None:
        """A writer that waits for nobody came by: what was not finished is lost, and so are those that never joined."""
        for capture in self.rank_captures:
            if capture.deleted or not self._of_this_group(capture):
                continue
            absent = set(range(RANKS)) - capture.joined if 0 in capture.finished else set()
            capture.lost |= (capture.joined - capture.finished) | absent
        for rank in self.ranks:
            rank.close()
        self.ranks, self.group_began = [], 100 + len(self.rank_captures)

    def check_ranks(self, reader: StoreReader, settled: bool) -> None:
        """All of them."""
        for capture in self.rank_captures:
            check_ranks(reader, capture, settled)
