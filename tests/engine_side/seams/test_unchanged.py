"""What vLLM looks at in a tapped model is as it was: classes of layers, of routers, of how they are quantized."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine_side.seams import loader, projections, unchanged
from engine_side.seams.ranks.tensor import fingerprint
from engine_side.tap import taps
from engine_side.tap.architectures import TapPoint
from engine_side.tap.staging import Staging, allocate
from schemas.errors import StartError
from tests.engine_side.seams.test_projections import Attention
from tests.engine_side.tap.test_experts import model_of
from tests.engine_side.tap.test_written_in_place import TOKENS, WIDTHS, Model
from tests.engine_side.tap.test_written_in_place import tapped as tapped_model


@pytest.fixture
def staging() -> Staging:
    return allocate({"z": 4}, {"z": [0]}, TOKENS, torch.float32, torch.device("cpu"), 1 << 20)[0]


def test_no_tap_changes_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to take rows, those that read staging and write into it among them."""
    model = Model()
    before = unchanged.classes(model)
    tapped_model(model, True, monkeypatch)
    assert unchanged.classes(model) == before and ("model.layers.1.self_attn.qkv_proj" in before)
    unchanged.check_classes(before, model)


@pytest.mark.parametrize("rule", [rule for rule, made in taps.RULES.items() if made.method == "forward"])
def test_no_rule_changes_a_class(rule: str, staging: Staging) -> None:
    layer = nn.Linear(4, 4)
    taps.install([TapPoint("z", 0, layer, rule, 4, "")], staging)
    assert type(layer) is nn.Linear and isinstance(layer.forward, MethodType)


def test_a_tapped_router_is_what_it_was() -> None:
    router = model_of(monolithic=False).model.layers[0].mlp.experts.router
    kind = type(router)
    experts, _ = allocate({"experts": 2}, {"experts": [0]}, TOKENS, torch.float32, torch.device("cpu"), 1 << 20)
    taps.install([TapPoint("experts", 0, router, "choice", 2, "")], experts)
    assert type(router) is kind


def test_another_class_ends_the_start() -> None:
    model = Attention()
    before = unchanged.classes(model)
    model.qkv_proj.__class__ = type("Projection", (type(model.qkv_proj),), {})
    with pytest.raises(StartError, match=r"qkv_proj is .* with taps and .* would serve adapters, quantize or load"):
        unchanged.check_classes(before, model)


def test_a_layer_that_took_a_tapped_ones_place_ends_the_start(staging: Staging) -> None:
    """As vLLM's layers with adapters would, were they made after the taps."""
    model = Attention()
    points = [TapPoint(site, 0, model.qkv_proj, site, 1, "") for site in ("q", "k")]
    homes = unchanged.homes(model, points)
    unchanged.check_homes(homes, model)
    around = nn.Identity()
    around.base_layer = model.qkv_proj
    model.qkv_proj = around
    with pytest.raises(StartError, match=r"replaced qkv_proj, a Projection with taps of q\.0, k"):
        unchanged.check_homes(homes, model)


def test_taps_go_into_the_layer_with_adapters_and_know_the_models_own_inside() -> None:
    """Versions of vLLM differ in whether such a layer answers for the one inside."""
    from engine_side.tap.architectures import _part, _width

    inner, around = Attention().qkv_proj, nn.Module()
    around.base_layer = inner
    model = nn.Module()
    model.qkv_proj = around
    assert _part(model, "qkv_proj") is around and _part(model, "qkv_proj.weight") is inner.weight
    assert [_width(around, rule, 1) for rule in "qkv"] == list(WIDTHS[site] for site in "qkv")
    joint = torch.arange(3.0 * sum(WIDTHS[site] for site in "qkv")).view(3, -1)
    rows = [taps.RULES[rule].rows(around, (joint, None)) for rule in "qkv"]
    assert torch.equal(torch.cat(rows, -1), joint) and torch.equal(taps.RULES["qkv"].rows(around, joint), joint)


def test_a_model_is_the_same_one_with_and_without_layers_for_adapters() -> None:
    model, config = Attention(), SimpleNamespace(hf_config=SimpleNamespace(to_json_string=str))
    before = fingerprint(model, config)
    around = nn.Module()
    around.base_layer = model.qkv_proj
    model.qkv_proj = around
    assert fingerprint(model, config) == before
    around.base_layer.weight.data += 1
    assert fingerprint(model, config) != before


def test_a_projection_with_adapters_is_copied() -> None:
    """They add to the product, and hand it the layer inside, which has no staging."""
    around = SimpleNamespace(base_layer=SimpleNamespace(), quant_method=None)
    assert not projections._plain(around)


def test_a_forward_that_puts_itself_back_is_refused(staging: Staging) -> None:
    """Offloaded weights: vLLM's forward would drop a tap that lies around it in the first call."""
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(StartError, match=r"a Linear, because vLLM replaces its forward in every call.*cpu_offload_gb"):
        taps.install([TapPoint("z", 0, layer, "argument", 4, "")], staging)


def test_an_engine_whose_model_nobody_tapped_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of vLLM's loaders do not come by the seam."""
    def worker(load_format: str) -> Any:
        return SimpleNamespace(vllm_config=SimpleNamespace(load_config=SimpleNamespace(load_format=load_format)))

    monkeypatch.delenv("VLLM_TAP_ENDPOINT", raising=False)  # of an engine that this process had before
    monkeypatch.setattr(loader.worker, "CURRENT", None)
    start = loader._warm_up(lambda self: "warm")
    assert start(worker("tensorizer")) == "warm"  # nothing is armed
    monkeypatch.setenv("VLLM_TAP_ENDPOINT", "ipc:///nowhere")
    with pytest.raises(StartError, match="load_format=tensorizer: the model was loaded without taps"):
        start(worker("tensorizer"))
