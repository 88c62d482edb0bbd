"""Real writers and real senders for tests: a writer process, and a small synchronous sender over a real socket."""

from __future__ import annotations

import atexit
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
import zmq

from schemas import codecs
from schemas.errors import NotFoundError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.spec import Armed, Resolved
from schemas.wire.engine_info import EngineInfo
from schemas.wire.messages import Ack, Bye, Frame, Hello, Ping, Refuse, StreamPart, Welcome, decode_from_writer, encode
from schemas.wire.records import ClientFinish, Delete, Dropped, Finish, Open, Own
from schemas.wire.row_table import FLAG_DRAFT, RowTable
from tests.support.forked import started
from tests.support.processes import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "support" / "writers"  # writers that fail, are slow, lack something
SITE = "resid_post"


T = TypeVar("T")


def until(condition: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """What the condition gives once it is true, or at last after the timeout.

    A capture that is not there is waited for like anything else: the catalog follows an engine's Ack a moment later.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if (value := condition()) or time.monotonic() > deadline:
                return value
        except NotFoundError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def is_erased(reader: StoreReader, *captures: str) -> bool:
    """Whether the captures are deleted, and nothing is left to be erased.

    The catalog hears of a delete a moment after its Ack: until then nothing is to be erased either.
    """
    return all(map(reader.is_deleted, captures)) and not reader.erasing()


def output_tokens(count: int) -> bytes:
    """The generated token ids of every test capture, as records carry them."""
    return np.arange(1000, 1000 + count, dtype="<u4").tobytes()


def socket_folder() -> Path:
    """With a short name, as the paths of sockets must have; it goes when the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="tap-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class WriterProcess:
    """``python -m writer_service`` as a child; ``script`` runs another program with the same flags."""

    def __init__(self, store: Path, *flags: str, script: Path | None = None) -> None:
        self.store = store
        self.folder = socket_folder()
        self.endpoint = f"ipc://{self.folder}/writer.sock"
        self.flags, self.script = flags, script
        self.start()

    def start(self) -> None:
        """Start it and wait until it can receive."""
        args = ["--store", str(self.store), "--endpoint", self.endpoint, *self.flags]
        self.process = started("writer_service", args) if self.script is None else subprocess.Popen(
            [sys.executable, str(self.script), *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True)
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 30)
        line = self.process.stdout.readline() if ready else ""
        if line != f"writer ready {self.endpoint}\n":
            self.process.kill()
            raise AssertionError(f"no writer: {line!r} {self.process.communicate()}")

    def kill(self) -> None:
        """As a crash does it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def stop(self) -> str:
        """A clean stop; what it printed."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, err
        return out

    def __enter__(self) -> WriterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def engine_info(
    width: int = 64, n_layers: int = 4, dtype: str = "float32", sites: Sequence[str] = (SITE,)
) -> EngineInfo:
    """What a small engine would say of itself."""
    return EngineInfo(
        model="tiny",
        model_dtype=dtype,
        fingerprint="f" * 16,
        revision="",
        tokenizer="tiny",
        n_layers=n_layers,
        armed=Armed({site: list(range(n_layers)) for site in sites}, n_layers),
        widths=dict.fromkeys(sites, width),
        max_model_len=4096,
        vllm_version="0",
        tap_version="0",
        runner="v1",
    )


def pieces_of(codec: str, width: int, dtype: str, keys: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Deterministic stored bytes of rows by an integer key each: uint8 ``[*keys.shape, piece bytes]`` by stream."""
    out = {}
    for number, stream in enumerate(codecs.streams(codec, width, dtype)):
        mixed = (
            keys[..., None].astype(np.uint64) * np.uint64(2654435761)
            + np.uint64(number * 97)
            + np.arange(stream.nbytes, dtype=np.uint64) * np.uint64(40503)
        ) >> np.uint64(7)
        data = (mixed & np.uint64(0x3F)).astype(np.uint8)  # small bytes: never NaN in float32, never the fill
        if stream.name == "outlier_index":
            data[..., ::2] = (data[..., :1] + np.arange(data.shape[-1] // 2)) % 64  # below 64, and each once
            data[..., 1::2] = 0
        out[stream.name] = data
    return out


def key_of(capture: int, position: Any, layer: Any, version: int = 0) -> Any:
    """The key that pieces_of takes, one for each row's content."""
    return ((np.asarray(position, np.int64) * 131 + np.asarray(layer)) * 17 + capture) * 7 + version


def frame_of(
    seq: int, site: str, codec: str, dtype: str, width: int, layers: Sequence[int], captures: Sequence[str],
    runs: Sequence[int], table: RowTable, pieces: Mapping[str, bytes], fingerprint: str = "f" * 16,
    extents: Mapping[str, list[tuple[int, int]]] | None = None,
) -> tuple[Frame, list[bytes]]:
    """A frame's message with the parts that follow it; ``extents``, where the pieces lie in a ring, leave those out."""
    data = table.to_bytes()
    streams = [StreamPart(name, len(piece), xxhash.xxh3_64_intdigest(piece), (extents or {}).get(name, []))
               for name, piece in pieces.items()]
    frame = Frame(seq, site, codec, dtype, width, list(layers), list(captures), list(runs),
                  xxhash.xxh3_64_intdigest(data), streams, fingerprint, time_ns=time.time_ns())
    return frame, [data, *([] if extents else pieces.values())]


class Sender:
    """Speaks the protocol as an engine or API would, synchronously; keeps what is not acknowledged."""

    def __init__(
        self,
        endpoint: str,
        role: str = "engine",
        stream: str | None = None,
        epoch: int | None = None,
        engine: EngineInfo | None = None,
        ring: Path | None = None,
        ring_bytes: int = 0,
    ) -> None:
        self.stream, self.role = stream or new_ulid(), role
        self.epoch = epoch or time.time_ns() // 1_000_000
        self.engine = engine or (engine_info() if role == "engine" else None)
        self.ring, self.ring_bytes = ring, ring_bytes
        self.rank = 0
        self.seq = self.durable = self.visible = 0
        self.kept: dict[int, list[bytes]] = {}
        self.refused: dict[int, tuple[str, str]] = {}
        self.refusals: list[Refuse] = []
        self.context: zmq.Context[Any] = zmq.Context.instance()
        self.endpoint = endpoint
        self.connect()

    def connect(self) -> None:
        """A new connection; the stream stays the same."""
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.connect(self.endpoint)

    def hello(self, within_s: float = 60.0) -> Welcome:
        """Greet, and send again what the writer does not have."""
        greeting = encode(
            Hello(
                self.stream,
                self.role,
                self.epoch,
                self.rank,
                engine=self.engine,
                pid=os.getpid(),
                ring_path=str(self.ring) if self.ring else None,
                ring_bytes=self.ring_bytes,
            )
        )
        self.socket.send(greeting)
        deadline = time.monotonic() + within_s
        while True:
            answer = self.receive(10)
            if answer is None and time.monotonic() < deadline:
                self.socket.send(greeting)  # as an engine does: one on its way to a writer that was killed is lost
                continue
            if isinstance(answer, Welcome):
                self.durable = max(self.durable, answer.durable)
                self.resend()
                return answer
            if isinstance(answer, Refuse) and answer.code == "disk":  # it asks for it
                self.socket.send(greeting)
            elif isinstance(answer, Refuse) and answer.code not in ("hello", "resend"):
                raise AssertionError(answer)
            assert answer is not None, "no Welcome"

    def resend(self) -> None:
        """Everything that is not durable."""
        for seq in sorted(self.kept):
            if seq <= self.durable:
                del self.kept[seq]
            else:
                self.socket.send_multipart(self.kept[seq])

    def receive(self, timeout_s: float = 5.0) -> Ack | Welcome | Refuse | None:
        """The next answer, None after the timeout."""
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        answer = decode_from_writer(self.socket.recv())
        if isinstance(answer, Ack):
            self.durable, self.visible = max(self.durable, answer.durable), answer.visible
            for seq, code, reason in answer.refused:
                self.refused[seq] = (code, reason)
            for seq in [seq for seq in self.kept if seq <= self.durable]:
                del self.kept[seq]
        elif isinstance(answer, Refuse):
            self.refusals.append(answer)
        return answer

    def send(self, message: Any, *parts: bytes) -> int:
        """Send a numbered message and keep it; its number."""
        self.seq = message.seq
        self.kept[message.seq] = [encode(message), *parts]
        self.socket.send_multipart(self.kept[message.seq])
        return int(message.seq)

    def wait(
        self, seq: int | None = None, timeout_s: float = PATIENCE_S, alive: Callable[[], bool] = lambda: True
    ) -> None:
        """Until ``seq`` (default: the last) is durable; pings, greets and resends as a real sender does.

        AssertionError after ``timeout_s``, or when the writer is not ``alive`` any more.
        """
        target = self.seq if seq is None else seq
        deadline = time.monotonic() + timeout_s
        resent = 0.0
        while self.durable < target:
            assert time.monotonic() < deadline, f"seq {target} is not durable, {self.durable} is; {self.refusals}"
            assert alive(), f"the writer died before seq {target} was durable"
            before = self.durable
            answer = self.receive(0.5)
            if answer is None:
                self.socket.send(encode(Ping()))
            elif isinstance(answer, Refuse):
                self.hello()
            stands = isinstance(answer, Ack) and self.durable == before and answer.visible == self.durable
            # Every message sent again is answered by an Ack: one round at a time, or the answers breed.
            if stands and self.kept and time.monotonic() - resent > 0.5:
                resent = time.monotonic()
                self.resend()

    def sync(self, timeout_s: float = 5.0) -> Ack:
        """Ping, and the Ack that answers it."""
        self.socket.send(encode(Ping()))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            answer = self.receive(timeout_s)
            if isinstance(answer, Ack):
                return answer
        raise AssertionError("no Ack")

    def next(self) -> int:
        """The number of the next message."""
        return self.seq + 1

    # ── messages ────────────────────────────────────────────────────────────────────────────────────────────────

    def own(
        self,
        capture: str,
        count: int = 1,
        owner: str = "",
        aliases: Sequence[str] = (),
        tags: dict[str, str] | None = None,
        created_ms: int | None = None,
    ) -> int:
        created_ms = created_ms or time.time_ns() // 10**6
        return self.send(Own(self.next(), capture, count, owner, list(aliases), tags or {}, created_ms))

    def open(
        self,
        capture: str,
        prompt_len: int = 8,
        layers: dict[str, list[int]] | None = None,
        codec: str = "int8b64",
        positions: Any = "all",
        prefix_cache: str = "recompute",
        cached: int = 0,
        request: str = "r",
        created_ms: int | None = None,
        edits: str = "",
    ) -> int:
        layers = layers or {SITE: [0, 1, 2, 3]}
        return self.send(
            Open(
                self.next(),
                capture,
                request,
                '{"sites":["resid_post"]}',
                Resolved(layers, dict.fromkeys(layers, codec), positions, prefix_cache),
                prompt_len,
                np.arange(prompt_len, dtype="<u4").tobytes(),
                cached,
                created_ms or time.time_ns() // 10**6,
                edits=edits,
            )
        )

    def finish(self, capture: str, end: int, output: int = 0, reason: str = "stop", edits: str = "") -> int:
        return self.send(Finish(self.next(), capture, reason, None, output_tokens(output), end, edits=edits))

    def dropped(self, capture: str, start: int, stop: int, layers: Sequence[int] = (0, 1, 2, 3)) -> int:
        return self.send(Dropped(self.next(), capture, SITE, list(layers), start, stop))

    def client_finish(self, capture: str, reason: str, output: int = 2) -> int:
        return self.send(ClientFinish(self.next(), capture, reason, "END", output_tokens(output)))

    def delete(self, capture: str) -> int:
        return self.send(Delete(self.next(), capture))

    def bye(self) -> None:
        self.socket.send(encode(Bye(self.seq)))

    def frame(
        self,
        rows: Sequence[tuple[str, int, Sequence[int]]],
        runs: Sequence[int] | None = None,
        layers: Sequence[int] = (0, 1, 2, 3),
        codec: str = "int8b64",
        width: int = 64,
        dtype: str = "float32",
        version: int = 0,
        site: str = SITE,
        send: bool = True,
        ring_at: int | None = None,
        drafts: Mapping[int, int] | None = None,
    ) -> tuple[Frame, list[bytes]]:
        """A frame of rows: (capture id, number of the capture in its content, positions) each; one run by default.

        ``ring_at`` writes the payload into the ring file from there on and names it by extents. ``drafts`` are the
        positions of guesses with the token guessed.
        """
        captures = [capture for capture, _, _ in rows]
        index = np.concatenate([np.full(len(p), i) for i, (_, _, p) in enumerate(rows)])
        content = np.concatenate([np.full(len(p), n) for _, n, p in rows])
        position = np.concatenate([np.asarray(p) for _, _, p in rows])
        runs = list(runs or [len(position)])
        guesses = drafts or {}
        table = RowTable(
            index.astype(np.uint32),
            position.astype(np.uint32),
            np.asarray([guesses.get(int(p), int(p) + 5000) for p in position], np.uint32),
            np.asarray([FLAG_DRAFT if int(p) in guesses else 0 for p in position], np.uint32),
        )
        bounds = np.cumsum([0, *runs])
        pieces, extents = {}, {}
        for stream in codecs.streams(codec, width, dtype):
            data = [pieces_of(codec, width, dtype, key_of(content[a:b], position[a:b], np.asarray(layers)[:, None],
                                                          version))[stream.name].tobytes() for a, b in pairwise(bounds)]
            pieces[stream.name] = b"".join(data)
            if ring_at is not None and self.ring is not None:
                extents[stream.name] = []
                with open(self.ring, "r+b") as ring:
                    for run in data:
                        ring.seek(ring_at)
                        ring.write(run)
                        extents[stream.name].append((ring_at, len(run)))
                        ring_at += len(run)
        frame, parts = frame_of(self.next(), site, codec, dtype, width, layers, captures, runs, table, pieces,
                                extents=extents)
        if send:
            self.send(frame, *parts)
        return frame, parts

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Sender:
        self.hello()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def expected_pieces(
    capture: int,
    positions: Sequence[int],
    layers: Sequence[int],
    codec: str = "int8b64",
    width: int = 64,
    dtype: str = "float32",
    version: int = 0,
) -> dict[str, np.ndarray[Any, Any]]:
    """What a slice of those rows must hold, bytes ``[layers, n, piece bytes]`` by stream."""
    keys = key_of(capture, np.asarray(positions)[None, :], np.asarray(layers)[:, None], version)
    return pieces_of(codec, width, dtype, keys)


def assert_rows(got: Any, capture: int, positions: Sequence[int], version: int = 0) -> None:
    """A slice holds exactly these positions, bit for bit."""
    assert got.positions.tolist() == list(positions)
    assert got.token_ids.tolist() == [position + 5000 for position in positions]
    wanted = expected_pieces(capture, positions, got.layers, got.codec, got.width, got.dtype, version)
    for name, array in got.pieces.items():
        assert array.view(np.uint8).reshape(wanted[name].shape).tobytes() == wanted[name].tobytes(), name


def assert_adds_up(manifest: Any) -> None:
    """expected = captured + missing, for every site and layer."""
    for entry in manifest.rows:
        assert entry.expected == entry.captured + sum(missing.rows for missing in entry.missing), entry
