"""Scales that are never too small, the scales of rows with a NaN or an infinity, and columns by the size of their
numbers.
"""

from __future__ import annotations

import torch

from schemas.codecs.declare import index_dtype


def rounded_up(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 of float32 that is not negative, never smaller than it: so that a scale reaches its largest number.

    NaN stays NaN; what is over bfloat16's largest number becomes infinite.
    """
    near = x.to(torch.bfloat16)
    return torch.where(near.to(torch.float32) < x, (near.view(torch.int16) + 1).view(torch.bfloat16), near)


def nan_unless_finite(scale: torch.Tensor) -> torch.Tensor:
    """The scale of a row with a NaN or an infinity becomes NaN, and so the row that decodes."""
    return torch.where(scale.isfinite(), scale, torch.full_like(scale, torch.nan))


def divided(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale`` in float32, 0 where the scale is 0 or NaN; ``scale`` bfloat16, of a shape that fits."""
    step = scale.to(torch.float32)
    usable = step > 0
    return torch.where(usable, x / torch.where(usable, step, torch.ones_like(step)), torch.zeros_like(step))


def largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the ``count`` largest magnitudes, ascending: int64 ``[..., count]``; NaN counts as largest."""
    return torch.topk(x.abs(), count, dim=-1, sorted=False).indices.sort(dim=-1).values


def numbered(index: torch.Tensor, width: int) -> torch.Tensor:
    """Column numbers in the dtype that is stored."""
    return index.to(torch.uint16 if index_dtype(width) == "uint16" else torch.uint32)
