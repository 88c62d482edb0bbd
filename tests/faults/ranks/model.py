"""What readers must get of a capture that several ranks send, from what each of them said. It knows nothing of files.

Whatever of it has arrived, a row that is served is of one computation, with the columns of every rank; once all has
arrived there is one right answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from schemas import limits
from schemas.errors import NotFoundError
from schemas.read.reader import StoreReader
from tests.faults.model import ranges
from tests.support.ranks import LAYERS, values

RANKS = 4
SITES = ("resid_post", "q")


@dataclass(frozen=True)
class Told:
    """Rows ``[start, stop)`` that a step computed, or, where ``step`` is None, that were dropped."""

    start: int
    stop: int
    step: int | None = None


@dataclass
class RankCapture:
    """One capture; rank 0 leads. ``told`` by rank and site, in the order in which that rank said it."""

    id: str
    number: int
    prompt_len: int
    joined: set[int] = field(default_factory=set)
    told: dict[tuple[int, str], list[Told]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    end: int = 0
    output: int = 0
    reason: str = ""
    deleted: bool = False
    reach: int = 0  # one past the highest position sent

    def say(self, rank: int, site: str, told: Told) -> None:
        """A rank said so."""
        self.told.setdefault((rank, site), []).append(told)
        if told.step is not None:
            self.reach = max(self.reach, told.stop)

    @property
    def status(self) -> str:
        """Once all has arrived."""
        if 0 not in self.finished:
            return "incomplete" if 0 in self.lost else "running"
        if set(range(RANKS)) - self.finished - self.lost:
            return "running"
        if any(missing for _, _, _, missing in self.places()):
            return "incomplete"
        return "complete" if any(there for _, _, there, _ in self.places()) else "empty"

    @property
    def total(self) -> int:
        """Tokens known."""
        return self.prompt_len + self.output if 0 in self.finished else max(self.prompt_len, self.reach)

    def places(self) -> Iterator[tuple[str, int, dict[int, int], tuple[tuple[int, int, str], ...]]]:
        """Of each site and layer the steps of what is there, by position, and what is missing."""
        served = self.end if 0 in self.finished else self.total
        expected = max(served, self.total - 1) if 0 in self.finished else self.total
        for site in SITES:
            for layer in LAYERS:
                ranks = list(range(RANKS)) if site == "q" else [layer % RANKS]
                newest = {rank: self._newest(rank, site) for rank in ranks}
                there, missing = dict[int, int](), []
                for p in range(expected):
                    reason = self._reason(p, newest, served)
                    if reason:
                        missing.append((p, reason))
                    else:
                        there[p] = newest[ranks[0]][p].step or 0
                yield site, layer, there, ranges(missing)

    def _newest(self, rank: int, site: str) -> dict[int, Told]:
        found: dict[int, Told] = {}
        for told in self.told.get((rank, site), []):
            found.update(dict.fromkeys(range(told.start, told.stop), told))
        return found

    def _reason(self, p: int, newest: dict[int, dict[int, Told]], served: int) -> str:
        """Why there is no row at a position; "" where there is one."""
        for rank, found in newest.items():
            told = found.get(p)
            if told is not None and told.step is not None and p < served:
                continue
            if any(each.step is None and each.start <= p < each.stop for site in SITES
                   for each in self.told.get((rank, site), []) if self._newest(rank, site) == found):
                return "dropped"
            return "aborted" if 0 in self.finished and self.reason == "abort" and p >= served else self._rest(rank)
        steps = {rank: found[p].step or 0 for rank, found in newest.items()}
        behind = [rank for rank, step in steps.items() if step < max(steps.values())]
        return self._rest(behind[0]) if behind else ""

    def _rest(self, rank: int) -> str:
        if 0 not in self.finished and 0 in self.lost:
            return "engine_lost"
        if rank in self.lost:
            return "part_lost"
        return "pending" if 0 not in self.finished or rank not in self.finished else "dropped"

    def steps_sent(self, site: str, layer: int, position: int) -> set[int]:
        """The steps at which every rank that has columns of a row sent its own."""
        ranks = range(RANKS) if site == "q" else [layer % RANKS]
        return set.intersection(*({told.step for told in self.told.get((rank, site), [])
                                   if told.step is not None and told.start <= position < told.stop} for rank in ranks))


@cache
def content(number: int, site: str, layer: int, position: int, step: int) -> bytes:
    """The row, float32; a step's rows have a content of its own."""
    return values(RANKS, number, site, [position], [layer], version=step % 7).tobytes()


def check_ranks(reader: StoreReader, capture: RankCapture, settled: bool) -> None:
    """Hold what a reader gets against the model: exactly, where all that was said has arrived."""
    try:
        manifest = reader.manifest(capture.id)
    except NotFoundError:
        assert capture.deleted or not settled, capture
        return
    if capture.deleted and settled:
        raise AssertionError(f"{capture} is there")
    right = {(site, layer): (there, missing) for site, layer, there, missing in capture.places()}
    if settled:
        assert (manifest.status, manifest.total_len) == (capture.status, capture.total), capture
        assert set(right) == {(entry.site, entry.layer) for entry in manifest.rows}
    for entry in manifest.rows:
        assert entry.expected == entry.captured + sum(gap.rows for gap in entry.missing), entry
        got = reader.slice(capture.id, entry.site, [entry.layer], 0, limits.position_max)
        rows, positions = got.values()[0], got.positions.tolist()
        there, missing = right[entry.site, entry.layer]
        if settled:
            assert positions == list(there), (capture, entry, there)
            assert tuple((gap.start, gap.stop, gap.reason) for gap in entry.missing) == missing, (capture, entry)
        for row, position in zip(rows, positions, strict=True):
            steps = {there[position]} if settled else capture.steps_sent(entry.site, entry.layer, position)
            right_rows = [content(capture.number, entry.site, entry.layer, position, step) for step in steps]
            assert np.ascontiguousarray(row).tobytes() in right_rows, (capture, entry, position)
