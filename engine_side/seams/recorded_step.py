"""One step of a model that is loaded and no more: no cache, no compiled graph, noise where attention would attend."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from engine_side.discovery.discover import ROWS, Contradicted, Discovery
from engine_side.discovery.parts import Roles
from engine_side.tap.architectures import Family, TapPoint, every_point

logger = logging.getLogger("vllm.tap")


def discover(model: nn.Module, vllm_config: Any) -> Family:
    """The sites of a model, found in one step of it; StartError says why they are not."""
    return _searched(model, vllm_config, (), False)


def prove(model: nn.Module, vllm_config: Any, family: Family) -> None:
    """Hold a family of the table against what is found in one step; StartError where its rows are others.

    What the search cannot tell (weights that are all but nothing, say) it does not hold against the table.
    """
    claims = list(every_point(model, family, vllm_config.model_config.get_hidden_size()))
    try:
        found = _searched(model, vllm_config, claims, family.sums)
    except Contradicted:
        raise
    except Exception as error:  # whatever a step outside of a running engine can meet
        logger.info("vllm-tap: sites of %s are its table's, not proved by structure: %s", type(model).__name__, error)
    else:
        held = sorted({point.site for point in claims} & found.found.keys())
        logger.info("vllm-tap: sites of %s proved by structure: %s", type(model).__name__, ", ".join(held))


def _searched(model: nn.Module, vllm_config: Any, claims: Sequence[TapPoint], sums: bool) -> Family:
    from vllm.forward_context import set_forward_context

    model_config = vllm_config.model_config
    draws = torch.Generator().manual_seed(0)
    ids = torch.randperm(int(model_config.get_vocab_size()), generator=draws)[:ROWS]
    device = next(model.parameters()).device
    said = model_config.hf_text_config.to_dict().values()
    search = Discovery(model, model_config.get_total_num_hidden_layers(), model_config.get_hidden_size(),
                       model_config.dtype, ids, _roles(),
                       [number for number in said if isinstance(number, float) and number > 0], claims, sums)

    def noise(result: torch.Tensor) -> None:
        result.copy_(torch.randn(result.shape, generator=draws))

    with torch.inference_mode(), set_forward_context(None, vllm_config, num_tokens=ROWS), _as_written(model):
        with search.recorded(noise) as outside:
            # As vLLM's runners call it: there are models that take no less.
            model(input_ids=ids.to(device), positions=torch.arange(ROWS, device=device), intermediate_tensors=None,
                  inputs_embeds=None)
        return search.found(outside)


def _roles() -> Roles:
    """What vLLM's own modules are."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.linear import LinearBase

    def chosen(module: nn.Module) -> tuple[int, int] | None:
        router: Any = getattr(module, "router", None)
        if not hasattr(router, "_compute_routing") or not hasattr(module, "routed_experts"):
            return None
        return int(router.global_num_experts), int(router.top_k)

    return Roles(lambda module: isinstance(module, AttentionLayerBase),
                 lambda module: isinstance(module, LinearBase | nn.Linear), chosen,
                 lambda module: bool(module.routed_experts.quant_method.is_monolithic))


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
