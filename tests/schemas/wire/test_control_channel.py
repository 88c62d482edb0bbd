"""The control channel against a scripted writer on a real socket, and against real writers that die and come back."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from schemas import limits
from schemas.errors import ConflictError, NotFoundError, ProtocolError, StoreError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.wire.control_channel import ControlChannel
from schemas.wire.messages import (
    Ack,
    Bye,
    FromSender,
    FromWriter,
    Hello,
    Ping,
    Refuse,
    Welcome,
    decode_from_sender,
    encode,
)
from schemas.wire.records import Delete, Own, Record
from tests.support.api_stack import Process
from tests.support.processes import PATIENCE_S

Answer = Callable[[FromSender], list[FromWriter]]


def own(capture: str) -> Callable[[int], Record]:
    return lambda seq: Own(seq=seq, capture=capture, count=1, owner="", aliases=[], tags={}, created_ms=1)


def delete(capture: str) -> Callable[[int], Record]:
    return lambda seq: Delete(seq=seq, capture=capture)


@pytest.fixture
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="tap-")
    yield path
    shutil.rmtree(path)


class Scripted:
    """A writer whose every answer a test decides; keeps what it heard."""

    def __init__(self, endpoint: str, answer: Answer) -> None:
        self.heard: list[FromSender] = []
        self.answer = answer
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)  # before it is bound: else ``term`` waits for peers that went
        self._router.bind(endpoint)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._end.is_set():
                if self._router.poll(20):
                    identity, data, *_ = self._router.recv_multipart()  # what follows are tables of frames
                    message = decode_from_sender(data)
                    self.heard.append(message)
                    for reply in self.answer(message):
                        self._router.send_multipart([identity, encode(reply)])
        finally:
            self._router.close()

    def seqs(self) -> list[int]:
        return [m.seq for m in self.heard if isinstance(m, Own | Delete)]

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._context.term()


class Obedient:
    """Answers as a writer that holds everything at once."""

    def __init__(self, store: str = "s") -> None:
        self.durable: dict[str, int] = {}
        self.stream = ""
        self.store = store

    def __call__(self, message: FromSender) -> list[FromWriter]:
        if isinstance(message, Hello):
            self.stream = message.stream
            return [Welcome(store=self.store, durable=self.durable.setdefault(self.stream, 0), ring=False)]
        if isinstance(message, Own | Delete):
            self.durable[self.stream] = max(self.durable[self.stream], message.seq)
        done = self.durable[self.stream]
        return [] if isinstance(message, Bye) else [Ack(done, done)]


@pytest.fixture
def script(folder: str) -> Iterator[Callable[[Answer], Scripted]]:
    made: list[Scripted] = []

    def make(answer: Answer) -> Scripted:
        made.append(Scripted(f"ipc://{folder}/w", answer))
        return made[-1]

    yield make
    for scripted in made:
        scripted.close()


@pytest.fixture
def channel(folder: str) -> Iterator[ControlChannel]:
    channel = ControlChannel(f"ipc://{folder}/w", "api")
    yield channel
    channel.close(0.1)


def test_records_go_in_order_from_many_threads(script: Callable[[Answer], Scripted], channel: ControlChannel) -> None:
    writer = script(Obedient())
    threads = [threading.Thread(target=lambda: [channel.submit(delete("x")) for _ in range(25)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.seqs() == list(range(1, 201))
    assert channel.alive and channel.pending == 0


def test_nobody_waits_for_what_others_may_post(
    script: Callable[[Answer], Scripted], channel: ControlChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schemas.wire.control_channel._GATHER_S", 5.0)
    writer = script(Obedient())
    channel.submit(delete("x"))
    begin = time.monotonic()
    for _ in range(3):
        channel.post(delete("x"))
    assert channel.flush(10.0) and writer.seqs() == [1, 2, 3, 4]

    def post() -> None:
        for _ in range(20):
            time.sleep(0.002)
            channel.post(delete("x"))

    poster, submitted = threading.Thread(target=post), 0
    poster.start()
    while poster.is_alive():  # while there are always others
        channel.submit(delete("x"))
        submitted += 1
    channel.post(delete("x"))
    channel.close(10.0)
    assert time.monotonic() - begin < 5.0
    assert submitted > 1 and writer.seqs() == list(range(1, 4 + 20 + submitted + 1 + 1))


@pytest.mark.parametrize(("code", "kind"), [
    ("conflict", ConflictError), ("held", ConflictError), ("not_found", NotFoundError), ("malformed", ProtocolError),
])
def test_a_refused_record_raises_what_it_was_refused_for(
    script: Callable[[Answer], Scripted], channel: ControlChannel, code: str, kind: type[Exception]
) -> None:
    obedient = Obedient()

    def answer(message: FromSender) -> list[FromWriter]:
        if isinstance(message, Own):
            obedient(message)
            return [Ack(message.seq, message.seq, [(message.seq, code, "because")])]
        return obedient(message)

    script(answer)
    channel.submit(delete("x"))
    with pytest.raises(kind, match="because"):
        channel.submit(own("x"))
    channel.submit(delete("x"))


def test_a_refusal_survives_a_reconnect(script: Callable[[Answer], Scripted], channel: ControlChannel) -> None:
    """The Ack that refused was lost; after the new Hello the Welcome covers the record and the next Ack refuses it."""
    obedient, hellos = Obedient(), []

    def answer(message: FromSender) -> list[FromWriter]:
        if isinstance(message, Hello):
            hellos.append(message)
        if isinstance(message, Own):
            obedient(message)
            return [Refuse("hello", "who are you")]
        replies = obedient(message)
        if isinstance(message, Ping) and len(hellos) > 1:
            return [Ack(1, 1, [(1, "conflict", "taken")])]
        return replies

    script(answer)
    with pytest.raises(ConflictError, match="taken"):
        channel.submit(own("x"))


def test_what_is_lost_on_the_way_is_sent_again(script: Callable[[Answer], Scripted], channel: ControlChannel) -> None:
    obedient, lost = Obedient(), []

    def answer(message: FromSender) -> list[FromWriter]:
        if isinstance(message, Delete) and message.seq == 2 and not lost:
            lost.append(message)
            return []
        if isinstance(message, Delete) and message.seq > obedient.durable[obedient.stream] + 1:
            return obedient(Ping())  # a gap: only what is covered
        return obedient(message)

    writer = script(answer)
    channel.submit(delete("a"))
    channel.post(delete("b"))
    channel.submit(delete("c"))
    assert writer.seqs()[:3] == [1, 2, 3] and writer.seqs()[-2:] == [2, 3]


def test_a_writer_that_forgot_gets_a_hello_and_only_what_it_lacks(
    script: Callable[[Answer], Scripted], channel: ControlChannel
) -> None:
    obedient, forgot = Obedient(), []

    def answer(message: FromSender) -> list[FromWriter]:
        if isinstance(message, Delete) and message.seq == 2 and not forgot:
            forgot.append(message)
            return [Refuse("hello", "who are you")]
        return obedient(message)

    writer = script(answer)
    for name in "abc":
        channel.submit(delete(name))
    assert writer.seqs() == [1, 2, 2, 3]
    assert len({m.stream for m in writer.heard if isinstance(m, Hello)}) == 1


def test_another_store_gets_a_stream_of_its_own(script: Callable[[Answer], Scripted], channel: ControlChannel) -> None:
    """Numbers that an empty store has never seen would be a gap for ever."""
    first = Obedient()
    writer = script(first)
    channel.submit(delete("a"))
    channel.submit(delete("b"))
    second, told = Obedient("other"), []

    def swapped(message: FromSender) -> list[FromWriter]:
        if not told and not isinstance(message, Hello):
            told.append(message)
            return [Refuse("hello", "who are you")]
        return second(message)

    writer.answer = swapped
    channel.submit(delete("c"))
    streams = [m.stream for m in writer.heard if isinstance(m, Hello)]
    assert streams[0] != streams[-1] and second.durable[streams[-1]] == 1


def test_a_disk_that_is_full_for_a_while_ends_no_channel(
    script: Callable[[Answer], Scripted], channel: ControlChannel
) -> None:
    obedient, full = Obedient(), [True]

    def answer(message: FromSender) -> list[FromWriter]:
        return [Refuse("disk", "No space left on device; try again")] if full else obedient(message)

    script(answer)
    with pytest.raises(StoreError):
        channel.submit(delete("a"), timeout_s=0.5)
    full.clear()
    channel.submit(delete("b"), timeout_s=10)
    assert channel.alive


def test_no_writer_means_an_error_in_time_and_nothing_left_behind(
    script: Callable[[Answer], Scripted], channel: ControlChannel
) -> None:
    started_s = time.monotonic()
    with pytest.raises(StoreError, match="is the writer process running"):
        channel.submit(own("never"), timeout_s=0.3)
    assert time.monotonic() - started_s < 1 and channel.pending == 0 and not channel.alive
    channel.post(delete("later"))
    writer = script(Obedient())
    channel.submit(delete("now"), timeout_s=10)
    assert [m.capture for m in writer.heard if isinstance(m, Own | Delete)] == ["later", "now"]


def test_the_queue_is_bounded(channel: ControlChannel) -> None:
    for _ in range(limits.control_records_pending_max):
        channel.post(delete("x"))
    with pytest.raises(StoreError, match=f"{limits.control_records_pending_max} records wait"):
        channel.post(delete("x"))


def test_a_refused_stream_fails_everything_at_once(
    script: Callable[[Answer], Scripted], channel: ControlChannel
) -> None:
    script(lambda message: [Refuse("version", "speak 2")])
    with pytest.raises(ProtocolError, match="speak 2"):
        channel.submit(delete("x"))
    with pytest.raises(ProtocolError, match="speak 2"):
        channel.post(delete("x"))


def test_a_record_that_cannot_be_made_harms_no_other(
    script: Callable[[Answer], Scripted], channel: ControlChannel
) -> None:
    writer = script(Obedient())

    def broken(seq: int) -> Record:
        raise ValueError("no")

    with pytest.raises(ProtocolError, match="no"):
        channel.submit(broken)
    channel.submit(delete("x"))
    assert writer.seqs() == [1]


def test_closing_flushes_and_says_bye(script: Callable[[Answer], Scripted], folder: str) -> None:
    channel = ControlChannel(f"ipc://{folder}/w", "cli")
    for _ in range(10):
        channel.post(delete("x"))
    writer = script(Obedient())
    channel.close(10)
    end_s = time.monotonic() + 5
    while not isinstance(writer.heard[-1], Bye) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert writer.seqs() == list(range(1, 11)) and writer.heard[-1] == Bye(seq=10)
    with pytest.raises(StoreError, match="closed"):
        channel.post(delete("x"))


def test_a_real_writer_killed_and_started_again(folder: str, tmp_path: Path) -> None:
    """What was submitted before the kill is there, what was posted during the gap arrives, a taken id stays taken."""
    args = ["writer_service", "--store", str(tmp_path / "store"), "--endpoint", f"ipc://{folder}/w"]
    writer = Process(args, tmp_path / "log")
    writer.wait_ready()
    channel = ControlChannel(f"ipc://{folder}/w", "api")
    before, during, after = ([new_ulid() for _ in range(20)] for _ in range(3))
    try:
        for capture in before:
            channel.submit(own(capture))
        writer.kill()
        for capture in during:
            channel.post(own(capture))
        writer = Process(args, tmp_path / "log")
        for capture in after:
            channel.submit(own(capture), timeout_s=PATIENCE_S)
        with pytest.raises(ConflictError, match=before[0]):
            channel.submit(own(before[0]))
        with pytest.raises(NotFoundError):
            channel.submit(delete(new_ulid()))
    finally:
        channel.close()
        assert writer.stop() == 0
    with StoreReader(tmp_path / "store") as reader:
        assert {row.id for row in reader.captures(limit=200)} == {*before, *during, *after}
