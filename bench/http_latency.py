"""Slices over HTTP while the writer is busy: milliseconds from the moment a request is due to its last byte.

    python -m bench.http_latency [--clients 50] [--seconds 20] [--slow 500] [--dtype float32] [--mb-s 50]

Open loop: what a client asks is due once a second, and is timed from then on even where its last answer came late. A
slice is 512 tokens × one layer of 4,096 numbers; a paced producer writes all the while. Then the same, with clients
beside them that read one byte a second.

The clients share the machine with the service, so they cost as little as they can: they count what they read and keep
none of it, and hold one answer in twenty against its checksum. What is left of them is printed beside the service's
processor time: ``clients_cpu_ms`` a request, the producer's included. The first row is the floor: the same clients, at
the same pace and beside the same producer, of a server that only sends as many bytes, which it has ready.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zmq

from schemas import codecs
from schemas.ids import new_ulid
from schemas.spec import Armed, Resolved
from schemas.wire.engine_info import EngineInfo
from schemas.wire.messages import Ack, Frame, Hello, StreamPart, Welcome, decode_from_writer, encode
from schemas.wire.records import Finish, Open
from schemas.wire.row_table import RowTable

LAYERS, WIDTH, TOKENS, CAPTURES = 4, 4096, 512, 16
VERIFIED = 20  # of so many answers of a client one is held against its checksum
ROOT = Path(__file__).resolve().parent.parent


class Producer:
    """One engine stream; captures are made whole, and then more of them at a pace."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        armed = Armed({"resid_post": list(range(LAYERS))}, LAYERS)
        info = EngineInfo("bench", "bfloat16", "f", "", "", LAYERS, armed, {"resid_post": WIDTH}, 4096, "0", "0", "")
        self._socket.send(encode(Hello(new_ulid(), "engine", time.time_ns() // 1_000_000, engine=info)))
        assert isinstance(decode_from_writer(self._socket.recv()), Welcome)
        self._seq, self.nbytes = 0, 0
        random_bytes = np.random.default_rng(0)
        shape = (LAYERS, TOKENS)
        self._payload = [np.ascontiguousarray({
            "q": random_bytes.integers(-127, 128, (*shape, WIDTH), np.int8),
            "scale": np.full((*shape, WIDTH // 64), 0x3C00, np.uint16),
            "outlier_index": np.broadcast_to(np.arange(8, dtype=np.uint16), (*shape, 8)),
            "outlier_value": np.zeros((*shape, 8), np.uint16),
        }[stream.name]).tobytes() for stream in codecs.streams("int8b64", WIDTH, "bfloat16")]
        self._parts = [StreamPart(stream.name, len(data), xxhash.xxh3_64_intdigest(data)) for stream, data in zip(
            codecs.streams("int8b64", WIDTH, "bfloat16"), self._payload, strict=True)]

    def make(self) -> str:
        """One more capture of 512 rows, durable when this returns."""
        ulid, tokens = new_ulid(), np.zeros(TOKENS, "<u4").tobytes()
        resolved = Resolved({"resid_post": list(range(LAYERS))}, {"resid_post": "int8b64"}, "all", "recompute")
        self._send(Open(self._next(), ulid, ulid, "{}", resolved, TOKENS, tokens, 0, time.time_ns() // 1_000_000))
        column = np.zeros(TOKENS, np.uint32)
        table = RowTable(column, np.arange(TOKENS, dtype=np.uint32), column, column).to_bytes()
        frame = Frame(self._next(), "resid_post", "int8b64", "bfloat16", WIDTH, list(range(LAYERS)), [ulid], [TOKENS],
                      xxhash.xxh3_64_intdigest(table), self._parts, "f")
        self._send(frame, table, *self._payload)
        self._send(Finish(self._next(), ulid, "length", None, b"", TOKENS))
        while True:
            answer = decode_from_writer(self._socket.recv())
            if isinstance(answer, Ack) and answer.durable >= self._seq:
                return ulid

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _send(self, message: Any, *parts: bytes) -> None:
        self._socket.send_multipart([encode(message), *parts], copy=False)
        self.nbytes += sum(map(len, parts))

    def pace(self, mb_s: float, stop: threading.Event) -> None:
        """Captures until ``stop``, ``mb_s`` megabytes a second of them."""
        began_s, before = time.monotonic(), self.nbytes
        while not stop.is_set():
            self.make()
            stop.wait(max(0.0, began_s + (self.nbytes - before) / (mb_s * 1e6) - time.monotonic()))


@contextlib.contextmanager
def started(*args: str) -> Iterator[tuple[int, int]]:
    """A module as a process that says in its first line where it listens: the port, where there is one, and its pid."""
    process = subprocess.Popen([sys.executable, "-m", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().rpartition(":")[2]
        yield int(port) if port.strip().isdecimal() else 0, process.pid
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def service(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Writer and API: the writer's endpoint, the API's port and its process."""
    endpoint = f"ipc://{folder}/s/writer.sock"
    common = ["--store", str(folder / "store"), "--endpoint", endpoint]
    with started("writer_service", *common), \
            started("api", *common, "--port", "0", "--upstream", "http://127.0.0.1:9") as (port, pid):
        yield endpoint, port, pid


def send_ready(nbytes: int) -> None:
    """A server whose every answer is the same bytes; prints its port."""
    body = bytes(nbytes)
    head = (f"HTTP/1.1 200 OK\r\nX-Tap-Xxh3: {xxhash.xxh3_64_hexdigest(body)}\r\n"
            f"Content-Length: {nbytes}\r\n\r\n").encode()

    class Ready(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                if line == b"\r\n":
                    self.connection.sendall(head)
                    self.connection.sendall(body)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, request_queue_size = True, 512

    with Server(("127.0.0.1", 0), Ready) as server:
        print(f"ready http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


class Client(asyncio.BufferedProtocol):
    """One connection. It costs little: all clients read into the same memory, and keep nothing of an answer."""

    _read = memoryview(bytearray(1 << 18))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def ask(self, path: str, verify: bool) -> tuple[int, int]:
        """Status and bytes of an answer; with ``verify`` it is held against its checksum."""
        self._head, self._size, self._left = b"", 0, -1
        self._digest = xxhash.xxh3_64() if verify else None
        self._whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await self._whole
        status = int(self._head.split()[1])
        if status == 200 and self._digest is not None:
            assert self._field("x-tap-xxh3") == self._digest.hexdigest(), "an answer does not match its checksum"
        return status, self._size

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        body = self._read[:nbytes]
        if self._left < 0:
            self._head, found, rest = (self._head + bytes(body)).partition(b"\r\n\r\n")
            if not found:
                return
            self._size = self._left = int(self._field("content-length"))
            body = memoryview(rest)
        if self._digest is not None:
            self._digest.update(body)
        self._left -= len(body)
        if self._left == 0:
            self._whole.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._whole.done():
            self._whole.set_exception(exc or ConnectionResetError("closed before the answer's end"))

    def _field(self, name: str) -> str:
        return self._head.decode("latin-1").lower().split(f"\r\n{name}: ")[1].split("\r\n")[0]


async def ask(port: int, ids: list[str], dtype: str, seconds: float, offset_s: float) -> list[tuple[float, int, int]]:
    """One client: (milliseconds from when it was due, status, bytes) of each answer."""
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    found = []
    began_s = time.perf_counter() + offset_s
    for number in range(int(seconds)):
        due_s = began_s + number
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        path = f"/v1/captures/{random.choice(ids)}/activations?layer={random.randrange(LAYERS)}&dtype={dtype}"
        status, size = await client.ask(path, verify=number % VERIFIED == 0)
        found.append(((time.perf_counter() - due_s) * 1000, status, size))
    client.transport.close()
    return found


def cpu_s(pid: int) -> float:
    """Of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(port: int, pid: int, ids: list[str], dtype: str, clients: int, seconds: float) -> dict[str, float]:
    """All clients in this process; what they saw, and what a request took of the service's processor."""

    async def all_of_them() -> list[list[tuple[float, int, int]]]:
        return await asyncio.gather(*(ask(port, ids, dtype, seconds, 1 + i / clients) for i in range(clients)))

    before, mine = cpu_s(pid), time.process_time()
    answers = [answer for each in asyncio.run(all_of_them()) for answer in each]
    took, mine = cpu_s(pid) - before, time.process_time() - mine
    good = np.sort([ms for ms, status, _ in answers if status == 200])
    return {"requests": len(answers), "refused": sum(status != 200 for _, status, _ in answers),
            "mb": answers[0][2] / 1e6, "p50_ms": float(np.percentile(good, 50)),
            "p99_ms": float(np.percentile(good, 99)), "most_ms": float(good[-1]),
            "service_cpu_ms": 1000 * took / len(answers), "clients_cpu_ms": 1000 * mine / len(answers)}


def read_slowly(port: int, ids: list[str], count: int, ready: threading.Event, stop: threading.Event) -> None:
    """``count`` connections that ask for a slice and take one byte a second of it; ``ready`` once all are answered."""
    asleep = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        path = f"/v1/captures/{random.choice(ids)}/activations?layer=0&dtype=codes"
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        asleep.append(connection)
    status = b"HTTP/1.1 200"
    assert all(connection.recv(len(status)) == status for connection in asleep), "a slow client is refused"
    ready.set()
    for connection in asleep:
        connection.setblocking(False)
    while not stop.wait(1.0):
        for connection in asleep:
            with contextlib.suppress(OSError):
                connection.recv(1)
    for connection in asleep:
        connection.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.http_latency", description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--slow", type=int, default=500)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--mb-s", type=float, default=50.0, help="what the producer writes")
    parser.add_argument("--send-ready", type=int, metavar="BYTES", help="be the server of the floor, until killed")
    args = parser.parse_args()
    if args.send_ready:
        send_ready(args.send_ready)
    with tempfile.TemporaryDirectory(prefix="tap-") as name, service(Path(name)) as (endpoint, port, pid):
        producer = Producer(endpoint)
        ids = [producer.make() for _ in range(CAPTURES)]
        time.sleep(1)
        warm = load(port, pid, ids, args.dtype, 2, 3)
        stop = threading.Event()
        threads = [threading.Thread(target=producer.pace, args=(args.mb_s, stop))]
        threads[0].start()
        with started("bench.http_latency", "--send-ready", str(round(warm["mb"] * 1e6))) as ready:
            result = {"floor": load(*ready, ids, args.dtype, args.clients, args.seconds)}
        result["alone"] = load(port, pid, ids, args.dtype, args.clients, args.seconds)
        if args.slow:
            ready = threading.Event()
            threads.append(threading.Thread(target=read_slowly, args=(port, ids, args.slow, ready, stop)))
            threads[1].start()
            assert ready.wait(60), "the slow clients are not answered"
            result[f"beside {args.slow} slow"] = load(port, pid, ids, args.dtype, args.clients, args.seconds)
        stop.set()
        for thread in threads:
            thread.join()
    for title, row in result.items():
        print(f"{title:>16}: " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
