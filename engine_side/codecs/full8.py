"""``full8``, the reference encoder; its codes are those of topk8 and rp8 too (schemas.codecs.full8)."""

from __future__ import annotations

import torch

from engine_side.codecs.scales import divided, nan_unless_finite, rounded_up
from schemas.codecs.full8 import SPAN, ZERO_MAX

KERNEL = "row8.full8"


def encode(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """``q``, ``scale`` and ``zero`` of rows ``[..., width]`` of any float dtype."""
    numbers = rows.to(torch.float32)
    low, high = numbers.amin(dim=-1, keepdim=True), numbers.amax(dim=-1, keepdim=True)
    # Divided first: the range of a row may be over float32's largest number where its ends are not.
    span = torch.maximum(high / SPAN - low / SPAN, torch.maximum(high, -low) / ZERO_MAX)
    scale = nan_unless_finite(rounded_up(span))
    zero = divided(-low, scale).round_()
    q = (divided(numbers, scale).round_() + zero).clamp_(0, 254)
    return {"q": q.to(torch.uint8), "scale": scale.view(torch.uint16), "zero": zero.to(torch.int16)}
