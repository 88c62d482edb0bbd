"""How long reads take: slices of a store of some GB, and listings and look-ups in a catalog of a million captures.

    python -m bench.read_latency [--gb 2] [--captures 1000000] [--rounds 200] [--codec int8b64,raw16] [--store DIR]

The store holds captures of 512 tokens × 36 layers × 4096: 448 positions in frames of one capture, as prompts make them,
the last 64 in frames of eight captures, as decoding does; half of the GB is of each codec. All of it is in the page
cache when it is read. What ends in "first touch" are a reader's first reads, of places that its process has not touched
(of the first codec without machine code, which comes after 65,536 rows). Then it reads every row once: what follows is
warm. Beside each warm read, in turns with it, a floor: NumPy copies the same bytes out of maps of the files, touched as
well, told beforehand where they lie, and hashes nothing; where numbers are asked for it decodes them as well.
Milliseconds are of the clock (p50, p99) and of the processor (cpu); on a machine that does other work the latter, and
the ratio of the two reads' processor time, say more.
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
import zmq

from bench.content import content
from schemas import codecs, limits
from schemas.catalog.records import connect_write
from schemas.catalog.tables import CATALOG_VERSION, DDL
from schemas.ids import new_ulid
from schemas.native.loops import load
from schemas.read.reader import StoreReader, read_store_uuid
from schemas.read.segment_maps import SegmentMaps
from schemas.spec import Armed, Resolved
from schemas.store.map_file import map_file
from schemas.store.paths import block_name, main_chunk
from schemas.store.segment import FrameView
from schemas.wire.engine_info import EngineInfo
from schemas.wire.messages import Ack, Frame, Hello, Ping, StreamPart, Welcome, decode_from_writer, encode
from schemas.wire.records import Finish, Open
from schemas.wire.row_table import RowTable
from vllm_tap.serve.services import make_socket_dir
from vllm_tap.serve.writer_process import WriterProcess

LAYERS, WIDTH, SLOTS = 36, 4096, 16
TOKENS: Final = 512
GROUP: Final = 8  # captures that decode together
PROMPT: Final = 448
RANDOM_ROWS: Final = 1000
SITE, DTYPE = "resid_post", "bfloat16"
Read = Callable[[], object]


class _Engine:
    """Sends frames of about 8 MiB as fast as the writer acknowledges them."""

    def __init__(self, endpoint: str, ring: Path, codec: str) -> None:
        row = LAYERS * sum(stream.nbytes for stream in codecs.streams(codec, WIDTH, DTYPE))
        self.rows = limits.frame_bytes_target // row // GROUP * GROUP
        pieces = content(codec, WIDTH, DTYPE, self.rows * LAYERS)
        slot = -(-sum(map(len, pieces)) // limits.section_align_bytes) * limits.section_align_bytes
        ring.write_bytes(b"".join(b"".join(pieces).ljust(slot, b"\0") for _ in range(SLOTS)))
        hashes = [xxhash.xxh3_64_intdigest(data) for data in pieces]
        names = [stream.name for stream in codecs.streams(codec, WIDTH, DTYPE)]
        starts = np.cumsum([0, *map(len, pieces)]).tolist()[:-1]
        self._frames = [
            Frame(0, SITE, codec, DTYPE, WIDTH, list(range(LAYERS)), [], [self.rows], 0,
                  [StreamPart(name, len(data), digest, [(number * slot + start, len(data))])
                   for name, data, digest, start in zip(names, pieces, hashes, starts, strict=True)], "f")
            for number in range(SLOTS)]
        self._socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        armed = Armed({SITE: list(range(LAYERS))}, LAYERS)
        info = EngineInfo("bench", DTYPE, "f", "", "", LAYERS, armed, {SITE: WIDTH}, 1 << 20, "", "", "")
        self._socket.send(encode(Hello(new_ulid(), "engine", 1, engine=info, ring_path=str(ring),
                                       ring_bytes=SLOTS * slot)))
        welcome = decode_from_writer(self._socket.recv())
        assert isinstance(welcome, Welcome) and welcome.ring, welcome
        self._seq = self._durable = 0

    def send(self, make: Callable[[int], Any], *parts: bytes) -> None:
        """A numbered message; waits while too many are not acknowledged."""
        self._seq += 1
        self._socket.send_multipart([encode(make(self._seq)), *parts])
        self.wait(SLOTS - 1)

    def frame(self, captures: list[str], positions: range) -> None:
        """A frame with those positions of each of the captures."""
        which = np.repeat(np.arange(len(captures), dtype=np.uint32), len(positions))
        position = np.tile(np.asarray(positions, np.uint32), len(captures))
        table = RowTable(which, position, position, position * 0).to_bytes()
        frame = self._frames[(self._seq + 1) % SLOTS]
        self.send(lambda seq: msgspec.structs.replace(
            frame, seq=seq, captures=captures, table_xxh3=xxhash.xxh3_64_intdigest(table)), table)

    def wait(self, behind: int) -> None:
        """Until at most so many messages are not durable."""
        while self._seq - self._durable > behind:
            if not self._socket.poll(1000):
                self._socket.send(encode(Ping()))
            elif isinstance(answer := decode_from_writer(self._socket.recv()), Ack):
                assert not answer.refused, answer.refused
                self._durable = answer.durable

    def close(self) -> None:
        """Everything durable."""
        self.wait(0)
        self._socket.close()


def fill(store: Path, codec: str, gb: float) -> list[str]:
    """Captures of so many GB together, all in sealed blocks; their ids."""
    row = LAYERS * sum(stream.nbytes for stream in codecs.streams(codec, WIDTH, DTYPE))
    captures: list[str] = []
    resolved = Resolved({SITE: list(range(LAYERS))}, {SITE: codec}, "all", "allow")
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (tempfile.TemporaryDirectory(dir=shm) as shared,
          WriterProcess(store, f"ipc://{make_socket_dir()}/writer.sock", "os") as writer):
        engine = _Engine(writer.endpoint, Path(shared) / "ring", codec)
        for _ in range(max(1, round(gb * 1e9 / (row * TOKENS * GROUP)))):
            group = [new_ulid() for _ in range(GROUP)]
            captures += group
            for capture in group:
                engine.send(lambda seq, c=capture: Open(seq, c, "r", "{}", resolved, PROMPT, b"", 0, 1))  # type: ignore[misc]
                for start in range(0, PROMPT, engine.rows):
                    engine.frame([capture], range(start, start + engine.rows))
            for start in range(PROMPT, TOKENS + 6, engine.rows // GROUP):  # a few positions past the end
                engine.frame(group, range(start, start + engine.rows // GROUP))
            for capture in group:
                engine.send(lambda seq, c=capture: Finish(seq, c, "length", None, bytes(4 * (TOKENS - PROMPT)), TOKENS))  # type: ignore[misc]
        engine.close()
    return captures


class Floor:
    """Where every row of a store lies, as runs of bytes; copies them out of maps."""

    def __init__(self, store: Path, captures: list[str], codec: str) -> None:
        self.streams, self.codec = codecs.streams(codec, WIDTH, DTYPE), codec
        self.files: dict[int, Any] = {}
        self.places: dict[str, tuple[list[int], list[list[int]], list[int]]] = {}
        maps = SegmentMaps(store, read_store_uuid(store))
        with StoreReader(store) as reader:
            for capture in captures:
                place = reader.places(capture, SITE, [0])[0]
                segments, starts, steps = [], [], []
                for number, offset, row in zip(place.segment[0].tolist(), place.offset[0].tolist(),
                                               place.row[0].tolist(), strict=True):
                    segment = reader.segment(number)
                    view = maps.frame(segment, offset)
                    assert segment.sealed and isinstance(view, FrameView)
                    if number not in self.files:
                        path = store / block_name(number) / main_chunk(segment.main)
                        self.files[number] = np.frombuffer(map_file(path), np.uint8)
                    segments.append(number)
                    starts.append([offset + part + row * stream.nbytes for part, stream in
                                   zip(view.layout.parts, self.streams, strict=True)])
                    steps.append(view.rows)
                self.places[capture] = segments, starts, steps
        maps.close()

    def copy(self, rows: list[tuple[str, int]], layers: list[int]) -> dict[str, Any]:
        """Stored pieces of rows, ``[layers, rows, …]``; what lies side by side is copied at once."""
        made = {stream.name: np.empty((len(layers), len(rows), stream.nbytes), np.uint8) for stream in self.streams}
        at = 0
        while at < len(rows):
            capture, position = rows[at]
            segments, starts, steps = self.places[capture]
            end = at + 1
            main = self.streams[0].nbytes
            while end < len(rows) and rows[end] == (capture, position + end - at) \
                    and segments[position + end - at] == segments[position] \
                    and starts[position + end - at][0] == starts[position][0] + (end - at) * main:
                end += 1
            data = self.files[segments[position]]
            for number, stream in enumerate(self.streams):
                for to, layer in enumerate(layers):
                    begin = starts[position][number] + layer * steps[position] * stream.nbytes
                    size = (end - at) * stream.nbytes
                    made[stream.name][to, at:end] = data[begin:begin + size].reshape(end - at, stream.nbytes)
            at = end
        return {stream.name: made[stream.name].view(stream.dtype) for stream in self.streams}

    def decode(self, pieces: dict[str, Any]) -> Any:
        """As numbers."""
        return codecs.decode(self.codec, pieces, WIDTH, DTYPE)


def clocked(work: Read) -> tuple[float, float]:
    """Milliseconds of the clock and of the processor."""
    began, began_cpu = time.perf_counter(), time.thread_time()
    work()
    return 1000 * (time.perf_counter() - began), 1000 * (time.thread_time() - began_cpu)


def in_turns(rounds: int, make: Callable[[], tuple[Read, Read]]) -> dict[str, float]:
    """A read and the floor of another one, a tenth of the rounds before to warm up: of the same rows, the second would
    find in the processor's caches what the first brought there.
    """
    clock, cpu, floor = [], [], []
    for number in range(rounds + rounds // 10):
        (read, _), (_, least) = make(), make()
        took, took_cpu = clocked(read)
        _, took_least = clocked(least)
        if number >= rounds // 10:
            clock.append(took)
            cpu.append(took_cpu)
            floor.append(took_least)
    return {"p50_ms": statistics.median(clock), "p99_ms": sorted(clock)[int(rounds * 0.99)],
            "cpu_ms": statistics.median(cpu), "floor_cpu_ms": statistics.median(floor),
            "over_floor": statistics.median(cpu) / statistics.median(floor)}


def slices(store: Path, captures: list[str], codec: str, rounds: int) -> dict[str, dict[str, float]]:
    """Of a store whose captures have been looked at once."""
    rng, every = random.Random(0), list(range(LAYERS))
    floor = Floor(store, captures, codec)
    found: dict[str, dict[str, float]] = {}
    with StoreReader(store) as reader:

        def slice_of(layers: list[int], start: int, stop: int, numbers: bool) -> tuple[Read, Read]:
            capture = rng.choice(captures)
            rows = [(capture, position) for position in range(start, stop)]
            if not numbers:
                return lambda: reader.slice(capture, SITE, layers, start, stop), lambda: floor.copy(rows, layers)
            return (lambda: reader.slice(capture, SITE, layers, start, stop).values(),
                    lambda: floor.decode(floor.copy(rows, layers)))

        def random_rows(numbers: bool) -> tuple[Read, Read]:
            rows, layers = [(rng.choice(captures), rng.randrange(TOKENS)) for _ in range(RANDOM_ROWS)], [
                rng.randrange(LAYERS)]
            if not numbers:
                return lambda: reader.rows_at(rows, SITE, layers), lambda: floor.copy(rows, layers)
            return (lambda: reader.rows_at(rows, SITE, layers).values(), lambda: floor.decode(floor.copy(rows, layers)))

        began = time.thread_time()
        for capture in captures:
            reader.slice(capture, SITE, [0], 0, 1)
        found["the first look at a capture"] = {"cpu_ms": 1000 * (time.thread_time() - began) / len(captures)}
        reads: dict[str, tuple[int, Callable[[bool], tuple[Read, Read]]]] = {
            f"{TOKENS} tokens of a capture, one layer": (
                rounds, lambda numbers: slice_of([rng.randrange(LAYERS)], 0, TOKENS, numbers)),
            "one token, all layers": (
                rounds, lambda numbers: slice_of(every, at := rng.randrange(TOKENS), at + 1, numbers)),
            f"{RANDOM_ROWS} random rows of a layer": (max(10, rounds // 4), random_rows),
        }
        for name, (times, make) in reads.items():
            took = [clocked(make(False)[0]) for _ in range(times // 4)]
            found[f"{name}, first touch"] = {"p50_ms": statistics.median(clock for clock, _ in took),
                                             "cpu_ms": statistics.median(cpu for _, cpu in took)}
        for capture in captures:
            for layer in every:
                reader.slice(capture, SITE, [layer])
        for data in floor.files.values():
            data[::mmap.PAGESIZE].max()
        load()  # compiled once in a process, beside the reads otherwise
        for numbers in (False, True):
            for name, (times, make) in reads.items():
                found[name + ", as float32" * numbers] = in_turns(times, lambda: make(numbers))  # noqa: B023
        found["a manifest"] = timed(rounds, lambda: reader.manifest(rng.choice(captures)))
    return found


def timed(rounds: int, work: Read) -> dict[str, float]:
    """A call alone."""
    seconds = []
    for number in range(rounds + rounds // 10):
        began = time.perf_counter()
        work()
        if number >= rounds // 10:
            seconds.append(time.perf_counter() - began)
    return {"p50_ms": 1000 * statistics.median(seconds), "p99_ms": 1000 * sorted(seconds)[int(rounds * 0.99)]}


def catalog(folder: Path, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Of a store that has nothing but a catalog of so many captures of a hundred owners."""
    (folder / "store.json").write_text(json.dumps({"version": limits.STORE_VERSION, "uuid": "0" * 32}))
    db = connect_write(folder / "catalog.sqlite")
    db.executescript(DDL)
    db.execute("INSERT INTO meta VALUES ('version', ?)", (str(CATALOG_VERSION),))
    ids = [new_ulid() for _ in range(count)]
    resolved = json.dumps({"layers": {SITE: [0, 1]}, "codec": {SITE: "raw16"}, "positions": "all",
                           "prefix_cache": "allow"})
    db.execute("BEGIN")
    db.executemany(
        "INSERT INTO captures (id, ulid, sample, owner, status, created_ms, stream, resolved, prompt_len) VALUES "
        "(?, ?, 0, ?, ?, ?, 's', ?, 9)",
        ((capture, capture, f"owner{number % 100}", "complete" if number % 10 else "incomplete", number, resolved)
         for number, capture in enumerate(ids)))
    db.executemany("INSERT INTO aliases (alias, owner, ulid) VALUES (?, ?, ?)",
                   ((f"chatcmpl-{capture}", f"owner{number % 100}", capture) for number, capture in enumerate(ids)))
    db.execute("COMMIT")
    db.close()
    rng = random.Random(0)
    with StoreReader(folder) as reader:
        return {
            "the newest 50": timed(rounds, lambda: reader.captures(limit=50)),
            "50 of an owner from the middle": timed(rounds, lambda: reader.captures(
                owner="owner7", limit=50, before=ids[100 * rng.randrange(count // 100) + 7])),
            "50 incomplete ones of an owner": timed(rounds, lambda: reader.captures(
                owner="owner10", status="incomplete", limit=50)),
            "one by its id": timed(rounds, lambda: reader.capture(rng.choice(ids))),
            "one by its response id": timed(rounds, lambda: reader.capture(f"chatcmpl-{rng.choice(ids)}")),
        }


def main() -> None:
    """Print the table as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--captures", type=int, default=1_000_000, help="of the catalog (0: leave it out)")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--codec", default="int8b64,raw16")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    asked = args.codec.split(",")
    with tempfile.TemporaryDirectory(dir=args.store) as work:
        store = Path(work) / "store"
        captures = {codec: fill(store, codec, args.gb / len(asked)) for codec in asked}
        report["store_gb"] = sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) / 1e9
        for codec, ids in captures.items():
            report[codec] = slices(store, ids, codec, args.rounds)
    if args.captures:
        with tempfile.TemporaryDirectory(dir=args.store) as work:
            report["catalog_captures"] = args.captures
            report["catalog"] = catalog(Path(work), args.captures, args.rounds)
    print(json.dumps(json.loads(json.dumps(report), parse_float=lambda text: round(float(text), 3)), indent=1))


if __name__ == "__main__":
    main()
