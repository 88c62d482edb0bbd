"""A writer that listens to other hosts: who has a key sends as over shared memory, who has none reaches nothing."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from typer.testing import CliRunner

from engine_side.transport import sender
from schemas import limits
from schemas.errors import ProtocolError, StartError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.wire.control_channel import ControlChannel
from schemas.wire.curve import make_sender, secure_sender
from schemas.wire.messages import Hello, Refuse, Welcome, decode_from_writer, encode
from schemas.wire.records import Delete
from tests.engine_side.transport.test_sender import LAYERS, MIB, Tapped, manifest_of
from tests.support.processes import free_port
from tests.support.store_helpers import SITE, Sender, WriterProcess, engine_info, until
from vllm_tap.cli.main import app
from writer_service.config import Config
from writer_service.receive.senders import remote_streams_max


class Place:
    """A writer that listens on a port of this host, and the keys of one engine."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.curve = folder / "curve"
        self.keys = make_sender(self.curve, "gpu-1")
        self.writer = WriterProcess(folder / "store", "--listen", self.endpoint, "--curve", str(self.curve))
        self.store = self.writer.store


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    with made.writer:
        yield made


def hello(endpoint: str, keys: Path | None, message: Hello, wait_ms: int = 5000, **options: Any
          ) -> Welcome | Refuse | None:
    """The first answer of the writer; None where there is none in time."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    secure_sender(dealer, keys)
    for name, value in options.items():
        setattr(dealer, name, value)
    dealer.connect(endpoint)
    try:
        dealer.send(encode(message))
        answer = decode_from_writer(dealer.recv()) if dealer.poll(wait_ms) else None
        assert answer is None or isinstance(answer, Welcome | Refuse)
        return answer
    finally:
        dealer.close()
        context.term()


def test_rows_of_another_host_arrive_as_they_are(place: Place) -> None:
    tapped = Tapped(place.endpoint, curve=place.keys, ring_bytes=64 * MIB)
    captures = [tapped.whole(rows) for rows in (1, 700, 8192)]  # the last has several frames, each of several parts
    for capture, rows in zip(captures, (1, 700, 8192), strict=True):
        manifest = manifest_of(place.store, capture)
        assert (manifest.status, manifest.captured) == ("complete", manifest.expected)
        with StoreReader(place.store) as reader:
            for layer in range(LAYERS):
                found = reader.slice(capture, SITE, [layer]).values()
                assert np.array_equal(found[0], tapped.staging.buffers[SITE][layer, :rows].numpy())
    tapped.close()


def test_nobody_without_a_key_is_heard(place: Place, tmp_path: Path) -> None:
    message = Hello(new_ulid(), "engine", 1, engine=engine_info())
    assert hello(place.endpoint, None, message, 1500) is None
    stranger = make_sender(tmp_path / "other", "stranger")  # a pair of its own …
    (stranger / "writer.key").write_text((place.keys / "writer.key").read_text())  # … and the writer's public key
    assert hello(place.endpoint, stranger, message, 1500) is None
    elsewhere = make_sender(tmp_path / "elsewhere", "gpu-1")  # who takes another's place as the writer is not believed
    assert hello(place.endpoint, elsewhere, message, 1500) is None
    assert isinstance(hello(place.endpoint, place.keys, message), Welcome)


def test_a_ring_that_another_host_names_is_not_opened(place: Place, tmp_path: Path) -> None:
    """Its path would be one of this host: any file of the writer's user could be read out through a capture."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 8192)
    for keys, endpoint, mapped in ((place.keys, place.endpoint, False), (None, place.writer.endpoint, True)):
        answer = hello(endpoint, keys, Hello(new_ulid(), "engine", 1, engine=engine_info(), ring_path=str(secret),
                                             ring_bytes=8192))
        assert isinstance(answer, Welcome) and answer.ring is mapped


@pytest.mark.parametrize("role", ["api", "cli", "writer"])
def test_another_host_speaks_for_an_engine_alone(place: Place, role: str) -> None:
    answer = hello(place.endpoint, place.keys, Hello(new_ulid(), role, 1))
    assert isinstance(answer, Refuse) and answer.code == "forbidden" and role in answer.reason


def test_another_host_deletes_nothing(place: Place) -> None:
    tapped = Tapped(place.writer.endpoint)
    capture = tapped.whole(3)
    assert manifest_of(place.store, capture).status == "complete"
    channel = ControlChannel(place.endpoint, "front_end", place.keys)
    with pytest.raises(ProtocolError, match="forbidden"):
        channel.submit(lambda seq: Delete(seq=seq, capture=capture), 20.0)
    channel.close()
    assert manifest_of(place.store, capture).status == "complete"
    tapped.close()


def test_a_writer_that_stands_still_does_not_fill_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "payload_window_bytes_max", 2 * MIB)
    monkeypatch.setattr(limits, "frame_bytes_target", MIB)
    tapped = Tapped(place.endpoint, curve=place.keys, ring_bytes=64 * MIB)
    assert manifest_of(place.store, tapped.whole(1)).status == "complete"
    place.writer.process.send_signal(signal.SIGSTOP)
    try:
        capture = tapped.open(8192)
        for first in range(0, 8192, 1024):  # 1 MiB each
            tapped.step(capture, first, 1024)
        tapped.finish(capture, 8192)
        waiting = tapped.sender.window.unacked

        def out() -> int:
            return sum(outgoing.nbytes for seq, outgoing in list(waiting.items()) if seq < tapped.sender.window.next)

        assert until(lambda: len(waiting) >= 9 and out() > 0)
        assert out() <= 2 * MIB < sum(outgoing.nbytes for outgoing in waiting.values())
    finally:
        place.writer.process.send_signal(signal.SIGCONT)
    manifest = manifest_of(place.store, capture)
    assert (manifest.status, manifest.captured) == ("complete", manifest.expected)
    tapped.close()


class SlowLine:
    """A proxy before an endpoint that carries so many bytes a second towards it."""

    def __init__(self, endpoint: str, rate: float) -> None:
        self._target, self._rate = int(endpoint.rpartition(":")[2]), rate
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                for a, b, rate in ((near, far, self._rate), (far, near, 0.0)):
                    threading.Thread(target=self._carry, args=(a, b, rate), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket, rate: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
                if rate:
                    time.sleep(len(data) / rate)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listening.close()


def test_a_slow_line_carries_each_frame_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_STALL_S", 0.1)
    monkeypatch.setattr(limits, "frame_bytes_target", MIB)
    made: list[int] = []
    inline = sender.Sender._inline

    def counted(self: sender.Sender, outgoing: sender.Outgoing) -> list[Any]:
        made.append(outgoing.nbytes)
        return inline(self, outgoing)

    monkeypatch.setattr(sender.Sender, "_inline", counted)
    line = SlowLine(place.endpoint, 2 * MIB)
    tapped = Tapped(line.endpoint, curve=place.keys, ring_bytes=64 * MIB)
    capture = tapped.open(6144)
    for first in range(0, 6144, 1024):
        tapped.step(capture, first, 1024)
    tapped.finish(capture, 6144)
    manifest = manifest_of(place.store, capture)
    assert (manifest.status, manifest.captured) == ("complete", manifest.expected)
    assert sum(made) == 6 * MIB
    tapped.close()
    line.close()


def test_another_host_cannot_keep_this_one_s_senders_out(place: Place) -> None:
    """However many streams it begins; and a sender that came when there were too many comes again."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    secure_sender(dealer, place.keys)
    dealer.connect(place.endpoint)
    said: list[Any] = []
    for _ in range(remote_streams_max + 50):
        dealer.send(encode(Hello(new_ulid(), "engine", 1, engine=engine_info())))
        while dealer.poll(0):
            said.append(decode_from_writer(dealer.recv()))

    def refused() -> bool:
        while dealer.poll(10):
            said.append(decode_from_writer(dealer.recv()))
        return sum(isinstance(answer, Refuse) and answer.code == "limit" for answer in said) == 50

    assert until(refused)
    assert isinstance(hello(place.writer.endpoint, None, Hello(new_ulid(), "engine", 1, engine=engine_info())), Welcome)
    dealer.close()
    context.term()


def test_the_newest_engine_is_the_one_that_came_last(place: Place) -> None:
    ahead = engine_info(n_layers=1)
    assert isinstance(hello(place.endpoint, place.keys, Hello(new_ulid(), "engine", 2**62, engine=ahead)), Welcome)
    with Sender(place.writer.endpoint) as local, StoreReader(place.store) as reader:
        local.hello()
        until(lambda: (newest := reader.engine()) is not None and newest.n_layers != 1, 10.0)
        newest = reader.engine()
        assert newest is not None and newest.n_layers == engine_info().n_layers


def test_an_engine_that_is_not_heard_says_so(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sender, "_ALONE_S", 0.5)
    monkeypatch.setattr(sender.logger, "warning", lambda text, *args: said.append(text % args))
    stranger = make_sender(tmp_path / "other", "stranger")
    (stranger / "writer.key").write_text((place.keys / "writer.key").read_text())
    tapped = Tapped(place.endpoint, curve=stranger)
    until(lambda: said != [], 10.0)
    time.sleep(1.2)
    tapped.close()
    assert len(said) == 1 and "this engine's key" in said[0]
    assert f"no writer has answered at {place.endpoint}" in said[0]


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["curve-keys", "gpu-2", "--folder", str(tmp_path / "keys")])
    assert run.exit_code == 0 and (out := tmp_path / "keys" / "gpu-2").is_dir() and str(out) in run.output
    assert sorted(path.name for path in out.iterdir()) == ["sender.key_secret", "writer.key"]
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o600}
    for name, why in (("gpu-2", "already"), ("../x", "letters"), ("", "letters"), ("senders", "not 'senders'")):
        with pytest.raises(StartError, match=why):
            make_sender(tmp_path / "keys", name)


def test_what_cannot_start(tmp_path: Path) -> None:
    keys = make_sender(tmp_path / "keys", "gpu-1")
    for more, why in (({"listen": "tcp://0.0.0.0:1"}, "go together"), ({"curve": keys}, "go together"),
                      ({"listen": "ipc://x", "curve": keys}, "--listen = 'ipc://x'")):
        with pytest.raises(StartError, match=why):
            Config(tmp_path / "store", "ipc:///tmp/x/writer.sock", **more)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = "--listen", f"tcp://127.0.0.1:{taken.getsockname()[1]}", "--curve"
        for folder, why in ((tmp_path / "none", "no key of a line"), (tmp_path / "keys", "Address already in use")):
            with pytest.raises(AssertionError, match=why):
                WriterProcess(tmp_path / "store", *flags, str(folder))
            assert not (tmp_path / "store").exists()  # a start that is refused mends nothing, and so makes nothing
    stray = tmp_path / "keys" / "senders" / "stray.key"
    for text, why in (("garbage", "no key of a line"), ('curve\n public-key = "short"\n', "40 characters of Z85")):
        stray.write_text(text)
        with pytest.raises(AssertionError, match=why):
            WriterProcess(tmp_path / "store", *flags, str(tmp_path / "keys"))
    stray.unlink()
    (tmp_path / "keys" / "writer.key_secret").chmod(0o644)
    with pytest.raises(AssertionError, match="chmod 600"):
        WriterProcess(tmp_path / "store", *flags, str(tmp_path / "keys"))


def test_a_sender_that_is_heard_still_needs_hello(place: Place) -> None:
    """The doors are two, the rules one: a stream of the one is not mistaken for a connection of the other."""
    with Sender(place.writer.endpoint) as local:
        local.hello()
        answer = hello(place.endpoint, place.keys, Hello(local.stream, "engine", local.epoch - 1, engine=engine_info()))
        assert isinstance(answer, Refuse) and answer.code == "stale"
