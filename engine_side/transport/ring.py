"""The ring: host memory that the device copies into and the writer maps, first in, first out.

The step allocates, the sender's process releases. The memory is a file that both map, and the writer too. It is touched
once at start, because the first touch of fresh pages costs far more than the copies that follow.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from math import prod
from pathlib import Path
from typing import Final

import torch

from engine_side.transport.ring_files import PREFIX, directory, remove_orphans
from engine_side.transport.shared_memory import EXTRA, Shared
from schemas import limits

ALIGN: Final = 64
DISK_ALIGN: Final = limits.section_align_bytes  # of what a disk may take from the ring itself


class Ring:
    """A byte ring of ``capacity``; ``head`` and ``shared.tail`` count bytes ever allocated and released."""

    def __init__(self, capacity: int, pinned: bool) -> None:
        self.capacity = capacity - capacity % mmap.PAGESIZE
        self.shared = self._create()
        self.path = self.shared.path
        whole = torch.frombuffer(self.shared.map, dtype=torch.uint8)
        self._pinned = pinned
        if pinned:
            error = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), len(whole), 0)
            if int(error) != 0:
                raise OSError(f"cudaHostRegister of {len(whole)} bytes: error {int(error)}")
        whole.zero_()
        self.memory = whole[: self.capacity]
        self.copied = view(whole, self.shared.copied_at, (), torch.int64)  # for the device: see Shared.copied
        self.head = 0  # bytes ever allocated
        self._skipped = 0, 0  # from where to where, before the last region

    def _create(self) -> Shared:
        remove_orphans()
        while True:
            file, path = tempfile.mkstemp(prefix=PREFIX, dir=directory())
            fcntl.flock(file, fcntl.LOCK_EX)  # held until this process ends, however it ends
            if os.fstat(file).st_nlink:
                break
            os.close(file)  # another engine, starting now, took it for an orphan
        self._file = file
        try:
            os.ftruncate(file, self.capacity + EXTRA)
            os.posix_fallocate(file, 0, self.capacity + EXTRA)  # a full /dev/shm must fail here, not as a step's SIGBUS
            shared = Shared(file, Path(path), self.capacity)
        except BaseException:
            Path(path).unlink()
            os.close(file)
            raise
        return shared

    def allocate(self, nbytes: int, alignment: int = ALIGN) -> tuple[int, int] | None:
        """``(offset, mark)`` of contiguous bytes, None when full; releasing up to ``mark`` frees them.

        ``alignment``: what ``offset`` is a multiple of, ``ALIGN`` or ``DISK_ALIGN``.
        """
        nbytes = aligned(nbytes)
        start = self.head % self.capacity
        skip = -start % alignment
        if start + skip + nbytes > self.capacity:
            skip = self.capacity - start
        if self.head + skip + nbytes - self.shared.tail > self.capacity:
            return None
        offset = (start + skip) % self.capacity
        self._skipped = self.head, self.head + skip
        self.head += skip + nbytes
        return offset, self.head

    def give_back(self, nbytes: int) -> None:
        """Give back the end of the last region; with all of it, what was skipped before it."""
        self.head -= nbytes
        before, begin = self._skipped
        if self.head == begin:
            self.head = before

    def close(self) -> None:
        """Remove the file; the mapping goes with the process."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            self._pinned = False
        self.path.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def aligned(nbytes: int, to: int = ALIGN) -> int:
    """Round bytes up to a multiple."""
    return -(-nbytes // to) * to


def view(memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over bytes (uint8) at ``offset``."""
    return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
