"""Rows in a recorder's staging that say whose they are, what captures ask of them, and what the sender was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine_side.front.ticket import Ticket
from engine_side.tap.staging import Staging
from engine_side.transport.events import Event, Freed, Lost, Opened, Run
from engine_side.transport.ring import Ring, view
from schemas.ids import new_ulid
from schemas.spec import Armed, intervals, parse_spec, resolve

LAYERS, TOKENS, WIDTH = 3, 64, 16
ARMED = Armed({"resid_post": [0, 1, 2], "mlp_out": [0, 1, 2]}, LAYERS)
SPECS: list[dict[str, object] | None] = [
    None,
    {"codec": "raw"},
    {"codec": "raw", "layers": [1], "sites": ["mlp_out"]},
    {"codec": "raw", "positions": "prompt"},
    {"codec": "raw", "positions": [[0, 2], [9, 14], [20, 21]]},
    {"codec": "raw", "positions": "generated", "layers": [0, 2]},
    {"codec": "raw", "sites": ["mlp_out"]},  # as one above takes beside another site
    {"sites": []},
]
Row = tuple[int, str, int, int]  # request, site, layer, position


def ticket_of(spec: dict[str, object]) -> Ticket:
    """Of a request that asks for that."""
    parsed = parse_spec({**spec, "id": new_ulid()})
    return Ticket(str(parsed.id), parsed.to_json(), resolve(parsed, ARMED), 0, 1, 1)


def wanted(request: int, ticket: Ticket, prompt: int, position: int) -> Iterator[Row]:
    """The rows that a request asks for at a position."""
    asked = ticket.resolved
    if not asked.empty and any(a <= position < b for a, b in intervals(asked.positions, prompt)):
        for site, layers in asked.layers.items():
            yield from ((request, site, layer, position) for layer in layers)


def staging() -> Staging:
    """Empty, of all that is armed."""
    return Staging({site: torch.zeros(LAYERS, TOKENS, WIDTH) for site in ARMED.sites}, ARMED.sites)


def token_of(request: int, position: int) -> int:
    """The id of a request's token."""
    return 1000 * request + position


def number_of(site: str, layer: int, token: int) -> float:
    """What all columns of a token's row are."""
    return token + layer / 4 + (0.125 if site == "mlp_out" else 0.0)


def write(into: Staging, tokens: Sequence[int]) -> None:
    """As the model does in a step of those tokens."""
    for site, buffer in into.buffers.items():
        for layer in range(LAYERS):
            buffer[layer, : len(tokens)] = torch.tensor([number_of(site, layer, token) for token in tokens])[:, None]


@dataclass
class Seen:
    """What the sender was given: every row that was taken, and held against what was written, or named as lost.

    ``full``: nothing is released. Requests are named by their numbers.
    """

    ring: Ring
    full: bool
    rows: Counter[Row] = field(default_factory=Counter)
    others: list[Event] = field(default_factory=list)
    _request_of: dict[int, int] = field(default_factory=dict)

    def take(self, outbox: Any) -> None:
        """All that is in the outbox, but for what is not copied yet."""
        while outbox:
            if isinstance(outbox[0], Run | Freed) and outbox[0].copied > self.ring.shared.over():
                return
            event = outbox.popleft()
            if isinstance(event, Opened):
                self._request_of[event.slot] = int(event.request)
            elif isinstance(event, Lost):
                self.rows.update(
                    (self._request_of[slot], event.entry.site, layer, position) for layer in event.entry.layers
                    for slot, position in zip(event.slot.tolist(), event.position.tolist(), strict=True))
            elif isinstance(event, Run):
                for k in range(event.steps):
                    self._check(event, k)
            elif not isinstance(event, Freed):
                self.others.append(event)
            if isinstance(event, Run | Freed) and not self.full:
                self.ring.shared.tail = event.mark[0]

    def _check(self, run: Run, k: int) -> None:
        n, memory, shift = len(run.slot), self.ring.memory, k * run.stride
        x = view(memory, run.extents["x"][0] + shift, (len(run.entry.layers), n, WIDTH), torch.float32)
        used = view(memory, run.positions + shift, (n,), torch.int64).tolist()
        tokens = view(memory, run.tokens + shift, (n,), torch.int32).tolist()
        assert used == (run.position + k).tolist()
        for i, (slot, position) in enumerate(zip(run.slot.tolist(), used, strict=True)):
            request = self._request_of[slot]
            assert tokens[i] == token_of(request, position)
            for number, layer in enumerate(run.entry.layers):
                assert bool((x[number, i] == number_of(run.entry.site, layer, tokens[i])).all())
                self.rows[request, run.entry.site, layer, position] += 1
