"""The control: plain threads that only hash and copy the same bytes into files of the same place."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from schemas import limits

_PIECE: Final = limits.frame_bytes_target
_FILE: Final = limits.segment_bytes_target


@dataclass(frozen=True, slots=True)
class Plain:
    """How the threads write. ``room``: bytes of files that stay at most, of all threads."""

    threads: int
    seconds: float
    room: int
    sync: bool  # everything is on the disk in the end, and after every commit's worth of bytes
    hashed: bool = True
    direct: bool = False  # past the page cache: OSError where the file system cannot


def plain_rate(ring: memoryview, folder: Path, how: Plain) -> tuple[float, float]:
    """Bytes a second that the threads write, each to files of its own; processor seconds a byte, of this process."""
    counts, begin, cpu = [0] * how.threads, time.perf_counter(), time.process_time()
    until = begin + how.seconds
    failed: list[OSError] = []

    def work(number: int) -> None:
        files: deque[Path] = deque()
        made = 0
        try:
            while time.perf_counter() < until:
                path = folder / f"plain-{number}-{made}"
                made += 1
                files.append(path)
                counts[number] += _write(path, ring, number * _PIECE + counts[number], until, how)
                while len(files) * _FILE > max(how.room // how.threads, _FILE):
                    files.popleft().unlink()
        except OSError as error:
            failed.append(error)
        for path in files:
            path.unlink(missing_ok=True)

    running = [threading.Thread(target=work, args=(number,)) for number in range(how.threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise failed[0]
    return sum(counts) / (time.perf_counter() - begin), (time.process_time() - cpu) / max(1, sum(counts))


def _write(path: Path, ring: memoryview, at: int, until: float, how: Plain) -> int:
    """One file; its bytes."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if how.direct else 0), 0o600)
    done = synced = 0
    try:
        while done < _FILE and time.perf_counter() < until:
            begin = (at + done) % (len(ring) - _PIECE)
            piece = ring[begin : begin + _PIECE]
            if how.hashed:
                xxhash.xxh3_64_intdigest(piece)
            done += os.pwrite(fd, piece, done)
            if how.sync and done - synced >= limits.commit_bytes_target:
                os.fdatasync(fd)
                synced = done
        if how.sync:
            os.fdatasync(fd)
    finally:
        os.close(fd)
    return done
