"""Blocks: the rows of an entry in a step as they lie in the ring.

A block is the codec's streams one after the other, each ``[layers, rows, *shape]``. The rows' token ids (int32) and
positions (int64) follow. Every part begins at a multiple of ``ALIGN``. A large block begins at a multiple of
``DISK_ALIGN``: a writer may have the disk take its main stream, the first, from the ring itself.
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
from engine_side.transport.events import Entry
from engine_side.transport.ring import ALIGN, DISK_ALIGN, aligned
from schemas import codecs, limits

_KERNEL_BLOCK_BYTES: Final = 32 << 20
_LARGE_BYTES: Final = 64 * DISK_ALIGN  # of a main stream: a place for a disk takes a 64th more of the ring at most


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
            end += aligned(size)
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
        return aligned(8 * self.block.n) if self.gathered else 0
