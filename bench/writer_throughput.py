"""Ingest of the writer against the disk: GB/s through a real socket and ring, over plain write() + fdatasync.

    python -m bench.writer_throughput [--gib 1] [--rounds 3] [--store DIR]

The same bytes are written both ways, in turns, so that the ratio is of the same moment of the same disk. A round of
the writer ends when the last frame is acknowledged as durable. Then it is stopped, which seals what it has (CPU seconds
and bytes of the blocks by GB of payload), or, in the last round, killed, and the recovery of its store is timed (warm).
On a store in shared memory (--store /dev/shm) no disk is in the way.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
import zmq

from schemas import codecs, limits
from schemas.control import Ack, EngineInfo, Frame, Hello, Open, Ping, StreamPart, Welcome, decode_from_writer, encode
from schemas.frame import RowTable
from schemas.ids import new_ulid
from schemas.spec import Armed, Resolved
from writer_service.recovery import recover

LAYERS, WIDTH, ROWS, SLOTS = 36, 4096, 56, 32  # 8 MiB frames of int8b64, as an 8B model makes them
ROOT = Path(__file__).resolve().parent.parent


def make_ring(path: Path, slot: int) -> None:
    """A pre-faulted ring of random bytes."""
    block = np.random.default_rng(0).integers(0, 256, slot, np.uint8).tobytes()
    with open(path, "wb") as file:
        for _ in range(SLOTS):
            file.write(block)


def describe(slot: int, ring: memoryview) -> list[Frame]:
    """One frame for each slot; only its number changes when it is sent."""
    frames = []
    for number in range(SLOTS):
        at, parts = number * slot, []
        for stream in codecs.streams("int8b64", WIDTH, "bfloat16"):
            nbytes = ROWS * LAYERS * stream.nbytes
            digest = xxhash.xxh3_64_intdigest(ring[at : at + nbytes])
            parts.append(StreamPart(stream.name, nbytes, digest, [(at, nbytes)]))
            at += nbytes
        layers = list(range(LAYERS))
        frames.append(Frame(1, "resid_post", "int8b64", "bfloat16", WIDTH, layers, [], [ROWS], 0, parts, "f"))
    return frames


def plain(folder: Path, ring: memoryview, slot: int, count: int) -> float:
    """Seconds for the same bytes by write() and one fdatasync."""
    path = folder / "plain"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    start = time.perf_counter()
    for number in range(count):
        at = number % SLOTS * slot
        os.write(fd, ring[at : at + slot])
    os.fdatasync(fd)
    seconds = time.perf_counter() - start
    os.close(fd)
    path.unlink()
    return seconds


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def anonymous_mb(pid: int) -> float:
    """Memory of a process that is no file's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1000


def through_writer(
    folder: Path, ring_path: Path, frames: list[Frame], slot: int, count: int, kill: bool
) -> dict[str, float]:
    """Seconds until the last of ``count`` frames is durable, the writer's CPU seconds, and those of what follows: the
    seals of a stop, or after a ``kill`` the recovery.
    """
    run = Path(tempfile.mkdtemp(prefix="tap-"))
    endpoint = f"ipc://{run}/w"
    process = subprocess.Popen(
        [sys.executable, "-m", "writer_service", "--store", str(folder / "store"), "--endpoint", endpoint],
        cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    armed = Armed({"resid_post": list(range(LAYERS))}, LAYERS)
    info = EngineInfo("bench", "bfloat16", "f", "", "", LAYERS, armed, {"resid_post": WIDTH}, 1 << 20, "", "", "")
    socket.send(encode(Hello(new_ulid(), "engine", 1, engine=info, ring_path=str(ring_path), ring_bytes=SLOTS * slot)))
    welcome = decode_from_writer(socket.recv())
    assert isinstance(welcome, Welcome) and welcome.ring, welcome
    capture = new_ulid()
    resolved = Resolved({"resid_post": list(range(LAYERS))}, {"resid_post": "int8b64"}, "all", "allow")
    socket.send(encode(Open(1, capture, "r", "{}", resolved, 0, b"", 0, 1)))
    durable, latencies = 0, []
    sent_at: dict[int, float] = {}
    cpu_before = cpu_seconds(process.pid)
    start = time.perf_counter()
    seq = 1
    while durable < count + 1:
        while seq < count + 1 and seq - durable < SLOTS:
            seq += 1
            position = np.arange((seq - 2) * ROWS, (seq - 1) * ROWS, dtype=np.uint32)
            table = RowTable(position * 0, position, position, position * 0).to_bytes()
            frame = msgspec.structs.replace(
                frames[seq % SLOTS], seq=seq, captures=[capture], table_xxh3=xxhash.xxh3_64_intdigest(table))
            sent_at[seq] = time.perf_counter()
            socket.send_multipart([encode(frame), table])
        if not socket.poll(1000):
            socket.send(encode(Ping()))
            continue
        answer = decode_from_writer(socket.recv())
        if isinstance(answer, Ack):
            assert not answer.refused, answer.refused
            now = time.perf_counter()
            latencies += [now - sent_at[n] for n in range(max(durable + 1, 2), answer.durable + 1)]
            durable = answer.durable
    seconds = time.perf_counter() - start
    cpu = cpu_seconds(process.pid) - cpu_before
    result = {"seconds": seconds, "cpu": cpu, "memory_mb": anonymous_mb(process.pid),
              "ack_p50_ms": 1000 * statistics.median(latencies),
              "ack_p99_ms": 1000 * sorted(latencies)[int(len(latencies) * 0.99)]}
    socket.close()
    before, store = cpu_seconds(process.pid), folder / "store"
    process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
    _, process.returncode, used = os.wait4(process.pid, 0)
    process.stdout.close()
    if kill:
        start = time.perf_counter()
        os.close(recover(store).lock)
        result["recovery_seconds"] = time.perf_counter() - start
    else:
        result["seal_cpu"] = used.ru_utime + used.ru_stime - before
        result["stored_bytes"] = sum(path.stat().st_size for path in (store / "blocks").rglob("*") if path.is_file())
    shutil.rmtree(store)
    shutil.rmtree(run, ignore_errors=True)
    return result


def measure(gib: float, rounds: int, folder: Path) -> dict[str, float]:
    """Medians over the rounds; one warming round before them is thrown away."""
    slot = sum(ROWS * LAYERS * stream.nbytes for stream in codecs.streams("int8b64", WIDTH, "bfloat16"))
    slot = -(-slot // limits.section_align_bytes) * limits.section_align_bytes
    count = max(1, int(gib * 2**30 / slot))
    shm = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    with tempfile.TemporaryDirectory(dir=shm) as shared, tempfile.TemporaryDirectory(dir=folder) as work:
        ring_path = Path(shared) / "ring"
        make_ring(ring_path, slot)
        with open(ring_path, "rb") as file:
            ring = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        frames = describe(slot, ring)
        results = []
        for number in range(rounds + 1):
            base = plain(Path(work), ring, slot, count)
            last = number == rounds
            got = through_writer(Path(work), ring_path, frames, slot, count, kill=last)
            gigabytes = count * slot / 1e9
            line = {"writer_gb_s": gigabytes / got["seconds"], "plain_gb_s": gigabytes / base,
                    "ratio": base / got["seconds"], "cpu_s_per_gb": got["cpu"] / gigabytes,
                    "ack_p50_ms": got["ack_p50_ms"], "ack_p99_ms": got["ack_p99_ms"], "memory_mb": got["memory_mb"]}
            if last:
                line["recovery_gb_s"] = gigabytes / got["recovery_seconds"]
            else:
                line["seal_cpu_s_per_gb"] = got["seal_cpu"] / gigabytes
                line["bytes_stored_per_byte"] = got["stored_bytes"] / (count * slot)
            if number:
                results.append(line)
            print(" ".join(f"{key}={value:.3g}" for key, value in line.items()) + ("" if number else " (warming)"),
                  file=sys.stderr)
        del ring
    keys = dict.fromkeys(key for line in results for key in line)
    return {key: statistics.median(line[key] for line in results if key in line) for key in keys}


def main() -> None:
    """Print the medians as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure")
    args = parser.parse_args()
    print(json.dumps({key: round(value, 3) for key, value in measure(args.gib, args.rounds, args.store).items()}))


if __name__ == "__main__":
    main()
