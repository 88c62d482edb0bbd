"""xxh3 of many pieces in one call that leaves the interpreter alone.

In Python each piece is a call and objects for it, three times what hashing 4 KB takes. Here machine code loops over the
xxhash package's own function. LLVM makes it, through llvmlite, which comes with vLLM: 50 ms of a processor and 12 MB of
memory, once in a process, so it is made for those alone who hash many pieces, in a thread beside them. Where it cannot
be made (no llvmlite, an xxhash without the function, memory that may not become code) everybody goes on in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Loop", "load", "loop_for"]

pieces_before: Final = 1 << 16  # hashed in Python, in about the time that making the loop takes
# For i < n: out[i] = hash(at[i], bytes, seeds[i])
_CODE: Final = """
define void @digests(ptr %hash, i64 %n, ptr %at, i64 %bytes, ptr %seeds, ptr %out) {
start:
  %any = icmp ne i64 %n, 0
  br i1 %any, label %piece, label %end
piece:
  %i = phi i64 [0, %start], [%next, %piece]
  %at_i = getelementptr ptr, ptr %at, i64 %i
  %seed_i = getelementptr i64, ptr %seeds, i64 %i
  %out_i = getelementptr i64, ptr %out, i64 %i
  %address = load ptr, ptr %at_i
  %seed = load i64, ptr %seed_i
  %digest = call i64 %hash(ptr %address, i64 %bytes, i64 %seed)
  store i64 %digest, ptr %out_i
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  br i1 %more, label %piece, label %end
end:
  ret void
}
"""

U64 = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Loop = Callable[[Bytes, npt.NDArray[np.int64] | None, U64 | None], U64]
"""xxh3 of rows of an array, uint8 ``[n, piece bytes]`` without gaps: of all of them, or of those named, in that order.

The third argument are their seeds, uint64 by result; None: 0 for all.
"""

_lock = threading.Lock()
_begun = False
_loop: Loop | None = None
_wanted = 0


def loop_for(pieces: int) -> Loop | None:
    """The loop, for who is about to hash so many pieces; None while it is not made, or where it cannot be."""
    global _begun, _wanted
    if _loop is not None or _begun:
        return _loop
    with _lock:
        _wanted += pieces
        if _wanted < pieces_before or _begun:
            return None
        _begun = True
    threading.Thread(target=load, name="xxh3").start()
    return None


def load() -> Loop | None:
    """Make the loop now; None where it cannot be made."""
    global _begun, _loop
    with contextlib.suppress(ImportError, AttributeError, OSError, RuntimeError):
        made = _make()
        with _lock:
            _begun, _loop = True, made
    return _loop


def _make() -> Loop:
    import llvmlite.binding as llvm

    _may_become_code()
    package = ctypes.CDLL(import_module("xxhash._xxhash").__file__)
    try:
        hash_one = package.XXH3_64bits_withSeed_dispatch  # takes the widest instructions that the processor has
    except AttributeError:
        hash_one = package.XXH3_64bits_withSeed
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_CODE)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())
    engine.finalize_object()
    signature = ctypes.CFUNCTYPE(None, *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
                                         ctypes.c_void_p, ctypes.c_void_p))
    function, address = signature(engine.get_function_address("digests")), ctypes.cast(hash_one, ctypes.c_void_p)

    def loop(pieces: Bytes, which: npt.NDArray[np.int64] | None, seeds: U64 | None, engine: Any = engine) -> U64:
        if which is not None and len(which) and not 0 <= which.min() <= which.max() < len(pieces):
            raise IndexError(f"pieces {which.min()} to {which.max()} of {len(pieces)}")
        pieces, nbytes = np.ascontiguousarray(pieces), pieces.shape[1]
        at = (np.arange(len(pieces)) if which is None else which) * nbytes + pieces.ctypes.data
        start = np.zeros(len(at), np.uint64) if seeds is None else np.ascontiguousarray(seeds, np.uint64)
        if len(start) != len(at):
            raise ValueError(f"{len(start)} seeds for {len(at)} pieces")
        out = np.empty(len(at), np.uint64)
        function(address, len(at), at.ctypes.data, nbytes, start.ctypes.data, out.ctypes.data)
        return out

    return loop


def _may_become_code() -> None:
    """OSError where memory may not be made executable (systemd's MemoryDenyWriteExecute): LLVM would crash."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError("memory may not become executable")
