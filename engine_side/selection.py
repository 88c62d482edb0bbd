"""Which rows of a step belong to a capture: running captures as arrays by slot, one pass over a step's rows.

Positions asked for are kept as boundaries ``slot << 32 | position``, sorted, start and stop alternating: a row is
wanted where the number of boundaries at or below its own key is odd. So any number of ranges costs one searchsorted.

Under speculative decoding the last rows of a request in a step may be of *drafts*. Under asynchronous scheduling the
host does not know yet how many of the drafts before were accepted, and takes them all for accepted: a row's position
may in truth be less by up to *slack*. Such a row is taken where any of its possible positions is wanted; the positions
that the model used travel with the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.frame import FLAG_DRAFT, FLAG_GENERATED, FLAG_RECOMPUTED
from schemas.spec import Resolved, intervals

I64 = npt.NDArray[np.int64]
_FAR: Final = 1 << 40


class Entry(NamedTuple):
    """One site of a plan: its layers in one codec."""

    site: str
    codec: str
    layers: tuple[int, ...]


Plan = tuple[Entry, ...]


@dataclass(slots=True)
class Selected:
    """The wanted rows of a step: index into the step's rows, and their columns.

    ``slack`` [rows]: how much less each position may be; None where all are certain. ``steady``: for how many steps,
    this one included, the same rows are wanted with the same flags if every request goes on by one token a step; 1
    where some computed another number of rows. ``live``: slots of the captures in the step, position of each one's
    first row.
    """

    row: I64
    slot: I64
    position: I64
    flags: I64
    plan: I64
    slack: I64 | None = None
    steady: int = 1
    live: tuple[I64, I64] = (np.zeros(0, np.int64), np.zeros(0, np.int64))


def plan_of(resolved: Resolved) -> Plan:
    """The plan of a resolved spec; equal selections make equal plans, so they share their kernels."""
    return tuple(
        Entry(site, resolved.codec[site], tuple(layers)) for site, layers in sorted(resolved.layers.items()) if layers
    )


class CaptureTable:
    """Running captures of this worker."""

    def __init__(self) -> None:
        self.slot_of: dict[str, int] = {}
        self.plans: list[Plan] = []
        self._plan_number: dict[Plan, int] = {}
        self._users: list[int] = []
        self._free: list[int] = []
        self._ranges: list[I64] = []
        self._boundaries: npt.NDArray[np.uint64] | None = None
        self._plan = np.zeros(0, np.int64)
        self._prompt_len = np.zeros(0, np.int64)
        self.computed = np.zeros(0, np.int64)  # one past the highest position ever computed that was no draft
        self.recomputed = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.slot_of)

    def open(self, request: str, resolved: Resolved, prompt_len: int) -> int:
        """A slot for a request that starts."""
        slot = self._free.pop() if self._free else self._grow()
        ranges = [] if resolved.empty else intervals(resolved.positions, prompt_len)
        self._ranges[slot] = np.array(ranges, np.int64).reshape(-1)
        self._plan[slot] = self._join(plan_of(resolved))
        self._prompt_len[slot] = prompt_len
        self.computed[slot] = self.recomputed[slot] = 0
        self.slot_of[request] = slot
        self._boundaries = None
        return slot

    def close(self, request: str) -> int:
        """Give the slot back; its counters stay readable until it is used again."""
        slot = self.slot_of.pop(request)
        self._leave(int(self._plan[slot]))
        self._ranges[slot] = np.zeros(0, np.int64)
        self._free.append(slot)
        self._boundaries = None
        return slot

    def plan(self, slot: int) -> Plan:
        """What is taken of the request in a slot."""
        return self.plans[int(self._plan[slot])]

    def select(self, requests: list[str], starts: I64, first: I64, drafts: I64 | None = None, slack: int = 0
               ) -> Selected | None:
        """The wanted rows of a step; None where no capture is in it.

        ``starts`` [n + 1]: rows of request i are ``starts[i]`` … ``starts[i+1]-1``; ``first`` [n]: position of each
        request's first row, too high by at most ``slack`` once it generates; ``drafts`` [n]: how many of its last
        rows are guesses, None for nobody.
        """
        slots = np.fromiter(map(self.slot_of.get, requests, repeat(-1)), np.int64, len(requests))
        live = np.flatnonzero(slots >= 0)
        if live.size == 0:
            return None
        slots, first, begin, counts = slots[live], first[live], starts[live], np.diff(starts)[live]
        own = counts if drafts is None else counts - drafts[live]
        unsure = None if slack == 0 else np.where(first > self._prompt_len[slots], slack, 0)
        offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        slot, position = np.repeat(slots, counts), np.repeat(first, counts) + offset
        before = self.computed[slot]
        self.recomputed[slots] += np.clip(self.computed[slots] - first, 0, counts)
        self.computed[slots] = np.maximum(self.computed[slots], first + own - (0 if unsure is None else unsure))
        boundaries = self._boundary_keys()
        below = np.searchsorted(boundaries, _keys(slot, position), side="right")
        chosen = below & 1
        if unsure is not None:
            unsure = np.repeat(unsure, counts)
            lowest = np.maximum(position - unsure, 0)
            chosen |= below != np.searchsorted(boundaries, _keys(slot, lowest), side="right")
        wanted = np.flatnonzero(chosen)
        steady = 1
        if drafts is None and slack == 0 and len(counts) == len(slot) and starts[-1] == len(requests):
            steady = self._steady(slot, position, before, below)
        live_columns = slots, first
        row = (np.repeat(begin, counts) + offset)[wanted]
        slot, position, before = slot[wanted], position[wanted], before[wanted]
        flags = (position >= self._prompt_len[slot]) * FLAG_GENERATED + (position < before) * FLAG_RECOMPUTED
        if drafts is not None:
            flags += (offset >= np.repeat(own, counts))[wanted] * FLAG_DRAFT
        return Selected(row, slot, position, flags, self._plan[slot], None if unsure is None else unsure[wanted],
                        steady, live_columns)

    def _steady(self, slot: I64, position: I64, before: I64, below: I64) -> int:
        """How many steps of a row a request want the same with the same flags, this one included."""
        if (position < before).any():  # computed again: it catches up some time
            return 1
        boundaries = self._boundary_keys()
        following = boundaries[np.minimum(below, len(boundaries) - 1)] if len(boundaries) else _keys(slot, position)
        stop = np.where((below < len(boundaries)) & (following >> np.uint64(32) == slot.astype(np.uint64)),
                        (following & np.uint64(0xFFFFFFFF)).astype(np.int64), _FAR)
        prompt_len = self._prompt_len[slot]
        stop = np.where(position < prompt_len, np.minimum(stop, prompt_len), stop)
        return int((stop - position).min())

    def advance(self, slots: I64, first: I64, steps: int) -> None:
        """Captures of ``slots``, at ``first`` when they were selected, went on for ``steps`` steps of a row."""
        self.computed[slots] = np.maximum(self.computed[slots], first + steps)

    def _boundary_keys(self) -> npt.NDArray[np.uint64]:
        if self._boundaries is None:
            sizes = [ranges.size for ranges in self._ranges]
            positions = np.concatenate(self._ranges) if sizes else np.zeros(0, np.int64)
            self._boundaries = _keys(np.repeat(np.arange(len(sizes)), sizes), positions)
        return self._boundaries

    def _grow(self) -> int:
        slot = len(self._ranges)
        self._ranges.append(np.zeros(0, np.int64))
        if slot == len(self._plan):
            more = max(64, slot)
            self._plan, self._prompt_len, self.computed, self.recomputed = (
                np.concatenate([column, np.zeros(more, np.int64)])
                for column in (self._plan, self._prompt_len, self.computed, self.recomputed)
            )
        return slot

    def _join(self, plan: Plan) -> int:
        number = self._plan_number.get(plan)
        if number is None:
            unused = next((i for i, users in enumerate(self._users) if users == 0), None)
            if unused is None:
                number = len(self.plans)
                self.plans.append(plan)
                self._users.append(0)
            else:
                number = unused
                self._plan_number.pop(self.plans[number], None)
                self.plans[number] = plan
            self._plan_number[plan] = number
        self._users[number] += 1
        return number

    def _leave(self, number: int) -> None:
        self._users[number] -= 1


def _keys(slot: I64, position: I64) -> npt.NDArray[np.uint64]:
    return slot.astype(np.uint64) << np.uint64(32) | position.astype(np.uint64)
