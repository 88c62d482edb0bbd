"""Lock of a store, which one writer holds: taken by it, looked at by others."""

from __future__ import annotations

import os
import time
from pathlib import Path

from schemas.errors import StartError
from schemas.store.paths import WRITER, endpoint_name
from writer_service import fs

__all__ = ["check_free", "is_free", "listens", "take_lock"]


def check_free(store: Path) -> None:
    """StartError where a writer has the store now; makes nothing and keeps nothing."""
    if not is_free(store):
        raise _taken(store)


def is_free(store: Path) -> bool:
    """Whether no writer has the store now."""
    try:
        fd = fs.lock(store / "writers" / WRITER / "LOCK", shared=True)
    except FileNotFoundError:
        return True
    except OSError:  # not ours to read: there may be one
        return False
    if fd is None:
        return False
    fs.close(fd)
    return True


def listens(store: Path) -> str | None:
    """Endpoint of the writer that has the store, None where it does not say so yet."""
    try:
        return (store / endpoint_name()).read_text()
    except FileNotFoundError:
        return None


def _taken(store: Path) -> StartError:
    return StartError(f"store {store}: another writer has it (writers/{WRITER}/LOCK); stop it first")


def take_lock(store: Path) -> tuple[int, int]:
    """(descriptor, epoch) of this writer; StartError where another one has the store."""
    folder = store / "writers" / WRITER
    fs.make_dirs(folder / "journal")
    fs.make_dirs(store / "blocks")
    tries = 0
    while (fd := fs.lock(folder / "LOCK")) is None:
        tries += 1
        if tries == 10:
            raise _taken(store)
        time.sleep(0.01)  # who looks whether the store is free has the lock for a moment
    fs.remove(store / endpoint_name())  # the word of one before it
    try:
        before = int(os.pread(fd, 64, 0).split()[0])
    except (IndexError, ValueError):
        before = 0
    # The count never repeats even where the lock file was lost: it never falls behind the clock.
    epoch = max(before + 1, int(time.time()))
    fs.write_at(fd, [f"{epoch} {os.getpid()}\n".ljust(64).encode()], 0)
    fs.datasync(fd)
    return fd, epoch
