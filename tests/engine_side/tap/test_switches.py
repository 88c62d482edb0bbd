"""Every key of a configuration that vLLM's code of a family reads: known to change no place, or a switch of ours."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine_side.seams.self_test import check_sums
from engine_side.tap.architectures import ARCHITECTURES, Sum, family_of, find_sums
from engine_side.tap.staging import Staging, allocate
from engine_side.tap.switches import SWITCHES
from schemas.errors import StartError
from tests.support.store_helpers import ROOT
from vllm_tap.serve.model_config import read_config

# With any value of these every place is what the table says: sizes, what a tensor is made of and not where it is, what
# follows the last norm. tests/support/models/families.py sets those that have a value to choose otherwise than usual.
_SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps"}
_PLAIN = _SIZES | {"rope_parameters", "rope_theta", "tie_word_embeddings", "layer_types", "sliding_window",
                   "hidden_act", "attention_bias", "logit_scale"}
_LLAMA = _PLAIN | {"bias", "qkv_bias", "mlp_bias", "target_layer_count"}
_GEMMA = _PLAIN | {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "hidden_activation"}
_MIXTURE = _PLAIN | {"num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
                     "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"}
_QWEN = _PLAIN | {"max_window_layers"}
# By architecture: the modules with its classes, and the keys.
READ: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "LlamaForCausalLM": (("vllm.llama",), _LLAMA),
    # The scaled condition's width; what repacks a checkpoint of Mistral's own format.
    "MistralForCausalLM": (("vllm.llama", "vllm.mistral"), _LLAMA | {"ada_rms_norm_t_cond_dim"}),
    "Qwen2ForCausalLM": (("vllm.qwen2",), _QWEN),
    "Qwen3ForCausalLM": (("vllm.qwen3", "vllm.qwen2"), _QWEN | {"qk_norm"}),  # of the blocks of Qwen2, that it replaces
    "Phi3ForCausalLM": (("vllm.llama", "vllm.phi3"), _LLAMA),
    "Gemma2ForCausalLM": (("vllm.gemma2",), _GEMMA),
    "Gemma3ForCausalLM": (("vllm.gemma3",), _GEMMA | {"rope_local_base_freq"}),
    "MixtralForCausalLM": (("vllm.mixtral",), _MIXTURE),
    "Qwen3MoeForCausalLM": (("vllm.qwen3_moe",), _MIXTURE),
    "OPTForCausalLM": (("vllm.opt",), _PLAIN | {"ffn_dim", "word_embed_proj_dim", "enable_bias", "activation_function",
                                                "layer_norm_elementwise_affine"}),
    "GPTNeoXForCausalLM": (("transformers.gpt_neox",), _PLAIN | {
        "layer_norm_eps", "attention_dropout", "hidden_dropout", "_attn_implementation"}),
}
_NO_KEYS = {"get_text_config"}
_HEADS = ("Classification", "QuestionAnswering")  # classes beside those that generate


def source(module: str) -> str:
    """The code of one of vLLM's models, or of one that it runs by Hugging Face's classes; without importing either."""
    library, _, name = module.partition(".")
    found = importlib.util.find_spec(library)
    assert found is not None and found.origin is not None
    place = f"model_executor/models/{name}.py" if library == "vllm" else f"models/{name}/modeling_{name}.py"
    return (Path(found.origin).parent / place).read_text()


def keys(code: str) -> Iterator[str]:
    """What is read of anything called ``config``, whose class is not one of vLLM's own settings."""
    for top in ast.parse(code).body:
        if isinstance(top, ast.ClassDef) and top.name.endswith(_HEADS):
            continue
        for node in ast.walk(top):
            if isinstance(node, ast.Attribute) and _is_config(node.value):
                yield node.attr
            if (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                    and node.func.id in ("getattr", "hasattr")):
                of, key, *_ = node.args
                if _is_config(of) and isinstance(key, ast.Constant):
                    yield str(key.value)


def _is_config(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("config", "hf_config", "hf_text_config", "text_config")


@pytest.mark.versions
@pytest.mark.parametrize("architecture", READ)
def test_every_key_that_its_code_reads_is_known(architecture: str) -> None:
    modules, harmless = READ[architecture]
    known = harmless | {switch.key for switch in SWITCHES[architecture]} | _NO_KEYS
    read = {key for module in modules for key in keys(source(module))}
    assert len(read & known) > 10, "the reader of code sees nothing"
    assert not (read - known), f"{architecture}: nobody has looked at what these change: {sorted(read - known)}"


def test_every_architecture_has_its_keys_looked_at() -> None:
    assert set(READ) == set(SWITCHES) == set(ARCHITECTURES)


def test_every_switch_is_in_the_docs() -> None:
    limits = (ROOT / "docs/reference/limits.md").read_text()
    assert not [switch.key for of in SWITCHES.values() for switch in of if f"`{switch.key}`" not in limits]


@pytest.mark.parametrize(("architecture", "said", "site", "why"), [
    ("OPTForCausalLM", {"do_layer_norm_before": False}, "resid_mid", "do_layer_norm_before = false: norms follow"),
    ("OPTForCausalLM", {"do_layer_norm_before": False}, "final_norm", "do_layer_norm_before = false"),
    ("OPTForCausalLM", {"_remove_final_layer_norm": True}, "final_norm", "_remove_final_layer_norm = true: no norm"),
    ("GPTNeoXForCausalLM", {}, "resid_mid", "use_parallel_residual = true: attention and MLP read the same"),
    ("MistralForCausalLM", {"llama_4_scaling": {"beta": 0.1}}, "q_rot", "queries are scaled by their position"),
    ("Qwen2ForCausalLM", {"dual_chunk_attention_config": {"chunk_size": 8}}, "q_rot", "dual_chunk_attention_config"),
    *((name, {"is_causal": False}, "", "is_causal = false: tokens attend to later tokens") for name in READ),
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "", "use_bidirectional_attention = true"),
    ("MistralForCausalLM", {"ada_rms_norm_t_cond": True}, "", "ada_rms_norm_t_cond = true"),
    ("Qwen2ForCausalLM", {"qk_norm": True}, "", "qk_norm = true"),
    ("Qwen3ForCausalLM", {"attention_bias": True}, "", "attention_bias = true"),
    ("Qwen3MoeForCausalLM", {"shared_expert_intermediate_size": 64}, "", "shared_expert_intermediate_size = 64"),
])
def test_what_a_configuration_changes_is_refused_before_the_model_is_loaded(
        architecture: str, said: dict[str, object], site: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **said}))
    config = read_config(str(tmp_path), ())
    assert config is not None
    with pytest.raises(StartError) as raised:
        config.check_taps("--arm", [site or "resid_post"], ())
    assert why in str(raised.value) and (not site or f"--arm = {site!r}" in str(raised.value))
    if site:
        config.check_taps("--arm", ["resid_pre.0", "resid_post", "attn_out", "mlp_out"], ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_are_not_the_sum_of_what_went_in_are_seen(dtype: torch.dtype) -> None:
    sums = find_sums(family_of(["LlamaForCausalLM"], {}), LAYERS)
    assert len(sums) == 3 * 2 + 1
    check_sums(right(dtype), sums, 2, "a runner")
    wrong = [("resid_mid", lambda s: s["resid_post"]), ("resid_post", lambda s: s["resid_mid"]),
             ("resid_pre", lambda s: s["resid_pre"].flip(0)), ("mlp_out", lambda s: 0.22 * s["mlp_out"]),
             ("attn_out", lambda s: s["mlp_out"])]
    for site, other in wrong:
        staging = right(dtype)
        staging.buffers[site].copy_(other(staging.buffers).clone())
        with pytest.raises(StartError, match=r"\.[01] is not resid_.*a runner"):
            check_sums(staging, sums, 2, "a runner")


def test_what_a_dummy_step_leaves_in_memory_accuses_nobody() -> None:
    """vLLM's attention returns zeros there, or what the memory had."""
    sums = find_sums(family_of(["LlamaForCausalLM"], {}), LAYERS)
    for left in (0.0, float("nan"), float("inf"), -3.3e38, 1e30):
        staging = right(torch.float32)
        staging.buffers["attn_out"].fill_(left)
        mid = staging.buffers["resid_pre"] + staging.buffers["attn_out"]
        staging.buffers["resid_mid"].copy_(mid)
        staging.buffers["resid_post"].copy_(mid + staging.buffers["mlp_out"])
        staging.buffers["resid_pre"][1].copy_(staging.buffers["resid_post"][0])
        staging.buffers["resid_mid"][1].copy_(staging.buffers["resid_pre"][1] + staging.buffers["attn_out"][1])
        staging.buffers["resid_post"][1].copy_(staging.buffers["resid_mid"][1] + staging.buffers["mlp_out"][1])
        check_sums(staging, sums, 2, "a runner")


def test_sums_are_held_where_a_configuration_has_them() -> None:
    after = family_of(["OPTForCausalLM"], {"do_layer_norm_before": False})
    assert find_sums(after, LAYERS) == [Sum(("resid_pre", 1), (("resid_post", 0),))]
    parallel = find_sums(family_of(["GPTNeoXForCausalLM"], {}), {s: [0] for s in LAYERS if s != "resid_mid"})
    assert parallel == [Sum(("resid_post", 0), (("resid_pre", 0), ("attn_out", 0), ("mlp_out", 0)))]


LAYERS = {site: [0, 1] for site in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")}


def right(dtype: torch.dtype) -> Staging:
    """Two blocks' rows, each sum rounded once as vLLM does."""
    staging, _ = allocate(dict.fromkeys(LAYERS, 64), LAYERS, 4, dtype, torch.device("cpu"), 1 << 20)
    parts, made = staging.buffers, torch.Generator().manual_seed(5)
    stream = torch.randn(4, 64, generator=made).to(dtype)
    for layer in range(2):
        for site in ("attn_out", "mlp_out"):
            parts[site][layer] = 3 * torch.randn(4, 64, generator=made)
        parts["resid_pre"][layer] = stream
        parts["resid_mid"][layer] = parts["resid_pre"][layer].float() + parts["attn_out"][layer].float()
        parts["resid_post"][layer] = parts["resid_mid"][layer].float() + parts["mlp_out"][layer].float()
        stream = parts["resid_post"][layer].clone()
    return staging
