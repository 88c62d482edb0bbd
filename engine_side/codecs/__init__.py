"""Encoders: the torch side of each codec declared in schemas.codecs; they run on the rows' own device.

A codec's encoder is the module of its name in this folder. The declaration of another package names its own module. The
module has ``encode(rows)``, which also takes the codec's parameters. Where a kernel does the same on a GPU, ``KERNEL``
is the kernel's name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch

from schemas import codecs
from schemas.codecs.declare import CodecFamily
from schemas.errors import StartError

__all__ = ["TORCH_DTYPES", "Encoder", "check_encoders", "encode", "encoder", "kernel_name"]

Encoder = Callable[[torch.Tensor], dict[str, torch.Tensor]]

# How the dtypes of declared streams (NumPy names; bfloat16 as uint16) look in torch.
TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "int8": torch.int8, "int16": torch.int16, "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32,
    "float16": torch.float16, "float32": torch.float32,
}


def _module(family: CodecFamily) -> Any:
    return import_module(family.encoder or f"engine_side.codecs.{family.name}")


def check_encoders() -> None:
    """StartError where a codec of another package has no encoder."""
    for family in codecs.CODECS.values():
        if family.encoder:
            try:
                found = callable(_module(family).encode)
            except Exception as error:  # a module of another package may raise anything
                raise StartError(f"codec {family.name}: its encoder {family.encoder} cannot be imported: "
                                 f"{error}") from None
            if not found:
                raise StartError(f"codec {family.name}: {family.encoder}.encode must be a function")


def encoder(identity: str) -> Encoder:
    """The function that makes pieces ``{stream: [..., *shape]}`` of rows ``[..., width]``, in the declared dtypes."""
    codec = codecs.identified(identity)
    return partial(_module(codec.family).encode, **codec.parameters)


def encode(identity: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Pieces of rows ``[..., width]``; a caller that encodes step after step keeps its ``encoder``."""
    return encoder(identity)(rows)


def kernel_name(family: CodecFamily) -> str:
    """The kernel of a codec as MODULE.FUNCTION, a module of engine_side.kernels where it has no dot; "" without one."""
    return str(getattr(_module(family), "KERNEL", ""))
