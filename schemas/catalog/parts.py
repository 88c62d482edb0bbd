"""Parts of a capture whose engine runs on several ranks: the progress of each, and their rows put together.

A site whose rows one rank has whole belongs to that rank's part alone. Other sites are shared out by columns. A
position of such a site is there if every part has it, computed in the same step. So columns of two computations of a
row, as before and after a preemption, are never put together. Where a part lacks the step that another has, the part's
reason for this is the position's reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.catalog.database import Database
from schemas.catalog.part_edits import Counting, counting_of, put_together, ranks_of
from schemas.catalog.records import Capture
from schemas.manifest import Missing
from schemas.spec import Resolved
from schemas.wire.layout import LEADER, WHOLE, Columns, Part, places_of

__all__ = ["ALONE", "Parts", "load_parts", "matched", "merged", "runs_of"]

I64 = npt.NDArray[np.int64]
Places = dict[tuple[str, int], tuple[Columns, ...]]


@dataclass(frozen=True, slots=True)
class Parts:
    """The share of a capture that each rank sends, and the ranks that have said all of it (``finished``) or never will
    (``lost``).

    ``joined`` has all that began. The one that leads is told of by the capture itself. ``counting``: who counts what
    the engine's edits did; ``editing``, those that do of this capture's; ``edits``, what they have told, by rank.
    """

    places: Places = field(default_factory=dict)  # who has which columns of each (site, layer)
    joined: frozenset[int] = frozenset()
    finished: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    counting: Counting = field(default_factory=dict)
    editing: frozenset[int] = frozenset()
    edits: dict[int, str] = field(default_factory=dict)

    def columns(self, site: str, layer: int) -> tuple[Columns, ...]:
        """The ranks that have the columns of a row; of what no rank has, such as a layer that is not armed, the leader
        tells.
        """
        return self.places.get((site, layer), WHOLE)

    def needed(self, resolved: Resolved) -> frozenset[int]:
        """The ranks beside the leader that have something of what a capture asks for, or count its edits."""
        return self.editing | self._having(resolved) if self.places else self.editing

    def _having(self, resolved: Resolved) -> set[int]:
        return {one.part for site, layers in resolved.layers.items() for layer in layers
                for one in self.columns(site, layer)} - {LEADER}

    def state(self, rank: int) -> str:
        """The progress of a rank beside the leader, as manifests say it."""
        told = {"finished": self.finished, "lost": self.lost, "running": self.joined}
        return next((state for state, ranks in told.items() if rank in ranks), "awaited")

    def shares_out(self, site: str) -> bool:
        """Whether ranks share out the columns of a site, in any layer."""
        return any(len(columns) > 1 for (name, _), columns in self.places.items() if name == site)

    def waits(self, resolved: Resolved) -> bool:
        """Whether a rank that is needed may still send rows."""
        return bool(self.needed(resolved) - self.finished - self.lost)

    def ended(self, capture: Capture, part: int) -> bool:
        """Whether a part's rows are all there that will come, unless its sender comes back."""
        if capture.lost and capture.finish_seq is None:
            return True
        return capture.finish_seq is not None if part == LEADER else part in self.finished | self.lost

    def rest(self, capture: Capture, part: int) -> str:
        """Reason of rows of a part that are not there and of which nothing is told."""
        if capture.finish_seq is None and capture.lost:
            return "engine_lost"
        if part in self.lost:
            return "part_lost"
        waits = part != LEADER and part not in self.finished
        return "pending" if waits or capture.finish_seq is None else "dropped"


    def uncounted(self, capture: Capture) -> bool:
        """Whether a rank whose counts of edits are needed will not tell them any more."""
        return any(self.ended(capture, rank) and not self.edits.get(rank) for rank in self.editing)

    def edited(self, capture: Capture) -> list[dict[str, Any]]:
        """The capture's edits as a manifest has them, with what every rank has told of them."""
        def reason(rank: int) -> str:
            rest = self.rest(capture, rank)
            return "not_counted" if rest == "dropped" else rest

        told: list[dict[str, Any]] = json.loads(capture.edits) if capture.edits else []
        return put_together(told, self.counting, self.edits, reason)


ALONE = Parts()


def load_parts(db: Database, capture: Capture) -> Parts:
    """The parts of a capture as the catalog has them."""
    if not capture.group or capture.stream is None:
        return ALONE
    info = db.execute("SELECT info FROM engines WHERE stream = ?", (capture.stream,)).fetchone()
    rows = db.execute("SELECT part, stream, finish_seq, lost, edits FROM parts WHERE capture = ?",
                      (capture.id,)).fetchall()
    counting = counting_of(info["info"]) if info else {}
    return Parts(
        _places(info["info"]) if info else {}, frozenset(row["part"] for row in rows if row["stream"]),
        frozenset(row["part"] for row in rows if row["finish_seq"] is not None),
        frozenset(row["part"] for row in rows if row["finish_seq"] is None and row["lost"]),
        counting, ranks_of(capture.edits, counting), {row["part"]: row["edits"] for row in rows if row["edits"]})


class _Told(msgspec.Struct):
    """The fields of an engine's description that are needed here."""

    layout: list[Part] = []


@lru_cache(maxsize=64)
def _places(info: str) -> Places:
    return places_of(msgspec.json.decode(info, type=_Told).layout)


def matched(keys: Sequence[tuple[I64, I64]]) -> list[I64]:
    """The indexes of each part's rows that all parts have; ``keys`` are their positions and steps, sorted so.

    The rows come in the same order for all.
    """
    _, number = np.unique(np.concatenate([step for _, step in keys]), return_inverse=True)
    bounds = np.cumsum([0, *(len(step) for _, step in keys)]).tolist()
    joint = [position << 32 | number[begin:end] for (position, _), begin, end in zip(keys, bounds, bounds[1:],
                                                                                    strict=False)]
    found = [np.unique(key, return_index=True) for key in joint]
    common = reduce(lambda a, b: np.intersect1d(a, b, assume_unique=True), [key for key, _ in found])
    return [first[np.searchsorted(key, common)].astype(np.int64) for key, first in found]


def runs_of(positions: I64, reason: str) -> list[Missing]:
    """Positions, sorted, as ranges."""
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return [Missing(int(run[0]), int(run[-1]) + 1, reason) for run in np.split(positions, cuts) if len(run)]


def merged(found: Iterable[Missing]) -> list[Missing]:
    """Ranges that may overlap as ranges that do not, in order; where they do, the first one's reason counts."""
    told = list(found)
    edges = sorted({edge for m in told for edge in (m.start, m.stop)})
    at = {edge: index for index, edge in enumerate(edges)}
    reasons: list[str | None] = [None] * len(edges)  # from each edge to the next
    for m in told:
        for index in range(at[m.start], at[m.stop]):
            reasons[index] = reasons[index] or m.reason
    ranges: list[Missing] = []
    for index, reason in enumerate(reasons):
        if reason is None:
            continue
        if ranges and ranges[-1].stop == edges[index] and ranges[-1].reason == reason:
            ranges[-1] = Missing(ranges[-1].start, edges[index + 1], reason)
        else:
            ranges.append(Missing(edges[index], edges[index + 1], reason))
    return ranges
