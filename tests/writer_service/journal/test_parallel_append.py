"""Bursts: frames written side by side into several segments, failures in the midst of them, descriptors bounded."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from schemas import limits
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.support.consistency import dump
from tests.support.store_helpers import (
    PROGRAMS,
    SITE,
    Sender,
    WriterProcess,
    assert_adds_up,
    assert_rows,
    engine_info,
    until,
)
from writer_service.config import lanes_max

FAULTY = PROGRAMS / "faulty_writer.py"
WIDTH, ROWS, COUNT = 4096, 80, 6
SLOT = WIDTH * ROWS * 4 * 4  # a frame of raw float32 × 4 layers: 5 MiB, more than a lane's share


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    path = tmp_path / "ring"
    path.write_bytes(bytes(COUNT * SLOT))
    return path


def greeted(writer: WriterProcess, ring: Path) -> Sender:
    return Sender(writer.endpoint, engine=engine_info(WIDTH), ring=ring, ring_bytes=COUNT * SLOT)


def burst(writer: WriterProcess, engine: Sender, capture: str, spoil: int = -1, times: int = 1) -> None:
    """Frames that lie in the socket together; frame ``spoil`` does not match its checksum."""
    writer.process.send_signal(signal.SIGSTOP)
    for number in range(COUNT * times):
        at = number % COUNT
        rows = [(capture, 1, range(at * ROWS, (at + 1) * ROWS))]
        frame, (table,) = engine.frame(rows, codec="raw", width=WIDTH, send=False, ring_at=at * SLOT)
        if number == spoil:
            part = msgspec.structs.replace(frame.streams[0], xxh3=1)
            frame = msgspec.structs.replace(frame, streams=[part])
        engine.send(frame, table)
    writer.process.send_signal(signal.SIGCONT)


def finished(engine: Sender, store: Path, capture: str) -> str:
    engine.finish(capture, end=COUNT * ROWS, output=0)
    engine.wait()
    with StoreReader(store) as reader:
        until(lambda: reader.capture(capture).status != "running")
        assert_adds_up(reader.manifest(capture))
        return reader.capture(capture).status


def opened(engine: Sender) -> str:
    capture = new_ulid()
    engine.open(capture, prompt_len=COUNT * ROWS, codec="raw")
    engine.wait()
    return capture


def test_a_burst_is_written_to_several_files_and_a_trickle_to_one(tmp_path: Path, ring: Path) -> None:
    store = tmp_path / "store"
    with WriterProcess(store) as writer, greeted(writer, ring) as engine:
        capture = opened(engine)
        burst(writer, engine, capture)
        engine.wait()
        files = len(list((store / "writers/w0/journal").glob("*.open")))
        assert files >= 2
        for _ in range(3):
            engine.frame([(capture, 1, range(9))], codec="raw", width=WIDTH)
            engine.wait()
        assert len(list((store / "writers/w0/journal").glob("*.open"))) == files
        assert finished(engine, store, capture) == "complete"
        with StoreReader(store) as reader:
            assert_rows(reader.slice(capture, SITE, [0, 3], 0, COUNT * ROWS), 1, range(COUNT * ROWS))
        writer.stop()
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 3], 0, COUNT * ROWS), 1, range(COUNT * ROWS))


def test_a_burst_is_synced_while_it_is_received(tmp_path: Path, ring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of it first and then all of it at once: disk and processor would wait for each other in turns. Files that
    are full by then are left for others.
    """
    monkeypatch.setenv("LINE_BYTES", str(SLOT))  # a frame a lane; with the default a busy lane may have all of it
    store = tmp_path / "store"
    flags = ("--segment-bytes", str(SLOT))
    with WriterProcess(store, *flags, script=PROGRAMS / "slow_writer.py") as writer, greeted(writer, ring) as engine:
        capture = opened(engine)
        before = engine.durable
        burst(writer, engine, capture, times=3)
        while engine.durable == before:
            assert engine.receive() is not None
        most = limits.commit_bytes_target + (lanes_max + 1) * SLOT  # a commit's, and what lanes may end meanwhile
        assert (engine.durable - before) * SLOT <= most < 3 * COUNT * SLOT
        assert finished(engine, store, capture) == "complete"
        writer.stop()
    assert len(list((store / "blocks").iterdir())) >= 4  # of two lanes


def test_a_burst_beyond_what_lanes_may_have_to_write(tmp_path: Path, ring: Path, monkeypatch: pytest.MonkeyPatch
                                                     ) -> None:
    """Nothing more is received until a lane is done, and then it goes on: each frame is more than they may have."""
    monkeypatch.setenv("LINE_BYTES", "1")
    store = tmp_path / "store"
    flags = ("--keep-s", "1000")  # a round of upkeep would wait for the lanes
    with WriterProcess(store, *flags, script=PROGRAMS / "slow_writer.py") as writer, greeted(writer, ring) as engine:
        capture = opened(engine)
        burst(writer, engine, capture, times=3)
        assert finished(engine, store, capture) == "complete"
        writer.stop()
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 3], 0, COUNT * ROWS), 1, range(COUNT * ROWS))
        assert len(dump(store)["frames"]) == 3 * COUNT


def test_a_disk_that_fills_in_the_midst_of_a_burst(tmp_path: Path, ring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the burst is taken, all of it comes again, and no row is in the store twice."""
    monkeypatch.setenv("FAULT", "write_at:.open:3:2:ENOSPC")
    store = tmp_path / "store"
    with WriterProcess(store, script=FAULTY) as writer, greeted(writer, ring) as engine:
        capture = opened(engine)
        burst(writer, engine, capture)
        assert finished(engine, store, capture) == "complete"
        assert "disk_errors=" in writer.stop()
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 3], 0, COUNT * ROWS), 1, range(COUNT * ROWS))
        assert sum(extent.rows for extent in reader.manifest(capture).sites[0].extents) == COUNT * ROWS


def test_a_sync_that_fails_while_lanes_write_takes_back_what_they_have_written(
        tmp_path: Path, ring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one line between what is stored and what comes again, and lanes are behind it."""
    monkeypatch.setenv("FAULT", "datasync:.open:1:1:EIO")
    store = tmp_path / "store"
    with WriterProcess(store, script=FAULTY) as writer, greeted(writer, ring) as engine:
        capture = opened(engine)
        burst(writer, engine, capture, times=3)
        assert finished(engine, store, capture) == "complete"
        assert "disk_errors=" in writer.stop()
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 3], 0, COUNT * ROWS), 1, range(COUNT * ROWS))
        assert len(dump(store)["frames"]) == 3 * COUNT


def test_a_bad_frame_in_the_midst_of_a_burst_costs_itself_alone(tmp_path: Path, ring: Path) -> None:
    store, bad = tmp_path / "store", 2
    with WriterProcess(store) as writer, greeted(writer, ring) as engine:
        capture = opened(engine)
        burst(writer, engine, capture, spoil=bad)
        assert finished(engine, store, capture) == "incomplete"
        assert [code for code, _ in engine.refused.values()] == ["malformed"]
        with StoreReader(store) as reader:
            there = [p for p in range(COUNT * ROWS) if p // ROWS != bad]
            assert_rows(reader.slice(capture, SITE, [0, 3], 0, COUNT * ROWS), 1, there)


def test_many_codecs_at_once_do_not_take_a_descriptor_each(tmp_path: Path) -> None:
    """Every parameter of a codec makes a segment of its own; those that wait to be sealed hold nothing open."""
    store, capture, count = tmp_path / "store", new_ulid(), 200
    with WriterProcess(store) as writer, Sender(writer.endpoint) as engine:
        engine.open(capture, prompt_len=count)
        most = 0
        for number in range(count):
            engine.frame([(capture, 1, [number])], codec=f"rp8:k=64,seed={number}")
            if number % 20 == 0:  # what has not reached the disk stays open, and a disk may be slow
                engine.wait()
                most = max(most, len(list(Path(f"/proc/{writer.process.pid}/fd").iterdir())))
        engine.wait()
        assert not engine.refused
        most = max(most, len(list(Path(f"/proc/{writer.process.pid}/fd").iterdir())))
        assert most < 150, most
        writer.kill()


def test_a_seal_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", "rename:.open:1:1:EIO,rename:.building:1:1:EIO")
    store, capture = tmp_path / "store", new_ulid()
    with (
        WriterProcess(store, "--seal-idle-s", "0.1", script=FAULTY) as writer,
        Sender(writer.endpoint) as engine,
    ):
        engine.open(capture, prompt_len=8)
        engine.frame([(capture, 1, range(8))])
        engine.finish(capture, end=8)
        engine.wait()
        assert until(lambda: [path.name for path in (store / "blocks").glob("w0-*.zarr")]) == ["w0-00000001.zarr"]
        with StoreReader(store) as reader:
            assert_rows(reader.slice(capture, SITE, [0, 3], 0, 8), 1, range(8))
        writer.stop()
