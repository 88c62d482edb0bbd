"""Small configurations of every architecture: one rule for all, and a table of what differs.

A configuration of Hugging Face's or vLLM's own class gets the sizes below in those fields that it has; where there is
no class, it is a plain one, of Llama's fields and of what vLLM's code reads besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tests.support.models.unlisted import UNLISTED

# By the name of a field; a configuration that has the field gets the number.
SMALL: Final[dict[str, Any]] = {
    "vocab_size": 512, "hidden_size": 128, "n_embd": 128, "d_model": 128, "word_embed_proj_dim": 128,
    "intermediate_size": 192, "ffn_dim": 192, "ffn_hidden_size": 192, "intermediate_size_mlp": 192,
    "shared_intermediate_size": 96, "prefix_dense_intermediate_size": 192,
    "num_hidden_layers": 3, "n_layer": 3, "n_layers": 3, "num_layers": 3,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512, "model_max_length": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.1, "init_std": 0.1, "sliding_window": 64,
    # experts
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96, "moe_shared_expert_intermediate_size": 96,
    "expert_ffn_hidden_size": 96, "n_group": 2, "topk_group": 1, "num_expert_group": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "decoder_sparse_step": 1, "num_nextn_predict_layers": 0,
    # attention on latents; the CPU's kernel takes 512 + 64 alone
    "q_lora_rank": 48, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
    "qk_head_dim": 96,
    # layers without attention
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64,
    "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 64,
    "mamba_d_ssm": 256, "mamba_expand": 2, "state_size": 16, "mamba_dt_rank": 8, "time_step_rank": 8,
    # what would not be seen were it one
    "embedding_multiplier": 6.0, "attention_multiplier": 0.05, "residual_multiplier": 0.22, "logits_scaling": 4.0,
    # Gemma
    "query_pre_attn_scalar": 32, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32,
    "laurel_rank": 16, "num_kv_shared_layers": 0,
}

# What a plain configuration has: Llama's fields.
PLAIN: Final[dict[str, Any]] = {
    **{name: SMALL[name] for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
        "initializer_range")},
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class Differs:
    """What an architecture's configuration needs besides.

    ``model_type``: its type, where Hugging Face's list of models does not name one. ``said``: fields, and what they
    are. ``written``: fields of config.json that vLLM reads and the class does not write. ``dtype``: of the model.
    ``zero``: the end of the names of parameters that are zeros, since vLLM's CPU build leaves them out.
    ``reference``: whether Hugging Face's model of the type, where there is one, is the same model.
    """

    model_type: str = ""
    said: dict[str, Any] | None = None
    written: dict[str, Any] | None = None
    dtype: str = "float32"
    zero: str = ""
    reference: bool = True


_HEADS: Final = {"head_dim": 32}
_MOE: Final = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "num_shared_experts": 1,
               "moe_shared_expert_intermediate_size": 96, "norm_topk_prob": True, "first_k_dense_replace": 1}
_ROUTED: Final = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_shared_experts": 1,
                  "norm_topk_prob": True, "first_k_dense_replace": 1}
_LATENT: Final = {"q_lora_rank": 48, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
                  "v_head_dim": 32}
_BAILING: Final = {**_MOE, **_HEADS, "embedding_dropout": 0.0, "use_bias": False, "use_qkv_bias": False,
                   "norm_head": False}
_GROUPS: Final = {"n_group": 2, "topk_group": 1, "score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_CHATGLM: Final = {"padded_vocab_size": 512, "kv_channels": 32, "multi_query_attention": True,
                   "multi_query_group_num": 2, "seq_length": 512, "add_qkv_bias": True, "original_rope": True,
                   "tie_word_embeddings": False}
_SIGMOID: Final = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_MIMO: Final = {
    "hybrid_layer_pattern": [1, 1, 0], "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32,
    "swa_v_head_dim": 32, "v_head_dim": 32, "swa_rope_theta": 10000.0, "sliding_window_size": 64, "sliding_window": 64,
    "layernorm_epsilon": 1e-5, "moe_layer_freq": [0, 1, 1], "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 96, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "n_group": 1, "topk_group": 1, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
_TWO: Final = ["sliding_attention", "sliding_attention", "full_attention"]

# Models that take images, by the families of tests/support/models: vLLM starts them where torchvision is installed.
WRAPPERS: Final = {
    "Gemma3ForConditionalGeneration": "gemma3", "Mistral3ForConditionalGeneration": "mistral3",
    "Qwen2VLForConditionalGeneration": "qwen2_vl", "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
}

DIFFERS: Final[dict[str, Differs]] = {
    "AfmoeForCausalLM": Differs(written={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}),
    # Hugging Face's has no norm behind the MLP of its dense layer.
    "AXK1ForCausalLM": Differs(said={"num_key_value_heads": 4}, reference=False),
    "BailingMoeForCausalLM": Differs("bailing_moe", _BAILING),
    "BailingMoeV2ForCausalLM": Differs("bailing_moe_v2", {**_BAILING, **_GROUPS, "use_qk_norm": True,
                                                         "use_rmsnorm": True, "partial_rotary_factor": 0.5}),
    "BailingMoeV2_5ForCausalLM": Differs("bailing_hybrid", {**_BAILING, **_GROUPS, **_LATENT, "layer_group_size": 3,
                                                           "num_key_value_heads": 4, "group_norm_size": 1,
                                                           "use_qk_norm": True, "rope_interleave": True}),
    "BailingMoeV3ForCausalLM": Differs("bailing_moe_v3", {**_BAILING, **_GROUPS, **_LATENT, "layer_group_size": 3,
                                                         "num_key_value_heads": 4, "short_conv_kernel_size": 4,
                                                         "no_kda_lora": True}),
    "ChatGLMModel": Differs("chatglm", _CHATGLM),
    "ChatGLMForConditionalGeneration": Differs("chatglm", _CHATGLM),
    "DeciLMForCausalLM": Differs("nemotron-nas", {"block_configs": [
        {"attention": {"no_op": False, "replace_with_linear": False, "n_heads_in_group": 2},
         "ffn": {"no_op": False, "replace_with_linear": False, "ffn_mult": 1.0}},
        {"attention": {"no_op": True, "replace_with_linear": False, "n_heads_in_group": None},
         "ffn": {"no_op": False, "replace_with_linear": False, "ffn_mult": 2.0}},
        {"attention": {"no_op": False, "replace_with_linear": False, "n_heads_in_group": 2},
         "ffn": {"no_op": False, "replace_with_linear": False, "ffn_mult": 1.0}}]}),
    "DeepseekForCausalLM": Differs("deepseek", _ROUTED),
    "DeepseekV2ForCausalLM": Differs(said={"num_key_value_heads": 4, "topk_method": "group_limited_greedy"}),
    "DeepseekV3ForCausalLM": Differs(said={"num_key_value_heads": 4}, written=_SIGMOID),
    "DeepseekV4ForCausalLM": Differs(written={"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "Ernie4_5_MoeForCausalLM": Differs(zero=UNLISTED["ernie4_5_moe"].zero),
    "ExaoneForCausalLM": Differs("exaone", {"activation_function": "silu", "layer_norm_epsilon": 1e-6}),
    "ExaoneMoEForCausalLM": Differs("exaone_moe"),
    "FalconForCausalLM": Differs(said={"new_decoder_architecture": False, "multi_query": True, "ffn_hidden_size": 512,
                                       "num_kv_heads": 1}),
    "Rnj1ForCausalLM": Differs("gemma3_text"),
    "Gemma4ForCausalLM": Differs(said={"num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
                                       "layer_types": _TWO, "global_head_dim": 32}),
    "Glm4MoeForCausalLM": Differs(said=_HEADS),
    "Glm4MoeLiteForCausalLM": Differs(said={"first_k_dense_replace": 1, "num_key_value_heads": 4}),
    "GPTJForCausalLM": Differs(said={"rotary_dim": 16}),
    "HYV3ForCausalLM": Differs(written={"first_k_dense_replace": 1, "expert_hidden_dim": 96, "route_norm": True,
                                        "qk_norm": True}),
    "InternLM2ForCausalLM": Differs("internlm2"),
    "InternLM3ForCausalLM": Differs("internlm3", {"bias": False, "qkv_bias": False, **_HEADS}),
    "IQuestCoderForCausalLM": Differs("iquestcoder", _HEADS),
    "IQuestLoopCoderForCausalLM": Differs("iquestloopcoder", {**_HEADS, "loop_num": 2, "loop_window_size": 64,
                                                              "sliding_window": None, "max_window_layers": 3}),
    "K2HorizonForCausalLM": Differs("k2_horizon", {
        **_MOE, **_HEADS, "attention_gate_func": "sigmoid", "decoder_sparse_step": 1, "mlp_only_layers": [],
        "layernorm_num_groups": 1, "moe_gate_bias": True, "mova_num_experts": 4, "mova_num_experts_per_tok": 2,
        "query_key_norm": True, "rope_head_dim": 16, "router_scaling_factor": 1.0, "router_score_func": "sigmoid"}),
    "Llama4ForCausalLM": Differs("llama4_text", {"num_experts_per_tok": 1}),
    "LLaMAForCausalLM": Differs("llama"),
    "Lfm2ForCausalLM": Differs(said={"layer_types": ["conv", "conv", "full_attention"], "block_ff_dim": 192,
                                     "block_auto_adjust_ff_dim": False}, written={"conv_dim": 128,
                                                                                  "conv_dim_out": 128,
                                                                                  "block_dim": 128}),
    "Lfm2MoeForCausalLM": Differs(said={"layer_types": ["conv", "conv", "full_attention"]}),
    "LongcatFlashForCausalLM": Differs(said={"num_key_value_heads": 4, "zero_expert_num": 2}, written={
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"}, reference=False),
    "Mamba2ForCausalLM": Differs(said={"num_heads": 8, "head_dim": 32}),
    "MiniCPMForCausalLM": Differs("minicpm", {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64,
                                              "num_experts": 0}),
    "MistralLarge3ForCausalLM": Differs("deepseek_v3", {"num_key_value_heads": 4}, _SIGMOID),
    "MiMoForCausalLM": Differs("mimo", {"sliding_window": None, "num_nextn_predict_layers": 0, "head_dim": 32}),
    # vLLM's router for the CPU knows softmax alone, which Hugging Face's model has not.
    "MiniMaxM2ForCausalLM": Differs(said={**_HEADS, "rotary_dim": 16}, written={"scoring_func": "softmax"},
                                    reference=False),
    "MiMoV2FlashForCausalLM": Differs(said=UNLISTED["mimo_v2_flash"].says, written=UNLISTED["mimo_v2_flash"].written),
    "MiMoV2ForCausalLM": Differs("mimo_v2", {**_HEADS, **_MIMO}),
    "MuseGlimmerForCausalLM": Differs("muse_glimmer_text"),
    "NemotronHForCausalLM": Differs(said={"num_hidden_layers": 4, "hybrid_override_pattern": "M-*-", "expand": 2}),
    "NemotronHPuzzleForCausalLM": Differs("nemotron_h", {"num_hidden_layers": 4, "hybrid_override_pattern": "M-*-",
                                                         "expand": 2}),
    "OrionForCausalLM": Differs("orion"),
    "PanguEmbeddedForCausalLM": Differs("PanguEmbedded", {"bias": True, **_HEADS}),
    "PanguProMoEV2ForCausalLM": Differs("PanguProMoE", {
        **_ROUTED, **_HEADS, "sandwich_norm": True, "router_enable_expert_bias": True, "qkv_bias": True,
        "routed_scaling_factor": 2.5}),
    "PanguUltraMoEForCausalLM": Differs("pangu_ultra_moe", {
        **_ROUTED, **_LATENT, "num_key_value_heads": 4, "sandwich_norm": True, "router_enable_expert_bias": True,
        "routed_scaling_factor": 2.5}),
    "Param2MoEForCausalLM": Differs("param2moe", {**_MOE, **_HEADS, **_GROUPS, "use_qk_norm": True}),
    "PhiMoEForCausalLM": Differs("phimoe", {"num_local_experts": 8, "num_experts_per_tok": 2, "lm_head_bias": True,
                                            "attention_bias": True}),
    "Plamo3ForCausalLM": Differs("plamo3", {**_HEADS, "layer_types": _TWO, "interleaved_sliding_window": [64, 64, None],
                                            "sliding_window": [64, 64, None], "rope_local_theta": 10000}),
    # vLLM's linear attention for the CPU computes in bfloat16 alone, whose roundings would choose other experts.
    "Qwen3_5ForCausalLM": Differs(dtype="bfloat16"),
    **{name: Differs(said={"num_experts_per_tok": 8}, dtype="bfloat16")
       for name in ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM")},
    "SarvamMoEForCausalLM": Differs("sarvam_moe", {**_BAILING, **_GROUPS, "use_qk_norm": True}),
    "SarvamMLAForCausalLM": Differs("sarvam_mla", {**_MOE, **_GROUPS, **_LATENT, "num_key_value_heads": 4,
                                                  "q_lora_rank": None}),
    "Step1ForCausalLM": Differs("step1", {"num_attention_groups": 2}),
    "Step3TextForCausalLM": Differs("step3_text", {
        "num_attention_groups": 1, "share_q_dim": 64, "head_dim": 32, "moe_num_experts": 8, "moe_top_k": 2,
        "share_expert_dim": 96, "moe_intermediate_size": 96, "moe_layers_enum": "1,2", "norm_expert_weight": True,
        "max_position_embedding": 512}),
    "Step3p5ForCausalLM": Differs("step3p5"),
    "SolarForCausalLM": Differs("solar", {"bskcn_1": [1], "bskcn_2": [1], "bskcn_3": [2], "bskcn_4": [2],
                                          "bskcn_tv": [0.9, 0.8]}),
    "TeleChat2ForCausalLM": Differs("telechat", {"n_layer": 3, "n_head": 4, "ffn_hidden_size": 192,
                                                 "layer_norm_epsilon": 1e-5}),
    "TeleChat3ForCausalLM": Differs("telechat3", _HEADS),
    "TeleFLMForCausalLM": Differs("teleflm", {"use_mup": True, "mup_scale_factor": 2.0, "output_mult": 2.0,
                                              "input_mult": 2.0}),
    "NanbeigeForCausalLM": Differs("nanbeige", _HEADS),
}


def small(fields: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """What to make a configuration of: the small sizes of those ``fields`` (with their defaults) that it has."""
    sizes = {name: size for name, size in SMALL.items() if name in fields}
    if "qk_rope_head_dim" in fields:
        sizes.pop("head_dim", None)  # another name of that one
    if "layer_types" in fields:
        kinds = list(dict.fromkeys(fields["layer_types"] or ()))
        kinds = sorted(kinds, key=lambda kind: "full" in kind)
        sizes["layer_types"] = [kinds[0], kinds[0], kinds[-1]] if len(kinds) > 1 else None
    if "mlp_layer_types" in fields:
        kinds = list(dict.fromkeys(fields["mlp_layer_types"] or ()))
        sizes["mlp_layer_types"] = [kinds[0], kinds[-1], kinds[-1]] if kinds else None
    return {name: value for name, value in {**sizes, **said}.items() if value is not None or name in said}
