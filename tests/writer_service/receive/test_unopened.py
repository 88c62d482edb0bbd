"""Captures that ranks joined and their leader never opened: they fail, with the reason, once nothing can open them."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.wire.messages import Ping, TapCounters, TapState, encode
from tests.support.consistency import assert_consistent
from tests.support.ranks import LAYERS, LivingRanks
from tests.support.store_helpers import WriterProcess, until

RANKS, LOST_S = 2, 1
FLAGS = ("--engine-lost-s", str(LOST_S), "--seal-idle-s", "600")  # none is sealed in the moment of the end


def tell(ranks: LivingRanks, waiting: int) -> None:
    """So many messages of each rank are on their way, as its heartbeat says."""
    ranks.tap = TapState(TapCounters(), 1 << 20, 0, waiting)


def join(ranks: LivingRanks, capture: str) -> None:
    """All that the second rank sends of a capture."""
    ranks.all[1].join(capture)
    ranks.all[1].rows(capture, 1, "q", range(3), 1)
    ranks.all[1].part_finish(capture)
    ranks.all[1].wait()


def begin_and_end(ranks: LivingRanks, capture: str) -> None:
    """All that the leader sends of it."""
    ranks.leader.open(capture, 3, {"q": LAYERS})
    ranks.leader.rows(capture, 1, "q", range(3), 1)
    ranks.leader.finish(capture, 3, 1)
    ranks.leader.wait()


@pytest.mark.parametrize("how", ["it did not take it", "it ended", "it is silent"])
def test_a_capture_that_its_leader_never_opened_fails(tmp_path: Path, how: str) -> None:
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store, *FLAGS) as writer, StoreReader(store) as reader, \
            LivingRanks(writer.endpoint, RANKS) as ranks:
        with ranks.lock:
            join(ranks, capture)
            if how == "it ended":
                ranks.leader.bye()
                ranks.dead.add(ranks.leader)
        if how == "it did not take it":
            tell(ranks, 0)
        elif how == "it is silent":
            ranks.kill(0)
        assert until(lambda: reader.capture(capture).status in ("pending", "failed"))
        assert until(lambda: reader.capture(capture).status == "failed")
        words = {"it did not take it": "did not open it: too much waited for the writer, or it was refused",
                 "it ended": "ended", "it is silent": "has no sender any more"}
        assert reader.manifest(capture).failed == f"other ranks joined it, but rank 0 of its engine {words[how]}"
    assert_consistent(store)


def test_a_leader_that_greets_again_has_not_said_yet_what_waits(tmp_path: Path) -> None:
    """What it said before its silence does not count: the Open may have come to wait since."""
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store, *FLAGS) as writer, StoreReader(store) as reader, \
            LivingRanks(writer.endpoint, RANKS) as ranks:
        with ranks.lock:
            ranks.leader.socket.send(encode(Ping(TapState(TapCounters(), 1 << 20, 0, 0))))
            ranks.dead.add(ranks.leader)  # from now on it greets, and no more
            join(ranks, capture)

        def failed_meanwhile() -> bool:
            with ranks.lock:
                ranks.leader.hello()
            return reader.capture(capture).status == "failed"

        assert until(lambda: reader.capture(capture).status == "pending")
        assert not until(failed_meanwhile, 5 * LOST_S)
        with ranks.lock:
            begin_and_end(ranks, capture)
            ranks.dead.remove(ranks.leader)
        assert until(lambda: reader.capture(capture).status == "complete")
    assert_consistent(store)


def test_what_waits_at_the_leader_may_still_open_it(tmp_path: Path) -> None:
    """However long that takes: its Open is among what it has not sent yet."""
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store, *FLAGS) as writer, StoreReader(store) as reader, \
            LivingRanks(writer.endpoint, RANKS) as ranks:
        with ranks.lock:
            join(ranks, capture)
        tell(ranks, 4)
        assert not until(lambda: reader.capture(capture).status == "failed", 5 * LOST_S)
        with ranks.lock:
            begin_and_end(ranks, capture)
        assert until(lambda: reader.capture(capture).status == "complete")
    assert_consistent(store)
