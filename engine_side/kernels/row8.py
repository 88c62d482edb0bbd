"""``fp8row`` and ``full8``: a byte a number and a scale a row; ``topk8`` has the bytes of ``full8`` for what it keeps.

The rounding to e4m3 is done in whole numbers, since not every GPU knows e4m3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine_side.kernels.primitives import (
    POINTERS,
    VARYING,
    bfloat16,
    bfloat16_bits_up,
    padded,
    row_of,
    single,
    warps,
    whole,
)
from schemas.codecs import Codec


def constants(codec: Codec, width: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], int]:
    """Constants of a kernel after the width, and its warps."""
    return (padded(width),), warps(width)


@triton.jit
def rounded(x):
    """The nearest whole number, half to even, of float32 that is less than 2^22 large."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def row8(x, chosen):
    """Codes (uint8), scale (bits of a bfloat16) and zero point (int16) of the chosen ones of float32 ``x``."""
    largest = tl.max(tl.where(chosen, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)).to(tl.float32, bitcast=True)
    low, high = tl.min(tl.where(chosen, x, float("inf"))), tl.max(tl.where(chosen, x, float("-inf")))
    # Divided first: the range of a row may be over float32's largest number where its ends are not.
    span = tl.maximum(tl.div_rn(high, 253.0) - tl.div_rn(low, 253.0), tl.div_rn(largest, 32000.0))
    scale = bfloat16_bits_up(tl.where(largest < float("inf"), span, float("nan")))
    step = bfloat16(scale)
    usable = step > 0
    step = tl.where(usable, step, 1.0)
    zero = tl.where(usable, rounded(tl.div_rn(-low, step)), 0.0)
    codes = tl.where(usable, rounded(tl.div_rn(x, step)), 0.0) + zero
    return tl.minimum(tl.maximum(codes, 0.0), 254.0).to(tl.uint8), scale, zero.to(tl.int16)


@triton.jit
def e4m3(y):
    """Codes of float32, at most 448 large: to nearest, ties to even, as uint8."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count steps of 2^-9: the sum rounds to a whole number, half to even, in the low bits.
    small = (tl.abs(y) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    return (tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def fp8row(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
           positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64,
           GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """``fp8row``. ``o0``, ``o1``: q, scale; ``o2``, ``o3``: token ids and positions."""
    row, number = row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch,
                         o2, o3, GATHERED, VECTOR)
    column = tl.arange(0, PADDED)
    x = single(tl.load(row + column, mask=column < WIDTH, other=0.0))
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)  # NaN above all
    scale = bfloat16_bits_up(tl.div_rn(largest, 448.0))
    tl.store((scratch + o1).to(tl.pointer_type(tl.uint16)) + number, scale)
    step = bfloat16(scale)
    quotients = tl.where(step > 0, tl.div_rn(x, tl.where(step > 0, step, 1.0)), 0.0)
    tl.store(scratch + whole(o0) + number * WIDTH + column, e4m3(quotients), mask=column < WIDTH)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def full8(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
           positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64,
           o4: tl.int64, GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """``full8``. ``o0`` … ``o2``: q, scale, zero; ``o3``, ``o4``: token ids and positions."""
    row, number = row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch,
                         o3, o4, GATHERED, VECTOR)
    column = tl.arange(0, PADDED)
    there = column < WIDTH
    codes, scale, zero = row8(single(tl.load(row + column, mask=there, other=0.0)), there)
    tl.store((scratch + o1).to(tl.pointer_type(tl.uint16)) + number, scale)
    tl.store((scratch + o2).to(tl.pointer_type(tl.int16)) + number, zero)
    tl.store(scratch + whole(o0) + number * WIDTH + column, codes, mask=there)
