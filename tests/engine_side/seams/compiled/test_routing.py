"""Routers that the compiled model misleads are found, however their kernel reads, and left as they were."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from engine_side.seams.compiled.routing import check_routing, padded
from schemas.errors import StartError

EXPERTS, CHOSEN, ROWS = 6, 2, 5


class Router:
    """Chooses the largest logits, of rows as they lie in memory where it reads as vLLM's kernel does."""

    def __init__(self, n_experts: int, reads_strides: bool) -> None:
        self.global_num_experts, self.reads_strides = n_experts, reads_strides

    def _compute_routing(self, hidden_states: torch.Tensor, router_logits: torch.Tensor, indices_type: Any = None,
                         *, input_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.reads_strides:
            router_logits = router_logits.as_strided(router_logits.shape, (router_logits.shape[1], 1))
        return router_logits.topk(CHOSEN)  # type: ignore[return-value]


class Model(nn.Module):
    """A layer with a router, whose logits are ``wide`` in memory."""

    def __init__(self, wide: int, reads_strides: bool, n_experts: int = EXPERTS) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.router = Router(n_experts, reads_strides)  # type: ignore[assignment]
        self.wide, self.n_experts = wide, n_experts

    def forward(self) -> torch.Tensor:
        logits = torch.zeros(ROWS, self.wide)  # as on the first token of a dummy step, whose embedding may be nothing
        router: Any = self.experts.router
        ids: torch.Tensor = router._compute_routing(
            torch.zeros(ROWS, 1), router_logits=logits[:, : self.n_experts], indices_type=None, input_ids=None)[1]
        return ids


def checked(model: Model, armed: list[str]) -> None:
    check_routing(padded(model), model, armed)


def test_a_misled_router_whose_sites_are_armed_is_refused_with_the_setting_that_helps() -> None:
    with pytest.raises(StartError, match=r"wrong experts in experts.*shape_padding.*do not arm router_logits, experts"):
        checked(Model(8, reads_strides=False), ["router_logits", "experts"])


def test_a_misled_router_is_told_of_where_its_sites_are_not_armed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.tap"):
        checked(Model(8, reads_strides=False), [])
    assert "wrong experts in experts" in caplog.text


@pytest.mark.parametrize(("wide", "reads_strides"), [(6, False), (6, True), (8, True)])
def test_a_router_that_reads_what_it_is_given_starts(wide: int, reads_strides: bool, caplog: pytest.LogCaptureFixture
                                                      ) -> None:
    with caplog.at_level(logging.WARNING, "vllm.tap"):
        checked(Model(wide, reads_strides), ["experts"])
    assert not caplog.text


@pytest.mark.parametrize("wide", [6, 8])
def test_the_router_is_what_it_was_and_chose_as_it_does(wide: int) -> None:
    model = Model(wide, reads_strides=False)
    model.again = nn.Module()
    model.again.router = model.experts.router  # a second layer with the same
    before = model()
    found: list[torch.Tensor] = []
    check_routing(padded(model), lambda: found.append(model()), [])
    assert len(found) == 1 and torch.equal(found[0], before) and torch.equal(model(), before)
    assert "_compute_routing" not in vars(model.experts.router)


def test_numbers_of_experts_that_are_never_padded_cost_no_step() -> None:
    assert padded(Model(8, reads_strides=False, n_experts=8)) == {}
