"""The editor: which rows of the next step get which edits. It fills the tables before the step's forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine_side.edits.conditions import Conditions, Watched, on_device
from engine_side.edits.edited import Edited, cut, numbers_of
from engine_side.edits.tables import ALONE, WHOLE, Place, Tables, count, programs_of_request
from schemas.edits.resolved import REPLACED, Edits
from schemas.spec import merged

logger = logging.getLogger("vllm.tap")


class NoRoom(Exception):
    """Rows of edits have no room, or none in one piece."""


def _by_position(here: Sequence[tuple[int, Edited]]) -> npt.NDArray[np.int64]:
    """The places from which on edits hold, int64 [5, places]. Row 0: number of a request << 32 | position, ascending;
    of two at one place the later holds. Rows 1 and 2: the programs where a condition is met and where it is not. Row 3:
    the request's line in the tables of conditions. Row 4: the ordinal of position 0. Before, between and behind the
    requests nothing is edited.
    """
    edges, programs, unmet, lines, ordinals = [-1], [0], [0], [0], [0]
    for number, each in here:
        edges += [number << 32 | start for start in each.starts] + [(number + 1) << 32]
        programs += [each.programs.get(which, 0) for which in each.which] + [0]
        unmet += [each.programs.get(which, 0) for which in each.which_unmet] + [0]
        lines += [0 if each.watched is None else each.watched.line] * len(each.starts) + [0]
        ordinals += [*each.ordinals, 0]
    return np.array([edges, programs, unmet, lines, ordinals], np.int64)


@dataclass(slots=True)
class Layout:
    """Edited requests of a batch, as long as the batch stays the same. ``there`` int64, on the device: the owner of
    each row, then the numbers of ``_by_position``. ``fill``: the kernel that fills the tables, where there is one.
    """

    requests: Sequence[str]
    starts: bytes
    rows: int
    there: torch.Tensor
    acting: int  # bits of the places that they edit
    watched: list[tuple[Watched, int]]  # those with a condition, and their newest rows
    fill: Callable[[torch.Tensor, int], None] | None = None


_NONE: Final = Layout((), b"", 0, torch.empty(0), 0, [])


class Editor:
    """Edited requests of one worker. Called by the thread that runs the steps, between them."""

    def __init__(self, made: Tables) -> None:
        self.tables = made
        self.conditions: Conditions | None = None  # where there are probes that they could be about
        self.requests: dict[str, Edited] = {}
        self.acting = 0  # bits of the places that the next forward edits, in the order of the tables
        self._places = list(made.slots)
        self._layout = _NONE  # of the last step
        self._rows = 0  # that have programs in the tables
        self._free_programs = list(range(made.size.programs - 1, 0, -1))
        self._free_slots = {width: list(range(made.size.vectors - 1, 0, -1)) for width in made.pools}
        end = made.size.vectors + made.size.rows
        self._free_rows = {width: [(made.size.vectors, end)] for width in made.pools}

    def warm(self) -> None:
        """Make ready what steps need of the device, before there is any."""
        if self.tables.programs.is_cuda:
            from engine_side.kernels import edits

            edits.warm(self.tables, None if self.conditions is None else self.conditions.switches)

    @property
    def busy(self) -> bool:
        """Whether there is anything to fill in, or to take out again."""
        return bool(self.requests) or self._rows > 0

    def open(self, request: str, edits: Edits, prompt_len: int) -> None:
        """Take a request's edits from its next step on."""
        if request not in self.requests:
            self.requests[request] = found = cut(edits, prompt_len)
            found.places, self._layout = self._places, _NONE
            placed = {place for one in edits.placed for place in one.places}
            found.acting = sum(1 << number for number, place in enumerate(self._places) if place in placed)
            if edits.condition is not None and self.conditions is not None:
                found.watched = self.conditions.open(request, edits.condition, prompt_len)

    def close(self, requests: Iterable[str]) -> dict[str, Edited]:
        """Let go of requests that have ended; returns them, with what was made of their edits."""
        ended = {request: self.requests.pop(request) for request in requests if request in self.requests}
        for each in ended.values():
            if self.conditions is not None and each.watched is not None:
                each.switches = self.conditions.close(each.watched)
        self._let_go(ended.values())
        return ended

    def before_forward(self, requests: Sequence[str], starts: npt.NDArray[np.integer], positions: torch.Tensor) -> None:
        """Fill the tables for a step. Rows ``starts[i]`` to ``starts[i + 1]`` are of request i. ``positions`` [rows],
        on the device, are the rows' positions in their requests.
        """
        if self.conditions is not None:
            self.conditions.settle()
        laid, edges = self._layout, starts[: len(requests) + 1].tobytes()
        if laid.starts != edges or laid.requests != requests:
            laid = self._laid(requests, starts, edges)
        if not laid.rows:
            self.tables.programs[: self._rows] = 0
        elif laid.fill is not None:
            laid.fill(positions, self._rows)
        else:
            self._fill(laid, positions)
        if laid.watched and self.conditions is not None:
            self.conditions.look_at(laid.watched, positions)
        self._layout, self._rows, self.acting = laid, laid.rows, laid.acting

    def _laid(self, requests: Sequence[str], starts: npt.NDArray[np.integer], edges: bytes) -> Layout:
        """The layout of another batch; what its requests need is written."""
        here = [(number, self.requests[request]) for number, request in enumerate(requests) if request in self.requests]
        if not here:
            return _NONE
        self._write_all([each for _, each in here])
        owners = np.repeat(np.arange(len(requests), dtype=np.int64) << 32, np.diff(starts[: len(requests) + 1]))
        there = self._to_device(np.concatenate([owners, _by_position(here).ravel()]))
        watched = [(each.watched, int(starts[number + 1]) - 1) for number, each in here if each.watched is not None]
        acting = reduce(or_, (each.acting for _, each in here))
        laid = Layout(list(requests), edges, len(owners), there, acting, watched if self.conditions is not None else [])
        if there.is_cuda:
            from engine_side.kernels.edits import Filler

            switches = self.conditions.switches if laid.watched and self.conditions is not None else None
            laid.fill = Filler(there, self.tables, switches, laid.rows)
        return laid

    def _fill(self, laid: Layout, positions: torch.Tensor) -> None:
        """Fill the tables with torch alone: what ``engine_side.kernels.edits.fill`` does in one launch."""
        tables, rows = self.tables, laid.rows
        keys, (begins, program, other, line, ordinal) = (laid.there[:rows] + positions[:rows],
                                                         laid.there[rows:].view(5, -1))
        at = torch.searchsorted(begins, keys, right=True) - 1
        chosen = program[at]
        if laid.watched and self.conditions is not None:
            chosen = torch.where(self.conditions.made(line[at], positions[:rows]), chosen, other[at])
        tables.programs[: self._rows] = 0
        tables.programs[:rows] = chosen.to(torch.int32)
        tables.ordinals[:rows] = (ordinal[at] + positions[:rows]).to(torch.int32)
        count(tables.counts[-1], tables.programs[:rows])

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
        self.acting = 1 << self._places.index(place)
        try:
            yield
        finally:
            self.acting = 0
            for each, kept in zip(changed, before, strict=True):
                each.copy_(kept)
            tables.counts.zero_()

    def _to_device(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        return on_device(numbers, self.tables.programs.device)

    def _write_all(self, here: Sequence[Edited]) -> None:
        """Write what the requests of a step have, in the room of those that wait (preempted ones) where need be."""
        new, needed = [each for each in here if not each.there], set(map(id, here))
        if not new:
            return
        for each in self.requests.values():
            if len(self._free_programs) >= len(new) * programs_of_request:
                break
            if id(each) not in needed:
                self._let_go([each])
        try:
            self._write(new)
        except NoRoom:  # in one piece: there is, once all are written anew
            self._let_go(self.requests.values())
            for each in here:
                try:
                    self._write([each])
                except NoRoom:  # the front end lets in no more than there is room for, but there may be several
                    logger.error("vllm-tap: VLLM_TAP_EDIT_ROWS=%d: no room for the rows of a request's edits, so they "
                                 "are not made; raise it", self.tables.size.rows)

    def _write(self, new: Sequence[Edited]) -> None:
        """Write several at once; NoRoom, with none of them written."""
        try:
            for each in new:
                self._take(each)
        except NoRoom:
            for each in new:
                self._give_back(each)
            raise
        programs = [program for each in new for program in each.programs.values()]
        table: npt.NDArray[np.int32] = np.zeros((len(self._places), len(programs), self.tables.size.depth), np.int32)
        column = 0
        for each in new:
            for which in each.programs:
                for row, place in enumerate(self._places):
                    slots = [each.slots[self.tables.widths[place]][number] for number in which
                             if place in each.edits.placed[number].places]
                    table[row, column, : len(slots)] = slots
                column += 1
        columns = self._to_device(np.array(programs, np.int64))
        self.tables.every_slot.index_copy_(1, columns, self._to_device(table))
        self.tables.counts.index_fill_(1, columns, 0)
        for width in self.tables.pools:
            self._write_slots(width, new)

    def _write_slots(self, width: int, new: Iterable[Edited]) -> None:
        """Forms, heads and vectors of rows of a width."""
        at: list[int] = []
        forms, vectors, heads, pool = [], [], [], self.tables.pools[width]
        for each in new:
            for one, slot in zip(each.edits.placed, each.slots.get(width, ()), strict=False):
                if not slot:
                    continue
                numbers = numbers_of(each, one, width)
                kind = np.full(pool.heads.shape[1], 0 if one.heads else WHOLE, np.int8)
                kind[one.heads] = ALONE
                at += range(abs(slot), abs(slot) + len(numbers))
                forms.append(np.tile(np.array(one.form, np.float32), (len(numbers), 1)))
                heads.append(np.tile(kind, (len(numbers), 1)))
                vectors.append(numbers)
        if at:
            rows = self._to_device(np.array(at, np.int64))
            for table, parts in ((pool.forms, forms), (pool.heads, heads), (pool.vectors, vectors)):
                table.index_copy_(0, rows, self._to_device(np.concatenate(parts)))

    def _take(self, each: Edited) -> None:
        """Programs and slots for a request; NoRoom, with some of them taken."""
        each.there = True
        each.programs = {which: self._free_programs.pop() for which in each.combinations}
        for number, one in enumerate(each.edits.placed):
            here = [place for place in one.places if place in self.tables.widths]  # others are another stage's
            for width in dict.fromkeys(self.tables.widths[place] for place in here):
                slots = each.slots.setdefault(width, [0] * len(each.edits.placed))
                slots[number] = (-self._take_rows(width, each.edits.rows_each) if one.rows
                                 else self._free_slots[width].pop())

    def _take_rows(self, width: int, count: int) -> int:
        """The first of so many slots in one piece; NoRoom."""
        free = self._free_rows[width]
        for number, (start, stop) in enumerate(free):
            if stop - start >= count:
                free[number : number + 1] = [(start + count, stop)] if stop - start > count else []
                return start
        raise NoRoom

    def _let_go(self, several: Iterable[Edited]) -> None:
        """Take requests out of the tables; what these have counted is kept with them."""
        there = [each for each in several if each.there]
        if not there:
            return
        self._layout = _NONE
        programs = [program for each in there for program in each.programs.values()]
        columns = self.tables.counts.index_select(1, self._to_device(np.array(programs, np.int64)))
        for each, made in zip(there, columns.split([len(each.programs) for each in there], dim=1), strict=True):
            each.made = made if each.made is None else each.made + made
            self._give_back(each)

    def _give_back(self, each: Edited) -> None:
        rows = each.edits.rows_each
        self._free_programs += each.programs.values()
        for width, slots in each.slots.items():
            self._free_slots[width] += [slot for slot in slots if slot > 0]
            self._free_rows[width] = merged([*self._free_rows[width], *((-slot, rows - slot) for slot in slots
                                                                        if slot < 0)])
        each.programs, each.slots, each.there = {}, {}, False
