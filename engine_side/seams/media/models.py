"""Models that take images beside text: an ordinary language model, and towers that make rows of what is no text.

vLLM looks up and merges embeddings outside of the model's step there, which begins with rows (``inputs_embeds``). It
does so for prompts of text alone as well, unless it is told to run the language model only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import torch
from torch import nn

from engine_side.front.media import DECODER_READS, EMBEDDED_OUTSIDE, EXPERTS_APART
from schemas.errors import StartError

_NOISE_ROWS: Final = 64  # a graph is padded to no more


def takes_media(model_config: Any) -> bool:
    """Whether a model has towers for what is no text, used or not."""
    return bool(getattr(model_config, "is_multimodal_model", False))


def embeds_outside(model_config: Any) -> bool:
    """Whether a step begins with rows that were embedded before it."""
    if not takes_media(model_config):
        return False
    if (known := getattr(model_config, "supports_multimodal_inputs", None)) is None:  # vLLM 0.26
        from vllm.multimodal import MULTIMODAL_REGISTRY

        known = MULTIMODAL_REGISTRY.supports_multimodal_inputs(model_config)
    return bool(known)


def language_model(model: nn.Module, model_config: Any) -> nn.Module:
    """The part of a loaded model that has the decoder blocks: all of it, where it takes text alone."""
    if not takes_media(model_config):
        return model
    try:
        return model.get_language_model()
    except (AttributeError, NotImplementedError) as error:
        raise StartError(f"vllm-tap: {', '.join(model_config.architectures)}: vLLM does not tell which part of it is "
                         f"the language model ({error!r}); take a text model") from None


def check_media(model_config: Any, tapped: Collection[str] = (), adapters: bool = False) -> None:
    """StartError for what has not been shown to be right of a model that takes more than text."""
    if not takes_media(model_config):
        return
    names = ", ".join(model_config.architectures)
    if getattr(model_config, "is_encoder_decoder", False):
        raise StartError(f"vllm-tap: {names}: {DECODER_READS}")
    if getattr(model_config.multimodal_config, "video_pruning_rate", None):
        raise StartError(f"vllm-tap: video_pruning_rate: {names} drops positions of a prompt while it runs; leave the "
                         "setting out")
    if "embed" in tapped and embeds_outside(model_config):
        raise StartError(f"vllm-tap: cannot arm embed: {EMBEDDED_OUTSIDE}")
    if apart := {"router_logits", "experts"} & set(tapped):
        raise StartError(f"vllm-tap: cannot arm {', '.join(sorted(apart))}: {EXPERTS_APART}")
    if getattr(model_config, "uses_xdrope_dim", 0):
        raise StartError(f"vllm-tap: {names} has positions in several dimensions (XD-RoPE), which are not tested; take "
                         "another model")
    if adapters:
        raise StartError(f"vllm-tap: enable_lora: adapters of models that take images or sound, such as {names}, are "
                         "not tested; leave enable_lora out")


def positions_of(tokens: int, model_config: Any, device: torch.device) -> torch.Tensor:
    """Positions of a prompt of text as the model is given them: [tokens], or a row for each of the dimensions in which
    an image has positions: [dimensions, tokens].
    """
    positions = torch.arange(tokens, device=device)
    if not getattr(model_config, "uses_mrope", False):
        return positions
    return positions.expand(int(getattr(model_config, "mrope_num_dims", 3)), -1)


def embed_noise(runner: Any) -> None:
    """Noise in the rows that a dummy step begins with, where it begins with rows: most runners leave zeros there, of
    which every sum is right.
    """
    if not embeds_outside(runner.model_config):
        return
    rows = getattr(getattr(runner, "inputs_embeds", None), "gpu", None)
    if rows is None and hasattr(runner, "model_state"):
        rows = runner.model_state.dummy_inputs_embeds(_NOISE_ROWS)
    if rows is not None:
        with torch.inference_mode():
            some = rows[:_NOISE_ROWS]
            some.copy_(torch.randn(some.shape, generator=torch.Generator().manual_seed(2)))
