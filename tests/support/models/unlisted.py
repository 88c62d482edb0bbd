"""Families that are in no table of taps, whose sites are found by structure: a small configuration of each, and where
Hugging Face's code has what they are held against.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from tests.support.models.common import COMMON, HEADS, TIED

STREAM: Final = ("resid_pre", "resid_post", "embed", "final_norm")
# Names that most families of Hugging Face's have for the parts of a block.
ATTENTION: Final = ("self_attn", "attn", "linear_attn", "mamba", "conv")
MLP: Final = ("mlp", "feed_forward", "block_sparse_moe", "ffn")


@dataclass(frozen=True, slots=True)
class Unlisted:
    """A family by its configuration.

    ``images``: whether it takes images too; then ``says`` is of the whole and tests/support/models/imaged.py has more.

    ``vision``: whether vLLM's file of the family has its class for images too, and imports what that needs.
    ``says``: what Hugging Face's class is given. ``written``: what vLLM reads besides, put into the model's
    config.json. ``reads``: what the reference is told otherwise (that the head is the
    embedding, where vLLM takes no other). ``attention`` and ``mlp``: the module of Hugging
    Face's block whose result is added to the stream, the first that a layer has (``path:Class`` where its class
    begins so); none where the family lacks the site, since ``lacks`` says why. ``raw``: the modules that those
    norm. ``factor``: what both are multiplied by. ``between``: whether the stream between them is somewhere.
    ``more``: sites besides, by a module of Hugging Face's block, where a layer has it, and which end of it has their
    rows: what it is given ("in") or returns ("out", of several things "out 1"), the experts that it is given ("chosen")
    or returns scores of ("scored"), the queries or keys of all its heads ("query", "key"), or the rotated part of the
    keys that they share ("shared key"). ``halves``: whether Hugging Face keeps the two numbers of a rotated pair half a
    row apart, where vLLM leaves them side by side. ``grouped``: whether the router's choice is not that of the largest
    logits, since it goes by groups or by a bias. ``mixed``: whether an expert of a smaller logit may weigh more.
    ``scale``: by what the embedding module that vLLM runs multiplies the rows of its table.
    ``zero``: the end of the names of parameters that are zeros, and ``because``. ``engine``: options of vLLM's CPU
    build.
    ``dtype``: the model's, where a kernel of vLLM's CPU build knows no other; a row's error is then over its length or
    that of the median row, the longer: single rows of linear attention come near to zero.
    ``blocks``: of the cache, fewer than eight requests want, where its kind does not say how many. ``here``: whether
    vLLM leaves Hugging Face's classes as they are, so that the engine may share a process with the reference.
    ``not_run``: why, by group of features or by feature.
    ``tolerance``: of a row's length, and ``why`` it is not 1e-4.
    """

    says: dict[str, Any]
    written: dict[str, Any] = field(default_factory=dict)
    reads: dict[str, Any] = field(default_factory=dict)
    attention: tuple[str, ...] = ATTENTION
    mlp: tuple[str, ...] = MLP
    raw: tuple[str, str] = ("", "")
    factor: float = 1.0
    more: dict[str, tuple[str, str]] = field(default_factory=dict)
    halves: bool = False
    grouped: bool = False
    mixed: bool = False
    scale: float = 1.0
    between: bool = True
    lacks: str = ""
    zero: str = ""
    because: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    blocks: int = 0
    here: bool = True
    not_run: dict[str, str] = field(default_factory=dict)
    tolerance: float = 1e-4
    why: str = ""
    dtype: str = ""
    images: bool = False
    vision: bool = False

    @property
    def sites(self) -> tuple[str, ...]:
        """What is armed."""
        stream = (site for site in STREAM if not (self.images and site == "embed"))
        return (*stream, *(("resid_mid",) if self.between else ()), *(("attn_out",) if self.attention else ()),
                *(("mlp_out",) if self.mlp else ()), *(("attn_out_raw",) if self.raw[0] else ()),
                *(("mlp_out_raw",) if self.raw[1] else ()), *self.more)


_MOE = {"num_local_experts": 8, "num_experts_per_tok": 2}
_EIGHT = {"num_experts": 8, "num_experts_per_tok": 2}
_THREE = ["sliding_attention", "full_attention", "sliding_attention"]
_LAST = ["sliding_attention", "sliding_attention", "full_attention"]
_SMALL = {"vocab_size": 512, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512, "initializer_range": 0.1,
          "bos_token_id": 1, "eos_token_id": 2}
_GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.05, "residual_multiplier": 0.22,
            "logits_scaling": 4.0}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64}
_NORMED: dict[str, Any] = {"attention": ("post_attention_layernorm",), "mlp": ("post_feedforward_layernorm",),
                           "raw": ("self_attn", "mlp")}
_PARALLEL: dict[str, Any] = {"between": False, "lacks": "attention and MLP are added at once"}
_APART: dict[str, Any] = {"here": False}  # vLLM runs Hugging Face's own classes, and changes them
# The rotary embedding's kernel of vLLM's CPU build is wrong on queries by heads, which is what these hand it eagerly.
_NATIVE: dict[str, Any] = {"engine": {"compilation_config": {"custom_ops": ["none"]}}}
# vLLM's other kernel of latent attention for CPUs, which it takes where they have AMX, knows bfloat16 alone.
_MLA_CPU: dict[str, Any] = {
    "engine": {**_NATIVE["engine"], "attention_backend": "CPU_MLA"},
    "not_run": dict.fromkeys(
        ("chunked prefill", "prefix cache, recomputed", "prefix cache, allowed"),
        'vLLM\'s CPU build: "MLA is enabled on a non-GPU platform; forcing chunked prefill and prefix caching to be '
        'disabled."')}
_PROJECTIONS = {"q": ("self_attn.q_proj", "out"), "k": ("self_attn.k_proj", "out"), "v": ("self_attn.v_proj", "out"),
                "z": ("self_attn.o_proj", "in"), "mlp_post": ("mlp.down_proj", "in")}
_LATENTS = {"q": ("self_attn.q_b_proj", "out"), "q_latent": ("self_attn.q_a_layernorm", "out"),
            "q_rot": ("self_attn", "query"), "kv_latent": ("self_attn.kv_a_layernorm", "out"),
            "k_pe": ("self_attn", "shared key"), "z": ("self_attn.o_proj", "in"), "mlp_post": ("mlp.down_proj", "in")}


def _routed(mlp: str = "mlp", router: str = "gate", end: str = "out") -> dict[str, tuple[str, str]]:
    return {"router_logits": (f"{mlp}.{router}", end), "experts": (f"{mlp}.experts", "chosen")}


def _mixed(mixer: str, into: str = "in_proj") -> dict[str, tuple[str, str]]:
    return {"mix_in": (f"{mixer}.{into}", "out"), "mix_post": (f"{mixer}.out_proj", "in")}


_SHARED = "shared experts are added beside the routed ones"
_NO_PREFIXES = "vLLM's CPU build caches no prefixes of a model that has mixers alone"
_NO_DRAFTS = ("vLLM's CPU build gives other tokens with drafts than without after the first few, taps or none; "
              "where it caches prefixes it fails")
_STATE: dict[str, Any] = {"not_run": {"speculative decoding": _NO_DRAFTS}}
_MLA = {"num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 512, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "moe_intermediate_size": 96, "n_shared_experts": 1}
# Of models that take images: the tower, the tokens that stand for an image, positions in three dimensions.
_TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
          "initializer_range": 0.1}
_PATCHES = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN_TOWER = {"hidden_size": 64, "out_hidden_size": 128, "num_heads": 4, "intermediate_size": 96, **_PATCHES}
_VISION_IDS = {"vision_start_token_id": 4, "vision_end_token_id": 5, "image_token_id": 6, "video_token_id": 7}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in COMMON.items() if key not in names}


_DELTA: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128,
                          "linear_value_head_dim": 128,
                          "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
# All experts are chosen: in bfloat16 a close call would go the other way.
_ALL_CHOSEN = {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 96,
               "shared_expert_intermediate_size": 96}
_NO_KERNEL = "vLLM's CPU build calls a Triton kernel there that it has not (v1/worker/mamba_utils.py)"
_NOT_CACHED = "vLLM's CPU build caches no prefixes of this model"
_BFLOAT16: dict[str, Any] = {"dtype": "bfloat16", "tolerance": 0.3, "blocks": 8, "not_run": {
    "speculative decoding": _NO_KERNEL, "prefix cache, recomputed": _NOT_CACHED, "prefix cache, allowed": _NOT_CACHED,
    "preemption": "eight requests have room in the smallest cache that vLLM's CPU build starts this model with"}}

UNLISTED: Final[dict[str, Unlisted]] = {
    "afmoe": Unlisted({**COMMON, **HEADS, **_EIGHT, "sliding_window": 64, "layer_types": _LAST, "num_dense_layers": 1,
                       "num_shared_experts": 1, "moe_intermediate_size": 96},
                      {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
                      attention=("post_attention_layernorm",), mlp=("post_mlp_layernorm",), raw=("self_attn", "mlp"),
                      more=_routed(router="router"), grouped=True),
    "apertus": Unlisted(COMMON, tolerance=1e-2, why="vLLM keeps the factors of its activation in bfloat16"),
    "arcee": Unlisted(COMMON, **_APART),
    "bitnet": Unlisted(COMMON, **_APART),
    "bloom": Unlisted({"vocab_size": 512, "hidden_size": 128, "n_layer": 3, "n_head": 4, "initializer_range": 0.1,
                       "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
                      attention=("self_attention.dense",), mlp=("mlp.dense_4h_to_h",), tolerance=1e-3,
                      why="vLLM computes another form of GELU"),
    "cohere": Unlisted({**COMMON, **TIED}, **_PARALLEL),
    "cohere2": Unlisted({**COMMON, **TIED, "sliding_window": 64, "layer_types": _THREE}, reads={"sliding_window": 65},
                        **_PARALLEL),
    "cwm": Unlisted({**COMMON, **HEADS, "sliding_window": 64, "layer_types": _LAST}, **_APART),
    "deepseek_v2": Unlisted({**COMMON, **_MLA, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy",
                             "norm_topk_prob": False}, **_MLA_CPU, grouped=True,
                            more={**_LATENTS, **_routed()}),
    "deepseek_v3": Unlisted({**COMMON, **_MLA, "n_group": 2, "topk_group": 1, "norm_topk_prob": True},
                            {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}, **_MLA_CPU, halves=True,
                            grouped=True, more={**_LATENTS, **_routed()}),
    "ernie4_5": Unlisted({**COMMON, **HEADS}),
    "ernie4_5_moe": Unlisted({**COMMON, **HEADS, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 96,
                              "moe_num_shared_experts": 1}, more=_routed(), zero="e_score_correction_bias",
                             because="vLLM's CPU build leaves the bias of its router out"),
    "exaone4": Unlisted({**COMMON, "sliding_window": 64, "layer_types": _LAST}, **_NORMED),
    "exaone_moe": Unlisted({**COMMON, **HEADS, **_EIGHT, "sliding_window": 64, "layer_types": _LAST,
                            "mlp_layer_types": ["dense", "sparse", "sparse"], "moe_intermediate_size": 96,
                            "num_shared_experts": 1, "n_group": 1, "topk_group": 1}, more=_routed(), grouped=True),
    "flex_olmo": Unlisted({**COMMON, **_EIGHT}, more=_routed(), **_NORMED, **_APART),
    "falcon": Unlisted({**_without("intermediate_size", "num_key_value_heads"), "new_decoder_architecture": False,
                        "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False},
                       attention=("self_attention",), **_PARALLEL),
    "falcon_h1": Unlisted({**COMMON, **HEADS, **_MAMBA, "mamba_d_ssm": 256}, attention=(), between=False,
                          lacks="two mixers are added up in place of attention", blocks=8,
                          more=_mixed("mamba"), **_STATE),
    "gemma": Unlisted({**COMMON, **HEADS, **TIED}),
    "gemma4_text": Unlisted({**COMMON, **HEADS, **TIED, "sliding_window": 64, "layer_types": _LAST,
                             "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32,
                             "global_head_dim": 32},
                            attention=("post_attention_layernorm",), mlp=(), raw=("self_attn", ""),
                            lacks="two tensors are added in the MLP's place"),
    "glm": Unlisted({**COMMON, **HEADS}, **_APART),
    "glm4": Unlisted({**COMMON, **HEADS, "partial_rotary_factor": 0.5}, attention=("post_self_attn_layernorm",),
                     mlp=("post_mlp_layernorm",), raw=("self_attn", "mlp")),
    "glm4_moe": Unlisted({**COMMON, **HEADS, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
                          "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 96,
                          "n_shared_experts": 1}, more=_routed(), grouped=True),
    "glm4_moe_lite": Unlisted({**COMMON, **{key: value for key, value in _MLA.items()
                                            if key != "first_k_dense_replace"}, "n_group": 1, "topk_group": 1,
                               "mlp_layer_types": ["dense", "sparse", "sparse"]},
                              {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1},
                              **_MLA_CPU, halves=True, grouped=True, more={**_LATENTS, **_routed()}),
    "gpt2": Unlisted(_SMALL),
    "gpt_bigcode": Unlisted(_SMALL, **_APART),
    "gpt_oss": Unlisted({**COMMON, **HEADS, **_MOE, "sliding_window": 64, "layer_types": _THREE},
                        more=_routed(router="router"), mixed=True),
    "gptj": Unlisted({**_SMALL, "rotary_dim": 16}, **_PARALLEL),
    "granite": Unlisted({**COMMON, **_GRANITE}, factor=0.22, more=_PROJECTIONS),
    "granite_swa": Unlisted({**COMMON, **_GRANITE, "sliding_window": 64, "layer_types": _LAST}, factor=0.22,
                            more=_PROJECTIONS),
    "granitemoe_swa": Unlisted({**COMMON, **_GRANITE, **_MOE, "shared_intermediate_size": 96, "sliding_window": 64,
                                "layer_types": _LAST}, factor=0.22, mlp=(), lacks=_SHARED,
                               more=_routed("block_sparse_moe", "router")),
    "granitemoeshared": Unlisted({**COMMON, **_GRANITE, **_MOE, "shared_intermediate_size": 96}, factor=0.22, mlp=(),
                                 lacks=_SHARED, more=_routed("block_sparse_moe", "router", "out 2")),
    "granitemoe": Unlisted({**COMMON, **_GRANITE, **_MOE}, factor=0.22,
                           more=_routed("block_sparse_moe", "router", "out 2")),
    "granitemoehybrid": Unlisted({**COMMON, **_GRANITE, **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2,
                                  "shared_intermediate_size": 96, "layer_types": ["mamba", "mamba", "attention"],
                                  "mamba_expand": 2, "position_embedding_type": "rope"}, factor=0.22, mlp=(),
                                 lacks=_SHARED,
                                 more={**_routed("block_sparse_moe", "router", "out 2"), **_mixed("mamba")}, **_STATE),
    "helium": Unlisted({**COMMON, **HEADS}, **_APART),
    "gemma3": Unlisted({"text_config": {**COMMON, **HEADS, **TIED, "query_pre_attn_scalar": 32, "sliding_window": 64,
                                        "layer_types": _THREE}, **TIED, "mm_tokens_per_image": 4, "boi_token_index": 4,
                        "eoi_token_index": 5, "image_token_index": 6,
                        "vision_config": {**_TOWER, "image_size": 32, "patch_size": 8}}, images=True, more=_PROJECTIONS,
                       blocks=40, **_NORMED),
    "mistral3": Unlisted({"text_config": {**COMMON, **HEADS, "model_type": "mistral"}, "image_token_index": 6,
                          "spatial_merge_size": 2, "vision_feature_layer": -1,
                          "vision_config": {**_TOWER, "model_type": "pixtral", "image_size": 64, "patch_size": 8,
                                            "head_dim": 16}}, images=True, more=_PROJECTIONS),
    "qwen2_vl": Unlisted({"text_config": {**COMMON, "rope_parameters": _MROPE}, **_VISION_IDS, "vision_config": {
                             "depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2,
                             **_PATCHES}}, images=True, more=_PROJECTIONS),
    "qwen2_5_vl": Unlisted({"text_config": {**COMMON, "rope_parameters": _MROPE}, **_VISION_IDS, "vision_config": {
                               **_QWEN_TOWER, "depth": 2, "window_size": 32, "fullatt_block_indexes": [1]}},
                           images=True, more=_PROJECTIONS),
    "qwen3_vl": Unlisted({"text_config": {**COMMON, **HEADS, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
                          **_VISION_IDS, "vision_config": {
                              **_QWEN_TOWER, "depth": 3, "num_position_embeddings": 64,
                              "deepstack_visual_indexes": [0, 1]}}, images=True, more=_PROJECTIONS),
    "hunyuan_v1_dense": Unlisted({**COMMON, **HEADS}, **_APART),
    "hunyuan_v1_moe": Unlisted({**COMMON, **HEADS, "num_experts": 8, "moe_topk": 2}, more=_routed(router="gate"),
                               **_APART),
    "hy_v3": Unlisted({**COMMON, **HEADS, **_EIGHT, "num_shared_experts": 1, "moe_intermediate_size": 96,
                       "mlp_layer_types": ["dense", "sparse", "sparse"]},
                      {"first_k_dense_replace": 1, "expert_hidden_dim": 96, "route_norm": True, "qk_norm": True},
                      more=_routed(), grouped=True),
    "hyperclovax": Unlisted({**COMMON, **HEADS, **_GRANITE}, attention=("post_norm1",), mlp=("post_norm2",),
                            raw=("self_attn", "mlp"), factor=0.22, more=_PROJECTIONS),
    "jais2": Unlisted({**COMMON, **HEADS}, more=_PROJECTIONS, **_APART),
    "lfm2": Unlisted({**COMMON, "layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 192,
                      "block_auto_adjust_ff_dim": False}, {"conv_dim": 128, "block_dim": 128}, reads=TIED,
                     **_NATIVE, **_STATE),
    "lfm2_moe": Unlisted({**COMMON, **_EIGHT, "layer_types": ["conv", "full_attention", "conv"],
                          "moe_intermediate_size": 96, "num_dense_layers": 1}, {"conv_dim": 128}, reads=TIED, **_NATIVE,
                         **_STATE, more=_routed("feed_forward"), grouped=True),
    "llama4_text": Unlisted({**COMMON, **HEADS, "intermediate_size_mlp": 192, "num_local_experts": 4,
                             "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 128},
                            more={"router_logits": ("feed_forward.router", "out 1"),
                                  "experts": ("feed_forward.router", "scored")}),
    "mamba2": Unlisted({**_without("intermediate_size"), "state_size": 16, "num_heads": 8, "head_dim": 32,
                        "n_groups": 1, "chunk_size": 64},
                       attention=("mixer",), mlp=(), between=False, lacks="a block is one mixer",
                       more=_mixed("mixer"), not_run={
                           "speculative decoding": _NO_DRAFTS, "prefix cache, recomputed": _NO_PREFIXES,
                           "prefix cache, allowed": _NO_PREFIXES,
                           "preemption": "a request holds one block of the cache from its beginning to its end"}),
    "mellum": Unlisted({**COMMON, **HEADS, **_MOE, "moe_intermediate_size": 96, "sliding_window": 64,
                        "mlp_layer_types": ["sparse"] * 3}, more=_routed(), blocks=14, **_APART),
    "minicpm3": Unlisted({**COMMON, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 64,
                          "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
                          "scale_depth": 1.4}, factor=1.4 / 3**0.5, blocks=14),
    "minimax_m2": Unlisted({**COMMON, **HEADS, **_MOE, "num_experts_per_tok": 1, "rotary_dim": 16},
                           {"use_routing_bias": True, "scoring_func": "softmax"}, more=_routed(),
                           zero="e_score_correction_bias", because="this router of vLLM's CPU build knows softmax "
                           "alone and no bias, so a token goes to one expert, whose weight is 1 by either"),
    "mimo_v2_flash": Unlisted(
        {**COMMON, **HEADS, "v_head_dim": 32, "sliding_window": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
         "layer_types": _LAST, "mlp_layer_types": ["dense", "sparse", "sparse"], "moe_intermediate_size": 96,
         "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0}
                             for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))}},
        # Layers with a window have twice the heads of keys, which Hugging Face's class knows and vLLM reads.
        {"hybrid_layer_pattern": [1, 1, 0], "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
         "swa_head_dim": 32, "swa_v_head_dim": 32, "swa_rope_theta": 1e4, "sliding_window_size": 64,
         "layernorm_epsilon": 1e-5, "moe_layer_freq": [0, 1, 1], "scoring_func": "sigmoid", "topk_method": "noaux_tc",
         "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}, more=_routed(), grouped=True),
    "ministral": Unlisted({**COMMON, **HEADS, "sliding_window": 64}, blocks=14, **_APART),
    "ministral3": Unlisted({**COMMON, **HEADS}),
    "nanochat": Unlisted(COMMON, **_APART),
    "nemotron": Unlisted({**COMMON, **HEADS, "partial_rotary_factor": 0.5}),
    "nemotron_h": Unlisted({**COMMON, **HEADS, "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-",
                            "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1,
                            "expand": 2, "chunk_size": 64},
                           attention=("mixer:NemotronHMamba", "mixer:NemotronHAttention"), mlp=("mixer:NemotronHMLP",),
                           between=False, lacks="a block is a mixer or an MLP", tolerance=2e-3,
                           why="off from the first Mamba layer on; what of vLLM's scan differs was not found",
                           more=_mixed("mixer"), blocks=8, **_STATE),
    "olmo": Unlisted(COMMON, **_APART),
    "olmo2": Unlisted(COMMON, **_NORMED, **_APART),
    "olmo3": Unlisted({**COMMON, "sliding_window": 64}, blocks=14, **_NORMED, **_APART),
    "olmoe": Unlisted({**COMMON, **_EIGHT}, more=_routed()),
    "phi": Unlisted(COMMON, **_PARALLEL, **_APART),
    # With 1e-5 one token of the tests has an expert 5e-7 off what its router lets through (2 % below the largest).
    "phimoe": Unlisted({**COMMON, **_MOE, "lm_head_bias": True, "attention_bias": True, "rms_norm_eps": 1e-4},
                       {"architectures": ["PhiMoEForCausalLM"]}, more=_routed(router="router"), mixed=True),
    "qwen2_moe": Unlisted({**COMMON, **_EIGHT, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96},
                          more=_routed()),
    "qwen3_next": Unlisted({**COMMON, **HEADS, **_DELTA, **_ALL_CHOSEN, "decoder_sparse_step": 1}, **_BFLOAT16,
                           more={"router_logits": ("mlp.gate", "out"), **_mixed("linear_attn", "in_proj_qkvz"),
                                 "mix_steps": ("linear_attn.in_proj_ba", "out")}),
    "qwen3_5_text": Unlisted({**COMMON, **HEADS, **_DELTA}, **_BFLOAT16, vision=True,
                             more={"mlp_post": ("mlp.down_proj", "in"), "mix_post": ("linear_attn.out_proj", "in")}),
    "qwen3_5_moe_text": Unlisted({**_without("intermediate_size"), **HEADS, **_DELTA, **_ALL_CHOSEN}, **_BFLOAT16,
                                 vision=True, more={"router_logits": ("mlp.gate", "out")}),
    "seed_oss": Unlisted({**COMMON, **HEADS}, **_APART),
    "smollm3": Unlisted(COMMON, **_APART),
    "solar_open": Unlisted({**_without("intermediate_size"), **HEADS, "n_routed_experts": 8, "num_experts_per_tok": 2,
                            "n_shared_experts": 1, "moe_intermediate_size": 96, "n_group": 1, "topk_group": 1},
                           more=_routed(), grouped=True, **_APART),
    "stablelm": Unlisted(COMMON),
    "starcoder2": Unlisted(COMMON, **_APART),
    "vaultgemma": Unlisted({**COMMON, **HEADS, "query_pre_attn_scalar": 32, "sliding_window": 64,
                            "layer_types": _THREE}, scale=COMMON["hidden_size"]**0.5, **_APART),
}

# Four streams a token, of which a block is given all.
SEVERAL_STREAMS: Final = {
    "gemma3n_text": {**COMMON, **HEADS, **TIED, "intermediate_size": [192, 192, 192], "laurel_rank": 16,
                     "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 0,
                     "sliding_window": 64, "activation_sparsity_pattern": [0.0, 0.0, 0.0], "layer_types": _LAST}}
