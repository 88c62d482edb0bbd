"""Copies from a device to pinned memory, by the CUDA runtime that vLLM has loaded.

A slice on either side and ``copy_`` under another stream cost the step's thread ten times as much as the call itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Final

from schemas.errors import StartError

__all__ = ["Copy", "device_to_host"]

Copy = Callable[[int, int, int, int], None]
_DEVICE_TO_HOST: Final = 2


def device_to_host() -> Copy:
    """``copy(target, source, nbytes, stream)``: addresses, and a stream's handle; waits for nothing.

    StartError where no CUDA runtime is loaded, RuntimeError of a copy that the runtime refuses.
    """
    library = ctypes.PyDLL(_loaded("libcudart"))  # keeps the interpreter: giving it away costs more than the call
    memcpy = library.cudaMemcpyAsync
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    memcpy.restype = ctypes.c_int

    def copy(target: int, source: int, nbytes: int, stream: int) -> None:
        error = memcpy(target, source, nbytes, _DEVICE_TO_HOST, stream)
        if error:
            raise RuntimeError(f"cudaMemcpyAsync of {nbytes} bytes to the host: error {error}")

    return copy


def _loaded(name: str) -> str:
    """The file of a library that this process has mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return f"/{path}"
    raise StartError(f"vllm-tap: no {name} among the libraries of this process: rows cannot be copied from the device")
