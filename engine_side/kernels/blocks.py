"""``int8b64`` and ``nf4b64``: blocks of 64 columns beside the 8 largest entries, found exactly.

A column's *key* is the bits of its magnitude, and below them its number counted from the end. All keys differ. So the 8
largest entries are those whose keys are the eighth largest or above, and of equal magnitudes the earlier columns are
taken. A row is read in groups of 8 columns, as a thread loads them. The 8 largest of the groups' maxima are the 8
largest of the row, unless a group holds two of these. Counting shows that (one row in ten at random). Then the maxima
are taken again one after the other, and each is replaced by the next largest of its group. That is exact for any row.
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
    bfloat16_bits,
    bfloat16_bits_up,
    padded,
    row_of,
    single,
    warps,
    whole,
)
from schemas.codecs import Codec
from schemas.codecs.nf4b64 import BETWEEN

# Compiled for float16, the search for outliers names a column twice in rows with a NaN (seen on an H200).
DTYPES = (torch.bfloat16, torch.float32)
_TINY = tl.constexpr(2.0**-100)
_LIFT = tl.constexpr(2.0**64)
_BETWEEN = tl.constexpr(tuple(BETWEEN.tolist()))


def constants(codec: Codec, width: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], int]:
    """Constants of a kernel after the width, and its warps."""
    return (padded(width) // 64, 32 if dtype == torch.float32 else 16), warps(width)


@triton.jit
def keys_of(x, column, there, BITS: tl.constexpr):
    """Keys of numbers of 16 or 32 bits, −1 where there is none."""
    if BITS == 16:
        key = ((x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF) << 16) | (0xFFFF - column)
    else:
        key = ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64) << 32) | (0xFFFF - column)
    return tl.where(there, key, -1)


@triton.jit
def column_of(key):
    """The column of a key, past every row for −1."""
    return tl.where(key < 0, 0x10000, 0xFFFF - (key & 0xFFFF).to(tl.int32))


@triton.jit
def magnitude_of(key, KIND: tl.constexpr, BITS: tl.constexpr):
    """float32 of a key's magnitude."""
    if BITS == 16:
        return single((key >> 16).to(tl.int16).to(KIND, bitcast=True))
    else:
        return (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def largest_eight(row, keys, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """The 8 largest of keys [blocks, 8, 8] of a row, −1 for those that a narrower row lacks."""
    eight = tl.arange(0, 8)
    groups = tl.max(keys, axis=2)
    left = groups
    least = tl.max(left)
    found = tl.where(eight == 0, least, -1)
    for i in tl.static_range(1, 8):
        left = tl.where(left == least, -1, left)
        least = tl.max(left)
        found = tl.where(eight == i, least, found)
    if tl.sum((keys >= least).to(tl.int32)) > 8:
        left = groups
        for again in range(8):
            most = tl.max(left)
            found = tl.where(eight == again, most, found)
            near = column_of(most) // 8 * 8 + eight
            there = near < WIDTH
            others = keys_of(tl.load(row + near, mask=there), near, there, BITS)
            left = tl.where(left == most, tl.max(tl.where(others < most, others, -1)), left)
    return found


@triton.jit
def without_largest(row, number, scratch, o_index, o_value, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
                    BITS: tl.constexpr):
    """Write the outliers of a row; its numbers, their keys, the least outlier's, and columns, all [blocks, 8, 8]."""
    column = (tl.arange(0, BLOCKS)[:, None, None] * 64 + tl.arange(0, 8)[None, :, None] * 8
              + tl.arange(0, 8)[None, None, :])
    there = column < WIDTH
    x = tl.load(row + column, mask=there, other=0.0)
    keys = keys_of(x, column, there, BITS)
    found = largest_eight(row, keys, WIDTH, BITS)

    OUTLIERS: tl.constexpr = 8 if WIDTH > 8 else WIDTH
    eight = tl.arange(0, 8)
    kept = tl.sort(column_of(found))
    values = bfloat16_bits(single(tl.load(row + kept, mask=eight < OUTLIERS, other=0.0)))
    index_out = (scratch + o_index).to(tl.pointer_type(tl.uint16)) + number * OUTLIERS
    value_out = (scratch + o_value).to(tl.pointer_type(tl.uint16)) + number * OUTLIERS
    tl.store(index_out + eight, kept.to(tl.uint16), mask=eight < OUTLIERS)
    tl.store(value_out + eight, values, mask=eight < OUTLIERS)
    return x, keys, tl.min(found), column


@triton.jit
def largest_left(keys, least, KIND: tl.constexpr, BITS: tl.constexpr):
    """The largest magnitude in each block below ``least``."""
    return magnitude_of(tl.max(tl.max(tl.where(keys < least, keys, 0), axis=2), axis=1), KIND, BITS)


@triton.jit
def scaled_by(scale, x, keys, least, number, scratch, o_scale, WIDTH: tl.constexpr, BLOCKS: tl.constexpr):
    """Write a row's scales [blocks], bits of bfloat16; in float32 the scales, and the numbers that are coded by them.

    Of a block whose scale is 0 or no number the scale is 1 and the numbers are 0, as are the outliers.
    """
    USED: tl.constexpr = (WIDTH + 63) // 64
    block = tl.arange(0, BLOCKS)
    tl.store((scratch + whole(o_scale)).to(tl.pointer_type(tl.uint16)) + number * USED + block, scale,
             mask=block < USED)
    step = bfloat16(scale)
    usable = (step > 0) & (step < float("inf"))
    values = tl.where(keys < tl.where(usable, least, 0)[:, None, None], single(x), 0.0)
    return tl.where(usable, step, 1.0), values


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def int8b64(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
            positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64,
            o4: tl.int64, o5: tl.int64, GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr,
            BLOCKS: tl.constexpr, BITS: tl.constexpr):
    """``int8b64``. ``o0`` … ``o3``: q, scale, outlier_index, outlier_value; ``o4``, ``o5``: token ids and positions."""
    row, number = row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch,
                         o4, o5, GATHERED, VECTOR)
    x, keys, least, column = without_largest(row, number, scratch, o2, o3, WIDTH, BLOCKS, BITS)
    scale = bfloat16_bits(tl.div_rn(largest_left(keys, least, x.dtype, BITS), 127.0))
    step, values = scaled_by(scale, x, keys, least, number, scratch, o1, WIDTH, BLOCKS)
    if tl.min(step) < _TINY:
        # Such a scale has no reciprocal, or few bits: lift both; and as it may be rounded far down, clamp.
        lift = tl.where(step < _TINY, _LIFT, 1.0)
        step *= lift
        most = (127 * step)[:, None, None]
        values = tl.minimum(tl.maximum(values * lift[:, None, None], -most), most)
    step = step[:, None, None]
    # x * (1 / s) in place of x / s is off by less than 2^-15. The first sum rounds it to a multiple of 2^-13, which
    # makes the ties of 16-bit numbers exact again: any other quotient of theirs is further from one. The second rounds
    # to a whole number, half to even, in the low bits.
    near = values * tl.div_rn(1.0, step) + 1536.0 if BITS == 16 else tl.div_rn(values, step)
    shifted = near + (12581376.0 if BITS == 16 else 12582912.0)
    codes = shifted.to(tl.int32, bitcast=True).to(tl.int8).to(tl.uint8, bitcast=True)
    tl.store(scratch + whole(o0) + number * WIDTH + column, codes, mask=column < WIDTH)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def nf4b64(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
           positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64,
           o4: tl.int64, o5: tl.int64, GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr,
           BLOCKS: tl.constexpr, BITS: tl.constexpr):
    """``nf4b64``. ``o0`` … ``o3``: q, scale, outlier_index, outlier_value; ``o4``, ``o5``: token ids and positions."""
    row, number = row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch,
                         o4, o5, GATHERED, VECTOR)
    x, keys, least, _ = without_largest(row, number, scratch, o2, o3, WIDTH, BLOCKS, BITS)
    scale = bfloat16_bits_up(largest_left(keys, least, x.dtype, BITS))
    step, values = scaled_by(scale, x, keys, least, number, scratch, o1, WIDTH, BLOCKS)
    quotients = tl.div_rn(values, step[:, None, None])
    numbers = tl.zeros_like(values).to(tl.int32)
    for i in tl.static_range(14):
        numbers += (quotients > _BETWEEN[i]).to(tl.int32)
    low, high = tl.split(tl.reshape(numbers, [BLOCKS, 8, 4, 2]))
    byte = (tl.arange(0, BLOCKS)[:, None, None] * 32 + tl.arange(0, 8)[None, :, None] * 4
            + tl.arange(0, 4)[None, None, :])
    BYTES: tl.constexpr = (WIDTH + 1) // 2
    tl.store(scratch + whole(o0) + number * BYTES + byte, (low | (high << 4)).to(tl.uint8), mask=byte < BYTES)
