"""The plan of an epoch: the order of an index's rows in its batches, and those that a rank and a worker read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.errors import ArgumentError
from vllm_tap.loader.row_index import BLOCK_ROWS

__all__ = ["WINDOW_ROWS", "EpochPlan", "block_sizes", "rows_between"]

WINDOW_ROWS: Final = 1 << 16
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Batches of ``batch`` rows out of windows of ``window``, for rank ``rank`` of ``world``; SpecError on bad numbers.

    An epoch of ``rows`` rows is the same again for the same plan, epoch and number of workers.
    """

    seed: int
    shuffle: bool
    batch: int
    window: int
    rank: int
    world: int

    def __post_init__(self) -> None:
        for name, value in (("batch", self.batch), ("window", self.window)):
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(name, value, "a number of rows, at least 1")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ArgumentError("seed", self.seed, "a whole number, 0 or more")
        if not 0 <= self.rank < self.world:
            raise ArgumentError("rank", self.rank, f"valid: 0 to {self.world - 1}, as world = {self.world}")
        # Whole batches: no batch reaches into the next window.
        object.__setattr__(self, "window", -(-max(self.window, self.batch) // self.batch) * self.batch)

    def blocks(self, rows: int, epoch: int, worker: int = 0, workers: int = 1) -> I64:
        """The blocks of a worker, in the order in which they are read."""
        count = -(-rows // BLOCK_ROWS)
        order = np.random.default_rng([self.seed, epoch]).permutation(count) if self.shuffle else np.arange(count)
        found: I64 = order[self.rank * workers + worker::self.world * workers].astype(np.int64)
        return found

    def slots(self, count: int, epoch: int, worker: int, workers: int, window: int) -> I64:
        """The place of each of ``count`` rows in a worker's window."""
        if not self.shuffle:
            return np.arange(count)
        return np.random.default_rng([self.seed, epoch, self.rank * workers + worker, window]).permutation(count)

    def rows_read(self, rows: int, epoch: int, worker: int = 0, workers: int = 1) -> int:
        """Rows of an epoch that a worker reads."""
        return int(block_sizes(rows, self.blocks(rows, epoch, worker, workers)).sum())

    def batches(self, rows: int, epoch: int, worker: int, workers: int) -> int:
        """Batches of an epoch that a worker makes."""
        return -(-self.rows_read(rows, epoch, worker, workers) // self.batch)


def block_sizes(rows: int, blocks: I64) -> I64:
    """Rows of each block; the last of all may be smaller."""
    firsts = blocks * BLOCK_ROWS
    return np.minimum(firsts + BLOCK_ROWS, rows) - firsts


def rows_between(blocks: I64, ends: I64, begin: int, end: int) -> I64:
    """Rows number ``begin`` … ``end`` - 1 of ``blocks``, one after the other, that end at ``ends``."""
    firsts = blocks * BLOCK_ROWS
    a, b = np.searchsorted(ends, (begin, end - 1), side="right")
    starts = np.concatenate(([0], ends[:-1]))
    sizes = ends[a:b + 1] - starts[a:b + 1]
    every = np.repeat(firsts[a:b + 1] - starts[a:b + 1], sizes) + np.arange(starts[a], ends[b])
    return every[begin - starts[a]:end - starts[a]]
