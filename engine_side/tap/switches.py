"""Keys of a model's configuration that change what a place of its family means, or that were not tested.

vLLM's classes serve more than one kind of model, and a key decides which. Every key that they read is here, or is known
to change no place (tests/engine_side/tap/test_switches.py lists those, and reads vLLM's code for others).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Switch:
    """``right`` are the values with which a family's places are what its table says; ``absent`` is what vLLM takes
    where there is no such key. With any other value ``sites`` are refused, or the model where none is named.

    ``sums``: whether the stream after a block is still what entered it, attention and MLP added.
    """

    key: str
    absent: Any
    right: tuple[Any, ...]
    why: str
    sites: tuple[str, ...] = ()
    sums: bool = True


_CAUSAL: Final = Switch("is_causal", True, (True,), "tokens attend to later tokens, so a row depends on tokens after "
                                                    "it")
_DUAL_CHUNK: Final = Switch("dual_chunk_attention_config", None, (None,), "the kernel gets five rotations of the "
                            "queries side by side, and keys rotated by their place in a chunk", ("q_rot", "k_rot"))
_BIAS: Final = Switch("attention_bias", False, (False, None), "vLLM leaves out the output projection's bias, which "
                      "Hugging Face has, so rows cannot be tested")
_LLAMA: Final = (_CAUSAL,)

SWITCHES: Final[dict[str, tuple[Switch, ...]]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": (
        *_LLAMA,
        Switch("llama_4_scaling", None, (None,), "queries are scaled by their position again, after the rotary "
                                                 "embedding", ("q_rot",)),
        Switch("ada_rms_norm_t_cond", False, (False, None), "the MLP's input is scaled by another input than the "
                                                            "tokens"),
    ),
    "Qwen2ForCausalLM": (
        _CAUSAL, _DUAL_CHUNK,
        Switch("qk_norm", False, (False, None), "queries and keys have norms that Hugging Face's Qwen2 does not have, "
                                                "so rows cannot be tested"),
    ),
    "Qwen3ForCausalLM": (_CAUSAL, _DUAL_CHUNK, _BIAS),
    "Phi3ForCausalLM": _LLAMA,
    "Gemma2ForCausalLM": (_CAUSAL,),
    "Gemma3ForCausalLM": (
        _CAUSAL,
        Switch("use_bidirectional_attention", False, (False, None), _CAUSAL.why),
    ),
    "MixtralForCausalLM": (_CAUSAL,),
    "Qwen3MoeForCausalLM": (
        _CAUSAL, _DUAL_CHUNK, _BIAS,
        Switch("shared_expert_intermediate_size", 0, (0, None), "mlp_out contains a shared expert that Hugging Face's "
               "Qwen3-MoE does not have, so rows cannot be tested"),
    ),
    "OPTForCausalLM": (
        _CAUSAL,
        Switch("do_layer_norm_before", True, (True,), "norms follow the additions, so no tensor is the stream between "
               "attention and MLP, and no norm follows the last block",
               ("resid_mid", "final_norm"), sums=False),
        Switch("_remove_final_layer_norm", False, (False, None), "no norm follows the last block", ("final_norm",)),
    ),
    "GPTNeoXForCausalLM": (
        _CAUSAL,
        Switch("use_parallel_residual", True, (False,), "attention and MLP read the same stream, so there is none "
                                                        "between them", ("resid_mid",)),
    ),
}


@dataclass(frozen=True, slots=True)
class Turned:
    """The switches of a model that are not as its family's table has them."""

    model: str  # why the whole model is refused, "" where it is not
    sites: Mapping[str, str]  # why each of these is refused
    sums: bool


def turned(names: Sequence[str], config: object) -> Turned:
    """Switches that ``config`` (vLLM's, or config.json's) turns on the first known of a model's architectures."""
    found = [(switch, value) for switch in next((SWITCHES[name] for name in names if name in SWITCHES), ())
             if (value := _value(config, switch)) not in switch.right]
    said = {switch.key: f"{switch.key} = {str(value).lower() if isinstance(value, bool) else value}: {switch.why}"
            for switch, value in found}
    return Turned(
        next((said[switch.key] for switch, _ in found if not switch.sites), ""),
        {site: said[switch.key] for switch, _ in found for site in switch.sites},
        all(switch.sums for switch, _ in found),
    )


def _value(config: object, switch: Switch) -> Any:
    if isinstance(config, Mapping):
        return config.get(switch.key, switch.absent)
    return getattr(config, switch.key, switch.absent)
