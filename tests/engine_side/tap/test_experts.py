"""Chosen experts, on a block made like vLLM's: the router's own choice, and nothing where its kernel hides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine_side.seams.tapping import check_ids
from engine_side.tap.architectures import every_point, family_of, find_points
from engine_side.tap.staging import allocate
from engine_side.tap.taps import install
from schemas.errors import StartError

EXPERTS, CHOSEN, TOKENS = 6, 2, 5
NAMES = ["Qwen3MoeForCausalLM"]
FAMILY = family_of(NAMES, {})


class Gate(nn.Module):
    """Passes logits through, as vLLM's linear layers return them: with a bias beside."""

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        return logits, None


class Router:
    """Chooses the *smallest* logits, in no order, so that its choice is told from the largest logits."""

    def __init__(self, n_experts: int) -> None:
        self.top_k, self.global_num_experts = CHOSEN, n_experts

    def _compute_routing(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = (-logits).topk(CHOSEN)
        return weights.flip(-1), ids.flip(-1).int()


class Experts(nn.Module):
    def __init__(self, monolithic: bool, n_experts: int) -> None:
        super().__init__()
        self.router = Router(n_experts)
        self.routed_experts = SimpleNamespace(quant_method=SimpleNamespace(is_monolithic=monolithic))

    def forward(self, logits: torch.Tensor) -> None:
        if not self.routed_experts.quant_method.is_monolithic:
            self.router._compute_routing(logits)


class Block(nn.Module):
    def __init__(self, monolithic: bool, n_experts: int) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate, self.mlp.experts = Gate(), Experts(monolithic, n_experts)

    def forward(self, logits: torch.Tensor) -> None:
        self.mlp.experts(self.mlp.gate(logits)[0])


def model_of(monolithic: bool, n_experts: int = EXPERTS) -> Any:
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([Block(monolithic, n_experts)])
    return model


def test_the_choice_heaviest_first() -> None:
    model = model_of(False)
    points = list(find_points(model, FAMILY, NAMES, ("experts",), 1, 16))
    assert [(p.site, p.layer, p.width, p.ids) for p in points] == [("experts", 0, CHOSEN, EXPERTS)]
    assert "vLLM's router chose" in points[0].meaning
    staging, _ = allocate({"experts": CHOSEN}, {"experts": [0]}, TOKENS, torch.bfloat16, torch.device("cpu"), 1 << 20)
    install(points, staging)
    staging.poison()
    logits = torch.rand(TOKENS, EXPERTS)
    model.model.layers[0](logits)
    assert not staging.unwritten(TOKENS)
    expected = logits.argsort()[:, :CHOSEN]
    assert torch.equal(staging.buffers["experts"][0].long(), expected)


def test_a_choice_that_the_kernel_keeps_to_itself_is_refused_and_never_made_here() -> None:
    model = model_of(True)
    with pytest.raises(StartError, match=r"cannot arm experts on .* \(a kernel .* chooses inside itself .*\); this "
                                         r"model offers: (?!.*\bexperts\b).*router_logits"):
        list(find_points(model, FAMILY, NAMES, ("experts",), 1, 16))
    assert "experts" not in {point.site for point in every_point(model, FAMILY, 16)}
    assert [point.site for point in find_points(model, FAMILY, NAMES, ("router_logits",), 1, 16)] == ["router_logits"]


def test_ids_that_the_models_dtype_cannot_hold_are_refused() -> None:
    points = list(find_points(model_of(False, 258), FAMILY, NAMES, ("experts",), 1, 16))
    for dtype in (torch.float32, torch.float16):
        check_ids(points, dtype)
    with pytest.raises(StartError, match=r"cannot arm experts: .* ids up to 257, .* bfloat16 is exact up to 256 only"):
        check_ids(points, torch.bfloat16)
    check_ids(list(find_points(model_of(False, 257), FAMILY, NAMES, ("experts",), 1, 16)), torch.bfloat16)
