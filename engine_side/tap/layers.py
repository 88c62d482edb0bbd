"""Layers of a site where not every block has it: what a configuration says, as vLLM's classes read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.sites import SITES

_ROUTED = ("router_logits", "experts")


def site_layers(names: Sequence[str], config: Mapping[str, Any], site: str, n_layers: int) -> list[int]:
    """Layers in which a model of these architectures, with ``n_layers``, has a site that its family has: none where
    every block is of another kind.
    """
    if not SITES[site].per_layer:
        return [0]
    routed = _routed(names, config, n_layers)
    if routed is None or site not in (*_ROUTED, "mlp_post"):
        return list(range(n_layers))
    return routed if site in _ROUTED else [layer for layer in range(n_layers) if layer not in routed]


def _routed(names: Sequence[str], config: Mapping[str, Any], n_layers: int) -> list[int] | None:
    """Layers whose MLP is a mixture of experts; None of a model that has none such."""
    if "MixtralForCausalLM" in names:
        return list(range(n_layers))
    if "Qwen3MoeForCausalLM" not in names:
        return None
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    some = 0 not in (config.get("num_experts"), config.get("num_local_experts"))
    return [layer for layer in range(n_layers) if some and layer not in dense and (layer + 1) % every == 0]
