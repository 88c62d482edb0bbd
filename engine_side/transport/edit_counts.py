"""Counts of edited rows, by edit and layer: *expected = applied + cached + missing*, for a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_side.transport.events import EditsCounted
from schemas.spec import intervals, ranges_of

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ToldEdits:
    """Edits of a capture as they are told (``Edits.told``), with what the device has counted of them, once it has.

    ``made`` int32 [places + 1, combinations]: rows that were edited at each place, last those that should have been.
    """

    told: str
    prompt_len: int
    counted: EditsCounted | None = None
    made: npt.NDArray[np.int32] | None = None

    def with_counts(self, end: int) -> str:
        """What is told with ``rows`` of every edit, by layers with equal numbers; ``end``: positions that there are.

        *cached* are those that were read from the prefix cache, where an equal request had left them edited.
        """
        edits: list[dict[str, Any]] = json.loads(self.told)
        cached = [] if self.counted is None else [(start, min(stop, end)) for start, stop in self.counted.cached]
        for number, edit in enumerate(edits):
            spans = intervals(ranges_of(edit.get("positions", "all")), self.prompt_len)
            expected, read = _overlap(spans, [(0, end)]), _overlap(spans, cached)
            groups: dict[int, list[int]] = {}
            for layer in edit["layers"]:
                groups.setdefault(self._applied(number, (edit["site"], layer), expected - read), []).append(layer)
            edit["rows"] = [{
                "layers": layers, "expected": expected, "applied": applied, "cached": read,
                "missing": (missing := expected - applied - read),
                **({"reason": "not_counted" if self.made is None else "not_applied"} if missing else {}),
            } for applied, layers in groups.items()]
        return json.dumps(edits)

    def _applied(self, number: int, place: tuple[str, int], computed: int) -> int:
        """Of so many rows those that an edit was made of. Rows that were computed again count again on the device: one
        that was left out must not hide behind them.
        """
        if self.made is None or self.counted is None or place not in self.counted.places:
            return 0
        columns = [column for column, which in enumerate(self.counted.combinations) if number in which]
        made, due = int(self.made[self.counted.places.index(place), columns].sum()), int(self.made[-1, columns].sum())
        return max(0, min(made, computed - (due - made)))


def _overlap(spans: Spans, others: Iterable[tuple[int, int]]) -> int:
    """Positions in both of two lists of disjoint ranges."""
    return sum(max(0, min(stop, until) - max(start, begin)) for begin, until in others for start, stop in spans)
