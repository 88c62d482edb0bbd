"""The plan of an epoch: the order of an index's rows in its batches, and those that a rank and a worker read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.errors import ArgumentError
from vllm_tap.loader.joined_index import AnyIndex, JoinedIndex
from vllm_tap.loader.row_index import BLOCK_ROWS

__all__ = ["WINDOW_ROWS", "EpochPlan", "rows_between", "units_of"]

WINDOW_ROWS: Final = 1 << 16
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Batches of ``batch`` rows out of windows of ``window``, for rank ``rank`` of ``world``; SpecError on bad numbers.

    An epoch of the same ``units`` is the same again for the same plan, epoch and number of workers.
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

    def order(self, units: I64, epoch: int, worker: int = 0, workers: int = 1) -> I64:
        """The numbers of a worker's units, in the order in which they are read."""
        count = len(units) - 1
        order = np.random.default_rng([self.seed, epoch]).permutation(count) if self.shuffle else np.arange(count)
        part, parts = self.rank * workers + worker, self.world * workers
        rows, mine = int(units[-1]), slice(part, None, parts)
        if rows >= 2 * BLOCK_ROWS * parts:
            # Units differ in size: each part has as many rows as the others, but for those of a unit.
            ends = np.cumsum(np.diff(units)[order])
            mine = slice(*np.searchsorted(ends, [rows * each // parts for each in (part, part + 1)], "right").tolist())
        found: I64 = order[mine].astype(np.int64)
        return found

    def slots(self, count: int, epoch: int, worker: int, workers: int, window: int) -> I64:
        """The place of each of ``count`` rows in a worker's window."""
        if not self.shuffle:
            return np.arange(count)
        return np.random.default_rng([self.seed, epoch, self.rank * workers + worker, window]).permutation(count)

    def rows_read(self, units: I64, epoch: int, worker: int = 0, workers: int = 1) -> int:
        """Rows of an epoch that a worker reads."""
        return int(np.diff(units)[self.order(units, epoch, worker, workers)].sum())

    def batches(self, units: I64, epoch: int, worker: int, workers: int) -> int:
        """Batches of an epoch that a worker makes."""
        return -(-self.rows_read(units, epoch, worker, workers) // self.batch)


def units_of(index: AnyIndex) -> I64:
    """The first row of each unit that is read as one, and at the end the number of rows, int64 ``[units + 1]``.

    A unit is of one segment, and has at most ``BLOCK_ROWS`` neighbours. In a cold block they are of the same
    ``BLOCK_ROWS`` rows of that, which are chunks of their own.
    """
    if isinstance(index, JoinedIndex):
        ends = np.cumsum([0, *(part.rows for part in index.parts)])
        units = [units_of(part)[:-1] + end for part, end in zip(index.parts, ends[:-1], strict=True)]
        return np.concatenate([*units, ends[-1:]])
    segment, offset = index.frames[index.frame[0]].T
    within = segment != np.append(-1, segment[:-1])
    number = np.arange(index.rows) - np.maximum.accumulate(np.where(within, np.arange(index.rows), 0))
    cold = np.isin(segment, [number for number, one in index.segments.items() if one.cold])
    unit = np.where(cold, offset + index.row[0], number) // BLOCK_ROWS
    return np.append(np.flatnonzero(within | (unit != np.append(-1, unit[:-1]))), index.rows)


def rows_between(firsts: I64, ends: I64, begin: int, end: int) -> I64:
    """Rows number ``begin`` … ``end`` - 1 of units: each begins at one of ``firsts``; together they end at ``ends``."""
    a, b = np.searchsorted(ends, (begin, end - 1), side="right")
    starts = np.concatenate(([0], ends[:-1]))
    sizes = ends[a:b + 1] - starts[a:b + 1]
    every = np.repeat(firsts[a:b + 1] - starts[a:b + 1], sizes) + np.arange(starts[a], ends[b])
    return every[begin - starts[a]:end - starts[a]]
