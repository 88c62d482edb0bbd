"""Files of rings, and those that killed engines left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "vllm-tap-ring-"


def directory() -> Path:
    """A file system in memory, where there is one."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def free_bytes() -> int:
    """Free bytes of the file system that rings lie in."""
    return shutil.disk_usage(directory()).free


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
