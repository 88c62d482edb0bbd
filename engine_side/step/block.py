"""Blocks: the rows of an entry in a step as they lie in the ring, and bursts of them.

A block is the codec's streams one after the other, each ``[layers, rows, *shape]``, then the rows' token ids (int32)
and positions (int64); every part begins at a multiple of ``ALIGN``.

A burst is one region for several steps of decode: while the same requests go on by a token a step, nothing is chosen
anew, and one kernel a step and entry (two of a projection) is all that is enqueued. Their bytes cross to the host
together. A step of any other kind makes bursts of one step.
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
from engine_side.transport.ring import ALIGN, view
from schemas import codecs, limits

_KERNEL_BLOCK_BYTES: Final = 32 << 20
_AHEAD: Final = 16  # steps whose positions are worked out at once


@dataclass(frozen=True, slots=True)
class Place:
    """Where the parts of a block of ``n`` rows lie, from its beginning."""

    n: int
    offsets: list[int]  # of each stream, then of token ids and positions
    sizes: list[int]  # of each stream
    nbytes: int


@dataclass(slots=True)
class Layout:
    """How the rows of an entry become bytes; ``layers`` count in the site's staging buffer."""

    entry: Entry
    buffer: torch.Tensor
    layers: list[int]
    layer_index: torch.Tensor
    names: list[str]
    pieces: list[int]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    encode: encoders.Encoder
    kernel: Callable[[kernels.Source, torch.Tensor, list[int], I64], kernels.Launch | kernels.Projected] | None
    rows_max: int  # of a block
    # Of its kernel, for rows that are gathered or not, with the addresses of the token ids and positions that it has.
    launches: dict[bool, tuple[tuple[int, int], kernels.Launch | kernels.Projected]] = field(default_factory=dict)

    def place(self, n: int) -> Place:
        """The parts of a block of ``n`` rows."""
        sizes = [n * len(self.layers) * piece for piece in self.pieces]
        offsets, at = [], 0
        for size in (*sizes, 4 * n, 8 * n):
            offsets.append(at)
            at += -(-size // ALIGN) * ALIGN
        return Place(n, offsets, sizes, at)

    def launch(self, piece: Piece, memory: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor,
               inputs: tuple[int, int]) -> kernels.Launch | kernels.Projected:
        """What encodes a piece into ``memory``, until another of the same entry is to be encoded: the launch is that
        one's then. A step has one piece of an entry, or encodes one after the other. ``inputs``: addresses.
        """
        assert self.kernel is not None
        had, launch = self.launches.get(piece.gathered, (None, None))
        if launch is None or had != inputs or not launch.aim(piece.where, piece.place.n, piece.place.offsets,
                                                             piece.begins):
            source = kernels.Source(self.buffer, self.layer_index, piece.where, piece.place.n, token_ids, positions)
            launch = self.kernel(source, memory, piece.place.offsets, piece.begins)
            self.launches[piece.gathered] = inputs, launch
        return launch


def layout_of(entry: Entry, staging: Staging, dtype: str, bytes_max: int, compiled: bool) -> Layout:
    """The layout of an entry in blocks of at most ``bytes_max``; SpecError where its codec cannot take such rows.

    ``compiled``: there is a kernel for it.
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
        # What encoding takes meanwhile follows from the rows as they are, however few bytes they become.
        rows_max = min(min(limits.frame_bytes_target, bytes_max) // row_bytes,
                       limits.encode_bytes_max // (4 * width * len(entry.layers)))
    layers = [staging.index(entry.site, layer) for layer in entry.layers]
    return Layout(
        entry, buffer, layers, torch.tensor(layers, dtype=torch.int32).to(buffer.device),
        [stream.name for stream in declared], [stream.nbytes for stream in declared],
        [stream.shape for stream in declared], [encoders.TORCH_DTYPES[stream.dtype] for stream in declared],
        probe.encode if probe else encoders.encoder(entry.codec), kernel, max(1, rows_max),
    )


@dataclass(slots=True)
class Piece:
    """The rows of one entry in a burst, as they are in its first step."""

    layout: Layout
    row: I64
    slot: I64
    position: I64
    flags: I64
    place: Place = field(init=False)
    at: int = 0  # from the begin of a step
    where: int | torch.Tensor = 0  # the first of contiguous rows, or the rows (int64, on the device)
    launch: kernels.Launch | kernels.Projected | None = None  # of its kernel, with the tensors of the last step
    begins: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  # [steps] of the burst, in the room

    def __post_init__(self) -> None:
        self.place = self.layout.place(len(self.row))

    @property
    def gathered(self) -> bool:
        """Whether rows do not follow one another."""
        return int(self.row[-1]) - int(self.row[0]) + 1 != len(self.row)


@dataclass(slots=True)
class Burst:
    """A region of ``steps_max`` steps in the ring and the room before it; ``first`` [requests]: where it begins."""

    pieces: list[Piece]
    steps_max: int
    steady: int  # steps for which the same rows are wanted
    requests: list[str]
    first: I64
    rows: int
    began: float
    live: tuple[I64, I64]  # slots of all captures that run, and the position of each in the first step
    head: int = 0  # bytes of indexes before the first step
    step_bytes: int = 0
    base: int = 0  # of the region in the ring
    memory: torch.Tensor | None = None
    at: int = 0  # of the region in its room
    done: int = 0
    brought: bool = False  # what was encoded is on its way; what follows needs a region of its own
    _inputs: tuple[int, int] = (0, 0)  # addresses of the last step's token ids and positions
    # Where requests are in the next steps, the bytes of the runner's integers: a few instructions beside a step whose
    # caches are cold, where an operation on an array would be thousands.
    _ahead: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        for piece in self.pieces:
            piece.at = self.step_bytes
            self.step_bytes += piece.place.nbytes
            if piece.gathered:
                self.head += -(-8 * piece.place.n // ALIGN) * ALIGN

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.head + self.steps_max * self.step_bytes

    def goes_on(self, requests: list[str], first: I64, rows: int) -> bool:
        """Whether a step is the next of this burst: the same requests, each one token further. Asked once a step.

        ``first``: the position of each, in the runner's integers, and perhaps numbers behind them.
        """
        if rows != self.rows or requests != self.requests:
            return False
        if not self._ahead:
            steps = np.arange(self.done + _AHEAD - 1, self.done - 1, -1)
            self._ahead = [step.tobytes() for step in (self.first + steps[:, None]).astype(first.dtype)]
        return first.tobytes().startswith(self._ahead.pop())

    def renewed(self, began: float) -> Burst:
        """A burst of the same rows from the next step on."""
        pieces = [Piece(piece.layout, piece.row, piece.slot, piece.position + self.done, piece.flags,
                        launch=None if piece.gathered else piece.launch)
                  for piece in self.pieces]
        slots, first = self.live
        return Burst(pieces, self.steps_max, self.steady - self.done, self.requests, self.first + self.done, self.rows,
                     began, (slots, first + self.done), _inputs=self._inputs, _ahead=self._ahead)

    def settle(self, ring: torch.Tensor, base: int, memory: torch.Tensor, at: int) -> None:
        """The region was taken; the indexes of rows go to the device through the ring, which is pinned."""
        self.base, self.memory, self.at = base, memory, at
        offset = 0
        steps = at + self.head + self.step_bytes * np.arange(self.steps_max)
        for piece in self.pieces:
            piece.begins = steps + piece.at
            if piece.launch is not None:
                piece.launch.move(piece.begins)
            if piece.gathered:
                piece.where = _index(piece, ring, base + offset, memory, at + offset)
                offset += -(-8 * piece.place.n // ALIGN) * ALIGN
            else:
                piece.where = int(piece.row[0])

    def encode(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Enqueue the next step's rows."""
        if not self.pieces:
            self.done += 1
            return
        inputs = token_ids.data_ptr(), positions.data_ptr()
        same = inputs == self._inputs
        for piece in self.pieces:
            assert self.memory is not None
            if piece.layout.kernel is None:
                begin = int(piece.begins[self.done])
                _encode(piece, self.memory, [begin + offset for offset in piece.place.offsets], token_ids, positions)
                continue
            if piece.launch is None or not same:
                piece.launch = piece.layout.launch(piece, self.memory, token_ids, positions, inputs)
            piece.launch(self.done)
        self._inputs = inputs
        self.done += 1

    def runs(self, end: int) -> list[Run]:
        """What was encoded; ``end`` is the ring's head after the region, which is free when all are released."""
        begin = self.base + self.head
        start = end - self.head - self.done * self.step_bytes
        found = []
        for number, piece in enumerate(self.pieces, 1):
            at = [begin + piece.at + offset for offset in piece.place.offsets]
            extents = {name: (offset, size)
                       for name, offset, size in zip(piece.layout.names, at, piece.place.sizes, strict=False)}
            mark = (end, 0) if number == len(self.pieces) else (start, number)
            found.append(Run(piece.layout.entry, piece.slot, piece.position, piece.flags, extents, at[-2], at[-1],
                             mark, 0, self.done, self.step_bytes))
        return found


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _index(piece: Piece, ring: torch.Tensor, base: int, memory: torch.Tensor, at: int) -> torch.Tensor:
    """The rows of a piece as a tensor at ``at`` of the memory, by way of ``base`` of the ring."""
    host = view(ring, base, (piece.place.n,), torch.int64)
    host.copy_(torch.from_numpy(piece.row))
    if memory is ring:
        return host
    there = view(memory, at, (piece.place.n,), torch.int64)
    return there.copy_(host, non_blocking=True)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _encode(piece: Piece, memory: torch.Tensor, offsets: list[int], token_ids: torch.Tensor, positions: torch.Tensor
            ) -> None:
    """By the reference encoders, where there is no kernel."""
    layout, n = piece.layout, piece.place.n
    where = slice(piece.where, piece.where + n) if isinstance(piece.where, int) else piece.where
    pieces = layout.encode(_gather(layout.buffer, layout.layers, where))
    for name, shape, dtype, offset in zip(layout.names, layout.shapes, layout.dtypes, offsets, strict=False):
        view(memory, offset, (len(layout.layers), n, *shape), dtype).copy_(pieces[name], non_blocking=True)
    view(memory, offsets[-2], (n,), torch.int32).copy_(token_ids[where], non_blocking=True)
    view(memory, offsets[-1], (n,), torch.int64).copy_(positions[where], non_blocking=True)


def _gather(buffer: torch.Tensor, layers: list[int], where: slice | torch.Tensor) -> torch.Tensor:
    """Rows ``where`` of chosen layers: [layers, rows, width]."""
    if len(layers) == buffer.shape[0]:
        return buffer[:, where]
    if layers[-1] - layers[0] + 1 == len(layers):
        return buffer[layers[0] : layers[-1] + 1][:, where]
    return torch.stack([buffer[layer][where] for layer in layers])
