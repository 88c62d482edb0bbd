"""The rate that a store takes: measured at the start, and by rows that come as fast as they are taken."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.ids import new_ulid
from schemas.wire.messages import Ack, Ping, StoreState, TapCounters, TapState, encode
from tests.support.store_helpers import PROGRAMS, Sender, WriterProcess, engine_info, until
from writer_service.journal.store_rate import StoreRate

SLOW = PROGRAMS / "slow_writer.py"
MIB = 1 << 20


def told(sender: Sender) -> StoreState:
    """What the writer answers to a Ping that asks."""
    sender.socket.send(encode(Ping(asks=True)))
    while True:
        answer: Any = sender.receive(30)
        assert answer is not None
        if (state := getattr(answer, "store", msgspec.UNSET)) is not msgspec.UNSET:
            assert isinstance(state, StoreState)
            return state


def at(rate: StoreRate, nbytes: int, start: float, end: float, full: bool = True) -> None:
    rate.start()
    rate.commit(nbytes, full, start, end)


def test_rows_that_do_not_stop_coming_are_what_the_store_takes() -> None:
    rate = StoreRate()
    at(rate, 50 * MIB, 0.0, 1.0)
    assert (rate.bytes_s, rate.measured) == (0.0, "")  # nobody knows when the one before ended
    at(rate, 40 * MIB, 1.0, 2.0)
    assert (rate.bytes_s, rate.measured) == (40 * MIB, "traffic")
    at(rate, 20 * MIB, 2.0, 3.0)
    assert rate.bytes_s == pytest.approx(30 * MIB, rel=0.03)
    for second in range(3, 60):
        at(rate, 10 * MIB, second, second + 1)
    assert 10 * MIB < rate.bytes_s < 11 * MIB  # what is long ago is forgotten


def test_senders_without_room_while_a_commit_is_synced_do_not_make_the_store_idle() -> None:
    rate = StoreRate()
    at(rate, 50 * MIB, 0.0, 1.0)
    rate.start()
    rate.quiet()
    rate.commit(40 * MIB, True, 1.0, 2.0)
    assert rate.bytes_s == 40 * MIB


def test_bursts_do_not_make_a_store_faster() -> None:
    """Commits in turns that end soon after the one before, in whose time their rows were written."""
    rate, now = StoreRate(), 0.0
    for _ in range(100):
        for seconds in (0.128, 0.005):
            at(rate, 32 * MIB if seconds > 0.1 else MIB, now, now + seconds)
            now += seconds
    assert rate.bytes_s == pytest.approx(33 * MIB / 0.133, rel=0.1)
    for _ in range(50):  # of each burst the first is none of a row: what began to be written before it counts too
        rate.quiet()
        at(rate, MIB, now, now + 0.1)
        rate.start()
        rate.commit(32 * MIB, True, now, now + 0.128)
        now += 1.0
    assert rate.bytes_s < 33 * MIB / 0.128


def test_rows_that_come_slowly_say_nothing_of_the_store() -> None:
    rate = StoreRate()
    rate.bytes_s, rate.measured = 100 * MIB, "start"
    at(rate, 50 * MIB, 0.0, 1.0)
    rate.quiet()
    at(rate, 32 * MIB, 8.0, 9.0)
    at(rate, MIB, 9.0, 10.0, full=False)
    assert (rate.bytes_s, rate.measured) == (100 * MIB, "start")
    rate.quiet()
    at(rate, 300 * MIB, 10.0, 11.0)  # unless they show that it takes more than was thought
    assert (rate.bytes_s, rate.measured) == (300 * MIB, "traffic")


def test_the_start_measures_the_disk_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE_S", "0.5")
    store = tmp_path / "store"
    with WriterProcess(store, script=SLOW) as writer, Sender(writer.endpoint, role="api") as api:
        assert until(lambda: told(api).measured) == "start"
        found = told(api)
        assert 0 < found.bytes_s <= 4 * MIB / 0.5
        assert found.rings == {}
        assert not list((store / "writers").rglob("*.probe"))
        writer.stop()


def test_a_disk_with_little_room_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=MIB))
    rate = StoreRate()
    rate._probe(tmp_path)
    assert (rate.bytes_s, rate.measured) == (0.0, "")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_slower_than_it_seemed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender whose room is so many frames, which a sync of ``slow_s`` frees at most."""
    window, slow_s = 8, 0.2
    for name, value in (("SLOW_S", slow_s), ("PROBE_S", 0.01), ("COMMIT_BYTES", 16 << 10)):
        monkeypatch.setenv(name, str(value))
    with WriterProcess(tmp_path / "store", script=SLOW) as writer, Sender(writer.endpoint) as engine:
        capture = new_ulid()
        engine.open(capture, prompt_len=4000, codec="raw")
        engine.wait()
        assert until(lambda: told(engine).measured) in ("start", "traffic")
        nbytes = 0
        for number in range(100):
            frame, _ = engine.frame([(capture, 1, range(number * 32, (number + 1) * 32))], codec="raw")
            nbytes = sum(part.nbytes for part in frame.streams)
            if number >= window:
                engine.wait(engine.seq - window)
        engine.wait()
        found = told(engine)
        assert found.measured == "traffic"
        assert 0 < found.bytes_s <= window * nbytes / slow_s
        writer.stop()


def test_rings_of_engines_are_told_by_name_and_only_to_who_asks(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer, Sender(
            writer.endpoint, engine=msgspec.structs.replace(engine_info(), name="east")) as engine, Sender(
            writer.endpoint, role="api") as api:
        engine.socket.send(encode(Ping(TapState(TapCounters(), 4096, 1024, 0))))
        answer = engine.receive(30)
        assert isinstance(answer, Ack) and answer.store is msgspec.UNSET
        assert until(lambda: told(api).rings) == {"east": (4096, 1024)}
        engine.bye()
        assert until(lambda: not told(api).rings)
        writer.stop()
