"""``rp8``, the reference encoder: a projection in the codes of full8."""

from __future__ import annotations

import torch

from engine_side.codecs import full8
from engine_side.codecs.matrices import times

KERNEL = "projected.rp8"


def encode(rows: torch.Tensor, k: int, seed: int) -> dict[str, torch.Tensor]:
    """Codes, scale and zero point of the projection of rows ``[..., width]`` of any float dtype."""
    return full8.encode(times(rows, "rp8", k, seed))
