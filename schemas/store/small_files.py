"""Small files beside the rows: there whole and durable, or as they were before."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_durable(path: Path, data: bytes) -> None:
    """Replace a file whole, mode 0600: a hidden file beside it, sync, rename, sync of the folder; OSError."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what was changed of a folder's names durable; OSError."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(held)
    finally:
        os.close(held)
