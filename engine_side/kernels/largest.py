"""``topk`` and ``topk8``: the k entries of largest magnitude, exactly; of equal ones the earlier columns.

The magnitude of the k-th largest is built from its highest bit down, by counting; a running count gives the places.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine_side.kernels.primitives import POINTERS, VARYING, bfloat16_bits, padded, row_of, single, warps
from engine_side.kernels.row8 import row8
from schemas.codecs import Codec
from schemas.codecs.topk import entries


def constants(codec: Codec, width: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], int]:
    """Constants of a kernel after the width, and its warps."""
    given = codec.parameters
    kept = entries(width, int(given["k"]) if "k" in given else None, given.get("density"))
    return (padded(width), kept, 8 * dtype.itemsize), warps(width, columns_a_warp=1024)


@triton.jit
def chosen_of(row, number, scratch, o_index, o_kept, WIDTH: tl.constexpr, PADDED: tl.constexpr, KEPT: tl.constexpr,
              BITS: tl.constexpr):
    """Write ``index`` and ``kept``; a row's numbers in float32, which of them are kept, and their places."""
    column = tl.arange(0, PADDED)
    there = column < WIDTH
    numbers = tl.load(row + column, mask=there, other=0.0)
    if BITS == 16:
        size = numbers.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    else:
        size = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    size = tl.where(there, size, -1)
    least = tl.min(tl.where(there, 0, 0))
    for i in range(BITS - 1):
        higher = least | (1 << (BITS - 2 - i))
        least = tl.where(tl.sum((size >= higher).to(tl.int32)) >= KEPT, higher, least)
    surely, tied = size > least, size == least
    counts = tl.cumsum(surely.to(tl.int32) | (tied.to(tl.int32) << 16))
    ties = (counts >> 16) & 0xFFFF
    taken = KEPT - tl.sum(surely.to(tl.int32))  # of those that are tied
    chosen = surely | (tied & (ties <= taken))
    place = (counts & 0xFFFF) + tl.minimum(ties, taken) - 1
    tl.store((scratch + o_index).to(tl.pointer_type(tl.uint16)) + number * KEPT + place, column.to(tl.uint16),
             mask=chosen)

    x = single(numbers)
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    unit = tl.div_rn(x, tl.where(most == 0, 1.0, most))  # squares of large numbers overflow
    squares = unit * unit
    share = tl.div_rn(tl.sum(tl.where(chosen, squares, 0.0)), tl.sum(squares))
    tl.store((scratch + o_kept).to(tl.pointer_type(tl.float32)) + number, tl.where(most == 0, 1.0, share))
    return x, chosen, place


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def topk(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
         positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64,
         o4: tl.int64, GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
         KEPT: tl.constexpr, BITS: tl.constexpr):
    """``o0`` … ``o2``: index, value, kept; ``o3``, ``o4``: token ids and positions."""
    row, number = row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch,
                         o3, o4, GATHERED, VECTOR)
    x, chosen, place = chosen_of(row, number, scratch, o0, o2, WIDTH, PADDED, KEPT, BITS)
    tl.store((scratch + o1).to(tl.pointer_type(tl.uint16)) + number * KEPT + place, bfloat16_bits(x), mask=chosen)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def topk8(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
          positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64,
          o4: tl.int64, o5: tl.int64, o6: tl.int64,
          GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
          KEPT: tl.constexpr, BITS: tl.constexpr):
    """``o0`` … ``o4``: index, q, scale, zero, kept; ``o5``, ``o6``: token ids and positions."""
    row, number = row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch,
                         o5, o6, GATHERED, VECTOR)
    x, chosen, place = chosen_of(row, number, scratch, o0, o4, WIDTH, PADDED, KEPT, BITS)
    codes, scale, zero = row8(x, chosen)
    tl.store(scratch + o1 + number * KEPT + place, codes, mask=chosen)
    tl.store((scratch + o2).to(tl.pointer_type(tl.uint16)) + number, scale)
    tl.store((scratch + o3).to(tl.pointer_type(tl.int16)) + number, zero)
