"""Rows of captures that are still being made, frame by frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas import codecs, limits
from schemas.read.journal_tail import FrameAt
from schemas.read.segment_maps import View
from schemas.wire.row_table import FLAG_ERASED

__all__ = ["LiveRows", "live_of"]


@dataclass(frozen=True, slots=True)
class LiveRows:
    """Rows of a capture out of one frame, as they came: ``values`` is float32 ``[layers, n, decoded width]``.

    ``seq`` grows from frame to frame. A position may come again, computed anew: the later one counts. ``durable`` says
    that the rows survive a loss of power, ``more`` that the frame has others after them; ``flags`` are
    schemas.wire.row_table's, uint32 ``[n]``.
    """

    seq: int
    durable: bool
    more: bool
    layers: list[int]
    positions: npt.NDArray[np.uint32]
    token_ids: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float32]


Verify = Callable[[list[int], npt.NDArray[np.int64], list[npt.NDArray[np.uint8]]], None]


def live_of(frame: FrameAt, view: View, capture: str, layers: Sequence[int], first: int, verify: Verify
             ) -> LiveRows | None:
    """Rows of a frame that was read, for ``StoreReader.live_rows``.

    ``verify`` is called with the layers, rows and pieces that were copied.
    """
    header = view.frame
    wanted = [layer for layer in layers if layer in header.layers]
    if capture not in header.captures or not wanted:
        return None
    mine = view.table.capture == header.captures.index(capture)
    there = np.flatnonzero(mine & (view.table.flags & FLAG_ERASED == 0))
    row_bytes = 4 * len(wanted) * codecs.identified(header.codec).decoded_width(header.width)
    rows = there[first : first + max(1, limits.live_event_bytes_max // row_bytes)]
    if not len(rows):
        return None
    source = view.pieces([header.layers.index(layer) for layer in wanted], rows)
    copied = [view.section(number)[source] for number in range(len(view.declared))]
    verify(wanted, rows, copied)
    pieces = {stream.name: found.view(stream.dtype).reshape(len(wanted), len(rows), *stream.shape)
              for stream, found in zip(view.declared, copied, strict=True)}
    values = codecs.decode(header.codec, pieces, header.width, header.dtype)
    return LiveRows(frame.seq, frame.durable, first + len(rows) < len(there), wanted, view.table.position[rows],
                    view.table.token_id[rows], view.table.flags[rows], values)
