"""Parts of every kernel beside its codec: where a row lies, its token and position, numbers in their bits."""

from __future__ import annotations

import triton
import triton.language as tl

# Counts and places differ from step to step: a kernel compiled for some of them would be compiled again in serving.
VARYING = ("to_layer", "to_row", "first", "id_step", "position_step", "o0", "o1", "o2", "o3", "o4", "o5", "o6")
POINTERS = ("layers", "rows", "ids", "positions")  # whatever these point at is read one number at a time


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number ≥ 1: the sides of a program's blocks must be powers of two.
    """
    return 1 << (number - 1).bit_length()


def padded(width: int) -> int:
    """Columns that a program looks at: whole blocks of 64."""
    return max(64, power_of_two(width))


def warps(width: int, columns_a_warp: int = 2048) -> int:
    """Warps of a program: what keeps a row in its registers."""
    return max(1, padded(width) // columns_a_warp)


@triton.jit
def row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch, o_ids,
           o_positions, GATHERED: tl.constexpr, VECTOR: tl.constexpr):
    """The row of this program: where it begins in staging and its number among all that are written.

    The programs of the first layer write token id and position too.
    """
    number = tl.program_id(0)
    layer = tl.program_id(1)
    row = tl.load(rows + number).to(tl.int64) if GATHERED else (first + number).to(tl.int64)
    if layer == 0:
        tl.store((scratch + o_ids).to(tl.pointer_type(tl.int32)) + number, tl.load(ids + row * id_step))
        position = tl.load(positions + row * position_step).to(tl.int64)
        tl.store((scratch + o_positions).to(tl.pointer_type(tl.int64)) + number, position)
    at = tl.load(layers + layer).to(tl.int64) * to_layer + row * to_row
    return buffer + tl.multiple_of(at, VECTOR), layer.to(tl.int64) * tl.num_programs(0) + number


@triton.jit
def whole(offset):
    """``offset``, a multiple of 64, so that the compiler sees that it is one and writes whole vectors."""
    return (offset >> 6) << 6


@triton.jit
def bfloat16_bits(x):
    """Bits of the nearest bfloat16 of float32, ties to even, as uint16; every NaN the same one."""
    bits = x.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, near, 0x7FC0).to(tl.uint16)


@triton.jit
def bfloat16_bits_up(x):
    """Bits of the smallest bfloat16 that is not below float32 ``x`` ≥ 0, as uint16; NaN unless it is finite."""
    bits = (x.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    return tl.where((x == x) & (bits < 0x7F80), bits, 0x7FC0).to(tl.uint16)


@triton.jit
def single(x):
    """float32 of a model's numbers, exactly."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def bfloat16(bits):
    """float32 of bfloat16's bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
