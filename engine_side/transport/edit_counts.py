"""Counts of edited rows, by edit and layer: *expected = applied + cached + missing*, for a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_side.transport.events import EditsCounted
from schemas import limits
from schemas.sites import edited_place
from schemas.spec import intervals, ranges_of

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ToldEdits:
    """Edits of a capture as they are told (``Edits.told``), with what the device has counted of them, once it has.

    ``numbers`` int32: [places + 1, combinations] of rows that were edited at each place, last those that should have
    been, and after them where its condition changed. ``here``: places that this rank counts; None: all that there are.
    """

    told: str
    prompt_len: int
    counted: EditsCounted | None = None
    numbers: npt.NDArray[np.int32] | None = None
    here: frozenset[tuple[str, int]] | None = None

    def with_counts(self, end: int) -> str:
        """The edits as they are told, with ``rows`` of each, by layers with equal numbers; ``end``: positions that
        there are.

        *cached* are those that were read from the prefix cache, where an equal request had left them edited. What other
        ranks count is not counted.
        """
        return json.dumps(self._counted(end))

    def of_this_rank(self, end: int) -> str:
        """The same on a rank that does not lead: of each edit the ``rows`` of layers that are counted here alone."""
        found: list[list[dict[str, Any]]] = []
        for edit in self._counted(end):
            layers = {layer for layer in edit.get("layers", ()) if self._is_here(edit["site"], layer)}
            found.append([{**group, "layers": mine} for group in edit.get("rows", ())
                          if (mine := [layer for layer in group["layers"] if layer in layers])])
        return json.dumps(found)

    def _is_here(self, site: str, layer: int) -> bool:
        return self.here is None or edited_place(site, layer) in self.here

    def _counted(self, end: int) -> list[dict[str, Any]]:
        edits: list[dict[str, Any]] = json.loads(self.told)
        cached = [] if self.counted is None else [(start, min(stop, end)) for start, stop in self.counted.cached]
        made, switches = self._read()
        used_up = bool(switches) and switches[-1] >= 0
        switches = [position for position in switches if position >= 0]
        number = -1  # among those that are made somewhere
        for edit in edits:
            if "when" in edit:
                edit["switched"] = [position for position in switches if position < end + (edit["op"] == "stop")]
                edit |= {"used_up": True} if used_up else {}
            if edit["op"] == "stop":
                continue
            number += 1
            spans: Spans = intervals(ranges_of(edit.get("positions", "all")), self.prompt_len)
            if "when" in edit:
                spans = _both(spans, _turns(switches))
            expected, read = _overlap(spans, [(0, end)]), _overlap(spans, cached)
            groups: dict[tuple[int, bool], list[int]] = {}
            for layer in edit["layers"]:
                known = made is not None and self._is_here(edit["site"], layer)
                applied = self._applied(made, number, edited_place(edit["site"], layer), expected - read)
                groups.setdefault((applied, known), []).append(layer)
            edit["rows"] = [{
                "layers": layers, "expected": expected, "applied": applied, "cached": read,
                "missing": (missing := expected - applied - read),
                **({"reason": "not_applied" if known else "not_counted"} if missing else {}),
            } for (applied, known), layers in groups.items()]
        return edits

    def _read(self) -> tuple[npt.NDArray[np.int32] | None, list[int]]:
        """Counts by place, and the positions where the condition changed, in their order, −1 for each that is unused.
        """
        if self.numbers is None or self.counted is None:
            return None, []
        shape = len(self.counted.places) + 1, len(self.counted.combinations)
        size = shape[0] * shape[1]
        return self.numbers[:size].reshape(shape), self.numbers[size:].tolist()

    def _applied(self, all_made: npt.NDArray[np.int32] | None, number: int, place: tuple[str, int], computed: int
                 ) -> int:
        """The number of rows that an edit was made of. Rows that were computed again count again on the device: one
        that was left out must not hide behind them.
        """
        if all_made is None or self.counted is None or place not in self.counted.places:
            return 0
        columns = [column for column, which in enumerate(self.counted.combinations) if number in which]
        made, due = int(all_made[self.counted.places.index(place), columns].sum()), int(all_made[-1, columns].sum())
        return max(0, min(made, computed - (due - made)))


def _turns(switches: Sequence[int]) -> Spans:
    """Ranges of positions that a condition is met in, of where it changes, first to met."""
    return list(zip(switches[::2], [*switches[1::2], limits.position_max][: len(switches[::2])], strict=True))


def _both(spans: Spans, others: Spans) -> Spans:
    """Ranges of positions in both of two lists of disjoint ranges."""
    return [(low, high) for start, stop in spans for begin, until in others
            if (low := max(start, begin)) < (high := min(stop, until))]


def _overlap(spans: Spans, others: Iterable[tuple[int, int]]) -> int:
    """Positions in both of two lists of disjoint ranges."""
    return sum(max(0, min(stop, until) - max(start, begin)) for begin, until in others for start, stop in spans)
