"""``fp8row``: e4m3 with a scale a row; the rounding in whole numbers, since not every GPU knows e4m3."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine_side.kernels.place import (
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


def choose(codec: Codec, width: int, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...], int]:
    """Kernel, its constants after the width, and its warps."""
    return kernel, (padded(width),), warps(width)


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
def kernel(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
           positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64,
           GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """``o0``, ``o1``: q, scale; ``o2``, ``o3``: token ids and positions."""
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
