"""A window of the training loader: rows are copied into it as they lie on the disk, and leave it mixed."""

from __future__ import annotations

import weakref
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from vllm_tap.loader.block_rows import Stored
from vllm_tap.loader.joined_index import AnyIndex
from vllm_tap.loader.row_decode import decode, fresh, is_as_stored
from vllm_tap.loader.row_index import name_of
from vllm_tap.loader.stored_rows import StoredRows

__all__ = ["Batch", "Window", "WindowMemory"]

Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Batch = dict[str, torch.Tensor]


class WindowMemory:
    """Memory of windows, one after the other, and of decoded rows: getting it from the system takes longer than
    filling it. It is used again when nobody looks at it. Pickled it is empty.
    """

    def __init__(self) -> None:
        self._free: list[Stored] | None = None
        self._lent: list[weakref.ref[Bytes]] = []
        self._decoded: list[tuple[Bytes, weakref.ref[Bytes]]] = []

    def __reduce__(self) -> tuple[type[WindowMemory], tuple[()]]:
        return WindowMemory, ()

    def take(self, index: AnyIndex, rows: int) -> list[Stored]:
        """Buffers by key and stream, uint8 [at least rows, piece bytes]: what was given back, unless someone looks at
        it still or it is too small; then fresh memory.
        """
        free, self._free = self._free, None
        if free is not None and len(next(iter(free[0].values()))) >= rows and not any(ref() is not None
                                                                                      for ref in self._lent):
            return free
        return [{stream.name: fresh(rows, stream.nbytes) for stream in kind.streams} for kind in index.kinds]

    def give(self, stored: list[Stored], lent: list[weakref.ref[Bytes]]) -> None:
        """Back what was taken; ``lent`` are arrays that may be looked at still."""
        self._free, self._lent = stored, lent

    def lend(self, kept: int, rows: int, nbytes: int) -> Bytes:
        """Uint8 [rows, nbytes] to decode to, until nobody looks at it; the last ``kept`` are used again."""
        at = next((number for number, (array, lent) in enumerate(self._decoded)
                   if lent() is None and array.shape == (rows, nbytes)), None)
        array = fresh(rows, nbytes) if at is None else self._decoded.pop(at)[0]
        given = array[:]
        self._decoded = [*self._decoded, (array, weakref.ref(given))][-kept:]
        return given


class Window:
    """The stored bytes of some rows, each at its slot; decoded a batch at a time."""

    def __init__(self, files: StoredRows, chosen: I64, slots: I64, memory: WindowMemory, most: int,
                 dtype: torch.dtype) -> None:
        """``most`` rows are in the largest window that ``memory`` is for."""
        self._index, self._memory, self._dtype = files.index, memory, dtype
        self._stored = memory.take(files.index, most)
        self._lent: list[weakref.ref[Bytes]] = []  # the arrays that batches are views of
        self._row = np.empty(len(chosen), np.int64)
        self._row[slots] = chosen
        self._token_id = np.empty(len(chosen), np.int64)
        files.fill(chosen, slots, self._stored, self._token_id)

    def batch(self, begin: int, end: int, copied: bool) -> Batch:
        """Rows at the slots ``[begin, end)``; what is stored as wanted is a view of the window unless ``copied``."""
        taken = self._row[begin:end]
        lend = partial(self._memory.lend, 2 * len(self._stored))  # a batch, and the one before it
        made: Batch = {}
        shares: dict[str, list[torch.Tensor]] = {}  # by name, what each rank has of the rows' columns
        for key, kind, stored in zip(self._index.keys, self._index.kinds, self._stored, strict=True):
            part = {name: array[begin:end] for name, array in stored.items()}
            values = decode(kind, part, self._dtype, lend)
            if is_as_stored(kind, self._dtype):
                if copied:
                    values = values.clone()
                else:
                    self._lent += map(weakref.ref, part.values())
            shares.setdefault(name_of(key), []).append(values)
        for name, parts in shares.items():
            made[name] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        made["position"] = torch.from_numpy(self._index.position[taken].astype(np.int64))
        made["token_id"] = torch.from_numpy(self._token_id[begin:end].copy())
        made["capture"] = torch.from_numpy(self._index.capture[taken].astype(np.int64))
        return made

    def close(self) -> None:
        """Give back the memory; batches stay as they are."""
        self._memory.give(self._stored, self._lent)
