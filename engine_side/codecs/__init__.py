"""Encoders: the torch side of each codec declared in schemas.codecs; they run on the rows' own device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from engine_side.codecs import int8b64, raw

__all__ = ["TORCH_DTYPES", "encode"]

Encoder = Callable[[torch.Tensor], dict[str, torch.Tensor]]

_ENCODERS: Final[dict[str, Encoder]] = {"raw": raw.encode, "raw16": raw.encode16, "int8b64": int8b64.encode}

# How the dtypes of declared streams (NumPy names; bfloat16 as uint16) look in torch.
TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "int8": torch.int8, "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32,
    "float16": torch.float16, "float32": torch.float32,
}


def encode(codec: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Pieces ``{stream: [..., *shape]}`` of rows ``[..., width]``, in the dtypes that the codec declares."""
    return _ENCODERS[codec](rows)
