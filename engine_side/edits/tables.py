"""Tables of edits on the device: read by the compiled graph, filled between steps.

A row of a step has a *program*, a number; 0: it is not edited. For each place (site and layer) that is armed, a table
says which slots a program uses there, in the order of the edits; slot 0 changes nothing. A slot has an edit's form and
vector (``schemas.edits``). A negative one, −s, is the first of many, one a row: that of a row is s + its *ordinal*.
Every buffer keeps its address, as CUDA graphs have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from schemas import limits
from schemas.edits import IDENTITY

programs_of_request: Final = 16

Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Pool:
    """Edits of rows of one width: ``vectors`` float32 [slots, width], ``forms`` float32 [slots, 4]."""

    vectors: torch.Tensor
    forms: torch.Tensor


@dataclass(frozen=True, slots=True)
class Size:
    """What there is room for: ``tokens`` rows in a step of ``requests``, with ``depth`` edits of a row at a place, and
    ``rows`` of edits that have one for each position.
    """

    tokens: int
    requests: int
    depth: int
    rows: int

    @property
    def programs(self) -> int:
        """Programs, with that of rows that are not edited."""
        return self.requests * programs_of_request + 1

    @property
    def vectors(self) -> int:
        """Slots of edits with one vector, and slot 0; those of ``rows`` come behind."""
        return self.requests * limits.edits_max + 1


@dataclass(frozen=True, slots=True)
class Tables:
    """``programs`` and ``ordinals`` int32 [tokens], of a step's rows; ``slots`` by place int32 [programs, depth], in
    their order parts of ``every_slot``, so that a request is written at once; ``pools`` by width.

    Requests of one step are at most as many as there is room for, so of programs and vectors it never runs out; the
    front end sees to ``rows`` (``schemas.edits.Edits.rows_kept``).
    """

    size: Size
    programs: torch.Tensor
    ordinals: torch.Tensor
    every_slot: torch.Tensor
    slots: dict[Place, torch.Tensor]
    widths: dict[Place, int]
    pools: dict[int, Pool]


def room(widths: dict[Place, int], size: Size) -> int:
    """Bytes that ``tables`` takes."""
    return (size.tokens * 8 + len(widths) * size.programs * size.depth * 4
            + sum((size.vectors + size.rows) * (width + 4) * 4 for width in set(widths.values())))


def tables(widths: dict[Place, int], size: Size, device: torch.device) -> Tables:
    """Empty tables for places of these widths."""
    slots, identity = size.vectors + size.rows, torch.tensor(IDENTITY, device=device)
    every_slot = torch.zeros(len(widths), size.programs, size.depth, dtype=torch.int32, device=device)
    programs, ordinals = torch.zeros(2, size.tokens, dtype=torch.int32, device=device)
    return Tables(
        size, programs, ordinals, every_slot, dict(zip(widths, every_slot, strict=True)), widths,
        {width: Pool(torch.zeros(slots, width, device=device), identity.repeat(slots, 1))
         for width in set(widths.values())})


def edited(rows: torch.Tensor, programs: torch.Tensor, ordinals: torch.Tensor, slots: torch.Tensor,
           vectors: torch.Tensor, forms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [tokens, width] as they go on, and which of them are edited, bool [tokens, 1]; traced into the graph.

    Rows that are not edited are the same, bit for bit. The arithmetic is float32, rounded once at its end.
    """
    chosen = slots[programs[: rows.shape[0]]]
    now = rows.float()
    for step in range(slots.shape[1]):
        first = chosen[:, step]
        slot = torch.where(first < 0, ordinals[: rows.shape[0]] - first, first)
        vector, form = vectors[slot], forms[slot]
        factor, constant, low, high = form[:, 0:1], form[:, 1:2], form[:, 2:3], form[:, 3:4]
        along = (now * vector).sum(dim=-1, keepdim=True)
        moved = factor * now + (constant + along.clamp(low, high) - along) * vector
        # Nothing of a row that is set stays, be it no number.
        now = torch.where(factor == 0, constant * vector, torch.where(slot[:, None] == 0, now, moved))
    any_slot = (chosen != 0).any(dim=-1, keepdim=True)
    return torch.where(any_slot, now.to(rows.dtype), rows), any_slot
