"""Selection of a step's rows that captures want: running captures as arrays by slot, one pass over the rows.

Positions asked for are kept as boundaries ``slot << 32 | position``, sorted, start and stop alternating. A row is
wanted where the number of boundaries at or below its own key is odd. So any number of ranges costs one searchsorted.

Under speculative decoding the last rows of a request in a step may be of *drafts*. Under asynchronous scheduling the
host does not know yet how many of the drafts before were accepted, and assumes that all were. A row's true position may
therefore be less by up to *slack*. Such a row is taken where any of its possible positions is wanted. The positions
that the model used travel with the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine_side.transport.events import Entry
from schemas.spec import Resolved, intervals
from schemas.wire.row_table import FLAG_DRAFT, FLAG_GENERATED, FLAG_RECOMPUTED

I64 = npt.NDArray[np.int64]
_FAR: Final = 1 << 40
_BEYOND: Final = np.array([1 << 62])


Plan = tuple[Entry, ...]


@dataclass(slots=True)
class Step:
    """A step of the model as its runner laid it out; a seam makes it.

    ``starts`` [n + 1]: rows of each request. ``first`` [n]: position of each request's first row, in the host's view,
    too high by at most ``slack``. Both are integers, and good until the runner prepares another step. ``positions`` and
    ``token_ids`` [rows]: the tensors that the model really used. ``drafts`` [n]: how many of each request's last rows
    are guesses of speculative decoding; None where no request has any.
    """

    requests: list[str]
    starts: I64
    first: I64
    positions: torch.Tensor
    token_ids: torch.Tensor
    drafts: I64 | None = None
    slack: int = 0
    begin: Callable[[], None] | None = None  # opens the captures of requests that begin with it
    number: int = 0  # the same on every rank


@dataclass(slots=True)
class Selected:
    """The wanted rows of a step: index into the step's rows, and their columns.

    ``slack`` [rows]: how much less each position may be; None where all are certain. ``steps_unchanged``: the number of
    steps, this one included, in which the same rows are wanted with the same flags, if every request advances by one
    token a step. It is 1 where a request computed another number of rows, where positions are computed again, and with
    drafts or slack. ``running``: slots of the captures in the step, position of each one's first row.
    """

    row: I64
    slot: I64
    position: I64
    flags: I64
    plan: I64
    slack: I64 | None = None
    steps_unchanged: int = 1
    running: tuple[I64, I64] = (np.zeros(0, np.int64), np.zeros(0, np.int64))

    def of_plans(self, plans: list[int]) -> Selected:
        """The rows of captures with one of ``plans``."""
        mine = np.isin(self.plan, plans)
        return Selected(self.row[mine], self.slot[mine], self.position[mine], self.flags[mine], self.plan[mine],
                        None if self.slack is None else self.slack[mine])


def plan_of(resolved: Resolved) -> Plan:
    """Plan of a resolved spec; equal selections make equal plans, so they share their kernels."""
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
        self._boundaries: I64 | None = None
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
        self._ranges[slot] = np.array(ranges, np.int64).reshape(-1) + (slot << 32)
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
        """Plan of the request in a slot."""
        return self.plans[int(self._plan[slot])]

    def select(self, requests: list[str], starts: I64, first: I64, drafts: I64 | None = None, slack: int = 0
               ) -> Selected | None:
        """The wanted rows of a step; None where no capture is in it.

        ``starts`` [n + 1]: rows of request i are ``starts[i]`` … ``starts[i+1]-1``. ``first`` [n]: position of each
        request's first row, too high by at most ``slack`` once it generates. ``drafts`` [n]: how many of its last rows
        are guesses; None where no request has any.
        """
        slots = np.fromiter(map(self.slot_of.get, requests, repeat(-1)), np.int64, len(requests))
        begin, counts = starts[:-1], starts[1:] - starts[:-1]
        every = bool(requests) and bool((slots >= 0).all())
        if not every:
            live = (slots >= 0).nonzero()[0]
            if live.size == 0:
                return None
            slots, first, begin, counts = slots[live], first[live], begin[live], counts[live]
            drafts = None if drafts is None else drafts[live]
        own = counts if drafts is None else counts - drafts
        before, prompt_len = self.computed[slots], self._prompt_len[slots]
        unsure = None if slack == 0 else np.where(first > prompt_len, slack, 0)
        again = bool((before > first).any())
        if again:
            self.recomputed[slots] += np.minimum(np.maximum(before - first, 0), counts)
        self.computed[slots] = np.maximum(before, first + own - (0 if unsure is None else unsure))
        running = slots, first
        alone = drafts is None and int(starts[-1]) == len(requests) and bool((counts == 1).all())  # a row each
        if alone:
            slot, position, row = slots, first, begin
        else:
            ends = counts.cumsum()
            row = np.arange(ends[-1])
            slot, position = slots.repeat(counts), row + (first - ends + counts).repeat(counts)
            before, prompt_len = before.repeat(counts), prompt_len.repeat(counts)
            if not every:
                row = row + (begin - ends + counts).repeat(counts)
        keys, boundaries = _keys(slot, position), self._boundary_keys()
        below = boundaries.searchsorted(keys, side="right")
        steps_unchanged = 1
        if alone and slack == 0 and not again:  # what is computed again catches up some time
            # Without a boundary of its own the next one is another slot's, farther away than any position.
            left = prompt_len - position
            steps_unchanged = int(np.minimum(boundaries[below] - keys, np.where(left > 0, left, _FAR)).min())
        chosen = below & 1
        if unsure is not None:
            unsure = unsure.repeat(counts)
            lowest = np.maximum(position - unsure, 0)
            chosen |= below != boundaries.searchsorted(_keys(slot, lowest), side="right")
        flags = (position >= prompt_len) * FLAG_GENERATED
        if again:
            flags += (position < before) * FLAG_RECOMPUTED
        if drafts is not None:
            flags += (np.arange(len(row)) >= (counts.cumsum() - drafts).repeat(counts)) * FLAG_DRAFT
        if not chosen.all():
            wanted = chosen.nonzero()[0]
            row, slot, position, flags = row[wanted], slot[wanted], position[wanted], flags[wanted]
            unsure = None if unsure is None else unsure[wanted]
        return Selected(row, slot, position, flags, self._plan[slot], unsure, steps_unchanged, running)

    def advance(self, slots: I64, first: I64, steps: int) -> None:
        """Advance captures of ``slots``, at ``first`` when they were selected, by ``steps`` steps of a row."""
        self.computed[slots] = np.maximum(self.computed[slots], first + steps)

    def _boundary_keys(self) -> I64:
        """Boundaries of all slots, and one beyond all."""
        if self._boundaries is None:
            self._boundaries = np.concatenate([*self._ranges, _BEYOND])
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


def _keys(slot: I64, position: I64) -> I64:
    return (slot << 32) + position
