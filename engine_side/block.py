"""A block: rows of one entry in one step as they lie in the ring, and how they get there.

The codec's streams one after the other, each ``[layers, rows, *shape]``, then the rows' token ids (int32) and
positions (int64); every part begins at a multiple of ``ALIGN``. Behind them lies, where rows do not follow one another,
their index (int64), which the device reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine_side import codecs as encoders
from engine_side import kernels
from engine_side.device import SideStream
from engine_side.ring import ALIGN, Ring, view
from engine_side.selection import Entry
from engine_side.staging import Staging
from schemas import codecs, limits

_KERNEL_BLOCK_BYTES: Final = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Place:
    """Where the parts of a block of ``n`` rows lie, from its beginning."""

    n: int
    offsets: list[int]  # of each stream, then of token ids and positions
    sizes: list[int]  # of each stream
    nbytes: int  # of what is delivered; the index lies behind it


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
    kernel: Callable[[kernels.Source, torch.Tensor, list[int]], None] | None
    rows_max: int  # of a block

    def place(self, n: int) -> Place:
        """The parts of a block of ``n`` rows."""
        sizes = [n * len(self.layers) * piece for piece in self.pieces]
        offsets, at = [], 0
        for size in (*sizes, 4 * n, 8 * n):
            offsets.append(at)
            at += -(-size // ALIGN) * ALIGN
        return Place(n, offsets, sizes, at)


def layout_of(entry: Entry, staging: Staging, dtype: str, ring: Ring, side: SideStream) -> Layout:
    """The layout of an entry; SpecError where its codec cannot take rows of the site's width."""
    buffer = staging.buffers[entry.site]
    width = buffer.shape[-1]
    declared = codecs.streams(entry.codec, width, dtype)
    row_bytes = sum(stream.nbytes for stream in declared) * len(entry.layers)
    kernel = None
    if side.scratch is not None and kernels.supported(entry.codec, width, buffer.dtype):
        kernel = partial(kernels.launch, entry.codec)
        block = min(_KERNEL_BLOCK_BYTES, ring.capacity // 8, side.scratch.capacity // 4)
        rows_max = block // (row_bytes + 12)
    else:
        block = min(limits.frame_bytes_target, ring.capacity // 4)
        if side.scratch is not None:
            block = min(block, side.scratch.capacity // 4)
        # What encoding takes meanwhile follows from the rows as they are, however few bytes they become.
        rows_max = min(block // row_bytes, limits.encode_bytes_max // (4 * width * len(entry.layers)))
    layers = [staging.index(entry.site, layer) for layer in entry.layers]
    return Layout(
        entry, buffer, layers, torch.tensor(layers, dtype=torch.int32).to(buffer.device),
        [stream.name for stream in declared], [stream.nbytes for stream in declared],
        [stream.shape for stream in declared], [encoders.TORCH_DTYPES[stream.dtype] for stream in declared],
        encoders.encoder(entry.codec), kernel, max(1, rows_max),
    )


def fill(layout: Layout, place: Place, index: npt.NDArray[np.int64], token_ids: torch.Tensor, positions: torch.Tensor,
         ring: Ring, base: int, side: SideStream) -> torch.Tensor | None:
    """Encode the rows ``index`` of staging into a block at ``base`` of the ring; the event after which it is there."""
    memory, at = side.room(ring, base, place.nbytes + 8 * place.n)
    offsets = [at + offset for offset in place.offsets]
    where: slice | torch.Tensor
    if index[-1] - index[0] + 1 == place.n:
        first = int(index[0])
        where = slice(first, first + place.n)
    else:
        # The index goes to the device through the ring, which is pinned: no allocation, nothing to wait for.
        host = view(ring.memory, base + place.nbytes, (place.n,), torch.int64)
        host.copy_(torch.from_numpy(index))
        where = host
        if memory is not ring.memory:
            where = view(memory, at + place.nbytes, (place.n,), torch.int64)
            where.copy_(host, non_blocking=True)
    if layout.kernel is not None:
        rows = where.start if isinstance(where, slice) else where
        source = kernels.Source(layout.buffer, layout.layer_index, rows, place.n, token_ids, positions)
        layout.kernel(source, memory, offsets)
    else:
        pieces = layout.encode(_gather(layout.buffer, layout.layers, where))
        for name, shape, dtype, offset in zip(layout.names, layout.shapes, layout.dtypes, offsets, strict=False):
            view(memory, offset, (len(layout.layers), place.n, *shape), dtype).copy_(pieces[name], non_blocking=True)
        view(memory, offsets[-2], (place.n,), torch.int32).copy_(token_ids[where], non_blocking=True)
        view(memory, offsets[-1], (place.n,), torch.int64).copy_(positions[where], non_blocking=True)
    return side.deliver(ring, base, at, place.nbytes)


def _gather(buffer: torch.Tensor, layers: list[int], where: slice | torch.Tensor) -> torch.Tensor:
    """Rows ``where`` of chosen layers: [layers, rows, width]."""
    if len(layers) == buffer.shape[0]:
        return buffer[:, where]
    if layers[-1] - layers[0] + 1 == len(layers):
        return buffer[layers[0] : layers[-1] + 1][:, where]
    return torch.stack([buffer[layer][where] for layer in layers])
