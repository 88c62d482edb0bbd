"""A request's edits by position: which are made together, and from where on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine_side.edits.conditions import Watched
from engine_side.edits.tables import Place, programs_of_request
from schemas.edits.resolved import Edits, Placed
from schemas.edits.vectors import F32
from schemas.errors import EditError
from schemas.spec import intervals

# By width of a pool those of each edit in their order: 0 where it is of another width, −s for the first of many.
Slots = dict[int, list[int]]


@dataclass(slots=True)
class Edited:
    """A request with edits. From position ``starts[i]`` on, the edits numbered in ``which[i]`` are made. Where one of
    these has rows of its own, position p has ordinal ``ordinals[i]`` + p.
    """

    edits: Edits
    starts: list[int]
    which: list[tuple[int, ...]]
    ordinals: list[int]
    which_unmet: list[tuple[int, ...]]  # of ``which`` those that are made where the condition is not met
    places: list[Place] = field(default_factory=list)  # of the tables
    acting: int = 0  # bits of those of them that it edits
    watched: Watched | None = None  # where it has a condition
    switches: torch.Tensor | None = None  # of its condition, int32, once it has ended
    made: torch.Tensor | None = None  # int32 [places + 1, combinations]: of Tables.counts what was its, up to now
    programs: dict[tuple[int, ...], int] = field(default_factory=dict)  # what it has of the tables, if anything
    slots: Slots = field(default_factory=dict)
    there: bool = False  # whether the tables have it

    @property
    def combinations(self) -> list[tuple[int, ...]]:
        """Numbers of the edits that are made together, in the order of ``programs``."""
        return [which for which in dict.fromkeys([*self.which, *self.which_unmet]) if which]

    @property
    def numbers(self) -> torch.Tensor | None:
        """The device's counts of a request at its end, int32: ``made`` and ``switches``; None where it has not run."""
        if self.made is None:
            return None
        return torch.cat([part.flatten() for part in (self.made, self.switches) if part is not None])


def cut(edits: Edits, prompt_len: int) -> Edited:
    """A request's edits by position; EditError where they are too many different ones."""
    spans = [intervals(one.positions, prompt_len) for one in edits.placed]
    starts = sorted({0, *(edge for each in spans for span in each for edge in span)})
    which = [tuple(number for number, each in enumerate(spans) if any(a <= start < b for a, b in each))
             for start in starts]
    unmet = [tuple(number for number in some if not edits.placed[number].when) for some in which]
    if (count := len({*which, *unmet} - {()})) > programs_of_request:
        raise EditError("", count, f"positions of one request may have at most {programs_of_request} different "
                                   "combinations of edits; use fewer ranges")
    ordinals, before = dict.fromkeys(starts, 0), 0
    for first, stop in edits.row_positions:
        for start in starts:
            if first <= start < stop:
                ordinals[start] = before - first
        before += stop - first
    return Edited(edits, starts, which, list(ordinals.values()), unmet)


def numbers_of(each: Edited, one: Placed, width: int) -> F32:
    """The vectors of an edit: float32 [1, width], or [rows, width] at the ordinals of its request."""
    if not one.vector:
        return np.zeros((1, width), np.float32)
    given = np.frombuffer(each.edits.vectors[one.vector], np.float32).reshape(-1, width)
    if not one.rows:
        return given.copy()
    found = np.zeros((each.edits.rows_each, width), np.float32)
    positions = np.concatenate([np.arange(*span) for span in one.positions])
    at = np.searchsorted(each.starts, positions, side="right") - 1
    found[np.array(each.ordinals)[at] + positions] = given
    return found
