"""Processes of this machine, as /proc shows them, ports for them, and how long they are waited for."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
from pathlib import Path
from typing import Final

# What has to come is waited for so long, whatever the machine does beside it; only a failure takes it.
PATIENCE_S: Final = 300.0
_drawn = random.SystemRandom()  # each of several processes its own
_told = set[int]()


def free_port() -> int:
    """A port of this machine that nobody listens on, below those that outgoing connections get: none takes it before
    the test does. Each is told once: whoever asks for two gets two.
    """
    while True:
        if (port := _drawn.randrange(10_000, 32_000)) in _told:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            _told.add(port)
            return port


def minds_signals() -> None:
    """For what is started (``preexec_fn``): as from a terminal, also where the tests run in the background."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def runs(pid: int) -> bool:
    """Whether it is there and no zombie."""
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def descendants(pid: int) -> list[int]:
    """Every process below one."""
    parents = {int(entry.name): int(fields[1]) for entry in Path("/proc").iterdir()
               if entry.name.isdigit() and (fields := _stat(int(entry.name)))}
    found: set[int] = set()
    front = {pid}
    while front:
        front = {child for child, parent in parents.items() if parent in front} - found
        found |= front
    return sorted(found)


def _stat(pid: int) -> list[str]:
    """The fields after the name: state, parent, …; none where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
