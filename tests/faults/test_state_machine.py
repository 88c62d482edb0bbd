"""Anything in any order, against a small model: captures opened, filled, finished, deleted and held; messages twice,
late and in disorder; writers killed, cut off from power and stopped; engines lost; blocks sealed, erased and compacted;
catalogs made again; and four ranks that share the rows of captures, each at its own pace, some of which die. Whatever
came before, readers get what the model says, and nothing else.
"""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, core, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.store.paths import journal_folder
from schemas.wire.records import Hold
from tests.faults.conftest import times
from tests.faults.model import Capture, Drop, Finish, Rows, read
from tests.faults.nursery import Forked, Nursery
from tests.faults.ranks.words import RANK_WORDS, Player, RankWords
from tests.support.consistency import dump
from tests.support.store_helpers import SITE, until
from tests.support.writers.power import Certain
from writer_service import fs
from writer_service.control_log import log_numbers
from writer_service.recover.recovery import recover
from writer_service.tools.compaction import compact
from writer_service.tools.fsck import fsck
from writer_service.tools.rebuild import rebuild

LAZY = ("--segment-bytes", "60000", "--seal-idle-s", "600", "--keep-s", "600", "--engine-lost-s", "600")
EAGER = ("--segment-bytes", "60000", "--seal-idle-s", "0.02", "--keep-s", "0.02", "--engine-lost-s", "600")
DAY_MS, VERSIONS = 86_400_000, 7
CODECS, POSITIONS = ("int8b64", "int8b64", "raw"), ("all", "all", "generated", [(1, 3), (5, 90)])
FATES = ("kill", "kill_a_start", "lose_power", "stop", "make_cold", "erase", "make_the_catalog_again",
         "lose_the_engine", "grow_old", "check")
Word = tuple[str, int, int]
some = st.integers(0, 1 << 16)
WORDS = st.lists(st.tuples(st.sampled_from([
    "opens", "starts", "rows", "rows", "rows", "rows_again", "rows_after_a_gap", "drops", "finishes", "comes_late",
    "twice", "holds_back", "lets_go", *RANK_WORDS]), some, st.integers(0, 4)), min_size=4, max_size=12)


class Pipeline(RankWords, RuleBasedStateMachine):
    """One store from its first writer to its last reader."""

    def __init__(self, nursery: Nursery) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tap-store-"))
        self.store = self.folder / "store"
        self.writer = Forked(nursery, self.store)
        self.endpoint = self.writer.endpoint
        self.captures: list[Capture] = []
        self.strays: list[str] = []
        self.unsettled_loss = False
        self.start(LAZY)
        self.engine, self.api = Player(self.writer.endpoint), Player(self.writer.endpoint, role="api")
        self.connect()

    # ── what is said ────────────────────────────────────────────────────────────────────────────────────────────

    @initialize(words=WORDS)
    def begin(self, words: list[Word]) -> None:
        self.say([("opens", 0, 0), ("opens", 4, 1), *words])

    @rule(words=WORDS)
    def say(self, words: list[Word]) -> None:
        for what, pick, number in words:
            getattr(self, what)(pick, number)

    def opens(self, pick: int, number: int) -> None:
        """Every second is announced by the API first, and some of these stay so for a while."""
        rng = random.Random(pick)
        capture = Capture(new_ulid(), len(self.captures) + 1, rng.choice(CODECS), rng.choice([[0, 1, 2, 3], [1, 3]]),
                          1 + number, rng.choice(POSITIONS), old=rng.random() < 0.5)
        self.captures.append(capture)
        if pick % 2:
            capture.owner = f"owner {capture.number}"
            capture.owned = self.api.own(capture.id, owner=capture.owner, created_ms=_created_ms(capture.old))
            self.api.wait()
        if not pick % 2 or pick % 8 > 1:
            self._open(capture)

    def starts(self, pick: int, number: int) -> None:
        """One that was only announced."""
        if capture := self.one(pick, lambda c: c.engine is None and not c.standing(self.api.seq)[1]):
            self._open(capture)

    def _open(self, capture: Capture) -> None:
        capture.opened = self.engine.open(
            capture.id, capture.prompt_len, {SITE: capture.layers}, capture.codec, capture.positions,
            created_ms=_created_ms(capture.old))
        capture.engine = self.engine

    def rows(self, pick: int, number: int) -> None:
        self._frame(pick, 1 + number * number, "next")

    def rows_again(self, pick: int, number: int) -> None:
        """Computed anew, as after a preemption."""
        self._frame(pick, 1 + number, "again")

    def rows_after_a_gap(self, pick: int, number: int) -> None:
        self._frame(pick, 1 + number, "gap")

    def _frame(self, pick: int, count: int, where: str) -> None:
        """Of one capture, or of two that are alike."""
        first = self.one(pick, self.runs)
        if first is None:
            return
        chosen = [first, *(c for c in [self.one(pick // 7, self.runs)] if c and c is not first
                           and (c.codec, c.layers) == (first.codec, first.layers))]
        seq, rows = self.engine.next(), []
        for capture in chosen:
            start = {"next": capture.reach, "again": capture.reach // 2, "gap": capture.reach + 2}[where]
            capture.events.append(Rows(seq, start, start + count, seq % VERSIONS))
            rows.append((capture.id, capture.number, range(start, start + count)))
        self.engine.frame(rows, layers=first.layers, codec=first.codec, version=seq % VERSIONS)

    def drops(self, pick: int, number: int) -> None:
        if capture := self.one(pick, self.runs):
            start = max(capture.reach - number, 0)
            seq = self.engine.dropped(capture.id, start, start + 3, capture.layers)
            capture.events.append(Drop(seq, start, start + 3))

    def finishes(self, pick: int, number: int) -> None:
        """Where the rows end, or earlier; the tokens may go on for longer."""
        if capture := self.one(pick, self.runs):
            end = max(capture.reach - (2 if number == 1 else 0), 0)
            output = max(end + 1 + (3 if number == 2 else 0) - capture.prompt_len, 0)
            reason = "abort" if number in (2, 3) else "stop"
            seq = self.engine.finish(capture.id, end, output, reason)
            capture.events.append(Finish(seq, end, output, reason))

    def comes_late(self, pick: int, number: int) -> None:
        """Rows that nobody may ever see: after the end, after a delete, of another engine, of nobody's capture."""
        capture = self.one(pick, lambda c: c.engine is not None and not self.runs(c)) if number else None
        if capture is None:
            self.strays.append(new_ulid())
        self.engine.frame([(capture.id if capture else self.strays[-1], 999, range(3))])

    def twice(self, pick: int, number: int) -> None:
        """Old words again."""
        rng = random.Random(pick)
        sender = rng.choice([self.engine, self.api])
        for word in rng.sample(sender.said, min(len(sender.said), 1 + number)):
            sender.socket.send_multipart(word)

    def holds_back(self, pick: int, number: int) -> None:
        if self.engine.held_back is None:
            self.engine.held_back = []

    def lets_go(self, pick: int, number: int) -> None:
        """In disorder: what comes too early is sent again when the engine wonders."""
        self.engine.let_go(random.Random(pick))

    # ── what is asked ───────────────────────────────────────────────────────────────────────────────────────────

    @rule(pick=some, what=st.sampled_from(["delete", "delete", "hold", "release"]))
    def ask(self, pick: int, what: str) -> None:
        """The API and the engine do not wait for each other; who asks has heard that the capture is there."""
        capture = self.one(pick, lambda c: not c.standing(self.api.seq)[1])
        if capture is None:
            return
        if capture.engine is not None and capture.opened > capture.engine.durable:
            self.settle()
            if capture.opened > capture.engine.durable:
                return  # its engine died before it was told
        seq = self.api.delete(capture.id) if what == "delete" else self.api.send(
            Hold(self.api.next(), capture.id, what == "hold"))
        capture.asked.append((seq, what))
        if capture.engine is None:
            self.api.wait()  # before an engine hears of it

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────────────

    @rule(what=st.sampled_from(FATES), seed=some)
    def befall(self, what: str, seed: int) -> None:
        with self.telling():
            getattr(self, what)(random.Random(seed))

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What failed is printed: deaths are at other moments when Hypothesis plays the same again, and it may not."""
        try:
            yield
        except BaseException:
            traceback.print_exc()
            print(f"the writer said: {self.writer.log.read_text()}")
            raise

    def kill(self, rng: random.Random) -> None:
        """SIGKILL, anywhere."""
        time.sleep(rng.choice([0, 0, 0.02, 0.06]))
        if rng.random() < 0.5:
            self.hear()
        self.writer.end(signal.SIGKILL)
        self.start(rng.choice([LAZY, EAGER]))
        self.check_what_arrived()
        self.connect()

    def kill_a_start(self, rng: random.Random) -> None:
        self.writer.end(signal.SIGKILL)
        self.writer.begin(EAGER, FAULT_SYNCED=str(self.folder / "synced"))
        time.sleep(rng.random() * 0.03)
        self.kill(rng)

    def lose_power(self, rng: random.Random) -> None:
        """SIGKILL, and what was not synced is cut off, zeros or noise."""
        if self.unsettled_loss:
            self.settle()  # what a dead engine sent last is either there or not, but does not come again
        time.sleep(rng.choice([0, 0.02, 0.04]))
        self.engine.sync()  # an Ack of this very moment
        self.hear()
        self.writer.end(signal.SIGKILL)
        Certain(self.store, self.folder / "synced").lose(rng)
        self.start(LAZY)
        self.connect()
        self.check(rng)

    def stop(self, rng: random.Random) -> None:
        """SIGTERM: everything is sealed."""
        self.rest(signal.SIGTERM)
        assert not list((self.store / "writers/w0/journal").glob("*.open"))
        self.check_what_arrived()
        self.start(rng.choice([LAZY, EAGER]))
        self.connect()

    def make_cold(self, rng: random.Random) -> None:
        """Compaction; what is compacted was sealed by a stop."""
        self.rest(rng.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]))
        with self.noting_syncs():
            assert not compact(self.store).failed
        self.check_what_arrived()
        self.start(LAZY)
        self.connect()

    def erase(self, rng: random.Random) -> None:
        """Nothing of what was deleted stays on the disk; its neighbours do."""
        self.settle()
        self.rest(rng.choice([signal.SIGTERM, signal.SIGKILL]))
        self.start(EAGER)
        self.connect()
        self.ask(rng.randrange(1 << 16), "delete")
        self.settle()
        with StoreReader(self.store) as reader:
            assert until(lambda: not reader.erasing()), "deleted rows stay"
        assert until(lambda: len(log_numbers(self.store / journal_folder())) <= 8), "logs stay"
        self.check(rng)

    def make_the_catalog_again(self, rng: random.Random) -> None:
        """By the command, or because it is not there any more."""
        self.rest(rng.choice([signal.SIGTERM, signal.SIGKILL]))
        if rng.random() < 0.5:
            for path in self.store.glob("catalog.sqlite*"):
                path.unlink()
        else:
            with self.noting_syncs():
                fs.close(rebuild(self.store).state.lock)
        self.start(LAZY)
        self.check_what_arrived()
        self.connect()

    def lose_the_engine(self, rng: random.Random) -> None:
        """What it has not finished is incomplete; the next engine has a stream or an epoch of its own."""
        before, how = self.engine, rng.choice(["begins again", "says goodbye", "falls silent"])
        before.let_go(rng)
        if how == "says goodbye":
            self.settle()
            before.bye()
            before.sync()
        elif how == "falls silent":
            self.settle()
            before.close()
            self.writer.end(signal.SIGKILL)
            self.start((*LAZY[:-1], "0.1"))
            with StoreReader(self.store) as reader:
                assert until(lambda: not reader.captures(status="running")), "an engine's silence is not noticed"
            self.writer.end(signal.SIGKILL)
            self.start(LAZY)
            self.api.close()
            self.api.connect()
            self.api.hello()
            self.all_ranks_fell_silent()
        before.close()
        again = {"stream": before.stream, "epoch": before.epoch + 1} if how == "begins again" else {}
        self.engine = Player(self.writer.endpoint, **again)
        self.engine.hello()
        for capture in self.captures:
            capture.lost |= capture.engine is before  # whatever it said last may not have arrived
        self.unsettled_loss = how == "begins again"

    def grow_old(self, rng: random.Random) -> None:
        """Retention takes what is old, but nothing that is held or still runs."""
        self.settle()
        doomed = [c for c in self.captures if c.old and not c.standing(self.api.seq)[0]
                  and (c.engine is None or c.finished or c.lost)]
        self.writer.end(signal.SIGKILL)
        self.start((*EAGER, "--retain-days", "30"))
        for capture in doomed:
            capture.expired = True
        ids = {capture.id for capture in doomed}
        with StoreReader(self.store) as reader:  # what goes while it is read in several steps has no one answer
            assert until(lambda: ids.isdisjoint(row.id for row in reader.captures(limit=1000))), "kept for too long"
            time.sleep(0.1)
        self.writer.end(signal.SIGKILL)
        self.start(LAZY)
        self.check_what_arrived()
        self.connect()

    # ── what must be true ───────────────────────────────────────────────────────────────────────────────────────

    def check(self, _: random.Random) -> None:
        """Once everything has arrived there is one right answer."""
        self.settle()
        self.check_what_arrived()
        with StoreReader(self.store) as reader:
            alive = {c.id for c in self.captures if c.answer(c.engine.durable if c.engine else 0, self.api.seq)}
            self.check_ranks(reader, settled=True)
            listed = {row.id for row in reader.captures(limit=1000)} - {c.id for c in self.rank_captures}
            doubtful = {c.id for c in self.captures if c.engine is not None and c.engine.seq > c.engine.durable}
            assert alive - doubtful == listed - doubtful

    def check_what_arrived(self) -> None:
        """Of what was sent without an answer, any part may count, but nothing else, and nothing in part."""
        told = sorted({self.api.durable, *(seq for c in self.captures for seq in (c.owned, *(s for s, _ in c.asked))
                                           if seq > self.api.durable)})
        with StoreReader(self.store) as reader:
            for capture in self.captures:
                got, right = read(reader, capture), capture.answers(told)
                if got not in right:
                    note(f"capture {capture}")
                    assert [_told(got)] == [_told(answer) for answer in right]
                    raise AssertionError(f"capture {capture.number}: rows have other bytes than were sent")
            self.check_ranks(reader, settled=False)
            known = {capture.id for capture in (*self.captures, *self.rank_captures)}
            assert {row.id for row in reader.captures(limit=1000)} <= known
            for name in self.strays:
                assert read(reader, Capture(name, 0, "", [], 1, "all", False)) is None

    def teardown(self) -> None:
        """The store is whole, and its journals and blocks alone say the same."""
        try:
            with self.telling():
                self.check_all()
        finally:
            self.writer.end(signal.SIGKILL)
            for sender in self.senders:
                sender.close()
            shutil.rmtree(self.folder)
            shutil.rmtree(self.writer.folder)

    def check_all(self) -> None:
        self.check(random.Random(0))
        self.rest(signal.SIGTERM)
        self.check_what_arrived()
        assert fsck(self.store).bad == []
        fs.close(recover(self.store).lock)  # ends what the keeper was at when it was stopped
        before = dump(self.store)
        done = rebuild(self.store)
        fs.close(done.state.lock)
        now = dump(self.store)
        assert {table: set(before[table]) ^ set(now[table]) for table in done.differences} == {}
        self.check_what_arrived()

    # ── doing it ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def senders(self) -> list[Player]:
        return [self.engine, self.api, *self.ranks]

    def one(self, pick: int, which: Any) -> Capture | None:
        found = [capture for capture in self.captures if which(capture)]
        return found[pick % len(found)] if found else None

    def runs(self, capture: Capture) -> bool:
        return capture.engine is self.engine and not capture.finished and not capture.standing(self.api.seq)[1]

    def start(self, flags: tuple[str, ...]) -> None:
        self.writer.begin(flags, FAULT_SYNCED=str(self.folder / "synced"))
        assert self.writer.ready(), self.writer.log.read_text()

    def connect(self) -> None:
        """Greet a new life of the writer; what it lacks goes out again."""
        for sender in self.senders:
            before = sender.durable
            sender.held_back = None
            sender.close()
            sender.connect()
            assert sender.hello().durable >= before, "what was acknowledged is forgotten"

    @contextmanager
    def noting_syncs(self) -> Iterator[None]:
        """What is synced here counts as well when the power goes."""
        with Certain(self.store, self.folder / "synced").watching():
            yield

    def rest(self, number: int) -> None:
        self.hear()
        self.writer.end(number)
        self.hear()

    def hear(self) -> None:
        for sender in self.senders:
            while sender.receive(0) is not None:
                pass

    def settle(self) -> None:
        """Until all that was sent is safe, and readers know it."""
        for sender in (self.engine, *self.ranks):
            sender.let_go(random.Random(0))
            sender.resend()
        for sender in (self.engine, *self.ranks):
            sender.wait()
        # To an API an Ack means that the catalog knows, and commits follow one another.
        self.api.send(Hold(self.api.next(), new_ulid(), True))
        self.api.wait()
        self.unsettled_loss = False


def _created_ms(old: bool) -> int:
    return time.time_ns() // 10**6 - (40 * DAY_MS if old else 0)


def _told(answer: Any) -> Any:
    """An answer without bytes."""
    return answer and (answer.status, answer.total, answer.expected, [p for p, _ in answer.rows], answer.missing,
                       answer.stored)


def play(nursery: Nursery, examples: int, steps: int, *phases: Phase) -> None:
    # A few are the same every time, so that everybody's test run is about their own change; many are drawn anew.
    same = examples < 10 and core.global_force_seed is None
    run_state_machine_as_test(lambda: Pipeline(nursery), settings=settings(  # type: ignore[no-untyped-call]
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck),
        derandomize=same, **({"database": None} if same else {}),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, *phases]))


def test_anything_in_any_order(nursery: Nursery) -> None:
    play(nursery, times(8, 60), 30)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_anything_in_any_order_for_long(nursery: Nursery) -> None:
    play(nursery, 1000, 60, Phase.shrink)
