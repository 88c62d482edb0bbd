"""``rp8`` and ``sketch``: rows times a matrix go into a workspace, then one program for each row makes codes of its
numbers.

Tensor cores multiply numbers of 16 bits and add in float32. Rows of 16 bits go in as they are. The float32 matrix is
the sum of two matrices in the rows' dtype, which is as good as float32 here. The part that is left out is at most 2^-16
of the matrix's largest number, and a code of ``rp8`` is a 253rd of a row's range.

A launch needs matrices and a workspace on the device. They are made where the kernels are compiled, before any step
uses them, and kept: a launch finds them there. So this memory is bounded, and codecs beyond the bound are left to the
reference.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from engine_side.kernels.primitives import (
    POINTERS,
    VARYING,
    bfloat16,
    bfloat16_bits,
    padded,
    power_of_two,
    row_of,
    warps,
    whole,
)
from engine_side.kernels.row8 import row8
from schemas import codecs
from schemas.codecs import Codec, projection
from schemas.codecs.sketch import PACKED, THRESHOLDS

logger = logging.getLogger("vllm.tap")

DTYPES: Final = (torch.bfloat16, torch.float16)  # tensor cores multiply numbers of 16 bits
SUMS_BYTES: Final = 64 << 20  # of the workspace
FEW: Final = 4096  # rows, of all layers, for which small tiles keep more of the device busy
DEPTH: Final = 64  # columns of rows that are multiplied at a time
MATRICES_BYTES: Final = 128 << 20  # on a device, of all codecs
_LEFT_BYTES: Final = 256 << 20  # of the device, that vLLM may need beyond what it has taken
_ACROSS: Final = 128  # the matrix has columns of zeros up to a multiple of it


@lru_cache(maxsize=16)
def tile(few: bool, device: torch.device) -> tuple[int, int, int, int]:
    """Rows and columns that a program of the product makes, its warps, and the number of its steps that are loaded at a
    time. All of it fits into the device's shared memory (99 KiB at least where there are tensor cores for bfloat16).
    """
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 1 << 20
    down, columns, warps_of = (64, 64, 4) if few or room < 3 * _step_bytes(128, _ACROSS) else (128, _ACROSS, 8)
    return down, columns, warps_of, max(3, min(4, room // _step_bytes(down, columns)))


def _step_bytes(down: int, across: int) -> int:
    """Bytes of rows and of both halves of the matrix that a step of the product loads."""
    return 2 * DEPTH * (down + 2 * across)


def numbers(codec: Codec, width: int) -> int:
    """The count of numbers that a row becomes."""
    return projection.columns(width, int(codec.parameters["k"]), codec.family.name)


def across(codec: Codec, width: int) -> int:
    """Columns of the matrix and of the workspace."""
    return -(-numbers(codec, width) // _ACROSS) * _ACROSS


def depth(width: int) -> int:
    """Rows of the matrix: the product takes whole steps."""
    return -(-width // DEPTH) * DEPTH


_Key = tuple[str, int, int, int, torch.dtype, torch.device]
_halves: dict[_Key, tuple[torch.Tensor, torch.Tensor]] = {}
_sums: dict[torch.device, torch.Tensor] = {}


def fits(identity: str, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is room for what launches of a codec need beside what is there already."""
    codec = codecs.identified(identity)
    if _key(codec, width, dtype, device) in _halves:
        return True
    own = _matrix_bytes(codec, width, dtype)
    taken = sum(high.nbytes + low.nbytes for (*_, where), (high, low) in list(_halves.items()) if where == device)
    if taken + own > MATRICES_BYTES:
        return False
    more = own + (0 if device in _sums else SUMS_BYTES)
    return device.type != "cuda" or int(torch.cuda.mem_get_info(device)[0]) >= more + _LEFT_BYTES


def halves(identity: str, width: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix as a sum of two in ``dtype``, zeros around it; on the device when this returns, for every stream.

    Made by the first call, which takes the workspace too; MemoryError where there is no room.
    """
    codec = codecs.identified(identity)
    key = _key(codec, width, dtype, device)
    if key not in _halves:
        if not fits(identity, width, dtype, device):
            raise MemoryError(f"{identity} at width {width}: no room for its matrix of "
                              f"{_matrix_bytes(codec, width, dtype) / 2**20:.1f} MiB")
        k = numbers(codec, width)
        matrix = torch.zeros(depth(width), across(codec, width), dtype=torch.float32, device="cpu")
        assert codec.family.matrix is not None  # only codecs with one come here
        made = codec.family.matrix(width, k, int(codec.parameters["seed"]))
        matrix[:width, :k] = torch.tensor(made, dtype=torch.float32, device="cpu")
        high = matrix.to(dtype)
        sums(device)
        _halves[key] = high.to(device), (matrix - high.float()).to(dtype).to(device)
        logger.info("vllm-tap: %s at width %d takes %.1f MiB of GPU memory, and all projections together %d MiB more",
                    identity, width, _matrix_bytes(codec, width, dtype) / 2**20, SUMS_BYTES >> 20)
    return _halves[key]


def sums(device: torch.device) -> torch.Tensor:
    """The workspace: one is enough, since what is launched later on the model's stream comes later."""
    if device not in _sums:
        _sums[device] = torch.empty(SUMS_BYTES // 4, dtype=torch.float32, device=device)
    return _sums[device]


def forget() -> None:
    """Give the device's memory back; nothing is launched any more."""
    _halves.clear()
    _sums.clear()


def _key(codec: Codec, width: int, dtype: torch.dtype, device: torch.device) -> _Key:
    """Key of a matrix: all that it follows from, so that codecs that differ otherwise share it."""
    return codec.family.name, width, numbers(codec, width), int(codec.parameters["seed"]), dtype, device


def _matrix_bytes(codec: Codec, width: int, dtype: torch.dtype) -> int:
    """Bytes of both halves of the matrix."""
    return 2 * depth(width) * across(codec, width) * int(dtype.itemsize)


def constants(codec: Codec, width: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], int]:
    """Constants after the width of the kernel that makes codes, and its warps."""
    k, bits = numbers(codec, width), int(codec.parameters.get("bits", 0))
    every = k, across(codec, width), padded(k)
    if not bits:
        return every, warps(k)
    places = power_of_two(-(-k * bits // PACKED))
    return (*every, bits, places, max(THRESHOLDS[bits])), max(1, places // 256)


@triton.jit(do_not_specialize=(*VARYING, "n", "total"), do_not_specialize_on_alignment=POINTERS)
def product(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
            positions, position_step: tl.int64, scratch, high, low, sums, n: tl.int32, total: tl.int32,
            GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
            DOWN: tl.constexpr, ACROSS: tl.constexpr, DEPTH: tl.constexpr):
    """Sums [``total``, STRIDE] of ``n`` rows of each layer times ``high + low`` [WIDTH rounded up, STRIDE]."""
    number = tl.program_id(0) * DOWN + tl.arange(0, DOWN)
    one = tl.minimum(number, total - 1)
    layer, which = one // n, one % n
    row = tl.load(rows + which).to(tl.int64) if GATHERED else first + which
    at = tl.multiple_of(tl.load(layers + layer).to(tl.int64) * to_layer + row * to_row, [VECTOR])
    column = tl.program_id(1) * ACROSS + tl.arange(0, ACROSS)
    within = tl.arange(0, DEPTH)
    from_rows = buffer + at[:, None] + within[None, :]
    from_matrix = within[:, None] * STRIDE + column[None, :]
    found = tl.zeros((DOWN, ACROSS), tl.float32)
    for begin in range(0, WIDTH, DEPTH):
        if WIDTH % DEPTH == 0:
            x = tl.load(from_rows + begin)
        else:
            x = tl.load(from_rows + begin, mask=begin + within[None, :] < WIDTH, other=0.0)
        found = tl.dot(x, tl.load(high + begin * STRIDE + from_matrix), found)
        found = tl.dot(x, tl.load(low + begin * STRIDE + from_matrix), found)
    out = sums + number.to(tl.int64)[:, None] * STRIDE + column[None, :]
    tl.store(out, found, mask=(number < total)[:, None])


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def rp8(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
        positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64,
        o4: tl.int64, sums, GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
        STRIDE: tl.constexpr, PADDED: tl.constexpr):
    """``o0`` … ``o2``: q, scale, zero; ``o3``, ``o4``: token ids and positions."""
    _, number = row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch,
                       o3, o4, GATHERED, VECTOR)
    column = tl.arange(0, PADDED)
    there = column < K
    codes, scale, zero = row8(tl.load(sums + number * STRIDE + column, mask=there, other=0.0), there)
    tl.store((scratch + o1).to(tl.pointer_type(tl.uint16)) + number, scale)
    tl.store((scratch + o2).to(tl.pointer_type(tl.int16)) + number, zero)
    tl.store(scratch + whole(o0) + number * K + column, codes, mask=there)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def sketch(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
           positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64, sums,
           GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
           PADDED: tl.constexpr, BITS: tl.constexpr, PLACES: tl.constexpr, THRESHOLD: tl.constexpr):
    """``o0``, ``o1``: q, scale; ``o2``, ``o3``: token ids and positions. PLACES: bytes, a power of two."""
    _, number = row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch,
                       o2, o3, GATHERED, VECTOR)
    column = tl.arange(0, PADDED)
    y = tl.load(sums + number * STRIDE + column, mask=column < K, other=0.0)
    largest = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)  # NaN above all
    unit = tl.where(largest == 0, 1.0, largest)  # squares of large numbers overflow
    shares = tl.div_rn(y, unit)
    root = unit * tl.sqrt_rn(tl.div_rn(tl.sum(shares * shares), K * 1.0))
    scale = tl.where(root < float("inf"), bfloat16_bits(root), 0x7FC0)
    scale = tl.where(scale == 0x7F80, 0x7FC0, scale).to(tl.uint16)
    tl.store((scratch + o1).to(tl.pointer_type(tl.uint16)) + number, scale)
    step = bfloat16(scale)
    usable = step > 0
    # Bit after bit, seven a byte: each is one of a number's.
    place, within = tl.arange(0, PLACES)[:, None], tl.arange(0, 8)[None, :]
    bit = place * 7 + within
    there = (within < 7) & (bit < K * BITS)
    y = tl.load(sums + number * STRIDE + bit // BITS, mask=there, other=0.0)
    y = tl.where(usable, tl.div_rn(y, tl.where(usable, step, 1.0)), 0.0)
    codes = (y >= 0.0).to(tl.int32)
    if BITS == 2:
        codes += (y >= -THRESHOLD).to(tl.int32) + (y >= THRESHOLD).to(tl.int32)
        codes = (codes >> (bit % 2)) & 1
    codes = tl.sum(tl.where(there, codes << within, 0), axis=1).to(tl.uint8)
    out = tl.arange(0, PLACES)
    tl.store(scratch + whole(o0) + number * ((K * BITS + 6) // 7) + out, codes, mask=out < (K * BITS + 6) // 7)
