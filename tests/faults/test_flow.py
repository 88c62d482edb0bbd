"""Stops, limits, frozen writers, messages twice and out of order, missing files, and what stays behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schemas.errors import NotFoundError, TapError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.spec import Resolved
from schemas.wire.messages import encode
from schemas.wire.records import Finish, Open
from tests.faults.conftest import times
from tests.faults.nursery import Forked, Nursery
from tests.faults.traffic import Traffic
from tests.support.forked import tap
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import SITE, Sender, WriterProcess, assert_rows, engine_info, is_erased, until
from vllm_tap.loader.dataset import RowDataset
from vllm_tap.loader.dataset import rows as training_rows
from writer_service.tools.fsck import fsck

Record = Callable[[str, object], None]


@pytest.fixture
def writer(nursery: Nursery, store: Path) -> Forked:
    made = Forked(nursery, store)
    made.begin()
    assert made.ready()
    return made


@pytest.fixture
def traffic(writer: Forked, rng: random.Random) -> Traffic:
    made = Traffic(writer.endpoint, rng)
    made.connect()
    return made


def test_row_05_a_stop_under_load(writer: Forked, traffic: Traffic, store: Path, record_property: Record) -> None:
    """SIGTERM while messages wait in the socket: it commits, seals and says so; nothing acknowledged is gone."""
    stops, rows = times(2, 30), 0
    for _ in range(stops):
        traffic.send(traffic.rng.randrange(1, 120))
        writer.end(signal.SIGTERM, timeout_s=PATIENCE_S)
        assert "writer stopped" in writer.log.read_text()
        assert not list((store / "writers/w0/journal").glob("*.open"))
        traffic.receive()
        writer.begin()
        assert writer.ready()
        rows += traffic.check(store, some=4)
        traffic.connect()
    traffic.settle(store)
    record_property("times", f"{stops} stops, {rows + traffic.check(store)} rows compared")
    traffic.close()


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[None]:
    """A file system of its own, of so many bytes."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=700", "tmpfs", str(folder)],
                             capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"NOT RUN: no tmpfs can be mounted here, which takes root: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(ballast: Path, spare: int) -> None:
    """Take what is left of the file system but ``spare`` bytes."""
    size, step = 0, 1 << 20
    with ballast.open("wb") as file:
        while step >= 4096:  # piece by piece: what does not fit whole is not taken at all, and a writer takes some too
            try:
                os.posix_fallocate(file.fileno(), size, step)
                size += step
            except OSError:
                step //= 4
        file.truncate(max(size - spare, 0))


def test_row_06_a_disk_that_is_really_full(
    nursery: Nursery, tmp_path: Path, rng: random.Random, record_property: Record
) -> None:
    """A tmpfs fills up under a writer that receives, seals, erases, or is killed and started then: nothing is
    acknowledged that is not stored, reads live on, and when there is space again it goes on by itself."""
    rounds, kills, rows = times(2, 20), 0, 0
    disk = tmp_path / "disk"
    with small_disk(disk, times(64, 256) << 20):
        store, ballast = disk / "store", disk / "ballast"
        writer = Forked(nursery, store)
        writer.begin()
        assert writer.ready()
        traffic = Traffic(writer.endpoint, rng)
        traffic.connect()
        for number in range(rounds):
            traffic.send(30)
            traffic.engine.wait()
            traffic.api.own(new_ulid())
            traffic.api.wait()  # the catalog has heard of all that
            readable = traffic.engine.durable
            fill(ballast, rng.choice([0, 0, 4096, 60_000]))
            sent = 0
            while traffic.engine.durable == traffic.engine.seq or sent < 60:
                traffic.send(20)
                sent += 20
                time.sleep(0.1)
                traffic.receive()
                assert sent < 5000, "the disk does not fill"
            assert writer.alive, writer.log.read_text()
            rows += traffic.check(store, some=4, durable=readable)  # the catalog may be what the disk has no space for
            if number % 2:
                kills += 1
                writer.end(signal.SIGKILL)
                writer.begin()
                started = writer.ready()  # or it says that it cannot
                said = writer.log.read_text()
                assert started or "No space left" in said or "disk is full" in said, said
                assert "Traceback" not in said, said
                ballast.unlink()
                if not started:
                    writer.begin()
                    assert writer.ready(), writer.log.read_text()
                rows += traffic.check(store, some=4)
                traffic.connect()
            else:
                ballast.unlink()
            traffic.engine.wait()
        traffic.settle(store)
        rows += traffic.check(store)
        writer.end(signal.SIGTERM)
        traffic.close()
        assert fsck(store).bad == []
    record_property("times", f"{rounds} times full, {kills} of them killed and started, {rows} rows compared")


@contextmanager
def erased_on_a_full_disk(nursery: Nursery, disk: Path) -> Iterator[tuple[Path, list[str], RowDataset]]:
    """A store of two captures, the first of which was erased, their ids, and a dataset of before. Pages that erasing
    freed are none to be had: whoever faults them in there dies."""
    captures = [new_ulid() for _ in range(2)]
    with small_disk(disk, 8 << 20):
        store, writer = disk / "store", Forked(nursery, disk / "store")
        writer.begin()
        assert writer.ready()
        with Sender(writer.endpoint, engine=engine_info(1024)) as engine:
            for capture in captures:
                engine.open(capture)
            engine.frame([(capture, number, range(150)) for number, capture in enumerate(captures)], width=1024)
            for capture in captures:
                engine.finish(capture, end=150)
            engine.wait()
            assert until(lambda: list((store / "blocks").glob("w0-*.zarr")))
            before = training_rows(store, SITE, 1)
            engine.delete(captures[0])
            engine.wait()
            with StoreReader(store) as reader:
                assert until(lambda: is_erased(reader, captures[0]))
        writer.end(signal.SIGTERM)
        fill(disk / "ballast", 64 << 10)
        yield store, captures, before


def test_row_06_a_check_where_what_was_erased_lies_on_a_full_tmpfs(
    nursery: Nursery, tmp_path: Path, record_property: Record
) -> None:
    with erased_on_a_full_disk(nursery, tmp_path / "disk") as (store, _, _):
        done = tap("fsck", "--store", store)
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    record_property("times", "one check")


def train_on_what_is_left(store: Path, captures: list[str], before: RowDataset) -> None:
    left = training_rows(store, SITE, 1, verify=True)
    assert left.captures == captures[1:] and sum(len(batch["position"]) for batch in left) == 150
    for verify in (False, True):
        before.verify = verify
        with pytest.raises(NotFoundError, match=captures[0]):
            list(before)


def test_row_06_training_where_what_was_erased_lies_on_a_full_tmpfs(
    nursery: Nursery, tmp_path: Path, record_property: Record
) -> None:
    """What is left is read, with ``verify`` too, and a dataset of before says what was deleted."""
    with erased_on_a_full_disk(nursery, tmp_path / "disk") as given:
        child = multiprocessing.get_context("spawn").Process(target=train_on_what_is_left, args=given)
        child.start()
        child.join(PATIENCE_S)
        assert child.exitcode == 0
    record_property("times", "three datasets")


def test_row_08_a_limit_on_the_size_of_files(
    writer: Forked, traffic: Traffic, store: Path, record_property: Record
) -> None:
    """RLIMIT_FSIZE: a write is cut short, then refused, and not acknowledged; it goes on when the limit is gone."""
    limits, stuck = times(1, 10), 0
    for _ in range(limits):
        traffic.send(20)
        largest = max(path.stat().st_size for path in (store / "writers/w0/journal").iterdir())
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (largest + traffic.rng.randrange(9000), -1))
        before = traffic.engine.seq
        traffic.send(40)
        time.sleep(0.2)
        traffic.receive()
        assert writer.alive
        stuck += traffic.engine.durable < before + 40  # where a new file began, all may have fitted into it
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (-1, -1))
        traffic.engine.wait()
    assert stuck > limits // 2
    traffic.settle(store)
    record_property("times", f"{limits} limits, {traffic.check(store)} rows compared")
    traffic.close()


def test_row_13_a_frozen_writer(writer: Forked, traffic: Traffic, store: Path, record_property: Record) -> None:
    """SIGSTOP for a while, SIGCONT: nobody is taken for lost, everything arrives."""
    seconds = times(1, 30)
    traffic.send(20)
    os.kill(writer.pid, signal.SIGSTOP)
    traffic.send(60)
    time.sleep(seconds)
    os.kill(writer.pid, signal.SIGCONT)
    traffic.settle(store)
    record_property("times", f"{seconds} s, {traffic.check(store)} rows compared")
    traffic.close()


class Twisted(Sender):
    """A connection that says everything twice and in another order."""

    window: list[list[bytes]] = []
    rng = random.Random(0)

    def send(self, message: object, *parts: bytes) -> int:
        self.window = [*self.window, [b""]]
        seq = super().send(message, *parts)
        self.window[-1] = self.kept[seq]
        if len(self.window) >= 32:
            again = [*self.window, *self.window]
            self.rng.shuffle(again)
            for late in again:
                self.socket.send_multipart(late)
            self.window = []
        return seq


def test_row_17_18_twice_and_out_of_order(
    writer: Forked, traffic: Traffic, store: Path, record_property: Record
) -> None:
    """Windows of 32 messages come again twice over in random order: each counts once, in its place."""
    messages = times(100, 5000)
    plain, traffic.engine = traffic.engine, Twisted(writer.endpoint)
    Twisted.rng = traffic.rng
    traffic.engine.hello()
    plain.close()
    for _ in range(messages // 50):
        traffic.send(50)
        traffic.engine.wait()
    traffic.settle(store)
    rows = traffic.check(store)
    with StoreReader(store) as reader:
        for capture in traffic.captures:
            if not capture.delete and capture.total:
                assert sum(extent.rows for extent in reader.manifest(capture.id).sites[0].extents) == capture.total
    record_property("times", f"{messages} messages three times each, {rows} rows compared")
    traffic.close()


def test_row_20_flipped_bits_in_messages(
    writer: Forked, traffic: Traffic, store: Path, record_property: Record
) -> None:
    """Each has the number that is due: it is looked at to its end. Others are served meanwhile, memory stays."""
    messages, rng, capture = times(300, 20_000), traffic.rng, new_ulid()
    warm_up(traffic, store)
    with Sender(writer.endpoint) as liar:
        liar.open(capture, prompt_len=3)
        liar.wait()
        before = memory(writer)
        for number in range(messages):
            liar.seq = liar.sync().visible
            liar.kept.clear()
            kind = rng.randrange(4)
            if kind == 0:
                words = [encode(Open(liar.next(), new_ulid(), "r", "{}", Resolved({SITE: [0]}, {SITE: "raw"}, "all",
                                                                                  "allow"), 2, bytes(8), 0, 1))]
            elif kind == 1:
                words = [encode(Finish(liar.next(), capture, "stop", None, bytes(8), 3))]
            else:
                frame, parts = liar.frame([(capture, 1, range(8))], send=False)
                words = [encode(frame), *parts]
            for _ in range(rng.randrange(1, 4)):
                at = rng.randrange(len(words))
                changed = bytearray(words[at])
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
                words[at] = bytes(changed)
            liar.socket.send_multipart(words)
            if number % 100 == 0:
                traffic.send(5)
                traffic.receive()
        refused = len(liar.refused)
    assert writer.alive and "Traceback" not in writer.log.read_text()
    traffic.settle(store)
    rows = traffic.check(store)
    assert memory(writer) < before + 64e6
    record_property("times", f"{messages} messages with flipped bits, {refused} refused by number; {rows} rows of "
                    "others compared")
    traffic.close()


def warm_up(traffic: Traffic, store: Path) -> None:
    """So many rows that what is loaded late has been, such as numba: that is no leak."""
    capture = new_ulid()
    traffic.engine.open(capture)
    for start in range(0, 20_000, 2000):
        traffic.engine.frame([(capture, 1, range(start, start + 2000))])
    traffic.engine.finish(capture, end=20_000)
    traffic.engine.wait()
    until(lambda: not list((store / "writers/w0/journal").glob("*.open")))


def memory(writer: Forked) -> int:
    """Bytes of the writer that are no file's: the kernel keeps pages of libraries (LLVM's are 90 MB) as it likes."""
    resident, shared = Path(f"/proc/{writer.pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * 4096


def test_row_34_missing_files_and_stray_ones(store: Path) -> None:
    """A block's main file is gone: its rows are an error that names it, others are served. What a crash left goes."""
    captures = [new_ulid(), new_ulid()]
    for number, capture in enumerate(captures):
        with WriterProcess(store, "--seal-idle-s", "60") as writer, Sender(writer.endpoint) as engine:
            engine.open(capture)
            engine.frame([(capture, number, range(8))])
            engine.finish(capture, end=8)
            engine.wait()
            writer.stop()
    (store / "blocks/w0-00000001.zarr/q/c/0/0/0").unlink()
    (store / "blocks/.building-w0-00000009").mkdir()
    (store / "blocks/.building-w0-00000009/left").write_bytes(b"x")
    with WriterProcess(store) as writer:
        with StoreReader(store) as reader:
            with pytest.raises((TapError, FileNotFoundError), match="00000001"):
                reader.slice(captures[0], SITE, [0], 0, 8)
            assert_rows(reader.slice(captures[1], SITE, [0, 3], 0, 8), 1, range(8))
        assert not list((store / "blocks").glob(".building-*"))
        writer.stop()


def test_row_32_a_clock_that_jumps(writer: Forked, traffic: Traffic, store: Path, record_property: Record) -> None:
    """The wall clock of one life is an hour before or after that of the last: order and epochs do not follow it."""
    lives, epochs = times(3, 20), []
    for _ in range(lives):
        traffic.send(20)
        writer.end(signal.SIGKILL)
        writer.begin(CLOCK_S=str(traffic.rng.choice([-3600, 0, 3600])))
        assert writer.ready()
        epochs.append(int((store / "writers/w0/LOCK").read_text().split()[0]))
        traffic.check(store)
        traffic.connect()
    assert epochs == sorted(set(epochs))
    traffic.settle(store)
    record_property("times", f"{lives} lives, {traffic.check(store)} rows compared")
    traffic.close()


@pytest.mark.parametrize("rounds", [
    pytest.param(300, marks=pytest.mark.faults),  # the caches are full after 2,500 captures: from a third on it is flat
    pytest.param(4000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
])
def test_row_36_nothing_grows(
    writer: Forked, traffic: Traffic, store: Path, record_property: Record, rounds: int
) -> None:
    """Thousands of captures, a tenth given up in the middle: memory and descriptors stay where they were."""

    def used() -> tuple[int, int]:
        return memory(writer), len(list(Path(f"/proc/{writer.pid}/fd").iterdir()))

    warm_up(traffic, store)
    before = (0, 0)
    for number in range(rounds):
        for _ in range(25):
            capture = new_ulid()
            traffic.engine.open(capture, prompt_len=8)
            traffic.engine.frame([(capture, 1, range(8))])
            if traffic.rng.random() < 0.1:
                traffic.engine.dropped(capture, 4, 8)
            traffic.engine.finish(capture, end=8, reason="abort" if traffic.rng.random() < 0.1 else "stop")
        traffic.engine.wait()
        if number == rounds // 3:
            before = used()
    until(lambda: not list((store / "writers/w0/journal").glob("*.open")))
    after = used()
    assert after[0] <= before[0] * 1.05 + 4e6 and after[1] <= before[1] + 4, (before, after)
    record_property("times", f"{25 * rounds} captures; memory {before[0] / 1e6:.0f} → {after[0] / 1e6:.0f} MB, "
                    f"descriptors {before[1]} → {after[1]}")
    traffic.close()
