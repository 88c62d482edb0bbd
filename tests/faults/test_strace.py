"""The same from below: strace makes the system calls themselves fail or take long, those of SQLite included."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.conftest import times
from tests.faults.nursery import FLAGS, Forked, Nursery
from tests.faults.traffic import Traffic
from tests.support.store_helpers import ROOT, socket_folder

Record = Callable[[str, object], None]
pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(shutil.which("strace") is None, reason="NOT RUN: needs strace: apt-get install strace"),
]


@contextmanager
def traced(store: Path, inject: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A writer under ``strace -e inject=…``, and its endpoint."""
    endpoint = f"ipc://{socket_folder()}/w"
    calls = inject.partition(":")[0]
    process = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}", "-e", f"inject={inject}", sys.executable,
         "-m", "writer_service", "--store", str(store), "--endpoint", endpoint, *FLAGS],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        yield endpoint, process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # strace itself heeds no signal while it runs a program
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(child), number)
            try:
                process.communicate(timeout=20)
                break
            except subprocess.TimeoutExpired:
                continue


def is_ready(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return any("writer ready" in line for line in iter(process.stdout.readline, ""))


@pytest.mark.parametrize("call", ["fdatasync,fsync", "pwritev", "pwrite64", "rename,renameat,renameat2"])
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "signal=KILL"])
def test_row_09_10_failing_system_calls(
    nursery: Nursery, tmp_path: Path, rng: random.Random, record_property: Record, call: str, error: str
) -> None:
    """The Nth call fails or kills: no acknowledgement is wrong, and a start without the fault finds everything."""
    what = error if "=" in error else f"error={error}"
    numbers, rows = sorted(rng.sample(range(1, 60), times(1, 3))), 0
    for turn, number in enumerate(numbers):
        store = tmp_path / f"{number}"
        if turn % 2 == 0:  # SQLite makes sixty calls and more to make a catalog: here they are made already
            first = Forked(nursery, store)
            first.begin()
            assert first.ready()
            first.end(15)
        with traced(store, f"{call}:{what}:when={number}") as (endpoint, process):
            traffic = Traffic(endpoint, random.Random(number))
            if is_ready(process):
                traffic.connect()
                for _ in range(4):
                    traffic.send(10)
                    time.sleep(0.1)
                    traffic.receive()
        after = Forked(nursery, store)
        after.begin()
        assert after.ready()
        rows += traffic.check(store)
        traffic.engine.endpoint = traffic.api.endpoint = after.endpoint
        traffic.connect()
        traffic.settle(store)
        rows += traffic.check(store)
        traffic.close()
        after.end(15)
    record_property("times", f"call {', '.join(map(str, numbers))} of {call}: {error}; {rows} rows compared")


def test_row_12_a_slow_disk(store: Path, rng: random.Random, record_property: Record) -> None:
    """Every sync takes 0.3 s: receiving goes on meanwhile, commits share syncs, nothing is lost."""
    with traced(store, "fdatasync:delay_enter=300000") as (endpoint, process):
        assert is_ready(process)
        traffic = Traffic(endpoint, rng)
        traffic.connect()
        started = time.monotonic()
        traffic.send(300)
        traffic.settle(store)
        seconds = time.monotonic() - started
        rows = traffic.check(store)
        traffic.close()
    assert seconds < 60
    record_property("times", f"300 messages in {seconds:.1f} s, {rows} rows compared")
