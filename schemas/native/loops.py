"""Loops over rows in machine code: they hash many pieces (xxh3), copy them, decode rows of codes, and make numbers
narrower or wider. Each is one call that leaves the interpreter alone.

In Python each piece takes a call and objects, three times what hashing 4 KB takes. NumPy goes over blocks twice. numba,
which comes with vLLM, compiles ``schemas.native.compiled``. That takes one or two seconds of a processor and 70 MB of
memory, once in a process. So it is done only for the HTTP service, at its start, and for a process that hashes many
pieces. A thread does it. Where it cannot be done, everything goes on in Python. The causes: no numba, an xxhash without
the functions, or memory that may not become code.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Loops", "begin", "load", "loops_for"]

pieces_before: Final = 1 << 16  # hashed in Python, before compiling the loops is worth it
fork_waits_s: Final = 30.0  # at most, for the loops: should who forks hold what the thread needs, the fork goes on
pieces_at_once: Final = 1 << 16  # whose addresses are held

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
_NONE: Final = np.empty(0, np.uint64)


class Loops:
    """The compiled loops, their arguments checked."""

    def __init__(self) -> None:
        _may_become_code()
        from schemas.native import compiled

        self._compiled, self._xxhash = compiled, compiled.XXHASH
        self._xxhash.XXH3_createState.restype = ctypes.c_void_p
        self._xxhash.XXH3_64bits_digest.restype = ctypes.c_uint64
        for name in ("XXH3_64bits_reset", "XXH3_64bits_digest", "XXH3_freeState"):
            getattr(self._xxhash, name).argtypes = [ctypes.c_void_p]

    def digests(self, pieces: Bytes, which: I64 | None, seeds: U64 | None) -> U64:
        """xxh3 of rows of an array, uint8 ``[n, piece bytes]``: of all, or of those named, in that order.

        ``seeds`` are by result; None: 0 for all.
        """
        if which is not None and len(which) and not 0 <= which.min() <= which.max() < len(pieces):
            raise IndexError(f"pieces {which.min()} to {which.max()} of {len(pieces)}")
        pieces = np.ascontiguousarray(pieces)
        start, nbytes = pieces.ctypes.data, pieces.shape[1]

        def at(first: int, stop: int) -> I64:
            rows: I64 = np.arange(first, stop) if which is None else which[first:stop]
            addresses: I64 = rows * nbytes + start
            return addresses

        return self._digests(at, len(pieces) if which is None else len(which), nbytes, seeds, 0)

    def stream(self, buffers: Sequence[memoryview], piece_bytes: int, seeds: U64 | None) -> tuple[int, U64]:
        """xxh3 of buffers as one stream, and of each piece in them, while the cache has it; each has whole pieces."""
        if any(buffer.nbytes % piece_bytes for buffer in buffers):
            raise ValueError(f"buffers of pieces of {piece_bytes} bytes end in the middle of one")
        arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        starts = np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)
        bounds = np.cumsum([0, *(len(array) // piece_bytes for array in arrays)])
        origins = starts - bounds[:-1] * piece_bytes  # where piece 0 of the stream were, if a buffer held all

        def at(first: int, stop: int) -> I64:
            counts = np.diff(np.clip(bounds, first, stop))
            addresses: I64 = np.repeat(origins, counts) + np.arange(first, stop) * piece_bytes
            return addresses

        state = self._xxhash.XXH3_createState()
        if state is None:
            raise MemoryError("no memory for a hash's state")
        try:
            self._xxhash.XXH3_64bits_reset(state)
            found = self._digests(at, int(bounds[-1]), piece_bytes, seeds, state)
            return self._xxhash.XXH3_64bits_digest(state), found
        finally:
            self._xxhash.XXH3_freeState(state)

    def gather(self, data: memoryview, starts: I64, out: Bytes, target: I64) -> None:
        """Copy the bytes that begin at each of ``starts`` to those rows of ``out``, uint8 ``[rows, piece bytes]``;
        IndexError where they lie beyond.
        """
        nbytes = out.shape[1]
        if not len(starts):
            return
        if not (starts.min() >= 0 and starts.max() + nbytes <= len(data) and target.min() >= 0
                and target.max() < len(out) and len(starts) == len(target) and out.flags.c_contiguous):
            raise IndexError(f"pieces from byte {starts.min()} to {starts.max()} of {len(data)}")
        at, to = starts + np.frombuffer(data, np.uint8).ctypes.data, target * nbytes + out.ctypes.data
        self._compiled.copied(at, nbytes, to, _NONE, _NONE)

    def copy(self, at: I64, out: Bytes) -> None:
        """Copy the bytes at each of the addresses ``at`` to the rows of ``out``, uint8 ``[n, piece bytes]``, in order.

        That they are there, and stay meanwhile, is for who calls to see to.
        """
        self._copied(at, out, _NONE, _NONE)

    def copy_hashed(self, at: I64, out: Bytes, seeds: U64 | None) -> U64:
        """``copy``, with the xxh3 of each piece as it was copied. ``seeds`` are by piece; None: 0 for all."""
        start = np.zeros(len(out), np.uint64) if seeds is None else np.ascontiguousarray(seeds, np.uint64)
        if len(start) != len(out):
            raise ValueError(f"{len(start)} seeds for {len(out)} pieces")
        found = np.empty(len(out), np.uint64)
        self._copied(at, out, start, found)
        return found

    def _copied(self, at: I64, out: Bytes, seeds: U64, found: U64) -> None:
        if at.shape != out.shape[:1] or not out.flags.c_contiguous:
            raise ValueError(f"addresses {at.shape} for an array {out.shape}")
        nbytes = out.shape[1]
        to = np.arange(len(out)) * nbytes + out.ctypes.data
        self._compiled.copied(np.ascontiguousarray(at, np.int64), nbytes, to, seeds, found)

    def decoded(self, codes: npt.NDArray[Any], scales: F32, at: I64, values: F32, dtype: str) -> npt.NDArray[Any]:
        """Decode int8 codes ``[..., width]``: each block of 64 is multiplied by one of ``scales`` ``[..., width /
        64]``, then the ``values`` ``[..., k]`` are put at the columns ``at``.

        The result is float32, or rounded to float16 or bfloat16 (its bits, uint16). IndexError where a column lies
        beyond.
        """
        width, kept = codes.shape[-1], at.shape[-1]
        rows = codes.size // width
        if codes.size != 64 * scales.size or width % 64 or at.shape != values.shape or at.size != rows * kept:
            raise ValueError(f"{scales.size} scales and {at.size} values for codes {codes.shape}")
        if at.size and not 0 <= at.min() <= at.max() < width:
            raise IndexError(f"columns {at.min()} to {at.max()} of {width}")
        found: npt.NDArray[Any] = np.empty(codes.shape, np.uint16 if dtype == "bfloat16" else dtype)
        out = found.reshape(rows, width)
        matrices = (np.ascontiguousarray(each).reshape(rows, size) for each, size in (
            (codes, width), (scales, width // 64), (at, kept), (values, kept)))
        self._compiled.decoded[dtype](*matrices, out.view(np.uint16) if dtype == "float16" else out)
        return found

    def narrowed(self, x: F32, dtype: str, out: U16) -> None:
        """The bits of ``x`` ``[n]`` as bfloat16 or float16, nearest, ties to even, into ``out``."""
        if x.shape != out.shape or not x.flags.c_contiguous or not out.flags.c_contiguous:
            raise ValueError(f"numbers {x.shape} for an array {out.shape}")
        self._compiled.narrowed[dtype](x, out)

    def widened(self, bits: U16, out: F32) -> None:
        """float16 ``[n]``, by its bits, as float32 into ``out``, exactly."""
        if bits.shape != out.shape or not (bits.flags.c_contiguous and out.flags.c_contiguous):
            raise ValueError(f"numbers {bits.shape} for an array {out.shape}")
        self._compiled.widened(bits, out)

    def _digests(self, at: Callable[[int, int], I64], count: int, nbytes: int, seeds: U64 | None, state: int) -> U64:
        """xxh3 of ``count`` pieces; ``at(first, stop)`` are the addresses of some, asked for in order."""
        if seeds is not None and len(seeds) != count:
            raise ValueError(f"{len(seeds)} seeds for {count} pieces")
        zeros, out = np.zeros(min(count, pieces_at_once), np.uint64), np.empty(count, np.uint64)
        for first in range(0, count, pieces_at_once):
            stop = min(first + pieces_at_once, count)
            start = zeros if seeds is None else np.ascontiguousarray(seeds[first:stop], np.uint64)
            self._compiled.digests(state, at(first, stop), nbytes, start, out[first:stop])
        return out


_lock = threading.Lock()  # held over a fork: what begins to make the loops, and a fork, are one at a time
_maker: threading.Thread | None = None
_loops: Loops | None = None
_wanted = 0


def loops_for(pieces: int) -> Loops | None:
    """The loops, for who is about to hash so many pieces; None while they are not made, or where they cannot be."""
    global _wanted
    if _loops is not None or _maker is not None:
        return _loops
    with _lock:
        _wanted += pieces
    if _wanted >= pieces_before:
        begin()
    return None


def begin() -> None:
    """Begin to make the loops in a thread of its own, once. A server does so at its start: the thread needs the
    interpreter, so requests beside it would wait for up to 0.2 s.
    """
    global _maker
    with _lock:
        if _maker is None and _loops is None:
            _maker = threading.Thread(target=load, name="native-loops")
            with contextlib.suppress(RuntimeError):  # no more threads may be started, or the interpreter is at its end
                _maker.start()


def load() -> Loops | None:
    """Make the loops now; None where they cannot be made. Without the lock: who forks holds it and waits for this."""
    global _loops
    with contextlib.suppress(Exception):  # numba's own errors are of no narrower kind
        _loops = Loops()
    return _loops


def _before_fork() -> None:
    """Wait for the thread: the child would find the locks of its imports held for ever, and no loops."""
    _lock.acquire()
    if _maker is not None:
        with contextlib.suppress(RuntimeError):  # it was never started, or is itself the one that forks
            _maker.join(fork_waits_s)


os.register_at_fork(before=_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release)


def _may_become_code() -> None:
    """OSError where memory may not be made executable (systemd's MemoryDenyWriteExecute): LLVM would crash."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError("memory may not become executable")
