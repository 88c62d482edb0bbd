"""One step of a model that is loaded and no more: no cache, no compiled graph, noise where attention would attend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from engine_side.discovery.discover import ROWS, Discovery
from engine_side.tap.architectures import Family


def discover(model: nn.Module, vllm_config: Any) -> Family:
    """The sites of a model, found in one step of it; StartError says why they are not."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    model_config = vllm_config.model_config
    draws = torch.Generator().manual_seed(0)
    ids = torch.randperm(int(model_config.get_vocab_size()), generator=draws)[:ROWS]
    device = next(model.parameters()).device
    said = model_config.hf_text_config.to_dict().values()
    search = Discovery(model, model_config.get_total_num_hidden_layers(), model_config.get_hidden_size(),
                       model_config.dtype, ids, lambda module: isinstance(module, AttentionLayerBase),
                       [number for number in said if isinstance(number, float) and number > 0])

    def noise(result: torch.Tensor) -> None:
        result.copy_(torch.randn(result.shape, generator=draws))

    with torch.inference_mode(), set_forward_context(None, vllm_config, num_tokens=ROWS), _as_written(model):
        with search.recorded(noise) as outside:
            # As vLLM's runners call it: there are models that take no less.
            model(input_ids=ids.to(device), positions=torch.arange(ROWS, device=device), intermediate_tensors=None,
                  inputs_embeds=None)
        return search.found(outside)


@contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """Modules that are compiled at their first call run as they are written, and scales that attention takes from its
    first call are left to a later one.
    """
    changed = [(module, name, value) for module in model.modules()
               for name, value in (("do_not_compile", False), ("calculate_kv_scales", True))
               if getattr(module, name, not value) is value]
    for module, name, value in changed:
        setattr(module, name, not value)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
