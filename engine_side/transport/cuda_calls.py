"""Calls of the CUDA libraries that vLLM has loaded: copies to pinned memory, launches of compiled kernels, and nodes of
captured graphs.

By torch, a slice on either side and ``copy_`` under another stream cost the step's thread ten times as much as the
copy's call itself. Triton's launcher asks every tensor for its address, asks the driver about that address, and gives
the interpreter away.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from schemas.errors import StartError

__all__ = ["Copy", "Function", "Launched", "device_to_host", "enable_node", "kernel_nodes"]

Copy = Callable[[int, int, int, int], None]
_DEVICE_TO_HOST: Final = 2
_KERNEL_NODE: Final = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_HIDDEN_MAX: Final = 2  # pointers that Triton adds: memory for itself, and for a profiler


def device_to_host() -> Copy:
    """``copy(target, source, nbytes, stream)``: addresses, and a stream's handle; waits for nothing.

    StartError where no CUDA runtime is loaded, RuntimeError of a copy that the runtime refuses.
    """
    memcpy = _library("libcudart").cudaMemcpyAsync
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    memcpy.restype = ctypes.c_int

    def copy(target: int, source: int, nbytes: int, stream: int) -> None:
        error = memcpy(target, source, nbytes, _DEVICE_TO_HOST, stream)
        if error:
            raise RuntimeError(f"cudaMemcpyAsync of {nbytes} bytes to the host: error {error}")

    return copy


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [*((f"{of}Dim{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "XYZ"),
                ("sharedMemBytes", ctypes.c_uint), ("hStream", ctypes.c_void_p), ("attrs", ctypes.c_void_p),
                ("numAttrs", ctypes.c_uint)]


class Function:
    """A kernel that Triton has compiled and the driver has loaded, whose parameters are numbers of at most 64 bits."""

    def __init__(self, handle: int, threads: int, shared: int, parameters: int) -> None:
        self.handle, self.threads, self.shared, self.parameters = handle, threads, shared, parameters
        self.launch = _library("libcuda.so").cuLaunchKernelEx
        self.launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self.launch.restype = ctypes.c_int

    @classmethod
    def of(cls, compiled: Any, given: int) -> Function | None:
        """The function of what Triton's launch returned for ``given`` arguments; None where it wants unknown ones."""
        about, handle = compiled.metadata, compiled.function
        unusual = (getattr(about, name, 0) for name in (
            "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"))
        # Of what is given it makes constants as it likes: then those that are left would be taken for one another.
        taken = sum(kind != "constexpr" for kind in compiled.src.signature.values())
        parameters = _parameters(handle)
        if any(unusual) or getattr(about, "num_ctas", 1) != 1 or taken != given or not (
                given <= parameters <= given + _HIDDEN_MAX):
            return None
        return cls(handle, 32 * about.num_warps, about.shared, parameters)


class Launched:
    """A kernel with its grid and arguments, to be launched again and again.

    ``values`` int64 [steps, arguments]: what each of its launches gets; they may be changed, as may the grid.
    """

    __slots__ = ("_at", "_config", "_device", "_function", "_launch", "_stream", "_table", "_tables", "values")

    def __init__(self, function: Function, grid: tuple[int, int, int], arguments: Sequence[int], device: int,
                 steps: int) -> None:
        self._launch, self._function, self._device = function.launch, function.handle, device
        whole: npt.NDArray[np.int64] = np.zeros((steps, function.parameters), np.int64)  # what Triton adds stays 0
        self.values = whole[:, : len(arguments)]
        self.values[:] = arguments
        # Where the driver finds each argument of a step, and where it finds that.
        self._table = whole.ctypes.data + 8 * np.arange(whole.size)
        begin = self._table.ctypes.data
        self._tables = [begin + 8 * function.parameters * step for step in range(steps)]
        self._config = _Config(*grid, function.threads, 1, 1, function.shared, None, None, 0)
        self._at, self._stream = ctypes.addressof(self._config), 0

    def over(self, programs: int) -> None:
        """Set the number of programs in the grid's first direction."""
        self._config.gridDimX = programs

    def __call__(self, step: int) -> None:
        """Enqueue it on the current stream; RuntimeError where the driver refuses."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if stream != self._stream:
            self._config.hStream = self._stream = stream
        error = self._launch(self._at, self._function, self._tables[step], None)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx: error {error}")


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = [("function", ctypes.c_void_p), *((f"{of}Dim{axis}", ctypes.c_uint) for of in ("grid", "block")
                                                 for axis in "XYZ"),
                ("sharedMemBytes", ctypes.c_uint), ("arguments", ctypes.POINTER(ctypes.c_void_p)),
                ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p)]


def kernel_nodes(graph: int, functions: Container[int], argument: int) -> Iterator[tuple[int, int]]:
    """Nodes of a captured graph that launch one of these functions (``Function.handle``), each with the value of one
    of its arguments, an address. RuntimeError if the driver refuses.
    """
    driver, count = _library("libcuda.so"), ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)), "cuGraphGetNodes")
    nodes, kind, about = (ctypes.c_void_p * count.value)(), ctypes.c_int(), _KernelNode()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)), "cuGraphGetNodes")
    for node in nodes:
        assert node is not None
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)), "cuGraphNodeGetType")
        if kind.value != _KERNEL_NODE:
            continue
        error = driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(about))
        _check(error, "cuGraphKernelNodeGetParams")
        if about.function in functions:
            yield node, ctypes.c_uint64.from_address(about.arguments[argument] or 0).value


def enable_node(executable: int, node: int, on: bool) -> None:
    """Turn a kernel of an instantiated graph on or off for launches to come; RuntimeError if the driver refuses."""
    error = _library("libcuda.so").cuGraphNodeSetEnabled(ctypes.c_void_p(executable), ctypes.c_void_p(node), int(on))
    _check(error, "cuGraphNodeSetEnabled")


def _check(error: int, call: str) -> None:
    if error:
        raise RuntimeError(f"{call}: error {error}")


def _parameters(function: int) -> int:
    """Number of a loaded kernel's parameters; -1 where one is wider than a number, or where the driver cannot tell
    (before 12.4).
    """
    ask = getattr(_library("libcuda.so"), "cuFuncGetParamInfo", None)
    if ask is None:
        return -1
    ask.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    offset, size, count = ctypes.c_size_t(), ctypes.c_size_t(), 0
    while ask(function, count, ctypes.byref(offset), ctypes.byref(size)) == 0:
        if size.value > 8:
            return -1
        count += 1
    return count


@lru_cache
def _library(name: str) -> ctypes.PyDLL:
    """A library of this process; its calls keep the interpreter, as giving it away costs more than they take."""
    return ctypes.PyDLL(_loaded(name))


def _loaded(name: str) -> str:
    """The file of a library that this process has mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(name):
            return f"/{path}"
    raise StartError(f"vllm-tap: {name} is not loaded in this process, and capture needs it on a GPU; install PyTorch "
                     "with CUDA")
