"""Sums of blocks as wide as real models' are: there, rows before a norm have nearly one length."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine_side.discovery.calls import Call, Value
from engine_side.discovery.identities import ROUNDINGS, Explained, Ways, explain
from engine_side.discovery.parts import Parts

ROWS, WIDTH = 8, 2048


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))


def block(share: float, length: float) -> tuple[torch.Tensor, torch.Tensor, list[Call]]:
    """The stream before and after a block that adds an attention's rows and an MLP's, both normed; its calls.

    ``length``: of the rows before their norm, all but equal. ``share``: what is added, of the stream.
    """
    draws = torch.Generator().manual_seed(3)

    def rounded(made: torch.Tensor) -> torch.Tensor:
        return made.to(torch.bfloat16).double()

    def rows(size: float) -> torch.Tensor:
        lengths = size * (1 + 0.01 * torch.randn(ROWS, 1, generator=draws))
        return rounded(torch.randn(ROWS, WIDTH, generator=draws) * lengths)

    def normed(raw: torch.Tensor) -> torch.Tensor:
        return rounded(raw / raw.square().mean(-1, keepdim=True).sqrt())

    calls, added = [], []
    for at, name in enumerate(("attention", "mlp")):
        raw = rows(length)
        added.append(normed(raw))
        calls += [Call(name, nn.Identity(), 4 * at, None, [], ended=4 * at + 1, made=[Value("result 0", raw)]),
                  Call(f"post_{name}", Norm(), 4 * at + 2, None, [Value("argument x", raw)], ended=4 * at + 3,
                       made=[Value("result 0", added[-1])])]
    pre = rows(1 / share)
    return pre, rounded(pre + added[0] + added[1]), calls


def explained(pre: torch.Tensor, post: torch.Tensor, calls: list[Call], factors: tuple[float, ...] = (1.0,)
              ) -> Explained | str:
    tolerance = ROUNDINGS[torch.bfloat16]
    return explain(pre, post, calls, "", tolerance, Ways(
        lambda call: call.path == "attention", lambda *_: Parts({}, {}),
        lambda found: next((one for one in factors if abs(found - one) <= 10 * tolerance * one), None)), {})


@pytest.mark.parametrize(("share", "length"), [(1.0, 0.3), (1.0, 0.9), (1.0, 1.1), (1.0, 2.0), (0.2, 0.3), (0.2, 2.0)])
def test_what_is_added_is_what_the_norm_has_made(share: float, length: float) -> None:
    """Also where a multiple of what the norm was given is as near as rounding is: a small share, not of length one."""
    found = explained(*block(share, length))
    assert isinstance(found, Explained), found
    assert [term.places[0].path for term in found.terms] == ["post_attention", "post_mlp"]
    assert [place.path for term in found.terms for place in term.raw] == ["attention", "mlp"]


def test_where_both_are_within_rounding_nothing_is_told() -> None:
    assert explained(*block(0.02, 1.0)) == "its addition to the stream can be explained in 4 ways"


def test_a_factor_that_no_configuration_states_decides_nothing() -> None:
    pre, post, calls = block(0.2, 0.5)
    assert explained(pre, post, calls, factors=()) == "its addition to the stream can be explained in 3 ways"
