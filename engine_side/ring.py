"""The ring: host memory that the device copies into and the writer maps, first in, first out.

One thread (the step) allocates, one (the sender) releases; each owns one counter, so no lock is shared. The memory is
a file that the writer process maps too; it is touched once at start, because first touch of fresh pages costs far
more than the copies that follow.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

U8 = npt.NDArray[np.uint8]
ALIGN: Final = 64
_PREFIX: Final = "vllm-tap-ring-"


class Ring:
    """A byte ring of ``capacity``; ``head`` and ``tail`` count bytes ever allocated and released."""

    def __init__(self, capacity: int, pinned: bool) -> None:
        self.capacity = capacity - capacity % mmap.PAGESIZE
        self.path = self._create()
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._pinned = pinned
        if pinned:
            error = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.capacity, 0)
            if int(error) != 0:
                raise OSError(f"cudaHostRegister of {self.capacity} bytes: error {int(error)}")
        self.memory.zero_()
        self.head = 0  # written by the step thread only
        self.tail = 0  # written by the sender thread only
        self.abandoned = False  # set by the sender thread: nothing will be released any more

    def _create(self) -> Path:
        directory = _directory()
        _remove_orphans(directory)
        while True:
            file, path = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
            fcntl.flock(file, fcntl.LOCK_EX)  # held until this process ends, however it ends
            if os.fstat(file).st_nlink:
                break
            os.close(file)  # another engine, starting now, took it for an orphan
        self._file = file
        try:
            os.ftruncate(file, self.capacity)
            os.posix_fallocate(file, 0, self.capacity)  # a full /dev/shm must fail here, not as SIGBUS in a step
            self._map = mmap.mmap(file, self.capacity)
        except BaseException:
            Path(path).unlink()
            os.close(file)
            raise
        return Path(path)

    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        """``(offset, mark)`` of contiguous bytes, None when full; releasing up to ``mark`` frees them."""
        nbytes = -(-nbytes // ALIGN) * ALIGN
        start = self.head % self.capacity
        skip = self.capacity - start if start + nbytes > self.capacity else 0
        if self.head + skip + nbytes - self.tail > self.capacity:
            return None
        offset = (start + skip) % self.capacity
        self.head += skip + nbytes
        return offset, self.head

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self.head - self.tail

    def give_back(self, nbytes: int) -> None:
        """The end of the last region is not needed after all."""
        self.head -= nbytes

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """The bytes themselves, for checksums and for sending across hosts."""
        return memoryview(self._map)[offset : offset + nbytes]

    def blocks_at(self, offset: int, nbytes: int, count: int, stride: int) -> U8:
        """``count`` blocks of ``nbytes``, ``stride`` apart, in place: uint8 [count, nbytes]."""
        return np.lib.stride_tricks.as_strided(self._bytes[offset:], (count, nbytes), (stride, 1), writeable=False)

    def close(self) -> None:
        """Remove the file; the mapping goes with the process."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            self._pinned = False
        self.path.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def free_bytes() -> int:
    """What the file system that rings lie in has left."""
    return shutil.disk_usage(_directory()).free


def _directory() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def view(memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over bytes (uint8) at ``offset``."""
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _remove_orphans(directory: Path) -> None:
    """A killed engine leaves its ring: that is memory, and nothing else gives it back."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # not ours, or its engine lives
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)
