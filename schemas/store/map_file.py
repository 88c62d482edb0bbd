"""A file as memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

__all__ = ["map_file"]


def map_file(path: Path) -> memoryview:
    """The file, mapped read-only; an empty file is an empty view."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)) if size else memoryview(b"")
    finally:
        os.close(fd)
