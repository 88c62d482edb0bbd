"""Places to edit: where changed rows go back to, and where nothing can be put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_side.edits.places import call_of
from engine_side.edits.tables import ALONE, WHOLE, edited
from engine_side.tap.architectures import TapPoint
from schemas.edits.resolved import IDENTITY
from schemas.errors import StartError

PROJECTION = SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=8)
MOST = IDENTITY[3]


def point(rule: str, site: str = "attn_out", source: str = "structure") -> TapPoint:
    return TapPoint(site, 1, PROJECTION, rule, 16, "", source=source)


@pytest.mark.parametrize(("rule", "site", "source"), [
    ("result 0 × 0.22", "attn_out", "structure"),  # of the rows that go back some have no number that makes them
    ("results 0 + 1 × 0.22", "attn_out", "structure"),
    ("written output", "attn_out", "structure"),
    ("argument input", "resid_mid", "structure"),  # nothing shows that the stream goes on with that tensor
    ("result 1", "resid_mid", "structure"),
    ("second", "resid_mid", "structure"),
    ("result", "resid_mid", "table"),
    ("choice", "experts", "table"),
])
def test_rows_that_do_not_go_back_are_refused_by_name(rule: str, site: str, source: str) -> None:
    with pytest.raises(StartError, match=rf"{site}\.1 cannot be edited in this model: its rows are .*; leave it out"):
        call_of(point(rule, site, source))


@pytest.mark.parametrize(("rule", "site", "given", "parts", "columns"), [
    ("q", "q", 0, (0,), (0, 32)), ("k", "k", 0, (0,), (32, 48)), ("v", "v", 0, (0,), (48, 64)),
    ("result 0 columns 8:24", "v", 0, (0,), (8, 24)),
    ("query", "q_rot", 1, (), None), ("argument key", "k_rot", 1, (), None),
    ("stream_in", "resid_pre", 2, (), None), ("arguments a + b", "resid_pre", 2, (), None),
    ("second", "resid_mid", 2, (), None), ("results 1 + 0", "resid_post", 0, (1, 0), None),
])
def test_rows_go_back_to_where_they_are_from(rule: str, site: str, given: int, parts: Any, columns: Any) -> None:
    call = call_of(point(rule, site, "table"))
    assert (len(call.given), call.parts, call.columns, call.in_place) == (given, parts, columns, False)


def test_a_tensor_that_goes_on_besides_is_changed_itself() -> None:
    assert call_of(point("argument", "resid_mid", "table")).in_place
    assert not call_of(point("argument", "resid_pre", "table")).in_place


@pytest.mark.parametrize("op", ["whole", "alone"])
def test_heads_are_edited_each_alone(op: str) -> None:
    """Two heads of four, against the formula in float64; the others keep their bits, rows that are no numbers too."""
    chance = torch.Generator().manual_seed(1)
    rows, vectors = (torch.randn(count, 16, generator=chance) for count in (3, 2))
    rows[1, 3] = torch.nan  # of a head that is not edited
    forms = torch.tensor([IDENTITY, (0.5, 2.0, -0.1, 0.1)])
    heads = torch.full((2, 4), WHOLE, dtype=torch.int8)
    if op == "alone":
        heads[1] = torch.tensor([0, ALONE, 0, ALONE])
    programs, ordinals = torch.tensor([0, 1, 1], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    slots = torch.tensor([[0], [1]], dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int32)
    now, chosen = edited(rows, programs, ordinals, slots, vectors, forms, counts, heads)
    assert chosen.flatten().tolist() == [False, True, True] and torch.equal(now[0], rows[0])
    assert int(counts[1]) == 2
    parts, v = rows[2].double().view(4, 4), vectors[1].double().view(4, 4)
    along = (parts * v).sum(-1, keepdim=True)
    if op == "whole":
        along = along.sum().expand(4, 1)
    right = 0.5 * parts + (2.0 + along.clamp(-0.1, 0.1) - along) * v
    found = now[2].view(4, 4)
    for head in range(4):
        if op == "whole" or head % 2:
            assert torch.allclose(found[head].double(), right[head], atol=1e-6)
        else:
            assert torch.equal(found[head], rows[2].view(4, 4)[head])
    assert bool(now[1].isfinite().all()) is False
    if op == "alone":
        assert bool(now[1, 4:].isfinite().all()) and torch.equal(now[1, 8:12], rows[1, 8:12])
