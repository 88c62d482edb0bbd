"""The line behind a played engine: a writer's process with its porter, here or in a network namespace beside it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from schemas.wire.curve import make_sender
from writer_service.upkeep.usage import disk_bytes

ROOT: Final = Path(__file__).resolve().parents[2]
_SAMPLE_S: Final = 0.5
_HERE, _THERE = "10.203.71.1", "10.203.71.2"


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process so far, all its threads; 0 where it has gone."""
    try:
        taken = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(taken.user + taken.system)


def anonymous_mb(pid: int) -> float:
    """Memory of a process that is no file's, MB; 0 where it has gone."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.NoSuchProcess:
        return 0.0
    return float(memory.rss - memory.shared) / 1e6


@contextlib.contextmanager
def namespace() -> Iterator[str]:
    """A network namespace that ``_HERE`` of this one is joined with; its name. RuntimeError where there can be none."""
    name = f"tap-bench-{os.getpid()}"
    veth = f"tap{os.getpid() % 100_000}"

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"no network namespace: ip {' '.join(words)}: {done.stderr.strip()}")

    try:
        ip("netns", "add", name)
        ip("link", "add", f"{veth}a", "type", "veth", "peer", "name", f"{veth}b")
        ip("link", "set", f"{veth}b", "netns", name)
        ip("addr", "add", f"{_HERE}/24", "dev", f"{veth}a")
        ip("link", "set", f"{veth}a", "up")
        ip("-n", name, "addr", "add", f"{_THERE}/24", "dev", f"{veth}b")
        ip("-n", name, "link", "set", f"{veth}b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        for words in (["link", "del", f"{veth}a"], ["netns", "del", name]):
            subprocess.run(["ip", *words], capture_output=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Line:
    """A writer with a store of its own. ``senders_endpoint`` and ``curve`` are what an engine is told.

    ``program``: what is run in place of ``-m writer_service``. ``tcp``: payload crosses a network, between two
    namespaces where this process may make one (``where`` says so), else over loopback.
    """

    def __init__(self, store: Path, *flags: str, program: tuple[str, ...] = ("-m", "writer_service"), tcp: bool = False
                 ) -> None:
        self.store = store
        self._ends = contextlib.ExitStack()
        self._run = Path(tempfile.mkdtemp(prefix="tap-"))
        self._ends.callback(shutil.rmtree, self._run, ignore_errors=True)
        self.endpoint = self.senders_endpoint = f"ipc://{self._run}/w"
        self.curve: Path | None = None
        self.where = "this host"
        command = [sys.executable, *program, "--store", str(store), "--endpoint", self.endpoint, *flags]
        try:
            if tcp:
                host = "127.0.0.1"
                try:
                    command = ["ip", "netns", "exec", self._ends.enter_context(namespace()), *command]
                    host, self.where = _THERE, "TCP between two network namespaces"
                except (RuntimeError, OSError) as error:
                    self.where = f"TCP over loopback ({error})"
                self.senders_endpoint = f"tcp://{host}:{_free_port()}"
                self.curve = make_sender(self._run / "keys", "bench")
                command += ["--listen", self.senders_endpoint, "--curve", str(self._run / "keys")]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            self._ends.callback(self._kill)
            assert self.process.stdout is not None
            for _ in range(1 + tcp):
                if not (line := self.process.stdout.readline()).startswith("writer "):
                    raise RuntimeError(f"the writer did not start: {line!r}; what it wrote to standard error says why")
        except BaseException:
            self._ends.close()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """Processes by what they are."""
        porters = [child.pid for child in psutil.Process(self.process.pid).children()
                   if any("porter" in word for word in child.cmdline())]
        return {"writer": self.process.pid, **({"porter": porters[0]} if porters else {})}

    def unsealed(self) -> int:
        """Bytes of the journal that are not sealed yet."""
        journal = list((self.store / "writers" / "w0" / "journal").glob("*.open"))
        return sum(map(disk_bytes, [*journal, *(self.store / "blocks").glob(".building-*")]))

    def settle(self, timeout_s: float = 120.0) -> None:
        """Wait until everything is sealed; RuntimeError where it does not come to that."""
        until = time.monotonic() + timeout_s
        while self.unsealed():
            if time.monotonic() > until:
                raise RuntimeError(f"{self.unsealed()} bytes are not sealed after {timeout_s:.0f} s")
            time.sleep(0.05)

    def stored(self) -> int:
        """Bytes that the store takes on its file system."""
        return disk_bytes(self.store)

    def close(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop or kill the writer."""
        if self.process.poll() is None:
            self.process.send_signal(how)
            self.process.communicate(timeout=120)
        self._ends.close()

    def _kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class Use:
    """What processes took of a stretch of time: seconds of a processor, and memory as it went on."""

    began: float
    cpu_s: dict[str, float]
    memory_mb: dict[str, list[float]] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)

    def slope_mb_min(self, name: str) -> float:
        """By how much a process grew, MB a minute, over the second half: what begins has to warm up."""
        half = len(self.times_s) // 2
        if len(self.times_s) - half < 3:
            return 0.0
        return 60 * float(np.polyfit(self.times_s[half:], self.memory_mb[name][half:], 1)[0])


class Watch:
    """Looks at processes now and then, in a thread, from ``start`` until ``stop``."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._ended = threading.Event()
        self.use = Use(time.monotonic(), {name: cpu_seconds(pid) for name, pid in pids.items()},
                       {name: [] for name in pids})
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.use.times_s.append(time.monotonic() - self.use.began)
            for name, pid in self._pids.items():
                self.use.memory_mb[name].append(anonymous_mb(pid))

    def stop(self) -> Use:
        """What they took since the start."""
        self._ended.set()
        self._thread.join()
        self.use.cpu_s = {name: cpu_seconds(pid) - self.use.cpu_s[name] for name, pid in self._pids.items()}
        return self.use
