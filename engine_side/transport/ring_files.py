"""Files of rings, and those that killed engines left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "vllm-tap-ring-"


def directory() -> Path:
    """A file system in memory, where there is one."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def free_bytes() -> int:
    """Free bytes of the file system that rings lie in, or of this process's memory where that is less."""
    return min(shutil.disk_usage(directory()).free, _system_free_bytes(), group_free_bytes())


def _system_free_bytes() -> int:
    """Bytes that programs of this system may still take; 2^63 - 1 where it does not say."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return sys.maxsize


def group_free_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the memory limit of this process's control group leaves, with what the system can take back; 2^63 - 1
    without a limit.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, StopIteration):
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip().lstrip("/")
        folder = next(each for each in (root / group, root) if (each / "memory.max").exists())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        taken = int((folder / "memory.current").read_text()) - int(statistics["inactive_file"])
        return max(int((folder / "memory.max").read_text()) - taken, 0)  # "max" is no number
    return sys.maxsize


def remove_orphans() -> None:
    """Remove the rings of killed engines: they are memory, and nothing else gives it back."""
    for path in directory().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # not ours, or its engine lives
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)
