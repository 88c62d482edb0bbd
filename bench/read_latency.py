"""How long reads take: slices of a store of a few GB, and listings and look-ups in a catalog of a million captures.

    python -m bench.read_latency [--gib 2] [--captures 1000000] [--rounds 200] [--store DIR]

The store holds captures of 512 tokens × 36 layers × 4096 (int8b64): 448 positions in frames of one capture, as prompts
make them, the last 64 in frames of eight captures, as decoding does. All of it is in the page cache when it is read.
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
import zmq

from bench.writer_throughput import LAYERS, ROOT, ROWS, SLOTS, WIDTH, describe, make_ring
from schemas import codecs, limits
from schemas.catalog import CATALOG_VERSION, DDL, connect_write
from schemas.control import Ack, EngineInfo, Finish, Hello, Open, Ping, Welcome, decode_from_writer, encode
from schemas.frame import RowTable
from schemas.ids import new_ulid
from schemas.mapping import SegmentMaps
from schemas.reader import Places, StoreReader, read_store_uuid
from schemas.spec import Armed, Resolved

TOKENS: Final = 512
GROUP: Final = 8  # captures that decode together
PROMPT: Final = 448
RANDOM_ROWS: Final = 1000
SITE: Final = "resid_post"


class _Engine:
    """Sends frames of random bytes as fast as the writer acknowledges them."""

    def __init__(self, folder: Path, shared: Path) -> None:
        slot = sum(ROWS * LAYERS * stream.nbytes for stream in codecs.streams("int8b64", WIDTH, "bfloat16"))
        slot = -(-slot // limits.section_align_bytes) * limits.section_align_bytes
        ring = shared / "ring"
        make_ring(ring, slot)
        with open(ring, "rb") as file:
            self._frames = describe(slot, memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))
        endpoint = f"ipc://{folder}/w"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "writer_service", "--store", str(folder / "store"), "--endpoint", endpoint],
            cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        armed = Armed({SITE: list(range(LAYERS))}, LAYERS)
        info = EngineInfo("bench", "bfloat16", "f", "", "", LAYERS, armed, {SITE: WIDTH}, 1 << 20, "", "", "")
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

    def rows(self, captures: list[str], positions: range) -> None:
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
        """Everything sealed."""
        self.wait(0)
        self._socket.close()
        self._process.terminate()
        self._process.communicate()


def fill(folder: Path, gib: float) -> list[str]:
    """Captures of so many bytes together; their ids."""
    row = LAYERS * sum(stream.nbytes for stream in codecs.streams("int8b64", WIDTH, "bfloat16"))
    groups = max(1, round(gib * 2**30 / (row * TOKENS * GROUP)))
    shm = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    captures: list[str] = []
    resolved = Resolved({SITE: list(range(LAYERS))}, {SITE: "int8b64"}, "all", "allow")
    with tempfile.TemporaryDirectory(dir=shm) as shared:
        engine = _Engine(folder, Path(shared))
        for _ in range(groups):
            group = [new_ulid() for _ in range(GROUP)]
            captures += group
            for capture in group:
                engine.send(lambda seq, c=capture: Open(seq, c, "r", "{}", resolved, PROMPT, b"", 0, 1))  # type: ignore[misc]
                for start in range(0, PROMPT, ROWS):
                    engine.rows([capture], range(start, start + ROWS))
            for start in range(PROMPT, TOKENS + 6, ROWS // GROUP):  # a few positions past the end
                engine.rows(group, range(start, start + ROWS // GROUP))
            for capture in group:
                engine.send(lambda seq, c=capture: Finish(seq, c, "length", None, bytes(4 * (TOKENS - PROMPT)), TOKENS))  # type: ignore[misc]
        engine.close()
    return captures


def timed(rounds: int, work: Callable[[], object]) -> dict[str, float]:
    """p50 and p99 of a call in ms, a tenth of the rounds before to warm up."""
    seconds = []
    for number in range(rounds + rounds // 10):
        began = time.perf_counter()
        work()
        if number >= rounds // 10:
            seconds.append(time.perf_counter() - began)
    return {"p50_ms": 1000 * statistics.median(seconds), "p99_ms": 1000 * sorted(seconds)[int(rounds * 0.99)]}


def random_rows(maps: SegmentMaps, reader: StoreReader, places: list[Places], rng: random.Random) -> None:
    """1,000 rows of any captures, positions and one layer each, checked as slices are."""
    wanted: dict[tuple[int, int, int], list[int]] = {}
    for _ in range(RANDOM_ROWS):
        place = rng.choice(places)
        at = rng.randrange(len(place.positions))
        key = int(place.segment[0, at]), int(place.offset[0, at]), rng.randrange(LAYERS)
        wanted.setdefault(key, []).append(int(place.row[0, at]))
    segments = {number: reader.segment(number) for number in {key[0] for key in wanted}}
    for (number, offset, layer), found in wanted.items():
        view = maps.frame(segments[number], offset, verify=False)
        rows = np.asarray(found)
        pieces = view.pieces([view.frame.layers.index(layer)], rows)
        maps.verify(segments[number], view, [layer], rows,
                    [view.section(stream)[pieces] for stream in range(len(view.declared))])


def slices(store: Path, captures: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Of the store."""
    rng, layers = random.Random(0), list(range(LAYERS))
    with StoreReader(store) as reader:
        places = [reader.places(capture, SITE, [0]) for capture in captures]
        maps = SegmentMaps(store, read_store_uuid(store))
        return {
            f"{TOKENS} tokens of a capture, one layer": timed(rounds, lambda: reader.slice(
                rng.choice(captures), SITE, [rng.randrange(LAYERS)], 0, TOKENS)),
            "one token, all layers": timed(rounds, lambda: reader.slice(
                rng.choice(captures), SITE, layers, at := rng.randrange(TOKENS), at + 1)),
            f"{RANDOM_ROWS} random rows": timed(max(10, rounds // 5), lambda: random_rows(maps, reader, places, rng)),
            "a manifest": timed(rounds, lambda: reader.manifest(rng.choice(captures))),
        }


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
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--captures", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.store) as work:
        captures = fill(Path(work), args.gib)
        store = Path(work) / "store"
        report["store_gb"] = sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) / 1e9
        report["slices"] = slices(store, captures, args.rounds)
    with tempfile.TemporaryDirectory(dir=args.store) as work:
        report["catalog_captures"] = args.captures
        report["catalog"] = catalog(Path(work), args.captures, args.rounds)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
