"""``nf4b64``, the reference encoder (the declaration and the formula are in schemas.codecs.nf4b64)."""

from __future__ import annotations

import torch

from engine_side.codecs.int8b64 import blocks_and_outliers
from engine_side.codecs.scales import divided, nan_unless_finite, rounded_up
from schemas.codecs.nf4b64 import BETWEEN

KERNEL = "blocks.nf4b64"
_ZERO = 7  # the number of the level 0


def encode(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Packed numbers of levels, scales and outliers of rows ``[..., width]`` of any float dtype."""
    blocks, outliers = blocks_and_outliers(rows)
    return {**coded(blocks, rows.shape[-1]), **outliers}


def coded(blocks: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
    """Packed numbers of levels, and scales, of the blocks of ``blocks_and_outliers`` of rows of ``width``."""
    scale = nan_unless_finite(rounded_up(blocks.abs().amax(dim=-1)))
    x = divided(blocks, scale.unsqueeze(-1)).flatten(-2)[..., :width]
    # Comparisons in place of a search: no kernel of its own, and the same on every device.
    numbers = torch.zeros_like(x, dtype=torch.uint8)
    for between in BETWEEN.tolist():
        numbers += x > between
    numbers = torch.nn.functional.pad(numbers, (0, width % 2), value=_ZERO).unflatten(-1, (-1, 2))
    return {"q": numbers[..., 0] | numbers[..., 1] << 4, "scale": scale.view(torch.uint16)}
