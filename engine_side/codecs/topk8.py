"""``topk8``, the reference encoder: the entries of topk in the codes of full8."""

from __future__ import annotations

import torch

from engine_side.codecs import full8
from engine_side.codecs.topk import chosen

KERNEL = "largest.topk8"


def encode(rows: torch.Tensor, k: int | None = None, density: float | None = None) -> dict[str, torch.Tensor]:
    """The largest entries of rows ``[..., width]`` of any float dtype, as uint8."""
    index_and_kept, values = chosen(rows, k, density)
    return {**index_and_kept, **full8.encode(values)}
