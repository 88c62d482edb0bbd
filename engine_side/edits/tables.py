"""Tables of edits on the device: read by the compiled graph, filled between steps.

A row of a step has a *program*, a number; with program 0 it is not edited. For each armed place (site and layer), a
table says which slots a program uses there, in the order of the edits; slot 0 changes nothing. A slot has an edit's
form and vector (``schemas.edits.resolved``). A negative slot, −s, is the first of many, one for each row: a row has
slot s + its *ordinal*. Every buffer keeps its address, because CUDA graphs have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from schemas import limits
from schemas.edits.resolved import IDENTITY

programs_of_request: Final = 16

WHOLE: Final = 2  # of a head in a slot: edited as part of its row
ALONE: Final = 1  # edited by itself

Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Pool:
    """Edits of rows of one width: ``vectors`` float32 [slots, width], ``forms`` float32 [slots, 4]. ``heads`` int8
    [slots, heads] is for sites that have heads. It is ``WHOLE`` where all heads are edited as one row, ``ALONE`` where
    a head is edited by itself, 0 where it stays as it is.
    """

    vectors: torch.Tensor
    forms: torch.Tensor
    heads: torch.Tensor


@dataclass(frozen=True, slots=True)
class Size:
    """The room of the tables: a step has at most ``tokens`` rows of ``requests`` requests. ``depth``: edits of a row at
    a place. ``rows``: slots for the rows of edits that have one for each position.
    """

    tokens: int
    requests: int
    depth: int
    rows: int

    @property
    def programs(self) -> int:
        """Programs, with that of rows that are not edited: so many that each place's tables begin at 16 bytes. Inductor
        would copy others in every step.
        """
        return -(-(self.requests * programs_of_request + 1) // 4) * 4

    @property
    def vectors(self) -> int:
        """Slots of edits with one vector, and slot 0; those of ``rows`` come behind."""
        return self.requests * limits.edits_max + 1


@dataclass(frozen=True, slots=True)
class Tables:
    """``ordinals`` int32 [tokens], of a step's rows. ``slots`` by place int32 [programs, depth], in their order parts
    of ``every_slot``, so that a request is written at once. ``pools`` by width.

    ``counts`` int32 [places + 1, programs]: rows that the graph has edited at a place, by program. The last line counts
    the rows that should have been edited. The numbers of program 0 mean nothing.

    A step has no more requests than there is room for, so programs and vectors never run out. The front end sees to
    ``rows`` (``schemas.edits.resolved.Edits.rows_kept``).
    """

    size: Size
    programs: torch.Tensor  # int32 [tokens], of a step's rows
    counts: torch.Tensor
    ordinals: torch.Tensor
    every_slot: torch.Tensor
    slots: dict[Place, torch.Tensor]
    widths: dict[Place, int]
    pools: dict[int, Pool]

    def pool_of(self, place: Place) -> Pool:
        """The pool that a place's slots are numbers of."""
        return self.pools[self.widths[place]]

    def counts_of(self, place: Place) -> torch.Tensor:
        """Counts of a place, int32 [programs]."""
        return self.counts[list(self.slots).index(place)]


def room(widths: dict[Place, int], size: Size, heads: Mapping[int, int]) -> int:
    """Bytes that ``tables`` takes."""
    slot = sum((width + 4) * 4 + heads.get(width, 1) for width in set(widths.values()))
    return (8 * size.tokens + 4 * (len(widths) + 1) * size.programs * (size.depth + 1)
            + (size.vectors + size.rows) * slot)


def tables(widths: dict[Place, int], size: Size, heads: Mapping[int, int], device: torch.device) -> Tables:
    """Empty tables for places of these widths; ``heads``: how many there are in rows of a width, if any."""
    slots, identity = size.vectors + size.rows, torch.tensor(IDENTITY, device=device)
    every_slot = torch.zeros(len(widths), size.programs, size.depth, dtype=torch.int32, device=device)
    counts = torch.zeros(len(widths) + 1, size.programs, dtype=torch.int32, device=device)
    programs, ordinals = (torch.zeros(size.tokens, dtype=torch.int32, device=device) for _ in range(2))
    return Tables(
        size, programs, counts, ordinals, every_slot, dict(zip(widths, every_slot, strict=True)), widths,
        {width: Pool(torch.zeros(slots, width, device=device), identity.repeat(slots, 1),
                     torch.full((slots, heads.get(width, 1)), WHOLE, dtype=torch.int8, device=device))
         for width in set(widths.values())})


def edited(rows: torch.Tensor, programs: torch.Tensor, ordinals: torch.Tensor, slots: torch.Tensor,
           vectors: torch.Tensor, forms: torch.Tensor, counts: torch.Tensor, heads: torch.Tensor | None = None
           ) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [tokens, width] as they go on, and which of them are edited, bool [tokens, 1]; traced into the graph.
    ``heads``: that of the pool, where single heads may be edited.

    Rows that are not edited are the same, bit for bit; those that are get counted. The arithmetic is float32, rounded
    once at its end.
    """
    here = programs[: rows.shape[0]]
    chosen = slots[here]
    now = rows.float()
    for step in range(slots.shape[1]):
        first = chosen[:, step]
        slot = torch.where(first < 0, ordinals[: rows.shape[0]] - first, first)
        vector, form = vectors[slot], forms[slot]
        factor, constant, low, high = form[:, 0:1], form[:, 1:2], form[:, 2:3], form[:, 3:4]
        along, mine = _along(now * vector, None if heads is None else heads[slot])
        moved = factor * now + (constant + along.clamp(low, high) - along) * vector
        # Nothing of a row that is set stays, be it no number.
        moved = torch.where(factor == 0, constant * vector, torch.where(slot[:, None] == 0, now, moved))
        now = moved if mine is None else torch.where(mine, moved, now)
    any_slot = (chosen != 0).any(dim=-1, keepdim=True)
    count(counts, torch.where(any_slot[:, 0], here, 0))
    return torch.where(any_slot, now.to(rows.dtype), rows), any_slot


def count(counts: torch.Tensor, programs: torch.Tensor) -> None:
    """Count the programs of rows, [rows], in int32 [programs]."""
    counts.scatter_add_(0, programs.long(), torch.ones_like(programs))


def _along(products: torch.Tensor, heads: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Projections of rows, [tokens, 1]. With ``heads``, the projection for the edit of each column, [tokens, width],
    and which columns are edited.
    """
    if heads is None:
        return products.sum(dim=-1, keepdim=True), None
    by_head = products.view(*heads.shape, -1)
    each = by_head.sum(dim=-1)
    along = torch.where(heads == ALONE, each, each.sum(dim=-1, keepdim=True))
    along, mine = (one[..., None].expand(by_head.shape).reshape(products.shape) for one in (along, heads != 0))
    return along, mine
