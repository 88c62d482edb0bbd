"""``sketch``, the reference encoder (the declaration and the formula are in schemas.codecs.sketch)."""

from __future__ import annotations

import torch

from engine_side.codecs.matrices import times
from engine_side.codecs.scales import divided, nan_unless_finite
from schemas.codecs.sketch import PACKED, THRESHOLDS

KERNEL = "projected.sketch"


def encode(rows: torch.Tensor, k: int, bits: int, seed: int) -> dict[str, torch.Tensor]:
    """Packed codes and scale of the transform of rows ``[..., width]`` of any float dtype."""
    y = times(rows, "sketch", k, seed)
    top = y.abs().amax(dim=-1, keepdim=True)
    unit = torch.where(top == 0, torch.ones_like(top), top)  # squares of large numbers overflow
    scale = nan_unless_finite((unit * (y / unit).square().mean(dim=-1, keepdim=True).sqrt()).to(torch.bfloat16))
    y = divided(y, scale)
    codes = torch.zeros_like(y, dtype=torch.uint8)
    for threshold in THRESHOLDS[bits]:
        codes += y >= threshold
    single = codes if bits == 1 else torch.stack([codes & 1, codes >> 1], dim=-1).flatten(-2)
    single = torch.nn.functional.pad(single, (0, -single.shape[-1] % PACKED)).unflatten(-1, (-1, PACKED))
    shifts = torch.arange(PACKED, dtype=torch.uint8, device=rows.device)
    return {"q": (single << shifts).sum(dim=-1, dtype=torch.uint8), "scale": scale.view(torch.uint16)}
