"""``raw`` and ``raw16``: rows as they are, or float32 rounded to bfloat16."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine_side.kernels.primitives import POINTERS, VARYING, bfloat16_bits, padded, row_of, warps, whole
from schemas.codecs import Codec


def constants(codec: Codec, width: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], int]:
    """Constants of a kernel after the width, and its warps."""
    (stored,) = codec.streams(width, str(dtype).removeprefix("torch."))
    return (padded(width), stored.nbytes < width * dtype.itemsize), warps(width)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def copy(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
         positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64,
         GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
         ROUNDS: tl.constexpr):
    """``o0``: x; ``o1``, ``o2``: token ids and positions."""
    row, number = row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch,
                         o1, o2, GATHERED, VECTOR)
    column = tl.arange(0, PADDED)
    there = column < WIDTH
    x = tl.load(row + column, mask=there)
    if ROUNDS:
        bits = bfloat16_bits(x)
    elif x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
    else:
        bits = x.to(tl.uint16, bitcast=True)
    out = (scratch + whole(o0)).to(tl.pointer_type(bits.dtype)) + number * WIDTH
    tl.store(out + column, bits, mask=there)
