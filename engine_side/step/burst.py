"""Bursts: the blocks of several steps in one region of the ring.

A burst lasts for several steps of decode, while the same requests advance by one token a step. No rows are selected
anew in it. Each step only enqueues one kernel for each entry (two of a projection). The bytes of a burst cross to the
host together. Any other step is written as bursts of one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from engine_side.step.block import EntryRows
from engine_side.step.selection import I64
from engine_side.transport.events import Run
from engine_side.transport.ring import ALIGN, aligned, view

_STEPS_AHEAD: Final = 16  # steps whose positions are worked out at once


@dataclass(slots=True)
class Burst:
    """Blocks of up to ``steps_max`` steps in one region: first the numbers of gathered rows, then the steps' blocks.

    ``first`` [requests]: position of each request's row in the burst's first step.
    """

    entries: list[EntryRows]
    steps_max: int
    steps_unchanged: int  # steps for which the same rows are wanted, this one included
    requests: list[str]
    first: I64
    step_rows: int  # of the model's step, wanted or not
    began: float  # time.monotonic() of its first step
    running: tuple[I64, I64]  # slots of all captures in the step, position of each one's first row
    number: int = 0  # of its first step
    pace: int = 1  # by which the numbers of its steps differ: others' come in between
    index_bytes: int = 0  # of gathered rows' numbers, before the first step
    step_bytes: int = 0
    ring_offset: int = 0  # of the region
    memory: torch.Tensor | None = None  # where rows are encoded: the ring, or the device's scratch
    memory_offset: int = 0  # of the region in ``memory``
    steps_done: int = 0
    begin_mark: int = 0  # the ring's head before the region
    mark: int = 0  # after it
    memory_end: int = 0  # scratch's head after it
    copied: bool = False  # what was encoded is on its way to the host; the next steps need a region of their own
    _inputs: tuple[int, int] = (0, 0)  # addresses of the last step's token ids and positions
    # Positions of the requests in the next steps, the last one first, as bytes of the runner's integers: comparing
    # them takes a few instructions beside a step whose caches are cold, an operation on an array thousands.
    _next_first: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rows in self.entries:
            rows.offset = aligned(self.step_bytes, rows.block.alignment)
            self.step_bytes = rows.offset + rows.block.nbytes
            self.index_bytes += rows.index_bytes
        self.step_bytes = aligned(self.step_bytes, self.alignment)
        self.index_bytes = aligned(self.index_bytes, self.alignment)

    @property
    def alignment(self) -> int:
        """The number that the region's offset in the ring must be a multiple of."""
        return max((rows.block.alignment for rows in self.entries), default=ALIGN)

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.index_bytes + self.steps_max * self.step_bytes

    def continues_with(self, requests: list[str], first: I64, rows: int) -> bool:
        """Whether a step is the next of this burst: the same requests, each one token further. Asked once a step.

        ``first``: the position of each, in the runner's integers, and perhaps numbers behind them.
        """
        if rows != self.step_rows or requests != self.requests:
            return False
        if not self._next_first:
            steps = np.arange(self.steps_done + _STEPS_AHEAD - 1, self.steps_done - 1, -1)
            self._next_first = [step.tobytes() for step in (self.first + steps[:, None]).astype(first.dtype)]
        return first.tobytes().startswith(self._next_first.pop())

    def counts(self, number: int) -> bool:
        """Whether a step is as far from the one before as that from the one before it; its second step says how far."""
        if self.steps_done == 1:
            self.pace = max(1, number - self.number)
        return number == self.number + self.steps_done * self.pace

    def renewed(self, began: float, number: int = 0) -> Burst:
        """A burst of the same rows from the next step on, which has this ``number``."""
        done = self.steps_done
        entries = [EntryRows(rows.layout, rows.row, rows.slot, rows.position + done, rows.flags,
                             launch=rows.launch if rows.layout.aimed.get(False) is rows else None)
                   for rows in self.entries]
        slots, first = self.running
        return Burst(entries, self.steps_max, self.steps_unchanged - done, self.requests, self.first + done,
                     self.step_rows, began, (slots, first + done), number, _inputs=self._inputs,
                     _next_first=self._next_first)

    def assign_region(self, ring: torch.Tensor, ring_offset: int, memory: torch.Tensor, memory_offset: int) -> None:
        """Lay the blocks out in a region; numbers of gathered rows go to the device through the ring: it is pinned."""
        self.ring_offset, self.memory, self.memory_offset = ring_offset, memory, memory_offset
        index = 0
        steps = memory_offset + self.index_bytes + self.step_bytes * np.arange(self.steps_max)
        for rows in self.entries:
            rows.begins = steps + rows.offset
            if rows.launch is not None:
                rows.launch.move(rows.begins)
                rows.layout.aimed[False] = rows
            if rows.gathered:
                rows.where = _index(rows, ring, ring_offset + index, memory, memory_offset + index)
                index += rows.index_bytes
            else:
                rows.where = int(rows.row[0])

    def encode(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Enqueue the encoding of the next step's rows."""
        if not self.entries:
            self.steps_done += 1
            return
        inputs = token_ids.data_ptr(), positions.data_ptr()
        same = inputs == self._inputs
        for rows in self.entries:
            assert self.memory is not None
            if rows.layout.kernel is None:
                begin = int(rows.begins[self.steps_done])
                _encode(rows, self.memory, [begin + offset for offset in rows.block.offsets], token_ids, positions)
                continue
            if rows.launch is None or not same or rows.layout.aimed[not isinstance(rows.where, int)] is not rows:
                rows.launch = rows.layout.launch(rows, self.memory, token_ids, positions, inputs)
            rows.launch(self.steps_done)
        self._inputs = inputs
        self.steps_done += 1

    def runs(self, end: int) -> list[Run]:
        """Events of what was encoded; ``end`` is the ring's head after the region, which is free when all are released.
        """
        begin = self.ring_offset + self.index_bytes
        found = []
        for number, rows in enumerate(self.entries, 1):
            at = [begin + rows.offset + offset for offset in rows.block.offsets]
            extents = {name: (offset, size)
                       for name, offset, size in zip(rows.layout.names, at, rows.block.sizes, strict=False)}
            mark = (end, 0) if number == len(self.entries) else (self.begin_mark, number)
            found.append(Run(rows.layout.entry, rows.slot, rows.position, rows.flags, extents, at[-2], at[-1],
                             mark, 0, self.steps_done, self.step_bytes, self.number, self.pace))
        return found


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _index(rows: EntryRows, ring: torch.Tensor, ring_offset: int, memory: torch.Tensor, memory_offset: int
           ) -> torch.Tensor:
    """Row numbers as a tensor at an offset of the memory, by way of one of the ring."""
    host = view(ring, ring_offset, (rows.block.n,), torch.int64)
    host.copy_(torch.from_numpy(rows.row))
    if memory is ring:
        return host
    return view(memory, memory_offset, (rows.block.n,), torch.int64).copy_(host, non_blocking=True)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _encode(rows: EntryRows, memory: torch.Tensor, offsets: list[int], token_ids: torch.Tensor, positions: torch.Tensor
            ) -> None:
    """Encode by the reference encoders, where there is no kernel."""
    layout, n = rows.layout, rows.block.n
    where = slice(rows.where, rows.where + n) if isinstance(rows.where, int) else rows.where
    encoded = layout.encode(_gather(layout.buffer, layout.layers, where))
    for name, shape, dtype, offset in zip(layout.names, layout.shapes, layout.dtypes, offsets, strict=False):
        view(memory, offset, (len(layout.layers), n, *shape), dtype).copy_(encoded[name], non_blocking=True)
    view(memory, offsets[-2], (n,), torch.int32).copy_(token_ids[where], non_blocking=True)
    view(memory, offsets[-1], (n,), torch.int64).copy_(positions[where], non_blocking=True)


def _gather(buffer: torch.Tensor, layers: list[int], where: slice | torch.Tensor) -> torch.Tensor:
    """Rows ``where`` of chosen layers: [layers, rows, width]."""
    if len(layers) == buffer.shape[0]:
        return buffer[:, where]
    if layers[-1] - layers[0] + 1 == len(layers):
        return buffer[layers[0] : layers[-1] + 1][:, where]
    return torch.stack([buffer[layer][where] for layer in layers])
