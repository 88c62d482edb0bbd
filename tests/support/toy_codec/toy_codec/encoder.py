"""``toy8``, the encoder, in torch."""

from __future__ import annotations

import torch


def encode(rows: torch.Tensor, top: int) -> dict[str, torch.Tensor]:
    """Codes and scale of rows ``[..., width]`` of any float dtype."""
    x = rows.to(torch.float32)
    scale = x.abs().amax(dim=-1, keepdim=True) / top
    codes = (x / torch.where(scale > 0, scale, torch.ones_like(scale))).round()
    return {"q": codes.to(torch.int8), "scale": scale}
