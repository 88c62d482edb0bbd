"""``raw`` and ``raw16``: no change but, for ``raw16`` of float32, rounding to bfloat16."""

from __future__ import annotations

import torch


def encode(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """``x`` as it is; bfloat16 shown as uint16."""
    return {"x": rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows}


def encode16(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """16-bit rows as they are, float32 rounded to bfloat16 (to nearest, ties to even)."""
    return encode(rows.to(torch.bfloat16) if rows.dtype == torch.float32 else rows)
