"""``full8``, the reference encoder."""

from __future__ import annotations

import torch

from engine_side.codecs import row8


def encode(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes, scale and zero point of rows ``[..., width]`` of any float dtype."""
    return row8.encode(rows.to(torch.float32))
