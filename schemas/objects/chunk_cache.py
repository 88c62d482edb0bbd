"""Files of a reader's cache on a local disk: bounded by bytes, the least used goes first.

Nothing in it is trusted: rows are held against their checksums after they were copied, whatever is read whole against
its own. So nothing is synced, and a file may be cut, changed or removed at any time.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from schemas.errors import TapError
from schemas.objects.layout import folder_of

__all__ = ["ChunkCache", "Sparing", "default_cache", "make_private"]

_FULL: Final = 0.9  # what is left of the bound once it was met
_SPARING: Final = 32


def default_cache() -> Path:
    """The folder of caches where none is named; TapError of a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-tap"
    except RuntimeError:
        raise TapError("cache: this user has no home folder; name a folder for the cache, or set XDG_CACHE_HOME"
                       ) from None


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone can enter, or make one so that is there; PermissionError of another's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder}: is another user's, or no folder; name another cache")
    if found.st_mode & 0o077:
        folder.chmod(0o700)


class ChunkCache:
    """Bytes by name below ``folder``, at most ``limit`` of them; several readers may share the folder.

    A reader counts what it finds there at its start and whenever the bound is met, and what it writes itself.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        make_private(self._folder)
        self._lock = threading.Lock()
        self._nbytes = sum(nbytes for _, nbytes, _ in self._files())

    @property
    def room(self) -> int:
        """Bytes that it takes before any have to go."""
        return max(int(self._limit * _FULL) - self._nbytes, 0)

    def read(self, name: str, into: memoryview) -> bool:
        """Fill ``into`` with the bytes of a name; False where they are not there, or of another length."""
        path = self._path(name)
        try:
            with path.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != len(into) or file.readinto(into) != len(into):
                    return False
            os.utime(path)  # it was used
        except OSError:
            return False
        return True

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Keep bytes under a name; not where there is no room for them."""
        if len(data) > self._limit * _FULL:
            return
        path = self._path(name)
        fresh = path.with_name(f"{secrets.token_hex(8)}.new")
        with self._lock:
            if self._nbytes + len(data) > self._limit:
                self._make_room(int(self._limit * _FULL) - len(data))
            self._nbytes += len(data)
        try:
            fresh.write_bytes(data)
            fresh.replace(path)
        except OSError:  # the disk is full, or the folder gone: it is read from the bucket again
            with suppress(OSError):
                fresh.unlink()

    def drop(self, name: str) -> None:
        """Forget a name."""
        with suppress(OSError):
            self._path(name).unlink()

    def keep(self, folders: Iterable[str]) -> None:
        """Forget what is not of a block in one of these folders."""
        kept = {_group(folder) for folder in folders}
        for _, _, path in self._files():
            if path.suffix != ".new" and path.name.partition("-")[0] not in kept:
                with suppress(OSError):
                    path.unlink()

    def _make_room(self, left: int) -> None:
        """Remove what was used least recently until ``left`` bytes are there."""
        files = sorted(self._files())
        self._nbytes = sum(nbytes for _, nbytes, _ in files)
        for _, nbytes, path in files:
            if self._nbytes <= left:
                break
            with suppress(OSError):
                path.unlink()
            self._nbytes -= nbytes

    def _files(self) -> list[tuple[int, int, Path]]:
        """When each file was used last, in nanoseconds, its bytes, and where it lies."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    found_at = entry.stat(follow_symlinks=False)
                    found.append((found_at.st_mtime_ns, found_at.st_size, Path(entry.path)))
        return found

    def _path(self, name: str) -> Path:
        return self._folder / f"{_group(folder_of(name))}-{xxhash.xxh3_128_hexdigest(name.encode())}"


class Sparing:
    """The allowance of a reader that goes over many rows, each once, to fill a cache. It may put as many bytes as there
    is ``room`` for, then a 32nd of those that it reads past the cache.

    So rows of an epoch do not push each other out before they are used again. Rows that nobody uses any more go after a
    while. No more than that 32nd is fetched in vain.
    """

    def __init__(self, room: int) -> None:
        self._left = room

    def take(self, nbytes: int) -> bool:
        """Whether so many bytes may be put."""
        if self._left < nbytes:
            return False
        self._left -= nbytes
        return True

    def past(self, nbytes: int) -> None:
        """Count bytes that were read past the cache."""
        self._left += nbytes // _SPARING


def _group(folder: str) -> str:
    return xxhash.xxh3_128_hexdigest(folder.encode())
