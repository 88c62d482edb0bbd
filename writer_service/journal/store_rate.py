"""The rate that the store takes rows at: measured once at the start, then by what comes as fast as it is taken."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from writer_service import fs

_FILE: Final = "rate.probe"
_PIECES: Final = 4 << 20, 32 << 20  # bytes that are written and synced: the second where the first says that it is soon
_SOON_S: Final = 0.25
_FREE_MIN: Final = 1 << 30  # bytes of the disk, below which nothing is written for this
_BLOCK: Final = 1 << 20
_HALF_S: Final = 7.0  # seconds of saturation after which older ones count half


class StoreRate:
    """Bytes of rows a second that become durable; fed by the main loop, with times of one clock."""

    def __init__(self) -> None:
        self.bytes_s = 0.0  # 0.0: not known yet
        self.measured = ""  # "start" or "traffic"
        self._bytes = self._seconds = 0.0  # of saturation, older ones less
        self._in_row = False  # whether the last commit was one of it
        self._ended: float | None = None  # when the last commit did, if rows have not stopped coming since
        self._since: float | None = None  # the same, as it was when the one that runs was started

    def begin(self, folder: Path) -> None:
        """Measure what the disk of ``folder`` takes, beside everything else, which need not wait for it."""
        threading.Thread(target=self._probe, args=(folder,), name="store-rate", daemon=True).start()

    def quiet(self) -> None:
        """Note that nothing waits to be received: until the next commit ends, the store is not what holds rows up."""
        self._ended = None

    def start(self) -> None:
        """A commit starts; while it is synced senders may run out of room, and nothing comes for that reason."""
        self._since = self._ended

    def commit(self, nbytes: int, full: bool, began: float, ended: float) -> None:
        """Rows of ``nbytes`` bytes became durable at ``ended``, the first of which began to be written at ``began``.

        ``full``: the commit was due because of its size. If rows had not stopped coming since the last one ended, that
        is what the store takes; otherwise the store takes at least so much.
        """
        if full and self._since is not None and ended > self._since:
            # The first of a row of them may have been written while the commit before was synced.
            self._saturated(nbytes, ended - (self._since if self._in_row else min(self._since, began)))
            self._in_row = True
        else:
            self._in_row = False
            if full and self.bytes_s and nbytes > self.bytes_s * (ended - began) > 0:
                self.bytes_s, self.measured = nbytes / (ended - began), "traffic"
        self._ended = ended

    def _saturated(self, nbytes: int, seconds: float) -> None:
        """Bytes over seconds, of which older ones count less."""
        keep: float = 0.5 ** (seconds / _HALF_S)
        self._bytes, self._seconds = self._bytes * keep + nbytes, self._seconds * keep + seconds
        self.bytes_s, self.measured = self._bytes / self._seconds, "traffic"

    def _probe(self, folder: Path) -> None:
        with suppress(OSError):  # then it is known when rows come
            if (found := _probed(folder)) and not self.measured:
                self.bytes_s, self.measured = found, "start"


def _probed(folder: Path) -> float:
    """Bytes a second that were written to a file and synced; 0.0 where there is little room."""
    if shutil.disk_usage(folder).free < _FREE_MIN:
        return 0.0
    path = folder / _FILE
    path.unlink(missing_ok=True)  # of a writer that was killed
    fd = fs.open_new(path)
    try:
        path.unlink()  # from now on it ends with its descriptor
        block = mmap.mmap(-1, _BLOCK)
        block.write(os.urandom(_BLOCK))  # what compresses would be no measure
        rate = 0.0
        for nbytes in _PIECES:
            if rate and nbytes / rate > _SOON_S:
                break
            began = time.perf_counter()
            written = fs.write_synced(fd, [memoryview(block)] * (nbytes // _BLOCK))
            rate = written / (time.perf_counter() - began)
        return rate
    finally:
        fs.close(fd)
