"""``int8b64``, the reference encoder (the declaration and the formula are in schemas.codecs.int8b64)."""

from __future__ import annotations

import torch

from engine_side.codecs.scales import largest, numbered
from schemas.codecs.int8b64 import BLOCK, outlier_count

KERNEL = "blocks.int8b64"


def encode(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes, scales and outliers of rows ``[..., width]`` of any float dtype."""
    blocks, outliers = blocks_and_outliers(rows)
    return {**coded(blocks, rows.shape[-1]), **outliers}


def coded(blocks: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
    """Codes and scales of the blocks that ``blocks_and_outliers`` makes of rows of ``width``."""
    scale = (blocks.abs().amax(dim=-1) / 127).to(torch.bfloat16)
    step = scale.to(torch.float32).unsqueeze(-1)
    # A zero scale means a block of zeros (or of values that even bfloat16 cannot scale): its codes are 0.
    codes = torch.nan_to_num(blocks / torch.where(step == 0, torch.ones_like(step), step), posinf=127.0, neginf=-127.0)
    codes = codes.round_().clamp_(-127, 127).to(torch.int8).flatten(-2)[..., :width]
    return {"q": codes, "scale": scale.view(torch.uint16)}


def blocks_and_outliers(rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """float32 blocks ``[..., blocks, BLOCK]`` with 0 in the place of outliers, and the outliers' two pieces."""
    width = rows.shape[-1]
    x = rows.to(torch.float32, copy=True)
    index = largest(x, outlier_count(width))
    value = x.gather(-1, index).to(torch.bfloat16)
    x.scatter_(-1, index, 0.0)
    blocks = torch.nn.functional.pad(x, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    return blocks, {"outlier_index": numbered(index, width), "outlier_value": value.view(torch.uint16)}
