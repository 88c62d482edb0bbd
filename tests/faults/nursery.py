"""Forks writers out of a process that has imported everything: one starts in milliseconds, so that hundreds of deaths
fit into a minute. ``python -m tests.faults.nursery`` is that process; a line of JSON in, a process id out.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.support.store_helpers import ROOT, socket_folder
from tests.support.writers.faulty_writer import break_as_asked
from tests.support.writers.power import Certain
from writer_service.__main__ import main as writer

FLAGS = ("--segment-bytes", "150000", "--seal-idle-s", "0.1", "--keep-s", "0.1")


class Nursery:
    """Makes writers on stores."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()

    def fork(self, store: Path, endpoint: str, log: Path, environment: dict[str, str], flags: Sequence[str]) -> int:
        """The id of a new writer; ``environment`` may name a FAULT."""
        return self.run("writer", ["--store", str(store), "--endpoint", endpoint, *flags], log, environment)

    def run(self, program: str, argv: Sequence[str], log: Path, environment: dict[str, str]) -> int:
        """The id of a new ``writer``, or of a ``vllm-tap``."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._lock:
            self.process.stdin.write(json.dumps([program, argv, str(log), environment]) + "\n")
            self.process.stdin.flush()
            return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Forked:
    """A writer on one store, started and killed as often as wanted."""

    def __init__(self, nursery: Nursery, store: Path) -> None:
        self.nursery, self.store = nursery, store
        self.folder = socket_folder()
        self.endpoint = f"ipc://{self.folder}/w"
        self.log = self.folder / "log"
        self.pid = 0

    def begin(self, flags: Sequence[str] = FLAGS, **environment: str) -> None:
        """Start it; ``ready`` waits."""
        self.log.write_text("")
        self.pid = self.nursery.fork(self.store, self.endpoint, self.log, environment, flags)

    def ready(self, timeout_s: float = 60.0) -> bool:
        """Whether it can receive; False where it died before."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if "writer ready" in self.log.read_text():
                return True
            if not self.alive:
                return False
            time.sleep(0.003)
        raise AssertionError(f"the writer does not start: {self.log.read_text()}")

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def end(self, number: int, timeout_s: float = 60.0) -> None:
        """Send a signal and wait until it is gone."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + timeout_s
        while self.alive:
            assert time.monotonic() < deadline, f"signal {number} does not end it: {self.log.read_text()}"
            time.sleep(0.002)


def command(argv: list[str]) -> int:
    """As ``vllm-tap`` in a shell."""
    from vllm_tap.cli.main import main as tap

    sys.argv = ["vllm-tap", *argv]
    tap()
    return 0


def child(program: str, argv: list[str], log: str, environment: dict[str, str]) -> None:
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: nothing outlives the nursery
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(0)
    faulthandler.enable()  # what kills it stands in its log
    os.environ.update(environment)
    if "FAULT" in environment:
        break_as_asked(environment["FAULT"])
    if "FAULT_SYNCED" in environment:
        Certain(Path(argv[argv.index("--store") + 1]), Path(environment["FAULT_SYNCED"]),
                environment.get("FAULT_LIES", "")).watch()
    if "CLOCK_S" in environment:  # of this process alone: the wall clock has no namespace
        now, now_ns, shift = time.time, time.time_ns, int(environment["CLOCK_S"])
        time.time, time.time_ns = lambda: now() + shift, lambda: now_ns() + shift * 10**9
    status = 1
    try:
        status = writer(argv) if program == "writer" else command(argv)
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not kept
    for line in sys.stdin:
        asked = json.loads(line)
        if asked[0] != "writer":  # what it needs is imported once, but no client of buckets made: that stands no fork
            for name in ("obstore.store", "vllm_tap.cli.main", "vllm_tap.bucket.push"):
                importlib.import_module(name)
        pid = os.fork()
        if pid == 0:
            child(*asked)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
