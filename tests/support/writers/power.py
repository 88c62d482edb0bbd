"""Power losses, simulated: of a file that is certain which was synced, of a folder the names that it had when it was.

``Certain`` watches ``fs.datasync`` and ``fs.sync_dir``, in whatever process it is made, and keeps beside the store what
each of them made certain. ``lose`` then makes the store what a loss of power may leave of it: bytes that were written
over and not synced are the old ones again, names come back and go. SQLite's files are its own business: the catalog
keeps its names, and its log may lose any tail.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from writer_service import fs

PAGE = 4096
T = TypeVar("T")
Names = dict[str, tuple[str, bool]]  # by name: which file it is, whether that is a folder
_libc = ctypes.CDLL(None)


class Certain:
    """What of ``store`` is certain, kept in ``beside`` on the same file system; several processes may share that.

    What was there before anybody watched is certain. ``lies``: syncs of files and folders whose path has this in it
    change nothing, as of a device that only says that it synced.
    """

    def __init__(self, store: Path, beside: Path, lies: str = "") -> None:
        self.store, self.beside, self.lies = store, beside, lies
        self._lock, self._looks = threading.Lock(), 0
        self._kept = dict[str, int]()  # by what it is called beside the store, the look that is kept
        if not beside.exists():
            self.settle()

    def settle(self) -> None:
        """All that is there now is certain."""
        self.beside.mkdir(parents=True)
        for folder, _, files in os.walk(self.store):
            self._keep_names(_which(folder), _names(Path(folder)))
            for path in map(Path(folder).joinpath, files):
                if not _of_sqlite(path):
                    self._put(_which(path), path.read_bytes())

    def watch(self) -> None:
        """From now on; see ``watching``."""
        sync_bytes, sync_names = fs.datasync, fs.sync_dir

        def noting_bytes(fd: int) -> None:
            place = Path(f"/proc/self/fd/{fd}")
            which = _which(place)
            number, data = self._look(place.read_bytes)  # before the sync: what is written meanwhile may be lost
            sync_bytes(fd)
            if self._is_true(place.readlink()):
                self._keep(which, number, data)

        def noting_names(path: Path) -> None:
            which = _which(path)
            number, names = self._look(lambda: _names(path))
            sync_names(path)
            if self._is_true(path):
                self._keep(f"names-{which}", number, _encoded(names))

        fs.datasync, fs.sync_dir = noting_bytes, noting_names

    def _look(self, how: Callable[[], T]) -> tuple[int, T]:
        """What is to be synced, and which look at it this was."""
        with self._lock:
            self._looks += 1
            return self._looks, how()

    def _keep(self, name: str, number: int, data: bytes) -> None:
        """Keep what was synced, unless a thread that looked later was sooner: its sync made more certain."""
        with self._lock:
            if self._kept.get(name, 0) < number:
                self._kept[name] = number
                self._put(name, data)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In this process, for a while."""
        real = fs.datasync, fs.sync_dir
        self.watch()
        try:
            yield
        finally:
            fs.datasync, fs.sync_dir = real

    def lose(self, rng: random.Random | None = None) -> int:
        """The power goes: all that is not certain is lost or, by ``rng``, any part of it. How many bytes were spoiled.

        What is left is certain.
        """
        now = {_which(path): path for path in (self.store, *self.store.rglob("*"))}
        left = self.store.with_name(f"{self.store.name}.left")
        left.mkdir()
        spoiled = self._leave(_which(self.store), now, left, rng)
        for path in self.store.glob("catalog.*"):
            if not path.name.endswith("-shm"):
                data = path.read_bytes()
                if rng is not None and path.name.endswith("-wal"):
                    data = _spoil(data[: rng.randrange(len(data) + 1)], data, rng)
                (left / path.name).write_bytes(data)
        self._keep_names(_which(left), _names(left))
        shutil.rmtree(self.store)
        left.rename(self.store)
        return spoiled

    def _leave(self, folder: str, now: dict[str, Path], left: Path, rng: random.Random | None) -> int:
        """Fill ``left`` with what is left of a folder."""
        names, spoiled = self._names_of(folder), 0
        if folder in now and rng is not None and rng.random() < 0.5:  # they are on the disk although nobody asked
            names = _names(now[folder])
        for name, (which, is_folder) in names.items():
            there, made = now.get(which), left / name
            if _of_sqlite(made):
                continue
            if there is not None and there.exists() and self._is_certain(there):
                there.rename(made)
            elif is_folder:
                made.mkdir(mode=0o700)
                spoiled += self._leave(which, now, made, rng)
                self._keep_names(_which(made), _names(made))
            else:
                kept = self.beside / which
                before = kept.read_bytes() if kept.exists() else b""
                after = there.read_bytes() if there is not None and there.exists() else before
                spoiled += max(len(after) - len(before), 0)
                made.write_bytes(before if rng is None else _spoil(before, after, rng))
                made.chmod(0o600)
                self._put(_which(made), made.read_bytes())
        return spoiled

    def _is_certain(self, path: Path) -> bool:
        """Whether a file, or a folder and all that is in it, is what a loss of power leaves of it."""
        if path.is_dir():
            return _names(path) == self._names_of(_which(path)) and all(map(self._is_certain, path.iterdir()))
        kept = self.beside / _which(path)
        return kept.exists() and kept.read_bytes() == path.read_bytes()

    def _is_true(self, path: Path) -> bool:
        return not self.lies or self.lies not in str(path)

    def _names_of(self, folder: str) -> Names:
        kept = self.beside / f"names-{folder}"
        if not kept.exists():
            return {}
        return {name: (which, is_folder) for name, (which, is_folder) in json.loads(kept.read_text()).items()}

    def _keep_names(self, folder: str, names: Names) -> None:
        self._put(f"names-{folder}", _encoded(names))

    def _put(self, name: str, data: bytes) -> None:
        """Whole, also where this process is killed meanwhile."""
        temporary = self.beside / f".{name}.{threading.get_ident()}"
        temporary.write_bytes(data)
        temporary.replace(self.beside / name)


def _encoded(names: Names) -> bytes:
    return json.dumps(names).encode()


def _names(folder: Path) -> Names:
    found: Names = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed at this moment
                found[entry.name] = _which(entry.path), entry.is_dir(follow_symlinks=False)
    return found


def _which(path: Path | str) -> str:
    """A file, by a name that no other has: inodes are used again, so its birth is part of it (statx, STATX_BTIME)."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statx(-100, os.fsencode(path), 0, 0x800, buffer) != 0:
        raise FileNotFoundError(path)
    return "-".join(map(str, (*struct.unpack_from("<Q", buffer, 32), *struct.unpack_from("<qI", buffer, 80))))


def _of_sqlite(path: Path) -> bool:
    return path.name.startswith("catalog.")


def _spoil(before: bytes, after: bytes, rng: random.Random) -> bytes:
    """A file of which ``before`` was synced and ``after`` was there: pages of either, and behind them also zeros or
    noise, or nothing.
    """
    if len(after) < len(before) and rng.random() < 0.5:
        after += before[len(after) :]
    pages = []
    for at in range(0, len(after), PAGE):
        old, new = before[at : at + PAGE], after[at : at + PAGE]
        over, more = new[: len(old)], new[len(old) :]
        pages += [rng.choice([old[: len(over)], over]), rng.choice([more, bytes(len(more)), rng.randbytes(len(more))])]
    data = b"".join(pages)
    return data[: rng.randrange(min(len(before), len(data)), len(data) + 1)] if rng.random() < 0.5 else data
