"""Columns of a row by the size of what is in them."""

from __future__ import annotations

import torch

from schemas.codecs.declare import index_dtype


def largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """Where the ``count`` largest magnitudes are, ascending: int64 ``[..., count]``; NaN counts as largest."""
    return torch.topk(x.abs(), count, dim=-1, sorted=False).indices.sort(dim=-1).values


def numbered(index: torch.Tensor, width: int) -> torch.Tensor:
    """Column numbers in the dtype that is stored."""
    return index.to(torch.uint16 if index_dtype(width) == "uint16" else torch.uint32)
