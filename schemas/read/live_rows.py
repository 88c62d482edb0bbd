"""Rows of captures that are still being made, frame by frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas import codecs, limits
from schemas.read.coverage import LayerGroup
from schemas.read.coverage_cache import CoveredCapture
from schemas.read.journal_tail import FrameAt
from schemas.read.segment_maps import View
from schemas.wire.row_table import FLAG_ERASED

__all__ = ["LiveRows", "PartsCursor", "live_of"]


I64 = npt.NDArray[np.int64]


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


class PartsCursor:
    """The place that a follower has reached in the rows of a capture of several ranks: of each layer, the step and
    position of the last row. Steps up to ``after`` were had before.

    Ranks do not progress in step. So a step is told only once each rank that has columns of the layer has sent
    something of a later one, or will send nothing more. Then the joined rows are of the newest computation, and it is
    decided which drafts hold.
    """

    def __init__(self, after: int = 0) -> None:
        self._after = after
        self._at: dict[int, tuple[int, int]] = {}
        self._told: dict[int, int] = {}  # by layer, steps up to here are told whole

    def follow(self, other: PartsCursor) -> None:
        """Be as far as another one of the same rows."""
        self._at, self._told = other._at, other._told

    @property
    def told(self) -> int:
        """Steps up to here are told, of all layers."""
        return min(self._told.values(), default=self._after)

    def take(self, covered: CoveredCapture, site: str, layers: Sequence[int], rows_max: int
             ) -> tuple[LayerGroup, list[int], I64] | None:
        """The next rows, at most ``rows_max`` of them: of which group, its layers, and which of the group's rows."""
        for layer in layers:
            self._told.setdefault(layer, self._after)
            self._at.setdefault(layer, (self._after, limits.position_max))
        for group in covered.coverage.sites[site]:
            alike: dict[tuple[int, int], list[int]] = {}
            for layer in layers:
                if layer in group.layers:
                    alike.setdefault(self._at[layer], []).append(layer)
            for at, wanted in alike.items():
                chosen = self._next(covered, site, group, at, wanted)
                if len(chosen):
                    return group, wanted, self._move(group, wanted, chosen, rows_max)
        return None

    def _next(self, covered: CoveredCapture, site: str, group: LayerGroup, at: tuple[int, int], wanted: list[int]
              ) -> I64:
        """The rows of a group that were not told, by step and position."""
        step, position = group.rows.step, group.rows.positions
        end = min(_told_by(covered, site, wanted[0], one.part) for one in covered.parts.columns(site, wanted[0]))
        self._told.update(dict.fromkeys(wanted, max(end, self._after)))
        if step is None:
            return np.zeros(0, np.int64)
        fresh = np.flatnonzero((step <= end) & ((step > at[0]) | (step == at[0]) & (position > at[1])))
        found: I64 = fresh[np.lexsort((position[fresh], step[fresh]))]
        return found

    def _move(self, group: LayerGroup, wanted: list[int], chosen: I64, rows_max: int) -> I64:
        """The chosen rows that are told at once."""
        now, left = chosen[:rows_max], chosen[rows_max:]
        assert group.rows.step is not None
        self._at.update(dict.fromkeys(wanted, (int(group.rows.step[now[-1]]), int(group.rows.positions[now[-1]]))))
        if len(left):
            self._told.update(dict.fromkeys(wanted, int(group.rows.step[left[0]]) - 1))
        return now


def _told_by(covered: CoveredCapture, site: str, layer: int, rank: int) -> int:
    """The last step whose rows a rank has told whole, of a layer of a site."""
    steps = [np.frombuffer(extent.steps, "<u8") for extent in covered.coverage.extents[site]
             if extent.part == rank and layer in extent.layers]
    newest = int(max((step.max(initial=0) for step in steps), default=0))
    return newest if covered.parts.ended(covered.capture, rank) else newest - 1
