"""``kv8`` and ``qk8``: int8 with a scale a head."""

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
    power_of_two,
    row_of,
    single,
    whole,
)
from schemas.codecs import Codec

_WARPS_MAX = 16


def constants(codec: Codec, width: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], int]:
    """Constants of a kernel after the width, and its warps."""
    head = int(codec.parameters["head"])
    heads, columns = power_of_two(width // head), power_of_two(head)
    return (head, heads, columns), min(_WARPS_MAX, max(1, heads * columns // 2048))


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def head8(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
          positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64, o3: tl.int64,
          GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr,
          HEADS: tl.constexpr, COLUMNS: tl.constexpr):
    """``o0``, ``o1``: q, scale; ``o2``, ``o3``: token ids and positions. HEADS, COLUMNS: powers of two."""
    row, number = row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch,
                         o2, o3, GATHERED, VECTOR)
    head, within = tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    used = head < WIDTH // HEAD
    column = head[:, None] * HEAD + within[None, :]
    there = used[:, None] & (within < HEAD)[None, :]
    x = single(tl.load(row + column, mask=there, other=0.0))
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)  # NaN above all
    scale = bfloat16_bits_up(tl.div_rn(largest, 127.0))
    scale_out = (scratch + whole(o1)).to(tl.pointer_type(tl.uint16)) + number * (WIDTH // HEAD)
    tl.store(scale_out + head, scale, mask=used)
    step = bfloat16(scale)
    usable = step > 0
    quotients = tl.div_rn(x, tl.where(usable, step, 1.0)[:, None])
    # The sum rounds to a whole number, half to even, in the low bits.
    codes = tl.where(usable[:, None], quotients, 0.0) + 12582912.0
    codes = codes.to(tl.int32, bitcast=True).to(tl.int8).to(tl.uint8, bitcast=True)
    tl.store(scratch + whole(o0) + number * WIDTH + column, codes, mask=there)
