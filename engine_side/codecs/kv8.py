"""``kv8``, the reference encoder (the declaration and the formula are in schemas.codecs.kv8)."""

from __future__ import annotations

import torch

from engine_side.codecs.scales import divided, nan_unless_finite, rounded_up

KERNEL = "heads.head8"


def encode(rows: torch.Tensor, head: int) -> dict[str, torch.Tensor]:
    """Codes and a scale a head of rows ``[..., width]`` of any float dtype."""
    heads = rows.to(torch.float32).unflatten(-1, (-1, head))
    scale = nan_unless_finite(rounded_up(heads.abs().amax(dim=-1) / 127))
    codes = divided(heads, scale.unsqueeze(-1)).round_()
    return {"q": codes.to(torch.int8).flatten(-2), "scale": scale.view(torch.uint16)}
