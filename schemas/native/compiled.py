"""The loops of schemas.native.loops, compiled by numba as this is imported: a second of a processor, 70 MB.

They were timed in turns with loops written in LLVM's own language. Hashing takes 0.92 of the time of those, decoding to
float32 0.99, to float16 and bfloat16 1.11 to 1.18. The latter costs 0.02 to 0.04 ms of a slice of 512 rows that takes 4
to 6.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core.cgutils import get_or_insert_function
from numba.core.types import Array, float32, int8, int64, uint16, uint64, void
from numba.extending import intrinsic

__all__ = ["XXHASH", "copied", "decoded", "digests", "narrowed", "widened"]

_PAGE: Final = 4096
_BLOCK: Final = 64
_U32: Final = np.uint32
_HALF: Final = np.float32(0.5)
_UNITS: Final = np.float32(1 << 24)  # of the smallest float16 there is


def _function(library: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A C function for loops to call, addresses as integers; of xxhash's the one for the widest instructions here."""
    found = getattr(library, f"{name}_dispatch", None) or getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


_address, _size, _word = ctypes.c_int64, ctypes.c_int64, ctypes.c_uint64
XXHASH: Final = ctypes.CDLL(import_module("xxhash._xxhash").__file__)
_xxh3: Final = _function(XXHASH, "XXH3_64bits_withSeed", _word, _address, _size, _word)
_update: Final = _function(XXHASH, "XXH3_64bits_update", ctypes.c_int, _address, _address, _size)
_memcpy: Final = _function(ctypes.CDLL(None), "memcpy", _address, _address, _address, _size)


def _read(dtype: Any, ndim: int = 1) -> Array:
    """An array that is only read, wherever in memory it begins."""
    return Array(dtype, ndim, "C", readonly=True, aligned=False)


@intrinsic
def _prefetch(_: Any, address: Any) -> Any:
    """A hint to the processor: the cache line at an address is wanted soon."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> None:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        signature = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        hint = get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
        builder.call(hint, [builder.inttoptr(arguments[0], pointer), number(0), number(3), number(1)])

    return void(int64), generate


@njit(void(int64, _read(int64), int64, _read(uint64), uint64[::1]), nogil=True)
def digests(state, at, nbytes, seeds, out):
    """xxh3 of the bytes at each address; a ``state``, where there is one, is carried over them meanwhile."""
    for i in range(len(at)):
        if state:
            _update(state, at[i], nbytes)
        out[i] = _xxh3(at[i], nbytes, seeds[i])


@njit(void(_read(int64), int64, _read(int64), _read(uint64), uint64[::1]), nogil=True)
def copied(at, nbytes, to, seeds, out):
    """Copy the bytes at each address to another. Where ``out`` has room, put the xxh3 of each copy there, hashed while
    the processor's first cache has it.

    Meanwhile the next piece (its second page too) is on its way from memory. Without these hints random rows take 1.15
    times as long.
    """
    for i in range(len(at)):
        ahead = at[min(i + 1, len(at) - 1)]
        _prefetch(ahead)
        if nbytes > _PAGE:
            _prefetch(ahead + _PAGE)
        _memcpy(to[i], at[i], nbytes)
        if len(out):
            out[i] = _xxh3(to[i], nbytes, seeds[i])


@njit
def _float32(x):
    """float32 as it is."""
    return x


@njit
def _bfloat16(x):
    """The bits of float32 as bfloat16: nearest, ties to even."""
    bits = np.float32(x).view(_U32)
    odd = _U32(_U32(bits >> _U32(16)) & _U32(1))
    found = _U32(_U32(_U32(bits + _U32(0x7FFF)) + odd) >> _U32(16))
    if _U32(bits & _U32(0x7FFFFFFF)) > _U32(0x7F800000):
        found = _U32(0x7FC0)
    return uint16(found)


@njit
def _float16(x):
    """The bits of float32 as float16: nearest, ties to even; where float16 has no normal number, adding 0.5 rounds.

    Every step is of 32 bits, which numba would widen: so all numbers of a vector are made at once.
    """
    bits = np.float32(x).view(_U32)
    size = _U32(bits & _U32(0x7FFFFFFF))
    odd = _U32(_U32(size >> _U32(13)) & _U32(1))
    found = _U32(_U32(_U32(size + _U32(0xC8000FFF)) + odd) >> _U32(13))
    if size < _U32(0x38800000):
        found = _U32(np.float32(np.uint32(size).view(np.float32) + _HALF).view(_U32) - _U32(0x3F000000))
    if size >= _U32(0x47800000):
        found = _U32(0x7C00)
    if size > _U32(0x7F800000):
        found = _U32(0x7E00)
    return uint16(_U32(found | _U32(_U32(bits >> _U32(16)) & _U32(0x8000))))


def _narrowing(rounded, dtype):
    """The loop that rounds float32."""

    @njit(void(_read(float32), dtype[::1]), nogil=True)
    def narrowed(x, out):
        for i in range(len(x)):
            out[i] = rounded(x[i])

    return narrowed


def _decoding(rounded, dtype):
    """The loop that decodes rows: each block of codes by its scale, the ``values`` at their columns; all rounded."""

    @njit(void(_read(int8, 2), _read(float32, 2), _read(int64, 2), _read(float32, 2), dtype[:, ::1]), nogil=True)
    def decoded(codes, scales, at, values, out):
        for row in range(len(codes)):
            for block in range(scales.shape[1]):
                begin, scale = block * _BLOCK, scales[row, block]
                numbers, code = out[row, begin:begin + _BLOCK], codes[row, begin:begin + _BLOCK]
                for i in range(_BLOCK):
                    numbers[i] = rounded(np.float32(code[i]) * scale)
            for kept in range(at.shape[1]):
                out[row, at[row, kept]] = rounded(values[row, kept])

    return decoded


_ROUNDED: Final = {"float32": (_float32, float32), "bfloat16": (_bfloat16, uint16), "float16": (_float16, uint16)}
decoded: Final = {name: _decoding(*rounded) for name, rounded in _ROUNDED.items()}
narrowed: Final = {name: _narrowing(*rounded) for name, rounded in _ROUNDED.items() if name != "float32"}


@njit(void(_read(uint16), float32[::1]), nogil=True)
def widened(x, out):
    """The bits of float16 as float32; those of no normal number count units."""
    for i in range(len(x)):
        size = _U32(x[i] & 0x7FFF)
        beyond = _U32(0x7F800000) if size >= _U32(0x7C00) else _U32(0)  # infinite, or no number
        normal = _U32(_U32(size << _U32(13)) + _U32(0x38000000)) | beyond
        small = np.float32(np.float32(np.int32(size)) / _UNITS).view(_U32)
        found = (small if size < _U32(0x400) else normal) | _U32(_U32(x[i] & 0x8000) << _U32(16))
        out[i] = np.uint32(found).view(np.float32)
