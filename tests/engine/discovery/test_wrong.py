"""Wrong identifications on purpose: a table that calls rows what they are not ends the start, on real models of vLLM.

Each case is the table's entry for a family with one place exchanged; all are held against one loaded model.
"""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_side.discovery.calls import Call
from engine_side.discovery.discover import Discovery
from engine_side.seams.recorded_step import discover, prove
from engine_side.tap.architectures import ARCHITECTURES, Family, ModulePath, family_of, find_adding
from schemas.errors import StartError
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, in_this_process, shut_down
from tests.support.models.families import family_model

pytestmark = [pytest.mark.skipif(ON_GPU, reason="the model is in another process there")]

Wrong = tuple[str, str, str, str]  # what is wrong, the site, the path and the rule that are taken for it
LLAMA: list[Wrong] = [
    ("hidden alone, without the residual", "resid_pre", "", "argument hidden_states"),
    ("the residual alone, a sublayer behind", "resid_pre", "", "argument residual"),
    ("the first norm's result", "resid_pre", "input_layernorm", "result"),
    ("what the block returns", "resid_pre", "", "stream_out"),
    ("hidden alone", "resid_post", "", "result 0"),
    ("a stale residual", "resid_post", "", "result 1"),
    ("twice the stream", "resid_post", "", "results 0 + 0"),
    ("what the block is given", "resid_post", "", "stream_in"),
    ("the stream before attention", "resid_mid", "input_layernorm", "second"),
    ("what the second norm is given, without the residual", "resid_mid", "post_attention_layernorm", "argument x"),
    ("the normed stream", "resid_mid", "post_attention_layernorm", "result"),
    ("the MLP's", "attn_out", "mlp", "result"),
    ("a half of it, as of one rank of two", "attn_out", "self_attn", "result 0 × 0.5"),
    ("one in a hundred too much", "attn_out", "self_attn", "result 0 × 1.01"),
    ("zeros", "attn_out", "self_attn", "result 0 × 0.0"),
    ("before the output projection", "attn_out", "self_attn.o_proj", "operand"),
    ("attention's", "mlp_out", "self_attn", "result"),
    ("what the MLP is given", "mlp_out", "mlp", "argument x"),
    ("with the wrong sign", "mlp_out", "mlp", "result 0 × -1.0"),
    ("what it makes", "mlp_post", "mlp.down_proj", "result"),
    ("the gate's half of the joint projection", "mlp_post", "mlp.gate_up_proj", "result 0 columns 0:192"),
    ("keys and some queries", "q", "self_attn.qkv_proj", "result 0 columns 64:192"),
    ("rotated queries", "q", "self_attn.attn", "query"),
    ("values", "k", "self_attn.qkv_proj", "v"),
    ("rotated keys", "k", "self_attn.attn", "key"),
    ("keys", "v", "self_attn.qkv_proj", "k"),
    ("queries before the rotation", "q_rot", "self_attn.qkv_proj", "q"),
    ("keys before the rotation", "k_rot", "self_attn.qkv_proj", "k"),
    ("values for keys", "k_rot", "self_attn.attn", "argument value"),
    ("queries", "z", "self_attn.qkv_proj", "q"),
    ("behind the output projection", "z", "self_attn.o_proj", "result"),
    ("rows of the output table", "embed", "model.norm", "result"),
    ("the stream before the norm", "final_norm", "model.norm", "second"),
]
GEMMA: list[Wrong] = [
    ("raw for as added", "attn_out", "self_attn", "result"),
    ("raw for as added", "mlp_out", "mlp", "result"),
    ("as added for raw", "attn_out_raw", "post_attention_layernorm", "result"),
    ("as added for raw", "mlp_out_raw", "post_feedforward_layernorm", "result"),
    ("what the norm behind attention is given", "resid_mid", "post_attention_layernorm", "argument x"),
]


class Models:
    """One loaded model at a time, without taps."""

    def __init__(self) -> None:
        self.family, self.llm = "", None

    def of(self, family: str) -> tuple[Any, Any]:
        """The model of a family and what vLLM runs it with."""
        from vllm import LLM

        if family != self.family:
            self.close()
            with in_this_process():
                self.llm, self.family = LLM(str(family_model(family, DTYPE)), dtype=DTYPE, skip_tokenizer_init=True,
                                            max_model_len=64, max_num_seqs=2, enforce_eager=True, **SHARED), family
        core: Any = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        runner = core.model_executor.driver_worker.model_runner
        return runner.get_model(), runner.vllm_config

    def close(self) -> None:
        if self.llm is not None:
            shut_down(self.llm)
        self.family, self.llm = "", None


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_TAP_ENDPOINT", raising=False)
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        kept = Models()
        yield kept
        kept.close()


def family_on(config: Any) -> Family:
    """The table's family of a model, its switches turned as the configuration says."""
    return family_of(config.model_config.architectures, config.model_config.hf_text_config)


def exchanged(family: Family, site: str, path: str, rule: str) -> Family:
    """The family with another place for a site."""
    side = "block" if site in family.block else "model"
    return replace(family, **{side: {**getattr(family, side), site: ModulePath(path, rule, "wrong on purpose")}})


@pytest.mark.parametrize(("family", "cases"), [("qwen3", LLAMA), ("gemma2", GEMMA)])
def test_a_table_that_is_wrong_ends_the_start(family: str, cases: list[Wrong], models: Models) -> None:
    model, config = models.of(family)
    started: list[Wrong] = []
    for wrong in cases:
        _, site, path, rule = wrong
        try:
            prove(model, config, exchanged(family_on(config), site, path, rule))
        except StartError as error:
            assert re.search(rf"do not match the table of architectures: .*\b{site}", str(error)), wrong
        else:
            started.append(wrong)
    assert started == []
    assert not any("forward" in vars(module) for module in model.modules())


def test_another_layers_rows_end_the_start(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer late: each claim of a block is made of the next one's modules."""
    import engine_side.seams.recorded_step as recorded_step

    model, config = models.of("gemma2")
    every = recorded_step.every_point

    def late(*args: Any) -> Iterator[Any]:
        for point in every(*args):
            yield replace(point, layer=point.layer + 1)

    monkeypatch.setattr(recorded_step, "every_point", late)
    with pytest.raises(StartError, match=r"\.1 is of block 0"):
        prove(model, config, family_on(config))


def test_a_switch_that_the_table_overlooks_ends_the_start(models: Models) -> None:
    """As opt-350m: norms follow the additions, and the place of resid_mid holds the stream after the MLP."""
    model, config = models.of("opt, norms after")
    with pytest.raises(StartError, match=r"resid_mid\.0 differs by .* from the sum of its parts"):
        prove(model, config, ARCHITECTURES["OPTForCausalLM"])
    held = prove(model, config, family_on(config))  # against its own sums alone
    assert held.proofs == () and held.unproved == "looked for one module that embeds the tokens, found none"


WIDE, KEPT_MAX = 8192, 64 << 20  # as wide as a model of 70 billion parameters, and what the search may keep beside it


def test_the_search_keeps_the_rows_of_two_blocks_at_most(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of tensors that were not there before, as each block ends, for a model of many more blocks than two."""
    import engine_side.seams.recorded_step as recorded_step

    model, config = models.of("qwen3")
    before, kept = tensors(), list[int]()

    class Measured(Discovery):
        def _block_ended(self, block: Call, inside: list[Call]) -> None:
            super()._block_ended(block, inside)
            kept.append(sum(size for place, size in tensors().items() if place not in before))

    monkeypatch.setattr(recorded_step, "Discovery", Measured)
    prove(model, config, family_on(config))
    width = config.model_config.get_hidden_size()
    assert len(kept) == 3 and 0 < max(kept) * WIDE / width <= KEPT_MAX
    gc.collect()
    left = sum(size for place, size in tensors().items() if place not in before)
    assert left * WIDE / width < KEPT_MAX / 100, left


def tensors() -> dict[int, int]:
    """Bytes of the memory of every tensor of this process, by its place."""
    found = [one.untyped_storage() for one in gc.get_objects() if issubclass(type(one), torch.Tensor)
             and one.device.type == "cpu" and one.layout == torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_the_table_is_proved(family: str, models: Models, caplog: pytest.LogCaptureFixture,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the search finds is what the table says, and the start says so."""
    monkeypatch.setattr(logging.getLogger("vllm.tap"), "propagate", True)
    model, config = models.of(family)
    with caplog.at_level(logging.INFO, "vllm.tap"):
        found = prove(model, config, family_on(config))
    assert "proved by structure: attn_out" in caplog.text
    proved = caplog.text.rpartition("proved by structure: ")[2].strip().split(", ")
    there = {site for site in (*family_on(config).block, *family_on(config).model)
             if site not in ("mlp_post",) or family == "gemma2"}
    assert there - set(proved) == set()
    assert {proof.site for proof in found.proofs} == set(proved) and found.unproved == ""
    assert all(proof.off is None or proof.off < 1e-6 for proof in found.proofs)
    norms = find_adding(model, family_on(config))
    assert len(norms) == 3 and norms == find_adding(model, discover(model, config)), "where the stream is read"
