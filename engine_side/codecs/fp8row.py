"""``fp8row``, the reference encoder (the declaration and the formula are in schemas.codecs.fp8row)."""

from __future__ import annotations

import torch

from engine_side.codecs.scales import divided, nan_unless_finite, rounded_up
from schemas.codecs.fp8row import LARGEST

KERNEL = "row8.fp8row"


def encode(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes and scale of rows ``[..., width]`` of any float dtype."""
    x = rows.to(torch.float32)
    scale = nan_unless_finite(rounded_up(x.abs().amax(dim=-1, keepdim=True) / LARGEST))
    q = divided(x, scale).to(torch.float8_e4m3fn)  # never over the largest number, which would give NaN
    return {"q": q.view(torch.uint8), "scale": scale.view(torch.uint16)}
