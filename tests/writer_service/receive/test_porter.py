"""Who opens connections, however many, ends no writer, and keeps nobody out for long."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from schemas import limits
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.wire.curve import make_sender, secure_sender
from schemas.wire.messages import Hello, Welcome
from tests.engine_side.transport.test_sender import LAYERS, MIB, Tapped, manifest_of
from tests.schemas.wire.test_curve import hello
from tests.support.processes import PATIENCE_S, descendants, free_port, runs
from tests.support.store_helpers import PROGRAMS, ROOT, SITE, Sender, WriterProcess, engine_info, until
from tests.writer_service.test_metrics import scrape
from writer_service.receive.porter import Door, Guest, crowded, peer_of
from writer_service.receive.porter_process import NULL_GREETING, PorterProcess, Threshold

FEW = 600
GREETING = b"\xff" + b"\0" * 8 + b"\x7f"  # how ZMTP begins


@pytest.fixture(autouse=True)
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Place:
    """A writer that may have few files open, for this host and others."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port, self.metrics = free_port(), free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.keys = make_sender(folder / "curve", "gpu-1")
        self.writer = WriterProcess(
            folder / "store", "--listen", self.endpoint, "--curve", str(folder / "curve"), "--metrics-port",
            str(self.metrics), *flags, script=PROGRAMS / "few_descriptors.py")

    @property
    def local(self) -> str:
        return self.writer.endpoint.removeprefix("ipc://")

    def lives(self) -> bool:
        return self.writer.process.poll() is None

    def porter(self) -> int:
        return porters(self.writer.process.pid)[0]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("FEW_DESCRIPTORS", str(FEW))
    made = Place(tmp_path)
    with made.writer:
        yield made


def porters(parent: int) -> list[int]:
    """The porter of a writer, where it is there."""
    return [pid for pid in descendants(parent)
            if runs(pid) and b"porter.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Attack:
    """Opens connections as fast as it can and keeps 1,500 of them; some say nothing, some begin and go no further."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self.opened, self._connect, self._end = 0, connect, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        held: list[socket.socket] = []
        dice = random.Random(7)
        while not self._end.is_set():
            try:
                held.append(self._connect())
                self.opened += 1
                if dice.random() < 0.7:
                    held[-1].send(GREETING[: dice.randrange(1, 11)] if dice.random() < 0.9 else GREETING + b"\3" * 400)
            except OSError:
                time.sleep(0.001)
            if len(held) > 1500:
                held.pop(dice.randrange(len(held))).close()
        for one in held:
            one.close()

    def end(self) -> None:
        self._end.set()
        self._thread.join()


def to(address: tuple[str, int] | str, source: str = "") -> socket.socket:
    """A connection that waits for nothing."""
    found = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.settimeout(1.0)
        if source:
            found.bind((source, 0))
        found.connect(address)
        found.setblocking(False)
    except OSError:
        found.close()
        raise
    return found


def assert_whole(store: Path, tapped: Tapped, capture: str, *steps: int) -> None:
    """Every row of its steps is there, once."""
    assert until(lambda: manifest_of(store, capture).status == "complete")
    manifest = manifest_of(store, capture)
    assert manifest.captured == manifest.expected
    assert sum(extent.rows for extent in manifest.sites[0].extents) == sum(steps)
    with StoreReader(store) as reader:
        for layer in range(LAYERS):
            found = reader.slice(capture, SITE, [layer]).values()
            staged = tapped.staging.buffers[SITE][layer].numpy()
            assert np.array_equal(found[0], np.concatenate([staged[:rows] for rows in steps]))


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_connections_without_a_key_end_no_writer(place: Place, source: str) -> None:
    """From the address of a sender with a key, and from another: rows are stored meanwhile, and new senders heard."""
    far = Tapped(place.endpoint, curve=place.keys, ring_bytes=64 * MIB)
    near = Tapped(place.writer.endpoint)
    first = far.whole(700)
    attack = Attack(lambda: to(("127.0.0.1", place.port), source))
    assert until(lambda: attack.opened > 3000 or not place.lives())
    for _ in range(10):
        message = Hello(new_ulid(), "engine", 1, engine=engine_info())
        assert isinstance(hello(place.writer.endpoint, None, message, 30_000), Welcome) and place.lives()
    captures = [(far, far.whole(5000), 5000), (near, near.whole(600), 600)]
    for tapped, capture, rows in [(far, first, 700), *captures]:
        assert_whole(place.writer.store, tapped, capture, rows)
    message = Hello(new_ulid(), "engine", 1, engine=engine_info())
    assert isinstance(hello(place.endpoint, place.keys, message, 60_000), Welcome)
    assert descriptors(place) < FEW - 100
    assert refused(place, "handshakes") > 100
    attack.end()
    far.close()
    near.close()
    place.writer.stop()
    for tapped, capture, rows in [(far, first, 700), *captures]:
        assert_whole(place.writer.store, tapped, capture, rows)


def test_whoever_begins_a_handshake_must_end_it(place: Place) -> None:
    with to(("127.0.0.1", place.port)) as silent, to(("127.0.0.1", place.port)) as slow:
        slow.send(GREETING)
        for one in (silent, slow):
            one.settimeout(30.0)
            while one.recv(4096):
                pass
    assert until(lambda: refused(place, "late") >= 1)


def test_connections_of_this_host_end_no_writer(place: Place) -> None:
    """Nor do those that are whole senders, one more than there is room for; when one goes another finds room."""
    attack = Attack(lambda: to(place.local))
    assert until(lambda: attack.opened > 3000 or not place.lives())
    attack.end()
    assert place.lives()
    senders: list[Sender] = []
    with contextlib.suppress(AssertionError):
        for number in range(FEW // 4):
            senders.append(Sender(place.writer.endpoint))
            senders[-1].hello(60.0 if number < 60 else 10.0)  # the last of them waits in vain
    assert 50 < len(senders) < FEW // 4
    assert place.lives()
    for one in senders:
        one.close()
    assert isinstance(hello(place.writer.endpoint, None, Hello(new_ulid(), "engine", 1, engine=engine_info()), 30_000),
                      Welcome)
    assert refused(place, "full") >= 1


def test_one_address_cannot_have_all_places(place: Place) -> None:
    """Whoever holds a key has a quarter of them at one address; others still come in, and those that end give way."""
    context, held = zmq.Context(), []

    def come(source: str) -> bool:
        one = context.socket(zmq.DEALER)
        one.set(zmq.LINGER, 0)
        one.set(zmq.IMMEDIATE, 1)
        secure_sender(one, place.keys)
        one.connect(f"tcp://{source}:0;{place.endpoint.removeprefix('tcp://')}")
        held.append(one)
        return bool(one.poll(30_000 if len(held) <= most or source != "127.0.0.2" else 1_000, zmq.POLLOUT))

    most = (FEW - limits.descriptors_reserved) // 4 // 4
    try:
        assert [come("127.0.0.2") for _ in range(most + 2)] == [True] * most + [False] * 2
        assert refused(place, "peer") >= 1
        assert come("127.0.0.3")
        held[0].close()
        assert until(lambda: bool(held[most].poll(0, zmq.POLLOUT) or held[most + 1].poll(0, zmq.POLLOUT)))
    finally:
        context.destroy(linger=0)


def test_a_host_that_is_dead_gives_its_places_back(place: Place) -> None:
    """The kernel asks each connection from another host whether somebody is there: a timer of kind 2."""
    with to(("127.0.0.1", place.port)):
        def timers() -> list[str]:
            lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            return [line[5][:2] for line in lines if line[1].endswith(f":{place.port:04X}") and line[3] == "01"]

        assert until(lambda: timers() == ["02"])


def test_an_address_of_a_network_stands_for_it() -> None:
    """Where one host has as many addresses as it likes, they are one peer."""
    for family, one, other, same in [
        (socket.AF_INET, "10.0.0.1", "10.0.0.1", True),
        (socket.AF_INET, "10.0.0.1", "10.0.0.2", False),
        (socket.AF_INET6, "2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        (socket.AF_INET6, "2001:db8:0:1::1", "2001:db8:0:2::1", False),
        (socket.AF_INET6, "::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        (socket.AF_INET6, "fe80::1%eth0", "fe80::2%eth0", True),
    ]:
        assert (peer_of(family, one) == peer_of(family, other)) == same, (one, other)


def test_who_is_turned_away_is_drawn_among_all_that_have_most() -> None:
    ends = [socket.socket() for _ in range(6)]
    door = Door(ends[0], "", 0, 100, 4, 100, 100)
    guests = [Guest(door, peer, end, 0.0) for peer, end in zip("aabbc", ends[1:], strict=True)]
    for guest in guests:
        door.strangers.setdefault(guest.peer, []).append(guest)
    assert {crowded(door).peer for _ in range(200)} == {"a", "b"}
    for end in ends:
        end.close()


def test_readers_of_metrics_take_few_descriptors(place: Place) -> None:
    held = []
    for _ in range(100):
        with contextlib.suppress(OSError):
            held.append(to(("127.0.0.1", place.metrics)))
    time.sleep(0.5)
    assert descriptors(place) < 150
    for one in held:
        one.close()
    assert until(lambda: _scrapes(place.metrics))


def _ignores(pid: int, number: int) -> bool:
    mask = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def descriptors(place: Place) -> int:
    return sum(1 for _ in Path(f"/proc/{place.writer.process.pid}/fd").iterdir())


def refused(place: Place, why: str) -> float:
    return scrape(place.metrics)[f"vllm_tap_writer_connections_refused_total[{why}]"]


def _scrapes(port: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(scrape(port))
    return False


def test_a_porter_that_is_killed_comes_again(place: Place) -> None:
    tapped = Tapped(place.endpoint, curve=place.keys, ring_bytes=64 * MIB)
    first = tapped.whole(300)
    assert manifest_of(place.writer.store, first).status == "complete"
    before = place.porter()
    os.kill(before, signal.SIGKILL)
    assert_whole(place.writer.store, tapped, tapped.whole(500), 500)
    assert place.porter() != before
    tapped.close()


def stopped(pid: int) -> None:
    """As SIGSTOP or a debugger leaves it: there, and doing nothing."""
    os.kill(pid, signal.SIGSTOP)
    assert until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


def test_a_porter_that_stands_still_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender over the network goes on behind it: every row once, also those that were under way."""
    monkeypatch.setenv("FEW_DESCRIPTORS", str(FEW))
    monkeypatch.setenv("PORTER_SILENT_S", "2")
    place = Place(tmp_path)
    with place.writer:
        tapped = Tapped(place.endpoint, curve=place.keys, ring_bytes=64 * MIB)
        first = tapped.whole(300)
        assert manifest_of(place.writer.store, first).status == "complete"
        under_way = tapped.open(900)
        tapped.step(under_way, 0, 500)
        before = place.porter()
        stopped(before)
        tapped.step(under_way, 500, 400)
        tapped.finish(under_way, 900)
        last = tapped.whole(5000)
        assert until(lambda: not runs(before))
        for capture, steps in [(first, (300,)), (under_way, (500, 400)), (last, (5000,))]:
            assert_whole(place.writer.store, tapped, capture, *steps)
        tapped.close()
        after = porters(place.writer.process.pid)
        place.writer.stop()
    assert not any(map(runs, [before, *after]))


def test_no_engine_is_lost_for_a_porter_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEW_DESCRIPTORS", str(FEW))
    monkeypatch.setenv("PORTER_SILENT_S", "1000")
    place = Place(tmp_path, "--engine-lost-s", "6")
    with place.writer:
        engine, capture = Sender(place.writer.endpoint), new_ulid()
        engine.hello()
        engine.open(capture, prompt_len=9)
        engine.wait()
        porter = place.porter()
        stopped(porter)

        def status() -> str:
            with StoreReader(place.writer.store) as reader:
                return reader.capture(capture).status

        assert not until(lambda: status() != "running", 10.0)
        os.kill(porter, signal.SIGCONT)
        assert until(lambda: status() == "incomplete")  # now the silence is its own
        engine.close()


def test_a_writer_that_stops_leaves_no_porter_that_stands_still(place: Place) -> None:
    porter = place.porter()
    stopped(porter)
    place.writer.stop()
    assert not runs(porter)


def test_a_writer_that_is_killed_leaves_no_porter_that_stands_still(place: Place) -> None:
    """It would keep the port, and senders' connections to nobody: they come to the next writer at once."""
    tapped = Tapped(place.writer.endpoint)
    assert_whole(place.writer.store, tapped, tapped.whole(300), 300)
    porter = place.porter()
    assert until(lambda: _ignores(porter, signal.SIGTERM))
    stopped(porter)
    place.writer.kill()
    assert until(lambda: not runs(porter))
    place.writer.start()
    assert_whole(place.writer.store, tapped, tapped.whole(500), 500)
    tapped.close()


@contextlib.contextmanager
def porter_of(folder: Path) -> Iterator[PorterProcess]:
    """Without a writer: the test looks after it, in a time of its own."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "w"))
        listener.listen()
        listener.setblocking(False)
        made = PorterProcess([Threshold(listener, folder / "inner", NULL_GREETING, 100, 100)])
        try:
            yield made
        finally:
            made.close()


def test_silence_counts_while_the_writer_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while the machine sleeps: then one look is far behind the other."""
    monkeypatch.setattr(PorterProcess, "silent_s_max", 1e9)
    others = set(porters(os.getpid()))  # of tests before this one, which may take their time to end
    with porter_of(tmp_path) as porter:
        now = itertools.count(1000).__next__
        assert until(lambda: not porter.look(now()))
        monkeypatch.setattr(PorterProcess, "silent_s_max", 15.0)  # of the next that it is seen to go round
        assert until(lambda: not porter.look(now()))
        (pid,) = set(porters(os.getpid())) - others
        stopped(pid)
        porter.look(now())
        assert [porter.look(now()) for _ in range(11)] == [1.0] * 11
        assert porter.look(now() + 100_000) == 2.0
        assert runs(pid)
        for later in range(200_000, 200_003):
            porter.look(later)
        assert until(lambda: not runs(pid))


def test_a_porter_may_take_long_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was killed too soon is given twice the time, until one begins."""
    monkeypatch.setattr(PorterProcess, "silent_s_max", 0.5)
    others = set(porters(os.getpid()))
    with porter_of(tmp_path) as porter:
        now = itertools.count(1000).__next__
        (pid,) = set(porters(os.getpid())) - others
        assert until(lambda: not porter.look(now()))
        assert set(porters(os.getpid())) - others and not runs(pid)


def test_the_porter_goes_with_its_writer(place: Place) -> None:
    porter = place.porter()
    assert until(lambda: _ignores(porter, signal.SIGTERM))  # it is meant for the writer
    os.kill(porter, signal.SIGTERM)
    place.writer.process.send_signal(signal.SIGSTOP)
    assert runs(porter)
    place.writer.kill()
    assert until(lambda: not runs(porter))
    place.writer.start()  # on the same port
    assert isinstance(hello(place.endpoint, place.keys, Hello(new_ulid(), "engine", 1, engine=engine_info())), Welcome)
    porter = place.porter()
    place.writer.stop()
    assert until(lambda: not runs(porter))


def test_an_interface_may_be_named(tmp_path: Path) -> None:
    keys, port = make_sender(tmp_path / "curve", "gpu-1"), free_port()
    with WriterProcess(tmp_path / "store", "--listen", f"tcp://lo:{port}", "--curve", str(tmp_path / "curve")):
        message = Hello(new_ulid(), "engine", 1, engine=engine_info())
        assert isinstance(hello(f"tcp://127.0.0.1:{port}", keys, message, 30_000), Welcome)
    with pytest.raises(AssertionError, match="--listen = 'tcp://nowhere0:1'"):
        WriterProcess(tmp_path / "store", "--listen", "tcp://nowhere0:1", "--curve", str(tmp_path / "curve"))


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not _has_ipv6(), reason="no ::1 on this machine")
@pytest.mark.parametrize("listen", ["[::1]", "[::]"])
def test_a_sender_over_ipv6(tmp_path: Path, listen: str) -> None:
    """An address in brackets, at both ends; an address of IPv4 goes on beside it where it listens to all."""
    keys, port = make_sender(tmp_path / "curve", "gpu-1"), free_port()
    with WriterProcess(tmp_path / "store", "--listen", f"tcp://{listen}:{port}", "--curve",
                       str(tmp_path / "curve")) as writer:
        for host in ["[::1]", "127.0.0.1"][: 1 + (listen == "[::]")]:
            tapped = Tapped(f"tcp://{host}:{port}", curve=keys, ring_bytes=64 * MIB)
            assert_whole(writer.store, tapped, tapped.whole(700), 700)
            tapped.close()


def test_too_few_descriptors_are_said_at_the_start(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(PROGRAMS / "few_descriptors.py"), "--store", str(tmp_path / "store"),
         "--endpoint", f"ipc://{tmp_path}/s/w"], env={**os.environ, "PYTHONPATH": str(ROOT), "FEW_DESCRIPTORS": "200"},
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 2 and "ulimit -n" in run.stderr and not (tmp_path / "store").exists()
