"""Edits by the operation of GPUs in a graph that Inductor has compiled: the same numbers as run line by line.

Inductor takes an operation that changes a part of a tensor for one that changes memory of its own, and of two parts of
one tensor it gets that memory wrong (torch 2.11 and 2.13): rows are read beyond their end.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch._inductor import config

from engine_side.edits import in_graph, places
from engine_side.edits.tables import Size, Tables, tables
from engine_side.tap.architectures import TapPoint
from engine_side.tap.staging import allocate
from engine_side.tap.taps import install
from tests.engine_side.tap.test_written_in_place import HIDDEN, QKV, TOKENS, Attention, attend

LAYERS = 2
HEADS = {32: 4, 16: 2}
EDITED = slice(3, 6)  # rows of a step of 11


class Rotated(Attention):
    """Queries and keys reach attention as they left the projection: parts of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attending()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.attn(*self.qkv_proj(x).split(list(QKV.values()), dim=-1)))


class Attending(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value)


class Blocks(nn.Module):
    def __init__(self, kind: type[Attention]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def edited_by(places_: Iterable[TapPoint]) -> Tables:
    """Tables of a step whose rows ``EDITED`` get a number added at every place."""
    made = tables({(point.site, point.layer): point.width for point in places_}, Size(TOKENS, 2, 2, 8), HEADS,
                  torch.device("cpu"))
    made.programs[EDITED] = 1
    made.every_slot[:, 1, 0] = 1
    for pool in made.pools.values():
        pool.forms[1], pool.vectors[1] = torch.tensor([1.0, 1.0, 0.0, 0.0]), 3
    return made


@pytest.mark.parametrize("tapped", [False, True])
@pytest.mark.parametrize(("kind", "path", "rules"), [
    (Attention, "qkv_proj", ("q", "k", "v")), (Attention, "qkv_proj", ("k", "v")),
    (Attention, "qkv_proj", ("result 0 columns 0:32", "", "result 0 columns 48:64")),
    (Rotated, "attn", ("query", "key")),
])
@torch.inference_mode()
def test_several_parts_of_one_tensor(kind: type[Attention], path: str, rules: tuple[str, ...], tapped: bool,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_graph, "DEVICES", {"cpu"})
    torch.manual_seed(0)
    model = Blocks(kind).eval().float()
    hidden = torch.randn(11, HIDDEN)
    plain = model(hidden)

    def points(sites: Iterable[tuple[str, str]]) -> list[TapPoint]:
        return [TapPoint(site, number, layer.get_submodule("qkv_proj" if rule in QKV else path), rule, QKV[site], "")
                for site, rule in sites if rule for number, layer in enumerate(model.layers)]

    edited = points(zip(rules if set(rules) <= set(QKV) else QKV, rules, strict=False))
    made = edited_by(edited)
    staging, _ = allocate(QKV, {site: list(range(LAYERS)) for site in QKV}, TOKENS, torch.float32,
                          torch.device("cpu"), 1 << 20)
    places.edit_results(edited, made)
    if tapped:
        install(points(zip(QKV, QKV, strict=True)), staging)
    places.edit_arguments(edited, made)

    seen = []
    for run in (model, torch.compile(model, dynamic=True, fullgraph=True)):
        torch._dynamo.reset()
        made.counts.zero_()
        with config.patch(enable_auto_functionalized_v2=False, emulate_precision_casts=True):  # as vLLM compiles
            seen.append((run(hidden), {site: rows[:, :11].clone() for site, rows in staging.buffers.items()},
                         made.counts.clone()))
    (result, rows, counts), (compiled, rows_compiled, counts_compiled) = seen
    off = (result - plain).abs().amax(dim=-1)
    assert off[EDITED].min() > 0.01 and off[: EDITED.start].max() == off[EDITED.stop :].max() == 0
    torch.testing.assert_close(compiled, result, rtol=1e-5, atol=1e-5)
    assert counts[:-1, 1].tolist() == [3] * len(edited) and torch.equal(counts, counts_compiled)
    for site, buffer in rows.items():
        torch.testing.assert_close(rows_compiled[site], buffer, rtol=1e-5, atol=1e-5)
        assert bool(buffer.any()) == tapped, site


class Norm(nn.Module):
    """A norm of the sum of two tensors, which it computes in float32, as vLLM's own does."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        summed = hidden.float() + residual.float()
        return (summed * summed.pow(2).mean(dim=-1, keepdim=True).rsqrt()).to(hidden.dtype)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden + 1, residual * 2)  # type: ignore[no-any-return]


@torch.inference_mode()
def test_an_edited_sum_is_rounded_before_it_goes_on() -> None:
    """In bfloat16 on a CPU: a row set to itself, as it was captured, gives the bits of one that is multiplied by 1."""
    torch.manual_seed(0)
    model, row = Normed().eval(), 4
    point = TapPoint("resid_post", 0, model.norm, "argument hidden + residual", HIDDEN, "")
    made = tables({("resid_post", 0): HIDDEN}, Size(TOKENS, 2, 2, 8), {}, torch.device("cpu"))
    made.programs[row] = made.every_slot[0, 1, 0] = 1
    places.edit_arguments([point], made)
    torch._dynamo.reset()
    run, (pool,) = torch.compile(model, dynamic=True, fullgraph=True), made.pools.values()
    hidden, residual = (torch.randn(11, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
    seen = []
    for form, vector in (([1.0, 0.0, 0.0, 0.0], torch.zeros(HIDDEN)),
                         ([0.0, 1.0, 0.0, 0.0], ((hidden + 1) + residual * 2)[row].float())):
        pool.forms[1], pool.vectors[1] = torch.tensor(form), vector
        with config.patch(enable_auto_functionalized_v2=False):
            seen.append(run(hidden, residual))
    assert torch.equal(*seen)
    assert made.counts[0, 1] == 2
