"""The editor: which rows of the next step get which edits. It fills the tables before the step's forward."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from engine_side.edits.conditions import Conditions, on_device
from engine_side.edits.edited import Edited, cut, numbers_of
from engine_side.edits.tables import ALONE, WHOLE, Place, Tables, programs_of_request
from schemas.edits.resolved import REPLACED, Edits, Placed
from schemas.edits.vectors import F32
from schemas.spec import merged

logger = logging.getLogger("vllm.tap")


class NoRoom(Exception):
    """Rows of edits have no room, or none in one piece."""


def _by_position(here: Sequence[tuple[int, Edited]]) -> npt.NDArray[np.int64]:
    """From where on what holds, int64 [5, places]: number of a request << 32 | position, ascending (of two at one place
    the later holds), then the programs where a condition is met and where it is not, its line, and the ordinal of
    position 0. Before, between and behind the requests nothing is edited.
    """
    edges, programs, unmet, lines, ordinals = [-1], [0], [0], [0], [0]
    for number, each in here:
        edges += [number << 32 | start for start in each.starts] + [(number + 1) << 32]
        programs += [each.programs.get(which, 0) for which in each.which] + [0]
        unmet += [each.programs.get(which, 0) for which in each.which_unmet] + [0]
        lines += [0 if each.watched is None else each.watched.line] * len(each.starts) + [0]
        ordinals += [*each.ordinals, 0]
    return np.array([edges, programs, unmet, lines, ordinals], np.int64)


class Editor:
    """Edited requests of one worker. Called by the thread that runs the steps, between them."""

    def __init__(self, made: Tables) -> None:
        self.tables = made
        self.conditions: Conditions | None = None  # where there are probes that they could be about
        self.requests: dict[str, Edited] = {}
        self._places = list(made.slots)
        self._rows = 0  # of the last step, whose marks are to be counted
        self._free_programs = list(range(made.size.programs - 1, 0, -1))
        self._free_slots = {width: list(range(made.size.vectors - 1, 0, -1)) for width in made.pools}
        end = made.size.vectors + made.size.rows
        self._free_rows = {width: [(made.size.vectors, end)] for width in made.pools}

    @property
    def busy(self) -> bool:
        """Whether there is anything to fill in, or to take out again."""
        return bool(self.requests) or self._rows > 0

    def open(self, request: str, edits: Edits, prompt_len: int) -> None:
        """Take a request's edits from its next step on."""
        if request not in self.requests:
            self.requests[request] = found = cut(edits, prompt_len)
            found.places = self._places
            if edits.condition is not None and self.conditions is not None:
                found.watched = self.conditions.open(request, edits.condition, prompt_len)

    def close(self, requests: Iterable[str]) -> dict[str, Edited]:
        """Let go of requests that have ended; returns them, with what was made of their edits."""
        ended = {request: self.requests.pop(request) for request in requests if request in self.requests}
        if ended:
            self._count()
        for each in ended.values():
            if self.conditions is not None and each.watched is not None:
                each.switches = self.conditions.close(each.watched)
            self._let_go(each)
        return ended

    def before_forward(self, requests: Sequence[str], starts: npt.NDArray[np.integer], positions: torch.Tensor) -> None:
        """Fill the tables for a step: row ``starts[i]`` to ``starts[i + 1]`` are of request i, ``positions`` [rows] of
        the device say which of its.
        """
        here = [(number, self.requests[request]) for number, request in enumerate(requests) if request in self.requests]
        self._count()
        if self.conditions is not None:
            self.conditions.settle()
        if not here:
            return
        self._write_all([each for _, each in here])
        rows = int(starts[len(requests)])
        owners = np.repeat(np.arange(len(requests), dtype=np.int64) << 32, np.diff(starts[: len(requests) + 1]))
        there = self._to_device(np.concatenate([owners, _by_position(here).ravel()]))
        keys, (begins, program, other, line, ordinal) = there[:rows] + positions[:rows], there[rows:].view(5, -1)
        at = torch.searchsorted(begins, keys, right=True) - 1
        chosen = program[at]
        if self.conditions is not None and any(each.watched is not None for _, each in here):
            chosen = torch.where(self.conditions.made(line[at], positions[:rows]), chosen, other[at])
            self.conditions.look_at([(each.watched, int(starts[number + 1]) - 1) for number, each in here
                                     if each.watched is not None], positions)
        self.tables.programs[:rows] = chosen.to(torch.int32)
        self.tables.ordinals[:rows] = (ordinal[at] + positions[:rows]).to(torch.int32)
        self._rows = rows

    def _count(self) -> None:
        """Count the marks of the last step, and take them away with its programs."""
        if self._rows:
            marks, counts = self.tables.marks[:, : self._rows], self.tables.counts
            counts.scatter_add_(1, marks.long(), counts.new_ones(1, 1).expand_as(marks))
            marks.zero_()
            self._rows = 0

    @contextmanager
    def setting(self, place: Place, rows: int) -> Iterator[None]:
        """Steps whose first rows are set to others at a place, before there is any request."""
        tables, pool = self.tables, self.tables.pool_of(place)
        changed = tables.programs[:rows], tables.slots[place][1], pool.forms[1], pool.vectors[1]
        before = [each.clone() for each in changed]
        changed[0].fill_(1)
        changed[1].copy_(torch.tensor([1] + [0] * (tables.slots[place].shape[1] - 1)))
        changed[2].copy_(torch.tensor(REPLACED))
        changed[3].copy_(torch.linspace(-3, 5, tables.widths[place]))
        try:
            yield
        finally:
            for each, kept in zip(changed, before, strict=True):
                each.copy_(kept)
            tables.marks.zero_()

    def _to_device(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return on_device(numbers, self.tables.programs.device)

    def _write_all(self, here: Sequence[Edited]) -> None:
        """Write what the requests of a step have, in the room of those that wait (preempted ones) where need be."""
        needed = set(map(id, here))
        for each in self.requests.values():
            if len(self._free_programs) >= len(here) * programs_of_request:
                break
            if id(each) not in needed:
                self._let_go(each)
        try:
            for each in here:
                if not each.there:
                    self._write(each)
        except NoRoom:  # in one piece: there is, once all are written anew
            for each in self.requests.values():
                self._let_go(each)
            for each in here:
                try:
                    self._write(each)
                except NoRoom:  # the front end lets in no more than there is room for, but there may be several
                    self._let_go(each)
                    logger.error("vllm-tap: no room for the rows of a request's edits, which are not made; raise "
                                 "VLLM_TAP_EDIT_ROWS=%d", self.tables.size.rows)

    def _write(self, each: Edited) -> None:
        each.there = True
        each.programs = {which: self._free_programs.pop() for which in each.combinations}
        self.tables.counts.index_fill_(1, self._columns(each), 0)
        for number, one in enumerate(each.edits.placed):
            for width in dict.fromkeys(self.tables.widths[place] for place in one.places):
                slots = each.slots.setdefault(width, [0] * len(each.edits.placed))
                slots[number] = self._write_one(numbers_of(each, one, width), one)
        every = self.tables.every_slot
        written = torch.zeros(every.shape[0], len(each.programs), every.shape[2], dtype=torch.int32)
        for row, place in enumerate(self.tables.slots):
            for column, which in enumerate(each.programs):
                here = [each.slots[self.tables.widths[place]][number] for number in which
                        if place in each.edits.placed[number].places]
                written[row, column, : len(here)] = torch.tensor(here, dtype=torch.int32)
        every[:, list(each.programs.values())] = written.to(every.device)

    def _write_one(self, numbers: F32, one: Placed) -> int:
        """The slot of an edit, whose form and vectors [its slots, width] are written; −s for the first of many."""
        count, width = numbers.shape
        pool = self.tables.pools[width]
        first = self._take_rows(width, count) if one.rows else self._free_slots[width].pop()
        at = slice(first, first + count)
        pool.forms[at] = torch.tensor(one.form).to(pool.forms.device)
        pool.heads[at] = 0 if one.heads else WHOLE
        if one.heads:
            pool.heads[at, one.heads] = ALONE
        pool.vectors[at] = torch.from_numpy(numbers).to(pool.vectors.device)
        return -first if one.rows else first

    def _take_rows(self, width: int, count: int) -> int:
        """The first of so many slots in one piece; NoRoom."""
        free = self._free_rows[width]
        for number, (start, stop) in enumerate(free):
            if stop - start >= count:
                free[number : number + 1] = [(start + count, stop)] if stop - start > count else []
                return start
        raise NoRoom

    def _columns(self, each: Edited) -> torch.Tensor:
        return self._to_device(np.array(list(each.programs.values()), np.int64))

    def _let_go(self, each: Edited) -> None:
        if not each.there:
            return
        made = self.tables.counts.index_select(1, self._columns(each))
        each.made = made if each.made is None else each.made + made
        rows = each.edits.rows_each
        self._free_programs += each.programs.values()
        for width, slots in each.slots.items():
            self._free_slots[width] += [slot for slot in slots if slot > 0]
            self._free_rows[width] = merged([*self._free_rows[width], *((-slot, rows - slot) for slot in slots
                                                                        if slot < 0)])
        each.programs, each.slots, each.there = {}, {}, False
