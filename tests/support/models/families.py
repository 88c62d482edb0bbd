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
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_tap.tiny_model import cache_dir

_COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}
_HEADS = {"head_dim": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON,
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, **_HEADS},
    "phi3": _COMMON,
    "gemma2": {**_COMMON, **_HEADS, "query_pre_attn_scalar": 32, "sliding_window": 64, "tie_word_embeddings": True},
    "gemma3_text": {**_COMMON, **_HEADS, "query_pre_attn_scalar": 32, "sliding_window": 64,
                    "tie_word_embeddings": True,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mixtral": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_COMMON, **_HEADS, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
                  "norm_topk_prob": True},
    "opt": {**_COMMON, "ffn_dim": 192, "word_embed_proj_dim": 128, "init_std": 0.1},
    # All heads have keys of their own here: told otherwise, vLLM's attention reads past the projections.
    "gpt_neox": {**{key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}, "rotary_pct": 0.5,
                 "use_parallel_residual": True},
}

# What else a configuration of a family may say: the family, and what differs.
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 128}
_TIED = {"tie_word_embeddings": True}
_WIDE = {"head_dim": 64}  # all heads together are wider than the stream
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3, **_TIED,
                                **_WIDE}),
    "mistral, wide heads": ("mistral", {"sliding_window": 32, **_WIDE}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": _YARN, **_TIED}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": _YARN, **_TIED, **_WIDE}),
    "phi3, half rotary": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 32, **_TIED}),
    "gemma2, biases": ("gemma2", {"attention_bias": True, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 100,
                                  "final_logit_softcapping": None, "sliding_window": 32,
                                  "layer_types": ["full_attention", "sliding_attention", "full_attention"], **_WIDE}),
    "gemma3, biases": ("gemma3_text", {"attention_bias": True, "query_pre_attn_scalar": 100, "sliding_window": 32,
                                       "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                                       **_WIDE}),
    "mixtral, one expert": ("mixtral", {"num_experts_per_tok": 1, "sliding_window": 32, **_TIED, **_WIDE}),
    "qwen3_moe, dense layers": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False, **_TIED, **_WIDE}),
    "qwen3_moe, every second": ("qwen3_moe", {"decoder_sparse_step": 2}),
    # As opt-350m: norms after the additions, embeddings narrower than the stream.
    "opt, norms after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 64}),
    "opt, no last norm": ("opt", {"_remove_final_layer_norm": True, "enable_bias": False, "tie_word_embeddings": True,
                                  "layer_norm_elementwise_affine": False, "activation_function": "gelu"}),
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}),
}


_MOE = {"num_local_experts": 8, "num_experts_per_tok": 2}
_THREE = ["sliding_attention", "full_attention", "sliding_attention"]
_LAST = ["sliding_attention", "sliding_attention", "full_attention"]
_SMALL = {"vocab_size": 512, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512, "initializer_range": 0.1,
          "bos_token_id": 1, "eos_token_id": 2}
_GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.05, "residual_multiplier": 0.22,
            "logits_scaling": 4.0}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64}
# Families that are in no table of taps: their sites are found by structure.
UNLISTED: dict[str, dict[str, Any]] = {
    "gpt2": _SMALL,
    "gptj": {**_SMALL, "rotary_dim": 16},
    "granite": {**_COMMON, **_GRANITE},
    "granitemoehybrid": {**_COMMON, **_GRANITE, **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2,
                         "shared_intermediate_size": 96, "layer_types": ["mamba", "mamba", "attention"],
                         "mamba_expand": 2, "position_embedding_type": "rope"},
    "olmo2": _COMMON,
    "olmo3": {**_COMMON, "sliding_window": 64},
    "olmoe": {**_COMMON, "num_experts": 8, "num_experts_per_tok": 2},
    "smollm3": _COMMON,
    "stablelm": _COMMON,
    "starcoder2": _COMMON,
    "falcon": {**{key: value for key, value in _COMMON.items() if key not in ("intermediate_size",
                                                                              "num_key_value_heads")},
               "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "bias": False,
               "alibi": False},
    "falcon_h1": {**_COMMON, **_HEADS, **_MAMBA, "mamba_d_ssm": 256},
    "phi": _COMMON,
    "cohere2": {**_COMMON, "sliding_window": 64, "layer_types": _THREE},
    "glm4": {**_COMMON, **_HEADS, "partial_rotary_factor": 0.5},
    "glm4_moe": {**_COMMON, **_HEADS, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                 "first_k_dense_replace": 1, "moe_intermediate_size": 96, "n_shared_experts": 1},
    "gpt_oss": {**_COMMON, **_HEADS, **_MOE, "sliding_window": 64, "layer_types": _THREE},
    "llama4_text": {**_COMMON, **_HEADS, "intermediate_size_mlp": 192, "num_local_experts": 4,
                    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 128},
    "gemma4_text": {**_COMMON, **_HEADS, "tie_word_embeddings": True, "sliding_window": 64, "layer_types": _LAST,
                    "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32,
                    "global_head_dim": 32},
    "exaone4": {**_COMMON, "sliding_window": 64, "layer_types": _LAST},
    "ernie4_5": {**_COMMON, **_HEADS},
    "seed_oss": {**_COMMON, **_HEADS},
    "nemotron": {**_COMMON, **_HEADS, "partial_rotary_factor": 0.5},
    "nemotron_h": {**_COMMON, **_HEADS, "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-",
                   "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "expand": 2,
                   "chunk_size": 64},
    "bloom": {"vocab_size": 512, "hidden_size": 128, "n_layer": 3, "n_head": 4, "initializer_range": 0.1,
              "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    # Four streams a token, of which a block is given all.
    "gemma3n_text": {**_COMMON, **_HEADS, "intermediate_size": [192, 192, 192], "tie_word_embeddings": True,
                     "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32, "laurel_rank": 16,
                     "num_kv_shared_layers": 0, "sliding_window": 64, "activation_sparsity_pattern": [0.0, 0.0, 0.0],
                     "layer_types": _LAST},
}


RECIPE = 1  # part of the cache key: raise it whenever the same configuration would give other weights


def family_model(name: str, dtype: str) -> Path:
    """The folder of a model of this family, or of a configuration of one, made now or taken from the user's cache:
    compiled graphs go by its path.
    """
    family, more = CONFIGURATIONS.get(name, (name, {}))
    said = {**(FAMILIES.get(family) or UNLISTED[family]), **more}
    text = json.dumps([RECIPE, said, transformers.__version__], sort_keys=True)
    folder = cache_dir() / "families" / f"{family}-{dtype}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as building:
            torch.manual_seed(7)
            config = AutoConfig.for_model(family, **said)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide their use
                        parameter += 0.2 * torch.randn_like(parameter)
                    elif not parameter.isfinite().all() or not parameter.any():  # left as memory was, or as zeros
                        parameter.copy_(0.1 * torch.randn_like(parameter))
            model.to(getattr(torch, dtype)).save_pretrained(Path(building) / "model")
            with contextlib.suppress(OSError):  # another process was faster: its files are the same
                (Path(building) / "model").rename(folder)
    return folder
