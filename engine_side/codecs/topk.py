"""``topk``, the reference encoder (the declaration is in schemas.codecs.topk)."""

from __future__ import annotations

import torch

from engine_side.codecs.scales import largest, numbered
from schemas.codecs.topk import entries

KERNEL = "largest.topk"


def encode(rows: torch.Tensor, k: int | None = None, density: float | None = None) -> dict[str, torch.Tensor]:
    """The largest entries of rows ``[..., width]`` of any float dtype, as bfloat16."""
    index_and_kept, values = chosen(rows, k, density)
    return {**index_and_kept, "value": values.to(torch.bfloat16).view(torch.uint16)}


def chosen(rows: torch.Tensor, k: int | None, density: float | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The pieces ``index`` and ``kept`` of rows, and the float32 values of the largest entries."""
    width = rows.shape[-1]
    x = rows.to(torch.float32)
    index = largest(x, entries(width, k, density))
    value = x.gather(-1, index)
    # Of the largest: squares of large numbers overflow.
    top = value.abs().amax(dim=-1, keepdim=True)
    unit = torch.where(top == 0, torch.ones_like(top), top)
    share = (value / unit).square().sum(dim=-1, keepdim=True) / (x / unit).square().sum(dim=-1, keepdim=True)
    return {"index": numbered(index, width), "kept": torch.where(top == 0, torch.ones_like(share), share)}, value
