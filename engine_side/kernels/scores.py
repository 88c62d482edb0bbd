"""Scores of a probe with few directions: a row stays in the registers of its program, directions come one by one."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from engine_side.kernels.primitives import POINTERS, VARYING, padded, row_of, single, warps, whole


def constants(count: int, width: int, sigmoid: bool) -> tuple[tuple[Any, ...], int]:
    """Constants of the kernel after the width, and its warps."""
    return (padded(width), count, sigmoid), warps(width)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=POINTERS)
def scores(buffer, to_layer: tl.int64, to_row: tl.int64, layers, rows, first: tl.int64, ids, id_step: tl.int64,
           positions, position_step: tl.int64, scratch, o0: tl.int64, o1: tl.int64, o2: tl.int64, directions, bias,
           GATHERED: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
           COUNT: tl.constexpr, SIGMOID: tl.constexpr):
    """``o0``: x; ``o1``, ``o2``: token ids and positions. ``directions`` float32 [COUNT, WIDTH], ``bias`` [COUNT]."""
    row, number = row_of(buffer, to_layer, to_row, layers, rows, first, ids, id_step, positions, position_step, scratch,
                         o1, o2, GATHERED, VECTOR)
    column = tl.arange(0, PADDED)
    there = column < WIDTH
    x = single(tl.load(row + column, mask=there, other=0.0))
    out = (scratch + whole(o0)).to(tl.pointer_type(tl.float32)) + number * COUNT
    for which in range(COUNT):
        direction = tl.load(directions + which * WIDTH + column, mask=there, other=0.0)
        score = tl.sum(x * direction, axis=0) + tl.load(bias + which)
        if SIGMOID:
            score = 1.0 / (1.0 + tl.exp(-score))
        tl.store(out + which, score)
