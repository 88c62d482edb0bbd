"""Edits as an engine makes them: where, on which rows, and in which form.

Every operation has one form, of a row x and a vector v. It is computed in float32 and rounded once at the end ::

    y = a·x + (c + clamp(t, low, high) − t)·v        t = x·v.

An edit of some heads has this for each of them alone, in its own columns; the others stay.
"""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash

from schemas.edits.vectors import LARGEST
from schemas.sites import edited_place
from schemas.spec import intervals, merged

__all__ = ["IDENTITY", "REPLACED", "Condition", "Edits", "Form", "Placed", "decode", "encode"]

Form = tuple[float, float, float, float]  # a, c, low, high
IDENTITY: Final[Form] = (1.0, 0.0, -LARGEST, LARGEST)  # the largest is no bound: JSON has no infinity
REPLACED: Final[Form] = (0.0, 1.0, -LARGEST, LARGEST)  # the row is the vector


class Placed(msgspec.Struct, frozen=True):
    """One edit held against an engine; ``vector`` is the digest of its vector, "" where it has none.

    ``form``: a, c, low, high of the module's formula. ``rows``: how many the vector is of, one for each position in
    ascending order; 0: it is one, for every position. ``heads``: edited each alone; none: the whole row. ``when``:
    only while the request's condition says so.
    """

    site: str
    layers: list[int]
    positions: str | list[tuple[int, int]]
    form: tuple[float, float, float, float]
    vector: str
    rows: int = 0
    heads: list[int] = []
    when: bool = False

    @property
    def places(self) -> list[tuple[str, int]]:
        """Site and layer of every tensor that is edited."""
        return [edited_place(self.site, layer) for layer in self.layers]


class Condition(msgspec.Struct, frozen=True):
    """The condition under which a request's conditional edits are made or, with ``stops``, the request ends.

    It watches the score ``column`` of a probe on each row that a token is drawn from. It begins to hold at a score of
    at least ``above``, and no longer holds after one less than ``below`` (None: it holds on). Each change takes effect
    from the next step on.
    """

    probe: str
    column: int
    above: float
    below: float | None
    stops: bool


class Edits(msgspec.Struct, frozen=True, tag="vllm-tap-edit", tag_field="ticket"):
    """All edits of a request in their order, with their vectors: float32, by digest."""

    placed: list[Placed]
    vectors: dict[str, bytes]
    told: str  # as in Manifest.edits, JSON
    condition: Condition | None = None

    @property
    def row_positions(self) -> list[tuple[int, int]]:
        """Positions that have rows of their own in any edit, as sorted, disjoint ranges."""
        return merged(span for one in self.placed if one.rows for span in one.positions if not isinstance(span, str))

    @property
    def rows_each(self) -> int:
        """The number of those positions, and of rows that each edit with rows has a place for."""
        return sum(stop - start for start, stop in self.row_positions)

    @property
    def rows_kept(self) -> int:
        """Rows that an engine keeps for them."""
        return sum(one.rows > 0 for one in self.placed) * self.rows_each

    def salt(self, prompt_len: int) -> str:
        """Text that is equal where the same rows get the same edits: what such requests cached they may share."""
        placed = [(one.places, intervals(one.positions, prompt_len), list(map(repr, one.form)), one.vector, one.heads,
                   one.when) for one in self.placed]
        # What is generated is edited or not by what a condition saw of it, from the end of the prompt on.
        depends = (self.condition, prompt_len) if any(one.when for one in self.placed) else None
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode([placed, depends]))


def encode(edits: Edits) -> str:
    """The JSON text of edits, as it travels in ``SamplingParams.extra_args``."""
    return msgspec.json.encode(edits).decode()


_decoder = msgspec.json.Decoder(Edits)


def decode(text: str) -> Edits:
    """Edits of their JSON text; msgspec.DecodeError on anything else."""
    return _decoder.decode(text)
