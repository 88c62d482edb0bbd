"""Writers and commands of the faults, forked: hundreds of deaths fit into a minute (tests/support/forked.py)."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.forked import started
from tests.support.store_helpers import socket_folder

FLAGS = ("--segment-bytes", "150000", "--seal-idle-s", "0.1", "--keep-s", "0.1")


class Nursery:
    """Makes writers on stores."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[str]] = []

    def run(self, program: str, argv: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
        """A new ``writer``, or a ``vllm-tap``; ``environment`` may name a FAULT (tests/support/writers/broken.py)."""
        with log.open("ab") as said:
            self.children.append(started("tests.support.writers.broken", [program, *argv], said, said, **environment))
        return self.children[-1]

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()


class Forked:
    """A writer on one store, started and killed as often as wanted."""

    def __init__(self, nursery: Nursery, store: Path) -> None:
        self.nursery, self.store = nursery, store
        self.folder = socket_folder()
        self.endpoint = f"ipc://{self.folder}/w"
        self.log = self.folder / "log"
        self.process: subprocess.Popen[str] | None = None

    def begin(self, flags: Sequence[str] = FLAGS, **environment: str) -> None:
        """Start it; ``ready`` waits."""
        self.log.write_text("")
        self.process = self.nursery.run("writer", ["--store", str(self.store), "--endpoint", self.endpoint, *flags],
                                        self.log, environment)

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
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def end(self, number: int, timeout_s: float = 60.0) -> None:
        """Send a signal and wait until it is gone."""
        if self.process is not None:
            self.process.send_signal(number)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"signal {number} does not end it: {self.log.read_text()}") from None
