"""``rp8`` and ``sketch``, the reference encoders (declarations in schemas.codecs.rp8 and sketch).

The matrices are NumPy's, copied to the rows' device by the first rows: the recorder encodes a row when a request
opens, so that no step waits for them.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from engine_side.codecs import row8
from engine_side.codecs.scales import divided, nan_unless_finite
from schemas.codecs import projection
from schemas.codecs.sketch import PACKED, THRESHOLDS


@lru_cache(maxsize=4)
def _gaussian(width: int, k: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(projection.gaussian(width, k, seed), device=device)


@lru_cache(maxsize=4)
def _hadamard(width: int, k: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(projection.hadamard(width, k, seed), device=device)


def encode_rp8(rows: torch.Tensor, k: int, seed: int) -> dict[str, torch.Tensor]:
    """Codes, scale and zero point of the projection of rows ``[..., width]`` of any float dtype."""
    width = rows.shape[-1]
    matrix = _gaussian(width, projection.columns(width, k, "rp8"), seed, rows.device)
    return row8.encode(rows.to(torch.float32) @ matrix)


def encode_sketch(rows: torch.Tensor, k: int, bits: int, seed: int) -> dict[str, torch.Tensor]:
    """Packed codes and scale of the transform of rows ``[..., width]`` of any float dtype."""
    width = rows.shape[-1]
    y = rows.to(torch.float32) @ _hadamard(width, projection.columns(width, k, "sketch"), seed, rows.device)
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
