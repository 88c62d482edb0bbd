"""Where the stream between two blocks is read: at the norm that makes the sum, where it is that sum."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.utils import PPMissingLayer

from engine_side.seams.compiled.residuals import at_norms
from engine_side.tap.architectures import ARCHITECTURES, TapPoint, find_adding

LLAMA = ARCHITECTURES["LlamaForCausalLM"]


def model_of(*blocks: bool, last: bool = True) -> nn.Module:
    """A model of blocks, some of which another stage of a pipeline has."""
    def norm() -> RMSNorm:
        made = RMSNorm.__new__(RMSNorm)
        nn.Module.__init__(made)
        return made

    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList()
    for here in blocks:
        block = nn.Module() if here else PPMissingLayer()
        if here:
            block.input_layernorm, block.post_attention_layernorm = norm(), norm()
        model.model.layers.append(block)
    model.model.norm = norm() if last else PPMissingLayer()
    return model


def moved(model: nn.Module, into: str = "stream_in", out: str = "stream_out") -> dict[str, str]:
    """The path of each place of the stream between blocks after they are moved; "" is a block's own call."""
    paths = {id(module): path.removeprefix("model.") for path, module in model.named_modules()}
    here = [layer for layer, block in enumerate(model.model.layers) if not isinstance(block, PPMissingLayer)]
    armed = [TapPoint(site, layer, model.model.layers[layer], rule, 8, "")
             for site, rule in (("resid_pre", into), ("resid_post", out)) for layer in here]
    found = at_norms(armed, find_adding(model, LLAMA))
    assert [(point.site, point.layer) for point in found] == [(point.site, point.layer) for point in armed]
    assert all(point.rule == "second" for point, before in zip(found, armed, strict=True) if point is not before)
    return {f"{point.site}.{point.layer}": paths[id(point.module)] if point is not before else ""
            for point, before in zip(found, armed, strict=True)}


def test_the_norm_of_the_next_block_or_the_final_one_has_the_sum() -> None:
    assert moved(model_of(True, True, True)) == {
        "resid_pre.0": "", "resid_pre.1": "layers.1.input_layernorm", "resid_pre.2": "layers.2.input_layernorm",
        "resid_post.0": "layers.1.input_layernorm", "resid_post.1": "layers.2.input_layernorm", "resid_post.2": "norm"}


def test_what_a_stage_hands_on_is_read_at_its_block() -> None:
    assert moved(model_of(True, True, False, False, last=False)) == {
        "resid_pre.0": "", "resid_pre.1": "layers.1.input_layernorm",
        "resid_post.0": "layers.1.input_layernorm", "resid_post.1": ""}
    assert moved(model_of(False, False, True, True)) == {
        "resid_pre.2": "layers.2.input_layernorm", "resid_pre.3": "layers.3.input_layernorm",
        "resid_post.2": "layers.3.input_layernorm", "resid_post.3": "norm"}


def test_a_model_of_no_table_is_read_there_too_if_it_carries_a_sum() -> None:
    model = model_of(True, True)
    assert moved(model, "arguments hidden_states + residual", "results 0 + 1") == moved(model)
    for into, out in (("argument hidden_states", "result 0"),
                      ("arguments a + b × 0.5", "results 0 + 1 × 0.5")):  # as Granite multiplies
        assert not any(moved(model, into, out).values())
    found = replace(LLAMA, block={}, adding={1: "model.layers.1.input_layernorm", 2: "model.norm", 3: "model.gone"})
    assert find_adding(model, found) == find_adding(model, LLAMA)


def test_other_norms_are_left_alone() -> None:
    assert find_adding(nn.Module(), ARCHITECTURES["OPTForCausalLM"]) == {}
    model = model_of(True, True)
    model.model.layers[1].input_layernorm = nn.LayerNorm(8)  # whose call returns no sum
    assert [place for place, path in moved(model).items() if path] == ["resid_post.1"]
