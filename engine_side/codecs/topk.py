"""``topk`` and ``topk8``, the reference encoders (declarations in schemas.codecs.topk and topk8)."""

from __future__ import annotations

import torch

from engine_side.codecs import row8
from engine_side.codecs.columns import largest, numbered
from schemas.codecs.topk import entries


def encode(rows: torch.Tensor, k: int | None = None, density: float | None = None) -> dict[str, torch.Tensor]:
    """The largest entries of rows ``[..., width]`` of any float dtype, as bfloat16."""
    kept, value = _choose(rows, k, density)
    return {**kept, "value": value.to(torch.bfloat16).view(torch.uint16)}


def encode8(rows: torch.Tensor, k: int | None = None, density: float | None = None) -> dict[str, torch.Tensor]:
    """The largest entries of rows ``[..., width]`` of any float dtype, as uint8."""
    kept, value = _choose(rows, k, density)
    return {**kept, **row8.encode(value)}


def _choose(rows: torch.Tensor, k: int | None, density: float | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """``index`` and ``kept``, and the float32 values."""
    width = rows.shape[-1]
    x = rows.to(torch.float32)
    index = largest(x, entries(width, k, density))
    value = x.gather(-1, index)
    # Of the largest: squares of large numbers overflow.
    top = value.abs().amax(dim=-1, keepdim=True)
    unit = torch.where(top == 0, torch.ones_like(top), top)
    share = (value / unit).square().sum(dim=-1, keepdim=True) / (x / unit).square().sum(dim=-1, keepdim=True)
    return {"index": numbered(index, width), "kept": torch.where(top == 0, torch.ones_like(share), share)}, value
