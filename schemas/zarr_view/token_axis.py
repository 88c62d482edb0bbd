"""The tokens of a capture that rows were asked of, as one axis: its positions are never counted out at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from schemas.manifest import Missing

__all__ = ["TokenAxis", "inside"]

I64 = npt.NDArray[np.int64]


class TokenAxis:
    """Positions of sorted, disjoint ranges ``[start, stop)``, one after the other; index 0 is the first of them."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        there = [(start, stop) for start, stop in ranges if start < stop]
        self._starts, stops = np.asarray(there, np.int64).reshape(-1, 2).T
        self._ends = np.cumsum(stops - self._starts)  # indexes past the last of each range

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def positions(self, first: int, last: int) -> I64:
        """Positions of the indexes ``[first, last)`` that there are, int64 ``[n]``, ascending."""
        index = np.arange(first, min(last, len(self)))
        which = self._ends.searchsorted(index, "right")
        found: I64 = self._starts[which] + index - np.append(0, self._ends)[which]
        return found


def inside(positions: I64, gaps: Sequence[Missing]) -> npt.NDArray[np.bool_]:
    """A mask of the positions that lie in one of the sorted, disjoint gaps, bool ``[n]``."""
    edges = np.asarray([(gap.start, gap.stop) for gap in gaps], np.int64).reshape(-1, 2)
    found: npt.NDArray[np.bool_] = (edges[:, 0].searchsorted(positions, "right")
                                    > edges[:, 1].searchsorted(positions, "right"))
    return found
