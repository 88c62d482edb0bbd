"""Two senders of one identity, as of a cloned process: each row is stored, or missing with its reason."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.catalog.records import connect_read
from schemas.ids import new_ulid
from schemas.manifest import Manifest, Missing
from schemas.read.reader import StoreReader
from schemas.wire.control_channel import ControlChannel
from schemas.wire.identity import Nonces, told_max
from schemas.wire.messages import Connect, Refuse, Welcome
from schemas.wire.records import Dropped, Own
from tests.engine_side.transport.test_sender import LAYERS, Tapped, manifest_of
from tests.schemas.wire.test_curve import hello
from tests.support.consistency import assert_consistent
from tests.support.store_helpers import ROOT, SITE, Sender, WriterProcess, engine_info, until


class Clone:
    """One of the processes."""

    def __init__(self) -> None:
        self.said = tempfile.TemporaryFile("a+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.writers.cloned_sender"], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.said, text=True)

    def do(self, *words: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"

    def whole(self, rows: int) -> str:
        capture = new_ulid()
        self.do("open", capture, rows)
        self.do("step", capture, 0, rows)
        self.do("finish", capture, rows)
        return capture

    def tells(self) -> bool:
        """Whether it said that another has its stream, since it was asked last."""
        self.said.seek(0)
        found = "another process continues this sender's stream" in self.said.read()
        self.said.truncate(0)
        self.said.seek(0)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.said.close()


class Identity:
    """Has senders of one stream in as many processes as are begun."""

    def __init__(self, endpoint: str, idle: list[Clone]) -> None:
        self.clones: list[Clone] = []
        self._words, self._idle = (endpoint, new_ulid(), time.time_ns() // 1_000_000), idle

    def begin(self, *opened: object) -> Clone:
        """``opened``: a capture, and its rows, that it had opened when it was cloned."""
        clone = self._idle.pop()
        clone.do("begin", *self._words, *opened)
        self.clones.append(clone)
        return clone

    def end(self) -> None:
        for clone in self.clones:
            if clone.process.poll() is None:
                clone.do("close")
                self._idle.append(clone)


@pytest.fixture(scope="module")
def idle() -> Iterator[list[Clone]]:
    """They take long to start, and start side by side."""
    made = [Clone() for _ in range(4)]
    yield list(made)
    for clone in made:
        if clone.process.poll() is None:
            clone.kill()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[WriterProcess]:
    with WriterProcess(tmp_path / "store", "--engine-lost-s", "3") as process:
        yield process


@pytest.fixture
def identity(writer: WriterProcess, idle: list[Clone]) -> Iterator[Identity]:
    made = Identity(writer.endpoint, idle)
    yield made
    made.end()


def captured(store: Path, capture: str) -> int:
    with StoreReader(store) as reader:
        return reader.manifest(capture).captured


def missing(manifest: Manifest) -> list[Missing]:
    assert {row.layer for row in manifest.rows} == set(range(LAYERS))
    return manifest.rows[0].missing


def test_two_of_one_identity(writer: WriterProcess, identity: Identity) -> None:
    """The first goes on as ever; the second is told, and what it captures from then on is stored."""
    first = identity.begin()
    assert manifest_of(writer.store, first.whole(30)).status == "complete"
    second = identity.begin()
    captures = [(clone.whole(rows), rows) for rows in (20, 300, 7) for clone in (first, second)]
    for capture, rows in captures:
        manifest = manifest_of(writer.store, capture)
        assert (manifest.status, manifest.captured) == ("complete", rows * LAYERS)
    assert (first.tells(), second.tells()) == (False, True)
    db = connect_read(writer.store / "catalog.sqlite")
    assert db.execute("SELECT count(DISTINCT stream) AS n FROM captures").fetchone()["n"] == 2
    db.close()
    identity.end()
    identity.clones.clear()
    writer.stop()
    assert_consistent(writer.store)


def test_three_at_once(writer: WriterProcess, identity: Identity) -> None:
    clones = [identity.begin() for _ in range(3)]
    captures = [(clone.whole(rows), rows) for rows in (40, 3) for clone in clones]
    for capture, rows in captures:
        manifest = manifest_of(writer.store, capture)
        assert (manifest.status, manifest.captured) == ("complete", rows * LAYERS)
    assert [clone.tells() for clone in clones].count(True) == 2


def test_a_snapshot_comes_first_to_a_writer_that_was_started_again(writer: WriterProcess, identity: Identity) -> None:
    """What it brings has the numbers of what the writer has, and is not taken for it."""
    first = identity.begin()
    assert manifest_of(writer.store, first.whole(30)).status == "complete"
    writer.kill()
    second = identity.begin()
    captures = [second.whole(10), first.whole(10), second.whole(5)]
    writer.start()
    for capture in captures:
        assert manifest_of(writer.store, capture).status == "complete"


@pytest.mark.parametrize("winner_lives", [True, False])
def test_a_capture_that_had_begun(writer: WriterProcess, identity: Identity, winner_lives: bool) -> None:
    """It stays with the first; rows that only the second had are missing, and the manifest says why."""
    capture, first = new_ulid(), identity.begin()
    first.do("open", capture, 40)
    first.do("step", capture, 0, 16)
    assert until(lambda: captured(writer.store, capture) == 16 * LAYERS)
    second = identity.begin(capture, 40)
    second.do("step", capture, 0, 16)
    assert manifest_of(writer.store, second.whole(25)).status == "complete"
    if not winner_lives:
        first.kill()
    for clone in (first, second) if winner_lives else (second,):
        clone.do("step", capture, 16, 24)
        clone.do("finish", capture, 40)
    manifest = manifest_of(writer.store, capture)
    if winner_lives:
        assert (manifest.status, manifest.captured) == ("complete", manifest.expected)
    else:
        assert manifest.status == "incomplete" and manifest.captured == 16 * LAYERS
        assert missing(manifest) == [Missing(16, 40, "fenced")]
    with StoreReader(writer.store) as reader:
        assert len(reader.slice(capture, SITE, [1], 0, 16).positions) == 16
    identity.end()
    identity.clones.clear()
    writer.stop()
    assert_consistent(writer.store)


def greeting(nonces: list[int], sent: int = 0, stream: str = "") -> Connect:
    return Connect(stream or new_ulid(), "engine", 1, engine=engine_info(), nonces=nonces, sent=sent)


def test_the_rules(writer: WriterProcess) -> None:
    stream = new_ulid()

    def greet(nonces: list[int], sent: int = 0) -> str:
        answer = hello(writer.endpoint, None, greeting(nonces, sent, stream))
        assert isinstance(answer, Welcome | Refuse)
        assert not isinstance(answer, Refuse) or (answer.code, answer.stream) == ("fenced", stream)
        return "in" if isinstance(answer, Welcome) else "out"

    assert greet([1]) == "in"
    assert greet([2]) == "out"  # it knows nothing of 1
    assert greet([1, 3]) == "in"  # the first, on a new connection
    assert greet([1, 3, 4, 5]) == "in"  # whose 4 got lost
    assert greet([1, 3, 4, 6]) == "out"
    assert greet([]) == "in"  # of a version that has none
    assert greet([7]) == "in"


def test_copies_that_give_up_different_layers(writer: WriterProcess) -> None:
    """What one could not store says nothing against what another could not, and said twice is said once."""
    capture = new_ulid()
    with Sender(writer.endpoint) as first, Sender(writer.endpoint) as second, Sender(writer.endpoint) as third:
        for clone in (first, second, third):
            clone.hello()
        first.open(capture, prompt_len=8)
        first.wait()
        for clone, layers, start in ((second, [0, 1], 0), (third, [2, 3], 0), (third, [2, 3], 0), (second, [1], 4)):
            clone.send(Dropped(clone.next(), capture, SITE, layers, start, 8, "fenced"))
            clone.wait()
        first.frame([(capture, 0, range(2))])
        first.finish(capture, end=8)
        first.wait()
    manifest = manifest_of(writer.store, capture)
    assert [row.missing for row in manifest.rows] == [[Missing(2, 8, "fenced")]] * 4
    db = connect_read(writer.store / "catalog.sqlite")
    assert db.execute("SELECT count(*) AS n FROM drops WHERE seq < 0").fetchone()["n"] == 3
    db.close()
    writer.stop()
    assert_consistent(writer.store)


def test_nonces() -> None:
    nonces = Nonces()
    first = nonces.draw()
    assert nonces.draw()[:1] == first
    nonces.welcomed()
    for _ in range(2 * told_max):
        told = nonces.draw()
    assert len(told) == len(set(told)) == told_max and told[0] == first[0]


@pytest.mark.parametrize("behind", [1, 20])
def test_a_writer_that_took_a_hello_and_was_away_for_long_knows_its_sender(writer: WriterProcess, behind: int) -> None:
    """Its answer got lost, and others that followed it; since then nobody heard the many Hellos there were."""
    nonces, stream = Nonces(), new_ulid()

    def answer(told: list[int]) -> object:
        return hello(writer.endpoint, None, greeting(told, 0, stream))

    for _ in range(behind):
        assert isinstance(answer(nonces.draw()), Welcome)
    for _ in range(4 * told_max):
        nonces.draw()
    assert isinstance(answer(nonces.draw()), Welcome)


def test_a_hello_that_never_went_out_is_told_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sender and of a channel, while no writer is there."""
    nowhere, turns, draw = f"ipc://{tmp_path}/nobody", Counter[int](), Nonces.draw

    def counted(nonces: Nonces) -> list[int]:
        turns[id(nonces)] += 1
        return draw(nonces)

    monkeypatch.setattr(Nonces, "draw", counted)
    tapped, channel = Tapped(nowhere), ControlChannel(nowhere, "api")
    assert until(lambda: turns[id(tapped.sender.window.nonces)] >= 5)
    tapped.close()
    channel.close(0.1)
    assert len(tapped.sender.window.nonces.draw()) == len(channel.window.nonces.draw()) == 1


def test_records_of_a_copy_are_not_lost(writer: WriterProcess) -> None:
    """Nor those of the API: what was not acknowledged is sent in a stream of its own."""
    first, second = (ControlChannel(writer.endpoint, "api") for _ in range(2))
    names = [new_ulid() for _ in range(4)]

    def own(channel: ControlChannel, capture: str) -> None:
        channel.submit(lambda seq: Own(seq, capture, 1, "", [], {}, 1), 30.0)

    own(first, names[0])
    second.connection.welcome, second.window.nonces = None, Nonces()
    second.window.stream, second.window.epoch, second.window.last = first.window.stream, first.window.epoch, 0
    assert isinstance(hello(writer.endpoint, None, greeting([9], 5, first.window.stream)), Refuse)
    for channel, name in zip((second, first, second), names[1:], strict=True):
        own(channel, name)
    with StoreReader(writer.store) as reader:
        assert {row.id for row in reader.captures()} == set(names)
    first.close()
    second.close()
