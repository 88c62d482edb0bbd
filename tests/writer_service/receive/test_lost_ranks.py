"""Ranks whose sender is gone while others of their group go on, as the writer tells readers of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.read.reader import StoreReader
from tests.support.consistency import assert_consistent
from tests.support.ranks import LivingRanks
from tests.support.store_helpers import PROGRAMS, WriterProcess, until

RANKS, LOST_S = 4, 3
FLAGS = ("--engine-lost-s", str(LOST_S))


def test_who_is_lost_is_told_again_after_a_commit_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends to be where the rank is heard again. Another engine's are none of its business."""
    store, broken, fired = tmp_path / "store", tmp_path / "broken", tmp_path / "fired"
    monkeypatch.setenv("FAULT", "datasync:control-:1:1:EIO")
    monkeypatch.setenv("FAULT_WHILE", str(broken))
    monkeypatch.setenv("FAULT_FIRED", str(fired))
    with WriterProcess(store, *FLAGS, script=PROGRAMS / "faulty_writer.py") as writer, StoreReader(store) as reader, \
            LivingRanks(writer.endpoint, RANKS) as other, LivingRanks(writer.endpoint, RANKS) as ranks:
        assert not until(lambda: reader.lost_ranks(ranks.info.group), 2 * LOST_S)
        broken.touch()
        ranks.kill(2)
        assert until(fired.exists) and reader.lost_ranks(ranks.info.group) == []
        broken.unlink()
        assert until(lambda: reader.lost_ranks(ranks.info.group) == [2])
        assert reader.lost_ranks(other.info.group) == [] == reader.lost_ranks("")
        ranks.start(2)
        assert until(lambda: reader.lost_ranks(ranks.info.group) == [])
        ranks.kill(1)
        assert until(lambda: reader.lost_ranks(ranks.info.group) == [1])
    assert_consistent(store)


def test_an_engine_that_has_ended_has_no_lost_ranks(tmp_path: Path) -> None:
    """Nor has one that ended while no writer ran: they would be in the way of its siblings for ever."""
    store = tmp_path / "store"
    with WriterProcess(store, *FLAGS) as writer, StoreReader(store) as reader:
        with LivingRanks(writer.endpoint, RANKS) as ranks:
            ranks.kill(2)
            assert until(lambda: reader.lost_ranks(ranks.info.group) == [2])
        assert until(lambda: reader.lost_ranks(ranks.info.group) == [])
    with WriterProcess(store, *FLAGS) as writer, LivingRanks(writer.endpoint, RANKS) as ranks, \
            StoreReader(store) as reader:
        ranks.kill(1)
        assert until(lambda: reader.lost_ranks(ranks.info.group) == [1])
        writer.kill()
    with WriterProcess(store, *FLAGS), StoreReader(store) as reader:
        assert reader.lost_ranks(ranks.info.group) == [1]
        assert until(lambda: reader.lost_ranks(ranks.info.group) == [])
    assert_consistent(store)


def test_an_engine_of_one_rank_is_lost_where_others_of_its_server_go_on(tmp_path: Path) -> None:
    """Not where it is alone: then nobody tells whether it ended. Nor where it said that it ends."""
    with WriterProcess(tmp_path / "store", *FLAGS) as writer, StoreReader(tmp_path / "store") as reader, \
            LivingRanks(writer.endpoint, 1, "01S-abc-0") as first, \
            LivingRanks(writer.endpoint, 1, "01S-abc-1") as other, \
            LivingRanks(writer.endpoint, 1, "01T-abc-0") as alone:
        first.kill(0)
        alone.kill(0)
        assert until(lambda: reader.lost_of_server("01S-abc-1") == {"data-parallel engine 0": [0]})
        assert reader.lost_of_server("01S-abc-0") == reader.lost_of_server("01S-abc-1")
        assert reader.lost_ranks("01S-abc-1") == [0] and reader.lost_ranks("01T-abc-0") == []
        writer.kill()  # the next one never hears of it, but for what this one told
        writer.start()
        assert not until(lambda: reader.lost_ranks("01S-abc-1") != [0], 4 * LOST_S)
        first.start(0)
        assert until(lambda: reader.lost_ranks("01S-abc-1") == [])
        with first.lock:
            first.all[0].bye()
        first.kill(0)
        assert not until(lambda: reader.lost_ranks("01S-abc-1"), 3 * LOST_S)
        other.kill(0)
    assert_consistent(tmp_path / "store")


def test_an_engine_of_several_ranks_is_lost_whole_where_others_of_its_server_go_on(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store", *FLAGS) as writer, StoreReader(tmp_path / "store") as reader, \
            LivingRanks(writer.endpoint, 2, "01S-abc-0") as first, LivingRanks(writer.endpoint, 2, "01S-abc-1"):
        for rank in (0, 1):
            first.kill(rank)
        assert until(lambda: reader.lost_of_server("01S-abc-1") == {"data-parallel engine 0": [0, 1]})
        first.start(1)
        assert until(lambda: reader.lost_ranks("01S-abc-1") == [0])
    assert_consistent(tmp_path / "store")


def test_of_a_server_that_ended_while_no_writer_ran_nobody_is_lost(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with WriterProcess(store, *FLAGS) as writer, StoreReader(store) as reader, \
            LivingRanks(writer.endpoint, 1, "01S-abc-0") as first, \
            LivingRanks(writer.endpoint, 1, "01S-abc-1") as other:
        first.kill(0)
        assert until(lambda: reader.lost_ranks("01S-abc-1") == [0])
        writer.kill()
        other.kill(0)
        writer.start()
        assert until(lambda: reader.lost_ranks("01S-abc-1") == [])
    assert_consistent(store)


def test_a_server_that_began_again_with_fewer_engines_lacks_none(tmp_path: Path) -> None:
    """Killed, and started under the same name: the engine that it has no more would be lost for ever."""
    with WriterProcess(tmp_path / "store", *FLAGS) as writer, StoreReader(tmp_path / "store") as reader, \
            LivingRanks(writer.endpoint, 1, "01S-abc-0") as first, \
            LivingRanks(writer.endpoint, 1, "01S-abc-1") as other:
        first.kill(0)
        other.kill(0)
        assert not until(lambda: reader.lost_ranks("01S-abc-0"), 1)  # their last words are taken before the new begin
        first.start(0)
        assert not until(lambda: reader.lost_ranks("01S-abc-0"), 4 * LOST_S)
    assert_consistent(tmp_path / "store")
