"""The writer killed anywhere: at random, and at every single call that touches the disk."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.conftest import times
from tests.faults.nursery import Forked, Nursery
from tests.faults.traffic import Traffic
from tests.support.store_helpers import until

Record = Callable[[str, object], None]
OPS = ("write_at", "datasync", "rename")
RARE_OPS = ("sync_dir", "open_new", "truncate", "write_new", "remove", "punch")


def test_row_01_killed_at_random(
    nursery: Nursery, tmp_path: Path, rng: random.Random, record_property: Record
) -> None:
    """kill -9 while captures are opened, filled, finished, deleted, sealed and erased, also while it is recovering."""
    stores, kills = times(1, 4), times(12, 128)
    seeds = [rng.randrange(1 << 30) for _ in range(stores)]
    with ThreadPoolExecutor(stores) as pool:
        rows = sum(pool.map(lambda seed: killed(Forked(nursery, tmp_path / f"{seed}"), seed, kills), seeds))
    record_property("times", f"{stores * kills} kills in {stores} stores, {rows} rows compared")


def killed(writer: Forked, seed: int, kills: int) -> int:
    """So many lives of a writer on one store; the number of rows compared."""
    rng, rows, store = random.Random(seed), 0, writer.store
    writer.begin()
    assert writer.ready()
    traffic = Traffic(writer.endpoint, rng)
    traffic.connect()
    for kill in range(kills):
        traffic.send(rng.randrange(1, 40))
        time.sleep(rng.random() * 0.03)
        if rng.random() < 0.7:
            traffic.receive()
        if kill % 16 == 15:  # lives are too short to seal all that they leave
            until(lambda: len(list((store / "writers/w0/journal").glob("*.open"))) < 4)
        writer.end(signal.SIGKILL)
        writer.begin()
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.06)
            writer.end(signal.SIGKILL)
            writer.begin()
        assert writer.ready()
        rows += traffic.check(store, some=None if kill % 50 == 49 else 4)
        traffic.connect()
    traffic.settle(store)
    rows += traffic.check(store)
    writer.end(signal.SIGTERM)
    rows += traffic.check(store)
    traffic.close()
    return rows


def greet(writer: Forked, traffic: Traffic) -> None:
    """Connect; a writer that dies of it is started again."""
    try:
        traffic.connect()
    except AssertionError:
        if writer.alive:
            raise
        writer.begin()
        assert writer.ready()
        traffic.connect()


def scenario(writer: Forked, seed: int, **fault: str) -> tuple[int, bool]:
    """A small life with everything in it, one fault; rows compared, and whether the fault happened."""
    fired = writer.folder / "fired"
    fired.unlink(missing_ok=True)
    traffic = Traffic(writer.endpoint, random.Random(seed))
    writer.begin(FAULT_FIRED=str(fired), **fault)
    if not writer.ready():  # it died, or gave up with an error: the next start must find everything as it was
        assert fired.exists(), writer.log.read_text()
        writer.begin()
        assert writer.ready()
    greet(writer, traffic)
    for part in range(4):
        traffic.send(7)
        enough = time.monotonic() + (0.25 if part == 1 else 0.03)  # time to seal and erase
        while writer.alive and time.monotonic() < enough:
            traffic.receive()
            time.sleep(0.005)
        if not writer.alive:
            assert fired.exists(), writer.log.read_text()
            writer.begin()
            assert writer.ready()
            traffic.check(writer.store)
            greet(writer, traffic)
    while True:
        try:
            traffic.settle(writer.store, lambda: writer.alive)
        except AssertionError:
            assert not writer.alive, writer.log.read_text()
        if writer.alive:
            break
        writer.begin()  # without the fault: it dies once
        assert writer.ready()
        greet(writer, traffic)
    rows = traffic.check(writer.store)
    writer.end(signal.SIGTERM)
    writer.begin()
    assert writer.ready()
    rows += traffic.check(writer.store)
    writer.end(signal.SIGTERM)
    traffic.close()
    return rows, fired.exists()


@pytest.mark.parametrize("op", [*OPS, *(pytest.param(op, marks=pytest.mark.faults) for op in RARE_OPS)])
@pytest.mark.parametrize("what", ["die", "EIO"])
def test_row_02_09_10_every_call(
    nursery: Nursery, tmp_path: Path, rng: random.Random, record_property: Record, what: str, op: str
) -> None:
    """The Nth call of a file operation fails, or the process dies in it, for N = 1, 2, … until no run has an Nth."""

    def attempt(number: int, seed: int) -> tuple[int, bool]:
        store = tmp_path / f"{number}"
        came = scenario(Forked(nursery, store), seed, FAULT=f"{op}::{number}:1:{what}")
        shutil.rmtree(store)
        return came

    sweep, first, fired, rows = times(0, 1), 1, 0, 0
    at_once = times(1, 4)  # they mostly wait
    with ThreadPoolExecutor(at_once) as pool:
        while True:
            numbers = range(first, first + at_once) if sweep else [rng.randrange(3, 30)]
            done = list(pool.map(attempt, numbers, [rng.randrange(1 << 30) for _ in numbers]))
            rows += sum(found for found, _ in done)
            fired += sum(happened for _, happened in done)
            first += at_once
            if not sweep or not any(happened for _, happened in done):
                break
    record_property("times", f"{op}: {fired} × {what}, {rows} rows compared")
