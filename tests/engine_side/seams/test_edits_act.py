"""The self-test of edits: what they do to a step is told from what it does by itself, or the engine does not start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode

from engine_side.edits import places
from engine_side.edits.editor import Editor
from engine_side.edits.tables import Size, tables
from engine_side.seams.patching import wrap
from engine_side.seams.runner import check_fills
from engine_side.seams.self_test import check_edits
from engine_side.seams.tapping import _check_parallel
from engine_side.tap.architectures import TapPoint
from schemas.errors import StartError

WIDTH, ROWS = 16, 2
CHANCE = torch.Generator().manual_seed(5)


class Block(nn.Module):
    """A residual block whose kernel adds ``noise`` of chance: rounding in another order at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(WIDTH, WIDTH), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        return x + made + self.noise * torch.randn(made.shape, generator=CHANCE)


class Model(nn.Module):
    """Two blocks and a norm, with ``resid_post`` of both armed for edits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(WIDTH)
        self.start, self.steps = torch.randn(ROWS, WIDTH), 0
        self.after: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, rows: rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.steps += 1
        return self.after(self.steps, self.norm(x))


def armed(model: Model) -> tuple[Any, Any]:
    """A runner of a model, and the worker with its editor."""
    points = [TapPoint("resid_post", layer, block, "result", WIDTH, "") for layer, block in enumerate(model.blocks)]
    made = tables({(point.site, point.layer): WIDTH for point in points}, Size(4, 2, 2, 3), {}, torch.device("cpu"))
    places.keep(model, made)
    places.edit_results(points, made)
    return (SimpleNamespace(_dummy_run=lambda rows: (model(model.start[:rows]),)),
            SimpleNamespace(model=model, editor=Editor(made)))


def noisy(model: Model) -> None:
    model.blocks[1].noise = 1e-3  # type: ignore[assignment]


def sometimes_noisy(model: Model) -> None:
    """The last step is the only one that rounds otherwise: one unit of float32."""
    model.after = lambda step, rows: rows * (1 + 2e-7) if step == 8 else rows


def no_numbers_at_first(model: Model) -> None:
    """What is set behind the weights that are none is a number again."""
    model.blocks[0].linear.weight.data[3] = torch.nan  # type: ignore[union-attr]


@pytest.mark.parametrize("chance", [lambda model: None, noisy, sometimes_noisy, no_numbers_at_first],
                         ids=["none", "noisy", "sometimes_noisy", "no_numbers_at_first"])
def test_edits_that_act_are_told_from_noise(chance: Callable[[Model], None]) -> None:
    chance(model := Model())
    runner, worker = armed(model)
    check_edits(runner, worker, "a runner")
    assert model.steps == 8 and not worker.editor.tables.programs.any()


@pytest.mark.parametrize(("chance", "said"), [
    (lambda model: None, r"edits of resid_post.0 do not act.*; looked at it"),
    (noisy, r"cannot prove that edits of resid_post.0 act: .* moved by .* with edits of it, and by .* without; "),
], ids=["none", "noisy"])
def test_edits_that_do_nothing_are_not_taken_for_noise(chance: Callable[[Model], None], said: str,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_put_back", lambda module, call, result: result)
    chance(model := Model())
    with pytest.raises(StartError, match=said):
        check_edits(*armed(model), "a runner")


def test_edits_of_one_row_of_two_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    right = places._put_back
    monkeypatch.setattr(places, "_put_back", lambda module, call, result: torch.cat(
        [result[:1], right(module, call, result)[1:]]))
    with pytest.raises(StartError, match=r"edits of resid_post.0 do not act"):
        check_edits(*armed(Model()), "a runner")


@pytest.mark.parametrize("often", [1, 3])
def test_where_there_are_no_numbers_nothing_is_proved(often: int) -> None:
    """Of weights that are none, and of a kernel that hands on memory as it finds it in some steps."""
    model = Model()
    model.after = lambda step, rows: rows * torch.nan if step % often == 0 else rows
    with pytest.raises(StartError, match=r"cannot prove that edits of resid_post.0 act: .*leave resid_post.0 out"):
        check_edits(*armed(model), "a runner")


def test_an_edit_that_stays_is_seen() -> None:
    model = Model()
    runner, worker = armed(model)
    model.after = lambda step, rows: rows + 0.01 if step == 8 else rows
    with pytest.raises(StartError, match="does not return the same rows as before"):
        check_edits(runner, worker, "a runner")


def test_a_runner_with_ways_of_its_own_gets_no_edits() -> None:
    """One that calls vLLM's own and then lays out otherwise cannot be told from one that does not."""
    class Runner:
        def execute_model(self) -> None:
            pass

        def _prepare_inputs(self) -> None:
            pass

        def sample_tokens(self) -> None:
            pass

    class Newer:
        def execute_model(self) -> None:
            pass

        def prepare_inputs(self) -> None:
            pass

        def sample_tokens(self) -> None:
            pass

    for kind in (Runner, Newer):
        names = set(vars(kind)) & {"execute_model", "_prepare_inputs", "prepare_inputs", "sample_tokens"}
        for name in names:
            wrap(kind, name, lambda original: lambda self: original(self))
        for name in names:
            own = type("Special", (kind,), {name: lambda self: None})
            with pytest.raises(StartError, match=f"Special: its {name} is not that of vLLM's GPUModelRunner"):
                check_fills(own())
        check_fills(type("Special", (kind,), {"more": print})())
    with pytest.raises(StartError, match="its prepare_inputs is not"):
        check_fills(type("Another", (), {"execute_model": Runner.execute_model, "lay_out": print})())


def test_a_deep_sleep_takes_nothing_of_the_tables() -> None:
    """vLLM gives away what was allocated while a model was loaded, and puts back what its modules have as buffers."""
    model = Model()
    _, worker = armed(model)
    made = worker.editor.tables
    kept = [getattr(part, field.name) for part in (made, *made.pools.values()) for field in fields(part)]
    tensors = [each for each in kept if isinstance(each, torch.Tensor)]
    for number, each in enumerate(tensors):
        each.copy_((torch.arange(each.numel()).view(each.shape) + number) % 101)
    before = [each.clone() for each in tensors]
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for each in tensors:
        each.fill_(77)
    for name, buffer in model.named_buffers():
        buffer.data.copy_(saved[name])
    for each, right in zip(tensors, before, strict=True):
        assert torch.equal(each, right)
    assert not any("vllm_tap" in name for name in model.state_dict()), "they would be taken for weights"


def test_a_quantized_layer_is_given_rows_not_codes() -> None:
    """In an fp8 model vLLM's activation hands codes to a layer that takes them, which nobody can edit."""
    activations = pytest.importorskip("vllm.model_executor.layers.fusion.quant_activation")
    get_input_quant_key = getattr(activations, "get_input_quant_key", None)
    if get_input_quant_key is None:
        pytest.skip("nothing of this vLLM hands on codes: 0.27")
    linear = nn.Linear(WIDTH, WIDTH)
    linear._input_quant_key = "fp8"  # type: ignore[assignment]  # as vLLM's kernels say that they take them
    assert get_input_quant_key(linear) is not None
    points = [TapPoint("mlp_post", 0, linear, "operand", WIDTH, "")]
    places.edit_arguments(points, tables({("mlp_post", 0): WIDTH}, Size(4, 2, 2, 3), {}, torch.device("cpu")))
    assert get_input_quant_key(linear) is None


@pytest.mark.parametrize(("cache", "parallel", "said"), [
    ({"kv_sharing_fast_prefill": True}, {}, "kv_sharing_fast_prefill: some layers .*; switch it off"),
    ({}, {"use_ubatching": True}, "dual-batch overlap .*; switch it off"),
    ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size=2: each rank has only its share of z; probe or edit other"),
    ({}, {"data_parallel_size": 2}, "data_parallel_size=2: .* edits are not tested in such steps; leave --edit"),
    ({}, {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2: each rank has only its share"),
])
def test_a_step_whose_rows_are_not_those_of_its_tokens_is_refused(cache: dict[str, Any], parallel: dict[str, Any],
                                                                   said: str) -> None:
    plain = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "data_parallel_size": 1, "use_ubatching": False}
    plan: Any = SimpleNamespace(touched=["z"], asked={}, probes={}, family=object(),
                                config=SimpleNamespace(edit=("z",)))

    def start(cache: dict[str, Any], parallel: dict[str, Any]) -> None:
        _check_parallel(plan, SimpleNamespace(cache_config=SimpleNamespace(**cache), speculative_config=None,
                                              parallel_config=SimpleNamespace(**{**plain, **parallel}),
                                              device_config=SimpleNamespace(device_type="cuda")))

    start({}, {})
    with pytest.raises(StartError, match=said):
        start(cache, parallel)


@pytest.mark.parametrize("site", ["mix_in", "mix_steps", "mix_post"])
def test_a_rank_has_its_share_of_what_is_inside_of_a_mixer(site: str) -> None:
    """A model with mixers is in no table, and the search of a rank sees its own columns alone."""
    plan: Any = SimpleNamespace(touched=[site], asked={site: None}, probes={}, family=None,
                                config=SimpleNamespace(edit=()))
    parallel = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=2, use_ubatching=False,
                               data_parallel_size=1)
    with pytest.raises(StartError, match=f"=2: each rank has only its share of {site}; arm other sites, or run on one"):
        _check_parallel(plan, SimpleNamespace(cache_config=None, parallel_config=parallel, speculative_config=None))


@pytest.mark.parametrize(("chosen", "refused"), [("enable_sp", True), ("fuse_gemm_comms", True),
                                                 ("fuse_norm_quant", False)])
def test_steps_whose_rows_ranks_share_out_are_refused(chosen: str, refused: bool) -> None:
    plan: Any = SimpleNamespace(touched=["resid_mid"], asked={}, probes={}, family=object(),
                                config=SimpleNamespace(edit=()))
    parallel = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=2, use_ubatching=False,
                               data_parallel_size=1)
    passes = SimpleNamespace(**{chosen: True})
    with pytest.raises(StartError, match=r"sequence parallelism .*; switch it off") if refused else nullcontext():
        _check_parallel(plan, SimpleNamespace(cache_config=None, parallel_config=parallel, speculative_config=None,
                                              compilation_config=SimpleNamespace(pass_config=passes)))


@pytest.mark.parametrize("site", ["router_logits", "experts"])
@pytest.mark.parametrize(("more", "said"), [
    ({"data_parallel_size": 2}, "data_parallel_size=2: .* sites than {site}, or set data_parallel_size to 1"),
    ({"data_parallel_size": 4, "tensor_parallel_size": 2, "use_sequence_parallel_moe": True}, "data_parallel_size=4: "),
    ({"tensor_parallel_size": 2, "use_sequence_parallel_moe": True}, "enable_expert_parallel .* sites than {site}, or"),
    ({"tensor_parallel_size": 2, "enable_expert_parallel": True, "use_sequence_parallel_moe": False}, ""),
    ({"tensor_parallel_size": 2}, ""),
])
def test_what_a_router_says_is_refused_where_it_sees_other_rows(site: str, more: dict[str, Any], said: str) -> None:
    def start(*touched: str) -> None:
        plan: Any = SimpleNamespace(touched=touched, asked={}, probes={}, family=object(),
                                    config=SimpleNamespace(edit=()))
        parallel = SimpleNamespace(**{"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "data_parallel_size": 1,
                                      "use_ubatching": False, **more})
        _check_parallel(plan, SimpleNamespace(cache_config=None, parallel_config=parallel, speculative_config=None,
                                              device_config=SimpleNamespace(device_type="cpu"),
                                              compilation_config=SimpleNamespace(pass_config=SimpleNamespace())))

    start("resid_post", "mlp_out")
    with pytest.raises(StartError, match=said.format(site=site)) if said else nullcontext():
        start("resid_post", site)


@pytest.mark.parametrize(("more", "said"), [
    ({"speculative_config": SimpleNamespace(method="ngram")}, "no drafter .* leave speculative_config out"),
    ({"lora_config": object(), "device": "cpu"}, "vLLM's CPU build ends with adapters .* leave enable_lora out"),
    ({"lora_config": object(), "edit": ("resid_post",)}, "edits beside adapters .* leave enable_lora out"),
    ({"kinds": ["full_attention", "sliding_attention"]},
     r"stage 1 has layers 1 to 1 \(sliding_attention\).* set cudagraph_mode to PIECEWISE"),
    ({"kinds": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]},
     r"stage 0 has layers 0 to 1 \(sliding_attention\)"),
    ({"kinds": ["full_attention", "linear_attention"] * 2}, r"layers 0 to 1 \(full_attention, linear_attention\)"),
    ({"data_parallel_size": 2}, "with data_parallel_size=2: .* set one of them to 1"),
])
def test_what_was_not_shown_on_the_stages_of_a_pipeline_is_refused(more: dict[str, Any], said: str) -> None:
    def start(**more: Any) -> None:
        plan: Any = SimpleNamespace(touched=["q"], asked={}, probes={}, family=object(),
                                    config=SimpleNamespace(edit=more.get("edit", ())))
        parallel = SimpleNamespace(
            pipeline_parallel_size=2, tensor_parallel_size=1, use_ubatching=False,
            data_parallel_size=more.get("data_parallel_size", 1))
        _check_parallel(plan, SimpleNamespace(
            cache_config=None, parallel_config=parallel, speculative_config=more.get("speculative_config"),
            lora_config=more.get("lora_config"), device_config=SimpleNamespace(device_type=more.get("device", "cuda")),
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(layer_types=more.get("kinds")),
                                         get_total_num_hidden_layers=lambda: len(more["kinds"])),
            compilation_config=SimpleNamespace(
                pass_config=SimpleNamespace(),
                cudagraph_mode=CUDAGraphMode[more.get("graphs", "FULL_AND_PIECEWISE")])))

    start()
    start(edit=("resid_post",))
    start(lora_config=object())
    start(kinds=["full_attention", "full_attention"])
    start(kinds=["full_attention", "sliding_attention"] * 2)
    start(kinds=["sliding_attention", "full_attention", "full_attention", "full_attention"])
    start(kinds=["full_attention", "sliding_attention"], device="cpu")
    start(kinds=["full_attention", "sliding_attention"], graphs="PIECEWISE")
    with pytest.raises(StartError, match=f"pipeline_parallel_size=2.* {said}"):
        start(**more)
