"""The writer against the disk: frames through a real socket and ring, over plain write() + fdatasync of the same bytes.

    python -m bench.writer_throughput [--gib 1] [--rounds 8] [--long-gib 10] [--journal-gib 4] [--store DIR]

One writer runs throughout. A round writes the same bytes plainly, then through the writer until the last frame is
acknowledged as durable, then waits until everything is sealed; the ratio is thus of the same moment of the same disk.
What the rounds wrote is deleted after all of them. CPU seconds are the writer's (the system's part is mostly copying
into new pages). A long run without a pause, sealing included, shows beside a plain file as long whether
acknowledgements stall and memory stays. Last a writer with so much in its journal is killed, and recovery (warm) is
timed beside hashing the same bytes once.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
import zmq

from schemas import codecs, limits
from schemas.ids import new_ulid
from schemas.spec import Armed, Resolved
from schemas.store.map_file import map_file
from schemas.wire.control_channel import ControlChannel
from schemas.wire.messages import (
    Ack,
    Delete,
    EngineInfo,
    Finish,
    Frame,
    Hello,
    Open,
    Ping,
    StreamPart,
    Welcome,
    decode_from_writer,
    encode,
)
from schemas.wire.row_table import RowTable
from writer_service.recover.recovery import recover

LAYERS, WIDTH, ROWS, SLOTS = 36, 4096, 56, 32  # 8 MiB frames of int8b64, as an 8B model makes them
ROOT = Path(__file__).resolve().parent.parent
chunk_bytes = 8 * 2**20


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


def slot_bytes() -> int:
    """What a frame takes of the ring."""
    nbytes = sum(ROWS * LAYERS * stream.nbytes for stream in codecs.streams("int8b64", WIDTH, "bfloat16"))
    return -(-nbytes // limits.section_align_bytes) * limits.section_align_bytes


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


def cpu_seconds(pid: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return np.array([int(fields[11]), int(fields[12])]) / os.sysconf("SC_CLK_TCK")


def anonymous_mb(pid: int) -> float:
    """Memory of a process that is no file's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1000


@dataclass(slots=True)
class Piece:
    """What a number of frames took, from the first sent to the last durable."""

    capture: str
    seconds: float
    cpu: float
    cpu_system: float
    stall_ms: float  # the longest time between two advances of what is durable
    ack_p50_ms: float
    ack_p99_ms: float


class Line:
    """A writer with a store of its own, and an engine that sends frames out of a ring."""

    def __init__(self, folder: Path, ring_path: Path, frames: list[Frame], slot: int, *flags: str) -> None:
        self.store, self._frames = folder / "store", frames
        self._run = Path(tempfile.mkdtemp(prefix="tap-"))
        self.endpoint = f"ipc://{self._run}/w"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "writer_service", "--store", str(self.store), "--endpoint", self.endpoint,
             "--engine-lost-s", "3600", *flags],  # it is silent while others have their turn
            cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(self.endpoint)
        armed = Armed({"resid_post": list(range(LAYERS))}, LAYERS)
        info = EngineInfo("bench", "bfloat16", "f", "", "", LAYERS, armed, {"resid_post": WIDTH}, 1 << 20, "", "", "")
        self._socket.send(encode(Hello(new_ulid(), "engine", 1, engine=info, ring_path=str(ring_path),
                                       ring_bytes=SLOTS * slot)))
        welcome = decode_from_writer(self._socket.recv())
        assert isinstance(welcome, Welcome) and welcome.ring, welcome
        self._seq = self._durable = 0

    @property
    def pid(self) -> int:
        """The writer's process."""
        return self._process.pid

    def cpu(self) -> float:
        """The writer's CPU seconds so far."""
        return float(cpu_seconds(self.pid).sum())

    def piece(self, count: int) -> Piece:
        """``count`` frames of a capture of their own, as fast as they are acknowledged."""
        capture = new_ulid()
        resolved = Resolved({"resid_post": list(range(LAYERS))}, {"resid_post": "int8b64"}, "all", "allow")
        cpu, start = cpu_seconds(self.pid), time.perf_counter()
        self._send(Open(self._seq + 1, capture, "r", "{}", resolved, 0, b"", 0, 1))
        sent: dict[int, float] = {}
        latencies: list[float] = []
        advanced, stall = start, 0.0
        first, last = self._seq + 1, self._seq + count
        while self._durable < last:
            while self._seq < last and self._seq - self._durable < SLOTS:
                position = np.arange((self._seq + 1 - first) * ROWS, (self._seq + 2 - first) * ROWS, dtype=np.uint32)
                table = RowTable(position * 0, position, position, position * 0).to_bytes()
                frame = msgspec.structs.replace(self._frames[self._seq % SLOTS], seq=self._seq + 1, captures=[capture],
                                                table_xxh3=xxhash.xxh3_64_intdigest(table))
                sent[frame.seq] = time.perf_counter()
                self._send(frame, table)
            before = self._durable
            self._take()
            now = time.perf_counter()
            if self._durable > before:
                latencies += [now - sent.pop(seq) for seq in range(max(before + 1, first), self._durable + 1)]
                stall, advanced = max(stall, now - advanced), now
        user, system = cpu_seconds(self.pid) - cpu
        seconds = time.perf_counter() - start
        self._send(Finish(self._seq + 1, capture, "length", None, b"", count * ROWS))
        latencies.sort()
        return Piece(capture, seconds, float(user + system), float(system), 1000 * stall,
                     1000 * latencies[len(latencies) // 2], 1000 * latencies[int(len(latencies) * 0.99)])

    def _send(self, message: Open | Frame | Finish, *parts: bytes) -> None:
        self._socket.send_multipart([encode(message), *parts])
        self._seq = message.seq

    def _take(self) -> None:
        if not self._socket.poll(1000):
            self._socket.send(encode(Ping()))
            return
        answer = decode_from_writer(self._socket.recv())
        assert isinstance(answer, Ack) and not answer.refused, answer
        self._durable = answer.durable

    def settle(self) -> None:
        """Until nothing is left to seal."""
        journal, blocks = self.store / "writers" / "w0" / "journal", self.store / "blocks"
        while self._durable < self._seq or any(journal.glob("*.open")) or any(blocks.glob(".building-*")):
            self._socket.send(encode(Ping()))
            self._take()
            time.sleep(0.1)

    def stored(self) -> int:
        """Bytes of all files of the blocks."""
        return sum(path.stat().st_size for path in (self.store / "blocks").rglob("*") if path.is_file())

    def let_go(self) -> None:
        """Give the memory of all files of the blocks back, as deleting them would."""
        for path in (self.store / "blocks").rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    def forget(self, captures: list[str]) -> None:
        """Delete all captures, and wait until their blocks are gone."""
        channel = ControlChannel(self.endpoint, "cli")
        for capture in captures:
            channel.submit(lambda seq, capture=capture: Delete(seq, capture), timeout_s=30)
        channel.close()
        while any((self.store / "blocks").iterdir()):
            self._socket.send(encode(Ping()))
            self._take()
            time.sleep(0.02)

    def end(self, how: signal.Signals) -> None:
        """Stop or kill the writer."""
        self._socket.close()
        self._process.send_signal(how)
        self._process.communicate()
        shutil.rmtree(self._run, ignore_errors=True)


def in_turns(work: Path, line: Line, ring: memoryview, slot: int, count: int, rounds: int) -> list[dict[str, float]]:
    """Rounds of plain writes and the writer; one warming round before them is thrown away.

    What they wrote is deleted after all of them: whenever ext4 makes a file, it passes over inodes that were deleted
    within the last minutes, and after some rounds that cost as much as all else of sealing.
    """
    gigabytes, results, captures, stored = count * slot / 1e9, [], list[str](), 0
    for number in range(rounds + 1):
        before = time.process_time()
        base = plain(work, ring, slot, count)
        base_cpu = time.process_time() - before
        got = line.piece(count)
        before = line.cpu()
        line.settle()
        result = {"ratio": base / got.seconds, "writer_gb_s": gigabytes / got.seconds, "plain_gb_s": gigabytes / base,
                  "plain_cpu_s_per_gb": base_cpu / gigabytes, "cpu_s_per_gb": got.cpu / gigabytes,
                  "cpu_system_s_per_gb": got.cpu_system / gigabytes,
                  "seal_cpu_s_per_gb": (line.cpu() - before) / gigabytes, "ack_p50_ms": got.ack_p50_ms,
                  "ack_p99_ms": got.ack_p99_ms, "bytes_stored_per_byte": (line.stored() - stored) / (count * slot)}
        captures.append(got.capture)
        stored = line.stored()
        line.let_go()
        print(shown(result) + ("" if number else " (warming)"), file=sys.stderr)
        if number:
            results.append(result)
    line.forget(captures)
    return results


def at_length(work: Path, line: Line, ring: memoryview, slot: int, count: int) -> dict[str, float]:
    """A long run: sealing goes on beside it. Plain writes of as much: new memory may be dearer than used."""
    base = plain(work, ring, slot, count)
    before, cpu = anonymous_mb(line.pid), line.cpu()
    got = line.piece(count)
    after, gigabytes = anonymous_mb(line.pid), count * slot / 1e9
    line.settle()
    result = {"long_ratio": base / got.seconds, "long_gb_s": gigabytes / got.seconds,
              "long_cpu_s_per_gb": (line.cpu() - cpu) / gigabytes,
              "stall_ms": got.stall_ms, "memory_before_mb": before, "memory_mb": after}
    line.forget([got.capture])
    print(shown(result), file=sys.stderr)
    return result


def recovery(folder: Path, ring_path: Path, frames: list[Frame], slot: int, count: int) -> dict[str, float]:
    """What a start takes after a kill, and what reading and hashing the same bytes once takes."""
    line = Line(folder, ring_path, frames, slot, "--segment-bytes", str(1 << 50), "--seal-idle-s", "3600")
    line.piece(count)
    line.end(signal.SIGKILL)
    gigabytes, result = count * slot / 1e9, {}
    for name in ("hash_gb_s", "recovery_gb_s"):
        cpu, start = time.process_time(), time.perf_counter()
        if name == "recovery_gb_s":
            os.close(recover(line.store).lock)
            result["recovery_cpu_s_per_gb"] = (time.process_time() - cpu) / gigabytes
        else:
            for path in (line.store / "writers" / "w0" / "journal").glob("*.open"):
                data = map_file(path)
                for at in range(0, len(data), chunk_bytes):
                    xxhash.xxh3_64_intdigest(data[at : at + chunk_bytes])
        result[name] = gigabytes / (time.perf_counter() - start)
    print(shown(result), file=sys.stderr)
    return result


def shown(result: dict[str, float]) -> str:
    """Figures on one line."""
    return " ".join(f"{key}={value:.3g}" for key, value in result.items())


def measure(
    gib: float, rounds: int, folder: Path, long_gib: float = 0.0, journal_gib: float = 1.0
) -> dict[str, float]:
    """Medians over the rounds, and the ratio's quartiles; what a long run and a start after a kill take."""
    slot = slot_bytes()

    def count(gib: float) -> int:
        return max(1, int(gib * 2**30 / slot))

    shm = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    with tempfile.TemporaryDirectory(dir=shm) as shared, tempfile.TemporaryDirectory(dir=folder) as work:
        ring_path = Path(shared) / "ring"
        make_ring(ring_path, slot)
        with open(ring_path, "rb") as file:
            ring = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        frames = describe(slot, ring)
        line = Line(Path(work), ring_path, frames, slot, "--seal-idle-s", "0.5", "--keep-s", "0.2")
        try:
            results = in_turns(Path(work), line, ring, slot, count(gib), rounds)
            found = {key: statistics.median(result[key] for result in results) for key in results[0]}
            ratios = np.array([result["ratio"] for result in results])
            found["ratio_q1"], found["ratio_q3"] = (float(q) for q in np.quantile(ratios, (0.25, 0.75)))
            found["memory_mb"] = anonymous_mb(line.pid)
            if long_gib:
                found |= at_length(Path(work), line, ring, slot, count(long_gib))
        finally:
            line.end(signal.SIGTERM)
        shutil.rmtree(line.store)
        found |= recovery(Path(work), ring_path, frames, slot, count(journal_gib))
        del ring
    return found


def main() -> None:
    """Print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="a round writes")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--long-gib", type=float, default=10.0, help="of the run without a pause; 0 for none")
    parser.add_argument("--journal-gib", type=float, default=4.0, help="what is recovered")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure")
    args = parser.parse_args()
    found = measure(args.gib, args.rounds, args.store, args.long_gib, args.journal_gib)
    print(json.dumps({key: round(value, 3) for key, value in found.items()}))


if __name__ == "__main__":
    main()
