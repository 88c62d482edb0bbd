"""Models that are in no table: their sites are found as the engine starts, and rows are those of Hugging Face.

``make test`` has a few families of different structure, ``make soak K=discovery`` all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from schemas.read.reader import StoreReader
from tests.support.engines.engines import DTYPE, ON_GPU, Engine, in_this_process
from tests.support.models.families import UNLISTED, family_model

pytestmark = pytest.mark.timeout(600)

STREAM = ("resid_pre", "resid_post", "embed", "final_norm")
EVERY = (*STREAM, "resid_mid", "attn_out", "mlp_out")
PARALLEL = (*STREAM, "attn_out", "mlp_out")
NORMED = (*EVERY, "attn_out_raw", "mlp_out_raw")
# What a family has besides the stream, where that is not all.
SITES = {
    **dict.fromkeys(UNLISTED, EVERY),
    **dict.fromkeys(("gptj", "falcon", "phi", "cohere2", "nemotron_h"), PARALLEL),
    **dict.fromkeys(("olmo2", "olmo3", "glm4", "exaone4"), NORMED),
    "gemma4_text": (*STREAM, "resid_mid", "attn_out", "attn_out_raw"),
    "granitemoehybrid": (*STREAM, "resid_mid", "attn_out"),
    "falcon_h1": (*STREAM, "mlp_out"),
}
# What of Hugging Face's modules makes a term, and what it is multiplied by; Llama's names elsewhere.
MADE: dict[str, tuple[str, str, float]] = {
    "gpt2": ("attn", "mlp", 1), "gptj": ("attn", "mlp", 1), "granite": ("self_attn", "mlp", 0.22),
    "falcon": ("self_attention", "mlp", 1), "bloom": ("", "", 1), "granitemoehybrid": ("", "", 1),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), ("post_attention_layernorm", "post_feedforward_layernorm", 1)),
    "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm", 1), "nemotron_h": ("", "", 1),
    "llama4_text": ("self_attn", "feed_forward", 1), "falcon_h1": ("", "feed_forward", 1),
    "gemma4_text": ("post_attention_layernorm", "", 1),
}
# vLLM's own differences: another form of GELU, another order of a scan.
TOLERANCE = {"bloom": 1e-3, "nemotron_h": 1e-3, "granitemoehybrid": 1e-3, "falcon_h1": 1e-3}
FAST = ("gpt2", "granite", "glm4")
BY_TRANSFORMERS = ("olmo2", "olmo3", "smollm3", "starcoder2", "phi", "seed_oss")
PROMPTS = [[(7 * token + 11 * seed) % 490 + 8 for token in range(length)] for seed, length in enumerate((21, 5, 40))]


class Reference:
    """Hugging Face's own forward: what its blocks are given and return, and what its modules make inside them."""

    def __init__(self, family: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(family_model(family, DTYPE), dtype=torch.float32,
                                                          attn_implementation="eager").eval()
        self.rows_of: dict[tuple[str, int], torch.Tensor] = {}
        layers = self.model.config.get_text_config().num_hidden_layers
        (self.blocks,) = [module for path, module in self.model.named_modules()
                          if isinstance(module, torch.nn.ModuleList) and len(module) == layers and "mlp" not in path]
        attention, mlp, self.factor = MADE.get(family, ("self_attn", "mlp", 1.0))
        for layer, block in enumerate(self.blocks):
            block.register_forward_pre_hook(self._given(layer), with_kwargs=True)
            for site, path in (("attn_out", attention), ("mlp_out", mlp)):
                if path:
                    block.get_submodule(path).register_forward_hook(self._made(site, layer))

    def _given(self, layer: int) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            self.rows_of["resid_pre", layer] = (args[0] if args else kwargs["hidden_states"])[0].clone()
        return hook

    def _made(self, site: str, layer: int) -> Any:
        def hook(_module: Any, _args: Any, result: Any) -> None:
            rows = result[0] if isinstance(result, tuple) else result
            self.rows_of[site, layer] = self.factor * rows.reshape(-1, rows.shape[-1])
        return hook

    def rows(self, tokens: list[int]) -> dict[tuple[str, int], Any]:
        """By site and layer, as far as Hugging Face shows them."""
        self.rows_of.clear()
        with torch.inference_mode():
            base = getattr(self.model, "model", self.model.base_model)
            made = base(torch.tensor([tokens]))
            self.rows_of["final_norm", 0] = made.last_hidden_state[0]
            self.rows_of["embed", 0] = self.model.get_input_embeddings().weight[torch.tensor(tokens)]
        for layer in range(1, len(self.blocks)):
            self.rows_of["resid_post", layer - 1] = self.rows_of["resid_pre", layer]
        return {key: rows.numpy() for key, rows in self.rows_of.items()}


@pytest.fixture(params=[family if family in FAST else pytest.param(family, marks=pytest.mark.soak)
                        for family in SITES if family != "gemma3n_text"])
def started(request: pytest.FixtureRequest, reader: StoreReader) -> Iterator[tuple[str, Engine]]:
    """An engine with every site of a family armed."""
    from vllm import LLM

    family = request.param
    memory: dict[str, Any] = {"gpu_memory_utilization": 0.3} if ON_GPU else {}
    with pytest.MonkeyPatch.context() as patch, in_this_process(not ON_GPU and family not in BY_TRANSFORMERS):
        patch.setenv("VLLM_TAP_ARM", ",".join(SITES[family]))
        llm = LLM(str(family_model(family, DTYPE)), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256,
                  max_num_seqs=8, max_num_batched_tokens=64, seed=0, **memory)
    engine = Engine(llm, reader, None)  # type: ignore[arg-type]
    try:
        yield family, engine
    finally:
        engine.close()


def test_rows_are_those_of_hugging_face(started: tuple[str, Engine]) -> None:
    """Of chunked prompts and what follows them; what a block adds is what it adds there, term by term."""
    family, engine = started
    reference = Reference(family)
    tolerance = 0.1 if ON_GPU else TOLERANCE.get(family, 1e-4)
    info = engine.reader.engine()
    assert info is not None and info.sources == dict.fromkeys(SITES[family], "structure")
    captures = engine.run(PROMPTS, [{"max_tokens": 6, "ignore_eos": True}] * 3, [{"codec": "raw"}] * 3)
    for captured in captures:
        assert captured.manifest.status == "complete"
        assert {row.site for row in captured.manifest.rows} == set(SITES[family])
        length = len(captured.tokens) - 1
        held = {(row.site, row.layer): engine.reader.slice(captured.id, row.site, [row.layer], 0, length).values()[0]
                for row in captured.manifest.rows}
        wanted = reference.rows(list(captured.tokens[:-1]))
        assert {site for site, _ in wanted} >= set(STREAM)
        worst = {key: float(np.abs(held[key] - rows).max()) / max(1.0, float(np.abs(rows).max()))
                 for key, rows in wanted.items() if key in held}
        assert max(worst.values()) <= tolerance, worst
        for (site, layer), rows in held.items():
            if site == "resid_mid":
                assert np.abs(held["resid_pre", layer] + held["attn_out", layer] - rows).max() < 10 * tolerance


def test_a_model_of_several_streams_is_refused(reader: StoreReader) -> None:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    with pytest.MonkeyPatch.context() as patch, in_this_process(not ON_GPU):
        patch.setenv("VLLM_TAP_ARM", "resid_post")
        with pytest.raises(Exception, match=r"sites are not found by structure: nothing that model\.layers\.0 returns"):
            LLM(str(family_model("gemma3n_text", DTYPE)), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256,
                max_num_seqs=8, seed=0)
        cleanup_dist_env_and_memory()  # what the start had begun in this process: the next engine's is another
