"""Kernels in Triton: one launch a block of rows (two of a projection) gathers, encodes and writes every stream.

The torch encoders in engine_side.codecs are the reference and run everywhere; these run where ``supported`` says so.
Nothing here imports Triton until a kernel is asked for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine_side.codecs import kernel_name
from engine_side.transport.cuda_calls import Function, Launched
from schemas import codecs
from schemas.errors import SpecError

__all__ = ["Kernel", "Kind", "Launch", "Projected", "StagedRows", "fits", "forget", "launch", "rows_max", "score",
           "scored", "supported", "warm", "warm_scores"]

_WIDTH_MAX: Final = 32768
_SCORES_MAX: Final = 16  # more are for a product of matrices
_VECTOR: Final = 16  # bytes of the widest load
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
I64 = npt.NDArray[np.int64]
logger = logging.getLogger("vllm.tap")
_left = False
_AT_0: Final = np.zeros(1, np.int64)
_STEPS: Final = 16  # that a launch has room for at least
_ROWS: Final = 4  # the place of what says which rows are taken, among a kernel's arguments


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows of a site in staging, all on one device.

    ``buffer`` [layers armed, tokens, width], rows contiguous; ``layers`` int32 [n_layers], places in the buffer.
    ``rows`` int64 [n], or the first of ``n`` rows that follow each other. ``token_ids`` and ``positions`` [tokens of
    the step], each int32 or int64, contiguous, none negative.
    """

    buffer: torch.Tensor
    layers: torch.Tensor
    rows: torch.Tensor | int
    n: int
    token_ids: torch.Tensor
    positions: torch.Tensor


class Kind(NamedTuple):
    """Properties of rows that a kernel is compiled for."""

    width: int
    dtype: torch.dtype
    gathered: bool
    aligned: bool  # to vectors, wherever a row lies
    device: torch.device

    @classmethod
    def of(cls, source: StagedRows) -> Kind:
        """The kind of a site's rows."""
        buffer, (to_layer, to_row, _) = source.buffer, source.buffer.stride()
        aligned = ((to_layer | to_row) * buffer.element_size() | buffer.data_ptr()) % _VECTOR == 0
        return cls(buffer.shape[2], buffer.dtype, not isinstance(source.rows, int), aligned, buffer.device)

    @property
    def constants(self) -> tuple[bool, int, int]:
        """The first constants of every kernel: GATHERED, VECTOR (in numbers), WIDTH."""
        return self.gathered, _VECTOR // self.dtype.itemsize if self.aligned else 1, self.width


@dataclass(slots=True)
class Kernel:
    """A kernel for rows of one kind; compiled by its first launch and held, which spares the look-up at the others."""

    function: Any
    constants: tuple[Any, ...]
    warps: int
    stages: int = 3
    compiled: Any = None
    loaded: Function | None = None  # compiled, and known to the driver as we know it

    def launch(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        """Launch by Triton, which compiles it first; ``args`` without the constants."""
        if self.compiled is not None:
            self.compiled[grid](*args, *self.constants)
            return
        self.compiled = self.function[grid](*args, *self.constants, num_warps=self.warps,  # None: it is interpreted
                                            num_stages=self.stages)
        if self.compiled is not None:
            try:
                self.loaded = Function.of(self.compiled, len(args))
            except Exception:
                _leave_to_triton(self)


def _leave_to_triton(kernel: Kernel) -> None:
    """Its launcher asks for more each time, and takes longer; logged once."""
    global _left
    kernel.loaded = None
    if not _left:
        _left = True
        logger.exception("vllm-tap: launching a kernel directly failed; Triton's slower launcher is used (logged once)")


@lru_cache(maxsize=256)
def supported(identity: str, width: int, dtype: torch.dtype) -> bool:
    """Whether ``launch`` takes rows of ``width`` numbers in ``dtype``; False on a machine without Triton."""
    try:
        codec = codecs.identified(identity)
        codec.streams(width, str(dtype).removeprefix("torch."))
    except SpecError:
        return False
    name = kernel_name(codec.family)
    if not name or not 0 < width <= _WIDTH_MAX or find_spec("triton") is None:
        return False
    return dtype in getattr(_module(name)[0], "DTYPES", _DTYPES)


def _module(name: str) -> tuple[Any, str]:
    """The module of a kernel by a codec's name for it, and the name of the function."""
    module, _, function = name.rpartition(".")
    return import_module(module if "." in module else f"engine_side.kernels.{module}"), function


class Launch:
    """A kernel with its rows and the memory it writes to, for as many steps as ``begins`` has. A step's streams lie
    from byte ``begins[step]`` (a multiple of 64) on. ``more``: arguments of the kernel's own. ``grid``: one program a
    row if it is not given.
    """

    __slots__ = ("_after", "_before", "_begins", "_gathered", "_grid", "_kernel", "_launched", "_movable", "_offsets",
                 "_steps")

    def __init__(self, kernel: Kernel, source: StagedRows, scratch: torch.Tensor, offsets: Sequence[int], begins: I64,
                 more: Sequence[torch.Tensor | int] = (), grid: tuple[int, int, int] | None = None) -> None:
        buffer, rows, ids, positions = source.buffer, source.rows, source.token_ids, source.positions
        to_layer, to_row, _ = buffer.stride()
        gathered = not isinstance(rows, int)
        # Of a 64-bit number that is not negative the lower half is the number: one kernel for both.
        wide_ids, wide_positions = ids.dtype == torch.int64, positions.dtype == torch.int64
        self._kernel, self._grid = kernel, grid or (source.n, source.layers.shape[0], 1)
        self._gathered, self._movable, self._steps = gathered, grid is None, max(len(begins), _STEPS)
        self._before: tuple[Any, ...] = (
            buffer, to_layer, to_row, source.layers, rows if gathered else source.layers, 0 if gathered else rows,
            ids.view(torch.int32) if wide_ids else ids, 1 + wide_ids,
            positions.view(torch.int32) if wide_positions else positions, 1 + wide_positions, scratch)
        self._offsets, self._after = np.array(offsets, np.int64), more
        self._launched: Launched | None = None
        if kernel.loaded is not None and source.n:  # the driver takes no empty grid
            addresses = [of.data_ptr() if isinstance(of, torch.Tensor) else int(of)
                         for of in (*self._before, *offsets, *more)]
            self._launched = Launched(kernel.loaded, self._grid, addresses, buffer.device.index, self._steps)
        self.move(begins)

    def aim(self, rows: torch.Tensor | int, n: int, offsets: Sequence[int], begins: I64) -> bool:
        """``n`` other rows of the same source go elsewhere from now on; False where another launch has to be made.

        To make one takes several times as long.
        """
        if isinstance(rows, int) == self._gathered or not self._movable or len(begins) > self._steps or not n:
            return False
        if self._launched is None and self._kernel.loaded is not None:  # a faster way has come
            return False
        self._grid, self._offsets = (n, *self._grid[1:]), np.array(offsets, np.int64)
        where, first = (rows, 0) if isinstance(rows, torch.Tensor) else (self._before[_ROWS], rows)
        self._before = (*self._before[:_ROWS], where, first, *self._before[_ROWS + 2 :])
        if self._launched is not None:
            self._launched.over(n)
            self._launched.values[:, _ROWS : _ROWS + 2] = where.data_ptr(), first
        self.move(begins)
        return True

    def move(self, begins: I64) -> None:
        """Streams lie elsewhere from now on; ``begins`` has no more steps than before."""
        self._begins = begins
        if self._launched is not None:
            first = len(self._before)
            self._launched.values[: len(begins), first : first + len(self._offsets)] = begins[:, None] + self._offsets

    def __call__(self, step: int) -> None:
        """Enqueue a step of it on the current stream."""
        if self._launched is not None:
            try:
                self._launched(step)
                return
            except RuntimeError:
                self._launched = None
                _leave_to_triton(self._kernel)
        offsets = (self._offsets + self._begins[step]).tolist()
        self._kernel.launch(self._grid, (*self._before, *offsets, *self._after))


class Projected:
    """``Launch`` of a codec that multiplies rows by a matrix first."""

    __slots__ = ("_codes", "_product")

    def __init__(self, product: Launch, codes: Launch) -> None:
        self._product, self._codes = product, codes

    def move(self, begins: I64) -> None:
        """Move as ``Launch.move`` does: the workspace between the two stays where it is."""
        self._codes.move(begins)

    def aim(self, rows: torch.Tensor | int, n: int, offsets: Sequence[int], begins: I64) -> bool:
        """Aim as ``Launch.aim`` does, never: how the product is cut up follows from the number of rows."""
        return False

    def __call__(self, step: int) -> None:
        """Enqueue a step of it on the current stream."""
        self._product(0)
        self._codes(step)


def launch(identity: str, source: StagedRows, scratch: torch.Tensor, offsets: Sequence[int], begins: I64 = _AT_0
           ) -> Launch | Projected:
    """The launch that encodes ``source`` (at least one row) into ``scratch`` (uint8).

    ``begins`` [steps]: the byte at which the output of each step begins. ``offsets``: counted from there, the byte at
    which each part begins. The parts are the declared streams in the declared order, as [n_layers, n, *shape], then
    token ids (int32 [n]) and positions (int64 [n]). All are multiples of 64. The first launch of a kind compiles,
    unless ``warm`` has.
    """
    if not codecs.identified(identity).family.projected:
        return Launch(_kernel(identity, Kind.of(source)), source, scratch, offsets, begins)
    from engine_side.kernels import projected

    buffer = source.buffer
    matrix = projected.halves(identity, buffer.shape[2], buffer.dtype, buffer.device)
    few = source.n * len(source.layers) <= projected.FEW
    return _project(identity, source, scratch, offsets, begins, matrix, projected.sums(buffer.device), few)


def _project(identity: str, source: StagedRows, scratch: torch.Tensor, offsets: Sequence[int], begins: I64,
             matrix: tuple[torch.Tensor, torch.Tensor], sums: torch.Tensor, few: bool) -> Projected:
    from engine_side.kernels import projected

    kind, total, columns = Kind.of(source), source.n * len(source.layers), matrix[0].shape[1]
    if total * columns > sums.numel():
        raise ValueError(f"{total} rows of {columns} sums, and the workspace has {sums.numel()} numbers")
    down, across, *_ = projected.tile(few, source.buffer.device)
    product = Launch(_product(columns, few, kind), source, scratch, (), _AT_0, (*matrix, sums, source.n, total),
                     (-(-total // down), columns // across, 1))
    return Projected(product, Launch(_kernel(identity, kind), source, scratch, offsets, begins, (sums,)))


def rows_max(identity: str, width: int) -> int:
    """The count of rows, of all layers, that ``launch`` takes at once; 0: any."""
    codec = codecs.identified(identity)
    if not codec.family.projected:
        return 0
    from engine_side.kernels import projected

    return projected.SUMS_BYTES // (4 * projected.across(codec, width))


def fits(identity: str, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has room for the matrix that ``launch`` of a codec keeps there, beside those of other codecs.
    """
    if not codecs.identified(identity).family.projected:
        return True
    from engine_side.kernels import projected

    return projected.fits(identity, width, dtype, device)


def forget() -> None:
    """Give back what launches keep on a device; there are none any more."""
    if (projected := sys.modules.get("engine_side.kernels.projected")) is not None:
        projected.forget()


def score(directions: torch.Tensor, bias: torch.Tensor, sigmoid: bool, source: StagedRows, scratch: torch.Tensor,
          offsets: Sequence[int], begins: I64 = _AT_0) -> Launch:
    """``launch`` of a probe: its scores x float32 [1, n, k] in the place of a codec's streams.

    ``directions`` float32 [k, width], contiguous; ``bias`` float32 [k]; both where the rows are, ``scored`` for them.
    """
    return Launch(_scorer(len(bias), sigmoid, Kind.of(source)), source, scratch, offsets, begins, (directions, bias))


def scored(count: int, width: int, dtype: torch.dtype) -> bool:
    """Whether ``score`` takes a probe of ``count`` directions; False on a machine without Triton."""
    return (0 < count <= _SCORES_MAX and 0 < width <= _WIDTH_MAX and dtype in _DTYPES
            and find_spec("triton") is not None)


def warm(identity: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what ``launch`` may need for such rows, so that no step waits for a compiler; and make what it keeps."""
    codec = codecs.identified(identity)
    declared = codec.streams(width, str(dtype).removeprefix("torch."))
    if codec.family.projected:
        from engine_side.kernels import projected

        matrix = projected.halves(identity, width, dtype, device)
        # The workspace is that of the steps, beside which this runs.
        sums = torch.empty(matrix[0].shape[1], dtype=torch.float32, device=device)
    for source, scratch, offsets in _samples(width, dtype, device, [stream.nbytes for stream in declared]):
        for _ in range(2):  # Triton's launch compiles it; the next is as steps do it
            if codec.family.projected:
                for few in (True, False):
                    _project(identity, source, scratch, offsets, _AT_0, matrix, sums, few)(0)
            else:
                launch(identity, source, scratch, offsets)(0)


def warm_scores(directions: torch.Tensor, bias: torch.Tensor, sigmoid: bool, dtype: torch.dtype) -> None:
    """``warm`` of what ``score`` may need for rows in ``dtype``."""
    for source, scratch, offsets in _samples(directions.shape[1], dtype, directions.device, [4 * len(bias)]):
        for _ in range(2):
            score(directions, bias, sigmoid, source, scratch, offsets)(0)


def _samples(width: int, dtype: torch.dtype, device: torch.device, sizes: Sequence[int]
             ) -> Iterator[tuple[StagedRows, torch.Tensor, list[int]]]:
    """A row as it may come, room for its streams of ``sizes`` bytes, and where they lie."""
    buffer = torch.zeros(1, 1, width, dtype=dtype, device=device)
    layers = torch.zeros(1, dtype=torch.int32, device=device)
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    ends = [0]
    for nbytes in [*sizes, 4, 8]:
        ends.append(ends[-1] + -(-nbytes // 64) * 64)
    scratch = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    for rows in (0, numbers):
        yield StagedRows(buffer, layers, rows, 1, numbers, numbers), scratch, ends[:-1]


@lru_cache(maxsize=1024)
def _kernel(identity: str, kind: Kind) -> Kernel:
    codec = codecs.identified(identity)
    module, function = _module(kernel_name(codec.family))
    constants, warps = module.constants(codec, kind.width, kind.dtype)
    return Kernel(getattr(module, function), (*kind.constants, *constants), warps)


@lru_cache(maxsize=256)
def _product(columns: int, few: bool, kind: Kind) -> Kernel:
    from engine_side.kernels import projected

    down, across, warps, stages = projected.tile(few, kind.device)
    return Kernel(projected.product, (*kind.constants, columns, down, across, projected.DEPTH), warps, stages)


@lru_cache(maxsize=256)
def _scorer(count: int, sigmoid: bool, kind: Kind) -> Kernel:
    from engine_side.kernels import scores

    constants, warps = scores.constants(count, kind.width, sigmoid)
    return Kernel(scores.scores, (*kind.constants, *constants), warps)
