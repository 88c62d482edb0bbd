"""Encoders: the torch side of each codec declared in schemas.codecs; they run on the rows' own device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from engine_side.codecs import fp8row, full8, head8, int8b64, nf4b64, projected, raw, raw16, topk
from schemas import codecs

__all__ = ["TORCH_DTYPES", "Encoder", "encode", "encoder"]

Encoder = Callable[[torch.Tensor], dict[str, torch.Tensor]]

_ENCODERS: Final[dict[str, Callable[..., dict[str, torch.Tensor]]]] = {
    "raw": raw.encode,
    "raw16": raw16.encode,
    "int8b64": int8b64.encode,
    "fp8row": fp8row.encode,
    "nf4b64": nf4b64.encode,
    "topk": topk.encode,
    "topk8": topk.encode8,
    "sketch": projected.encode_sketch,
    "kv8": head8.encode,
    "qk8": head8.encode,
    "full8": full8.encode,
    "rp8": projected.encode_rp8,
}

# How the dtypes of declared streams (NumPy names; bfloat16 as uint16) look in torch.
TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "int8": torch.int8, "int16": torch.int16, "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32,
    "float16": torch.float16, "float32": torch.float32,
}


def encoder(identity: str) -> Encoder:
    """What makes pieces ``{stream: [..., *shape]}`` of rows ``[..., width]``, in the dtypes that the codec declares."""
    codec = codecs.identified(identity)
    return partial(_ENCODERS[codec.family.name], **codec.parameters)


def encode(identity: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Pieces of rows ``[..., width]``; what encodes step after step keeps its ``encoder``."""
    return encoder(identity)(rows)
