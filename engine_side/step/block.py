"""Blocks: the rows of an entry in a step as they lie in the ring, and bursts of them.

A block is the codec's streams one after the other, each ``[layers, rows, *shape]``. The rows' token ids (int32) and
positions (int64) follow. Every part begins at a multiple of ``ALIGN``. A large block begins at a multiple of
``DISK_ALIGN``: a writer may have the disk take its main stream, the first, from the ring itself.

A burst is one region of the ring for several steps of decode, while the same requests advance by one token a step. No
rows are selected anew in it. Each step only enqueues one kernel for each entry (two of a projection). The bytes of a
burst cross to the host together. Any other step is written as bursts of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import torch

from engine_side import codecs as encoders
from engine_side import kernels
from engine_side.step.selection import I64
from engine_side.tap.staging import Staging
from engine_side.transport.events import Entry, Run
from engine_side.transport.ring import ALIGN, DISK_ALIGN, view
from schemas import codecs, limits

_KERNEL_BLOCK_BYTES: Final = 32 << 20
_LARGE_BYTES: Final = 64 * DISK_ALIGN  # of a main stream: a place for a disk takes a 64th more of the ring at most
_STEPS_AHEAD: Final = 16  # steps whose positions are worked out at once


@dataclass(frozen=True, slots=True)
class BlockOffsets:
    """Byte offsets of the parts of a block of ``n`` rows, from its beginning."""

    n: int
    offsets: list[int]  # of each stream, then of token ids and positions
    sizes: list[int]  # of each stream
    nbytes: int

    @property
    def alignment(self) -> int:
        """The number that the block's offset in the ring must be a multiple of."""
        return DISK_ALIGN if self.sizes[0] >= _LARGE_BYTES else ALIGN


@dataclass(slots=True)
class EntryLayout:
    """Encoding of an entry's rows into bytes; ``layers`` count in the site's staging buffer."""

    entry: Entry
    buffer: torch.Tensor
    layers: list[int]
    layer_index: torch.Tensor
    names: list[str]  # of the codec's streams, as are the next three
    stream_bytes: list[int]  # a row
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    encode: encoders.Encoder
    kernel: Callable[[kernels.StagedRows, torch.Tensor, list[int], I64], kernels.Launch | kernels.Projected] | None
    rows_max: int  # of a block
    # The kernel's launches by whether rows are gathered, each with the addresses of its token ids and positions.
    launches: dict[bool, tuple[tuple[int, int], kernels.Launch | kernels.Projected]] = field(default_factory=dict)
    aimed: dict[bool, EntryRows] = field(default_factory=dict)  # whose rows a launch encodes

    def block(self, n: int) -> BlockOffsets:
        """Offsets of a block of ``n`` rows."""
        sizes = [n * len(self.layers) * nbytes for nbytes in self.stream_bytes]
        offsets, end = [], 0
        for size in (*sizes, 4 * n, 8 * n):
            offsets.append(end)
            end += _aligned(size)
        return BlockOffsets(n, offsets, sizes, end)

    def launch(self, rows: EntryRows, memory: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor,
               inputs: tuple[int, int]) -> kernels.Launch | kernels.Projected:
        """A launch that encodes ``rows`` into ``memory``, until other rows of the same entry are to be encoded.

        The launch is theirs then: a step encodes an entry's rows once, or one part after the other. ``inputs``: the
        addresses of ``token_ids`` and ``positions``.
        """
        assert self.kernel is not None
        had, launch = self.launches.get(rows.gathered, (None, None))
        if launch is None or had != inputs or not launch.aim(rows.where, rows.block.n, rows.block.offsets, rows.begins):
            source = kernels.StagedRows(self.buffer, self.layer_index, rows.where, rows.block.n, token_ids, positions)
            launch = self.kernel(source, memory, rows.block.offsets, rows.begins)
            self.launches[rows.gathered] = inputs, launch
        self.aimed[rows.gathered] = rows
        return launch


def layout_of(entry: Entry, staging: Staging, dtype: str, bytes_max: int, compiled: bool) -> EntryLayout:
    """Layout of an entry in blocks of at most ``bytes_max``; SpecError where its codec cannot take such rows.

    ``compiled``: whether its kernel is ready.
    """
    buffer = staging.buffers[staging.source(entry.site)]
    width = buffer.shape[-1]
    probe = staging.probes.get(entry.site)
    declared = codecs.streams(entry.codec, *((probe.count, "float32") if probe else (width, dtype)))
    row_bytes = sum(stream.nbytes for stream in declared) * len(entry.layers)
    kernel = None
    if compiled:
        kernel = (partial(kernels.score, probe.directions, probe.bias, probe.sigmoid) if probe
                  else partial(kernels.launch, entry.codec))
        rows_max = min(_KERNEL_BLOCK_BYTES, bytes_max) // (row_bytes + 12)
        if not probe and (most := kernels.rows_max(entry.codec, width)):
            rows_max = min(rows_max, most // len(entry.layers))
    else:
        # Memory of the reference encoders follows from the rows as they are, however few bytes they become.
        rows_max = min(min(limits.frame_bytes_target, bytes_max) // row_bytes,
                       limits.encode_bytes_max // (4 * width * len(entry.layers)))
    layers = [staging.index(entry.site, layer) for layer in entry.layers]
    return EntryLayout(
        entry, buffer, layers, torch.tensor(layers, dtype=torch.int32).to(buffer.device),
        [stream.name for stream in declared], [stream.nbytes for stream in declared],
        [stream.shape for stream in declared], [encoders.TORCH_DTYPES[stream.dtype] for stream in declared],
        probe.encode if probe else encoders.encoder(entry.codec), kernel, max(1, rows_max),
    )


@dataclass(slots=True)
class EntryRows:
    """Rows of one entry in a burst, as they are in its first step."""

    layout: EntryLayout
    row: I64
    slot: I64
    position: I64
    flags: I64
    block: BlockOffsets = field(init=False)
    offset: int = 0  # of the block in a step's bytes
    where: int | torch.Tensor = 0  # the first of contiguous rows, or the rows (int64, on the device)
    launch: kernels.Launch | kernels.Projected | None = None  # of its kernel, with the tensors of the last step
    begins: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  # [steps_max] offset of each step's block

    def __post_init__(self) -> None:
        self.block = self.layout.block(len(self.row))

    @property
    def gathered(self) -> bool:
        """Whether the rows do not follow one another."""
        return int(self.row[-1]) - int(self.row[0]) + 1 != len(self.row)

    @property
    def index_bytes(self) -> int:
        """Bytes that the row numbers take in the burst's region."""
        return _aligned(8 * self.block.n) if self.gathered else 0


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
            rows.offset = _aligned(self.step_bytes, rows.block.alignment)
            self.step_bytes = rows.offset + rows.block.nbytes
            self.index_bytes += rows.index_bytes
        self.step_bytes = _aligned(self.step_bytes, self.alignment)
        self.index_bytes = _aligned(self.index_bytes, self.alignment)

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


def _aligned(nbytes: int, to: int = ALIGN) -> int:
    return -(-nbytes // to) * to


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
