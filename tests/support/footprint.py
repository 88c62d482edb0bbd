"""What a process has open and how much memory is its own, as /proc shows it; and how much of that is in use: allocated
and not freed, whatever the allocator keeps beside it."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import PATIENCE_S

ROWS = "rows of the store"


@dataclass(frozen=True)
class Footprint:
    """Descriptors by kind; named maps by kind; how many other maps; bytes of memory that no file has."""

    files: Counter[str]
    maps: Counter[str]
    unnamed: int
    anonymous: int

    @property
    def open(self) -> tuple[Counter[str], Counter[str]]:
        """What must not change: of the rows of a store, which are cached, only that there are no more than allowed."""
        kept = Counter(self.files), Counter(self.maps)
        for each in kept:
            del each[ROWS]
        return kept


def footprint(pid: int, store: Path) -> Footprint:
    """Of a process at this moment."""
    files, maps, unnamed = Counter[str](), Counter[str](), 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            files[_kind(str(entry.readlink()), store)] += 1
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        name = line.split(maxsplit=5)[5:]
        if not name or name[0].startswith("["):
            unnamed += 1
        else:
            maps[_kind(name[0], store)] += 1
    status = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert status is not None
    return Footprint(files, maps, unnamed, int(status[1]) << 10)


def at_rest(pid: int, store: Path, quiet_s: float = 2.0, timeout_s: float = PATIENCE_S) -> Footprint:
    """Once what it has open has not changed for a while."""
    end_s = time.monotonic() + timeout_s
    found, since_s = footprint(pid, store), time.monotonic()
    while time.monotonic() < min(end_s, since_s + quiet_s):
        time.sleep(0.25)
        if (now := footprint(pid, store)).open != found.open:
            since_s = time.monotonic()
        found = now
    return found


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def answer() -> None:
    """In the process, started with PYTHONMALLOC=malloc: tell at SIGUSR2, in a file of the folder WEIGHED."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    place = Path(os.environ["WEIGHED"], str(os.getpid()))

    def told(*_: object) -> None:
        gc.collect()
        found = libc.mallinfo2()
        beside = place.with_suffix(".new")
        beside.write_text(str(found.uordblks + found.hblkhd))
        beside.rename(place)

    signal.signal(signal.SIGUSR2, told)


def weigh(pid: int, folder: Path, times: int = 8) -> int:
    """Bytes in use, the least of several looks: what is needed for a moment does not count."""
    found = []
    for _ in range(times):
        place = folder / str(pid)
        place.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR2)
        while not place.exists():
            time.sleep(0.02)
        found.append(int(place.read_text()))
        time.sleep(0.2)
    return min(found)


def _kind(name: str, store: Path) -> str:
    """A name without the numbers that tell one of a kind from the next."""
    if name.endswith("(deleted)") and name.startswith("/") and not name.startswith("/memfd:"):
        return "removed"
    if name.startswith((f"{store}/blocks/", f"{store}/writers/")) and not name.endswith((".log", "/LOCK")):
        return ROWS
    return re.sub(r"\d+", "N", name) if name.startswith(str(store)) else re.sub(r"\[\d+\]", "", name)
