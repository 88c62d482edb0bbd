"""Vectors that an engine is started with, for edits to name: safetensors files with one tensor, ``vector`` [width]."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from schemas import limits
from schemas.errors import StartError
from schemas.probes import Registered

_DTYPES: Final = ("F16", "F32", "F64")


def load_vector(registered: Registered) -> npt.NDArray[np.float32]:
    """The numbers of a file's vector, float32 [width]; StartError naming the file, the field and what is valid.

    Sizes are held against ``schemas.limits`` before memory is taken.
    """
    from safetensors import SafetensorError, safe_open

    start = f"vector {registered.name!r}: {registered.path}:"
    try:
        size = registered.path.stat().st_size
        if size > limits.vector_file_bytes_max:
            raise StartError(f"{start} bytes = {size}: valid: at most {limits.vector_file_bytes_max}")
        with safe_open(registered.path, framework="np") as file:
            if (names := sorted(file.keys())) != ["vector"]:
                raise StartError(f"{start} tensors = {names}: valid: vector, and no others")
            part = file.get_slice("vector")
            shape, dtype = list(part.get_shape()), part.get_dtype()
            if len(shape) != 1 or not 0 < shape[0] <= limits.width_max:
                raise StartError(f"{start} vector = {shape}: valid: [width], at most {limits.width_max}")
            if dtype not in _DTYPES:
                raise StartError(f"{start} vector = {dtype}: valid: one of {', '.join(_DTYPES)} (tensor.float() makes "
                                 "it F32)")
            numbers = file.get_tensor("vector")
    except OSError as error:
        raise StartError(f"{start} {error.strerror or error}") from None
    except SafetensorError as error:
        raise StartError(f"{start} no safetensors file ({error}); save it with safetensors.numpy.save_file or "
                         "safetensors.torch.save_file") from None
    with np.errstate(over="ignore"):
        kept: npt.NDArray[np.float32] = numbers.astype(np.float32)
    if not np.isfinite(kept).all():
        at = int(np.argwhere(~np.isfinite(kept))[0][0])
        raise StartError(f"{start} vector[{at}] = {numbers[at]}: valid: finite numbers that float32 holds")
    return kept
