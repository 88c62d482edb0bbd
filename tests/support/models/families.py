"""Small models of every architecture, with random weights, made by Hugging Face's own classes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.models.common import COMMON, HEADS, TIED
from tests.support.models.imaged import IMAGED, save
from tests.support.models.unlisted import SEVERAL_STREAMS, UNLISTED
from vllm_tap.tiny_model import cache_dir

# All heads have keys of their own: told otherwise, vLLM's attention reads past the projections.
_OWN_KEYS = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "mistral": COMMON,
    "qwen2": COMMON,
    "qwen3": {**COMMON, **HEADS},
    "phi3": COMMON,
    "gemma2": {**COMMON, **HEADS, "query_pre_attn_scalar": 32, "sliding_window": 64, "tie_word_embeddings": True},
    "gemma3_text": {**COMMON, **HEADS, "query_pre_attn_scalar": 32, "sliding_window": 64,
                    "tie_word_embeddings": True,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mixtral": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**COMMON, **HEADS, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
                  "norm_topk_prob": True},
    "opt": {**_OWN_KEYS, "ffn_dim": 192, "word_embed_proj_dim": 128, "init_std": 0.1},
    "gpt_neox": {**_OWN_KEYS, "rotary_pct": 0.5, "use_parallel_residual": True},
}

# What else a configuration of a family may say: the family, and what differs.
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 128}
_WIDE = {"head_dim": 64}  # all heads together are wider than the stream
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3, **TIED,
                                **_WIDE}),
    "mistral, wide heads": ("mistral", {"sliding_window": 32, **_WIDE}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": _YARN, **TIED}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": _YARN, **TIED, **_WIDE}),
    "phi3, half rotary": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 32, **TIED}),
    "gemma2, biases": ("gemma2", {"attention_bias": True, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 100,
                                  "final_logit_softcapping": None, "sliding_window": 32,
                                  "layer_types": ["full_attention", "sliding_attention", "full_attention"], **_WIDE}),
    "gemma3, biases": ("gemma3_text", {"attention_bias": True, "query_pre_attn_scalar": 100, "sliding_window": 32,
                                       "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                                       **_WIDE}),
    "mixtral, one expert": ("mixtral", {"num_experts_per_tok": 1, "sliding_window": 32, **TIED, **_WIDE}),
    "qwen3_moe, dense layers": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False, **TIED, **_WIDE}),
    "qwen3_moe, every second": ("qwen3_moe", {"decoder_sparse_step": 2}),
    # As opt-350m: norms after the additions, embeddings narrower than the stream.
    "opt, norms after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 64}),
    "opt, no last norm": ("opt", {"_remove_final_layer_norm": True, "enable_bias": False, "tie_word_embeddings": True,
                                  "layer_norm_elementwise_affine": False, "activation_function": "gelu"}),
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}),
}

# For engines on two ranks: each gets as many layers, and heads of K/V of its own or one that both have.
OF_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, two K/V heads": ("qwen3", {"num_hidden_layers": 4}),
    "qwen3, one K/V head": ("qwen3", {"num_hidden_layers": 4, "num_key_value_heads": 1}),
    "gemma2, both kinds on each stage": ("gemma2", {"num_hidden_layers": 4}),
}

RECIPE = 1  # part of the cache key: raise it whenever the same configuration would give other weights


def family_model(name: str, dtype: str) -> Path:
    """The folder of a model of this family, or of a configuration of one, made now or taken from the user's cache:
    compiled graphs go by its path.
    """
    family, more = (CONFIGURATIONS | OF_RANKS).get(name, (name, {}))
    unlisted = UNLISTED.get(family)
    said = {**(unlisted.says if unlisted else FAMILIES.get(family) or SEVERAL_STREAMS[family]), **more}
    written, zero = (unlisted.written, unlisted.zero) if unlisted else ({}, "")
    # Biases of a router that Hugging Face keeps as buffers, and begins as zeros.
    biased = [unlisted.grouped] if unlisted and unlisted.grouped else []
    taken = [*IMAGED[family].special.items(), IMAGED[family].published] if family in IMAGED else []
    more_said = [part for part in (written, zero, taken, biased) if part]
    text = json.dumps([RECIPE, said, transformers.__version__, *more_said], sort_keys=True)
    folder = cache_dir() / "families" / f"{family}-{dtype}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as building:
            torch.manual_seed(7)
            config = AutoConfig.for_model(family, **said)
            kind = AutoModelForImageTextToText if family in IMAGED else AutoModelForCausalLM
            model = kind.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for path, parameter in model.named_parameters():
                    if zero and path.endswith(zero):
                        parameter.zero_()
                    elif parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide their use
                        parameter += 0.2 * torch.randn_like(parameter)
                    elif not parameter.isfinite().all() or not parameter.any():  # left as memory was, or as zeros
                        parameter.copy_(0.1 * torch.randn_like(parameter))
                for path, buffer in model.named_buffers():
                    if biased and path.endswith(("e_score_correction_bias", "expert_bias")):
                        buffer += 0.2 * torch.randn_like(buffer)
            model.to(getattr(torch, dtype)).save_pretrained(Path(building) / "model")
            if family in IMAGED:
                save(family, Path(building) / "model")
            described = Path(building) / "model" / "config.json"
            described.write_text(json.dumps({**json.loads(described.read_text()), **written}, indent=2))
            with contextlib.suppress(OSError):  # another process was faster: its files are the same
                (Path(building) / "model").rename(folder)
    return folder
