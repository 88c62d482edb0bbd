"""Edits in Triton: rows changed where they lie, and the tables of a step filled in one launch.

A program that finds its row unedited ends at once, so an armed place costs what a launch in a graph costs. The formula
is that of ``engine_side.edits.tables.edited``, which is the reference and runs everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from engine_side.kernels import Kernel
from engine_side.kernels.primitives import bfloat16, bfloat16_bits, padded, power_of_two, single, warps
from engine_side.transport.cuda_calls import Launched, kernel_nodes

_FILLED = 128  # rows of a program that fills tables


@triton.jit
def _rounded(x, like: tl.constexpr):
    """float32 of ``x`` rounded to a model's dtype."""
    if like == tl.bfloat16:
        return bfloat16(bfloat16_bits(x))
    else:
        return x.to(like).to(tl.float32)


@triton.jit
def _put(at, x, there):
    """Store float32 as a model's dtype."""
    if at.dtype.element_ty == tl.bfloat16:
        tl.store(at.to(tl.pointer_type(tl.uint16)), bfloat16_bits(x), mask=there)
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=there)


_COUNTS: Final = 10  # the place of ``counts`` among the arguments of ``change``
_TABLES = ("programs", "ordinals", "slots", "vectors", "forms", "heads", "counts")


@triton.jit(do_not_specialize=("to_row", "to_other"), do_not_specialize_on_alignment=_TABLES)
def change(rows, to_row: tl.int64, others, to_other: tl.int64, programs, ordinals, slots, vectors, forms, heads, counts,
           VECTOR: tl.constexpr, PAIR: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, COUNT: tl.constexpr,
           SINGLE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program a row: ``rows``, with PAIR the sum of ``rows`` and ``others``, which are zeros afterwards.

    COUNT heads of WIDTH // COUNT columns, HEADS and COLUMNS the next powers of two; SINGLE: single ones are edited.
    """
    row = tl.program_id(0)
    program = tl.load(programs + row)
    if program != 0:
        head, within = tl.arange(0, HEADS), tl.arange(0, COLUMNS)
        column = head[:, None] * (WIDTH // COUNT) + within[None, :]
        there = (head < COUNT)[:, None] & (within < WIDTH // COUNT)[None, :]
        at = rows + tl.multiple_of(row.to(tl.int64) * to_row, VECTOR) + column
        beside = others + tl.multiple_of(row.to(tl.int64) * to_other, VECTOR) + column
        now = single(tl.load(at, mask=there, other=0.0))
        if PAIR:
            now = _rounded(now + single(tl.load(beside, mask=there, other=0.0)), rows.dtype.element_ty)
        ordinal = tl.load(ordinals + row)
        anything = program * 0
        for step in range(DEPTH):
            slot = tl.load(slots + program * DEPTH + step)
            anything = anything | slot
            if slot != 0:
                place = tl.where(slot < 0, ordinal - slot, slot).to(tl.int64)
                form = forms + place * 4
                factor, constant, low, high = tl.load(form), tl.load(form + 1), tl.load(form + 2), tl.load(form + 3)
                vector = tl.load(vectors + place * WIDTH + column, mask=there, other=0.0)
                along = tl.sum(now * vector, axis=1)
                if SINGLE:
                    kind = tl.load(heads + place * COUNT + head, mask=head < COUNT, other=0)
                    along = tl.where(kind == 1, along, tl.sum(along, axis=0))
                moved = constant + tl.minimum(tl.maximum(along, low), high) - along
                moved = factor * now + moved[:, None] * vector
                moved = tl.where(factor == 0.0, constant * vector, moved)
                if SINGLE:
                    moved = tl.where((kind != 0)[:, None], moved, now)
                now = moved
        if anything != 0:
            _put(at, now, there)
            if PAIR:
                _put(beside, tl.zeros([HEADS, COLUMNS], tl.float32), there)
            tl.atomic_add(counts + program, 1)


@lru_cache(maxsize=256)
def _changing(width: int, depth: int, count: int, pair: bool, vector: int, dtype: torch.dtype, device: torch.device
              ) -> Kernel:
    """The kernel of a kind; device and dtype are what it is compiled for."""
    columns = power_of_two(width // count) if count > 1 else padded(width)
    made = Kernel(change, (vector, pair, width, depth, count, count > 1, power_of_two(count), columns), warps(width))
    _made.append(made)
    return made


_made: list[Kernel] = []  # by ``_changing``


def nodes(graph: int) -> Iterator[tuple[int, int]]:
    """Nodes of a captured graph (a cudaGraph_t) that launch ``change``, each with the address of its counts."""
    return kernel_nodes(graph, {kernel.loaded.handle for kernel in _made if kernel.loaded is not None}, _COUNTS)


def change_rows(rows: torch.Tensor, others: torch.Tensor | None, tables: tuple[torch.Tensor, ...],
                heads: torch.Tensor | None) -> None:
    """Edit rows [n, width] of unit stride where they lie. ``tables``: programs, ordinals, slots, vectors, forms and
    counts of the place, as ``engine_side.edits.tables`` has them.
    """
    programs, ordinals, slots, vectors, forms, counts = tables
    beside = rows if others is None else others
    size, steps = rows.element_size(), (rows.stride(0), beside.stride(0))
    aligned = (steps[0] * size | steps[1] * size | rows.data_ptr() | beside.data_ptr()) % 16 == 0
    kernel = _changing(rows.shape[1], slots.shape[1], 1 if heads is None else heads.shape[1], others is not None,
                       16 // size if aligned else 1, rows.dtype, rows.device)
    kernel.launch((rows.shape[0], 1, 1), (rows, steps[0], beside, steps[1], programs, ordinals, slots, vectors, forms,
                                          programs if heads is None else heads, counts))


_NUMBERS = ("rows", "edges", "cleared", "steps")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=(
    "there", "positions", "programs", "ordinals", "counts", "switches"))
def fill(there, positions, programs, ordinals, counts, switches, rows: tl.int64, edges: tl.int64, cleared: tl.int64,
         steps: tl.int64, WATCHED: tl.constexpr, SWITCHES: tl.constexpr, BLOCK: tl.constexpr):
    """Programs and ordinals of a step's ``rows``, 0 for those behind them up to ``cleared``.

    ``there`` int64: first request << 32 of each row, then five lists of ``edges`` numbers each. List 1: the place from
    which on an entry holds (request << 32 | position, ascending). Lists 2 and 3: its program, and its program where the
    condition is not met. List 4: the condition's line. List 5: the ordinal of position 0.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = row < rows
    position = tl.load(positions + row, mask=mine, other=0).to(tl.int64)
    key = tl.load(there + row, mask=mine, other=-1) + position
    begins = there + rows
    low = row.to(tl.int64) * 0
    high = low + edges
    for _ in range(steps):  # the first that begins behind the row
        middle = (low + high) // 2
        wide = low < high
        behind = wide & (tl.load(begins + middle, mask=wide, other=0) <= key)
        high = tl.where(wide & (behind == 0), middle, high)
        low = tl.where(behind, middle + 1, low)
    at = begins + edges + low - 1
    program = tl.load(at, mask=mine, other=0)
    if WATCHED:
        line = tl.load(at + 2 * edges, mask=mine, other=0)
        crossed = row * 0
        for number in range(SWITCHES):
            crossed += (tl.load(switches + line * SWITCHES + number, mask=mine, other=0) <= position).to(tl.int32)
        program = tl.where(crossed % 2 == 1, program, tl.load(at + edges, mask=mine, other=0))
    ordinal = tl.load(at + 3 * edges, mask=mine, other=0) + position
    tl.store(programs + row, program.to(tl.int32), mask=row < cleared)
    tl.store(ordinals + row, ordinal.to(tl.int32), mask=mine)
    tl.atomic_add(counts + program, 1, mask=mine & (program != 0))


@lru_cache(maxsize=16)
def _filling(switches: int, positions: torch.dtype, device: torch.device) -> Kernel:
    """The kernel of a kind; the dtype of positions and the device are what it is compiled for."""
    return Kernel(fill, (switches > 0, switches, _FILLED), 4)


class Filler:
    """``fill`` of the steps of one batch into ``engine_side.edits.tables.Tables``. ``switches`` int64 [lines, n]: of
    conditions, where there are any.
    """

    __slots__ = ("_args", "_kernel", "_launched", "_rows", "_switches")

    def __init__(self, there: torch.Tensor, tables: Any, switches: torch.Tensor | None, rows: int) -> None:
        edges = (there.shape[0] - rows) // 5
        self._rows, self._switches = rows, 0 if switches is None else switches.shape[1]
        self._args = (there, there, tables.programs, tables.ordinals, tables.counts[-1],
                      there if switches is None else switches, rows, edges, rows, edges.bit_length() + 1)
        self._kernel: Kernel | None = None
        self._launched: Launched | None = None

    def __call__(self, positions: torch.Tensor, before: int) -> None:
        """Enqueue it for a step on the current stream; ``before``: rows of the step before."""
        cleared = max(self._rows, before)
        grid = (-(-cleared // _FILLED), 1, 1)
        if self._kernel is None:
            self._kernel = _filling(self._switches, positions.dtype, positions.device)
        if self._launched is None and self._kernel.loaded is not None:
            addresses = [of.data_ptr() if isinstance(of, torch.Tensor) else of for of in self._args]
            self._launched = Launched(self._kernel.loaded, grid, addresses, positions.device.index, 1)
        if self._launched is None:
            there, _, *more = self._args
            self._kernel.launch(grid, (there, positions, *more[:-2], cleared, more[-1]))
            return
        self._launched.over(grid[0])
        self._launched.values[0, 1], self._launched.values[0, 8] = positions.data_ptr(), cleared
        self._launched(0)


def warm(tables: Any, switches: torch.Tensor | None) -> None:
    """Compile what a ``Filler`` may need, so that no step waits for a compiler; nothing is edited afterwards."""
    device = tables.programs.device
    there = torch.tensor([0, -1, 0, 0, 0, 0], device=device)
    for some in (None,) if switches is None else (None, switches):
        for _ in range(2):  # Triton's launch compiles it; the next is as steps do it
            Filler(there, tables, some, 1)(torch.zeros(1, dtype=torch.int64, device=device), 0)
