"""One step of a model that is loaded and no more: no cache, no compiled graph, noise where attention would attend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn

from engine_side.discovery.discover import ROWS, Discovery
from engine_side.discovery.identities import ROUNDINGS
from engine_side.discovery.outcome import Outcome, proved_sites
from engine_side.tap.architectures import Family, family_of, is_known
from schemas.errors import StartError


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
            model(input_ids=ids.to(device), positions=torch.arange(ROWS, device=device))
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


def search(model: nn.Module, vllm_config: Any) -> Outcome:
    """The outcome of ``discover`` on a model that is loaded and no more, with the places of the table beside those that
    were found; StartError where it is not looked into.
    """
    import vllm

    model_config = vllm_config.model_config
    names, n_layers = list(model_config.architectures), model_config.get_total_num_hidden_layers()
    if getattr(model_config, "is_multimodal_model", False):
        raise StartError(f"vllm-tap: {', '.join(names)} takes images or sound, whose positions are not looked into")
    outcome = Outcome(str(model_config.dtype).removeprefix("torch."), ROUNDINGS[model_config.dtype],
                      str(vllm.__version__), n_layers)
    known = family_of(names, model_config.hf_text_config) if is_known(names) else None
    try:
        family = discover(model, vllm_config)
    except StartError as error:
        return msgspec.structs.replace(outcome, failed=str(error).rpartition("not found by structure: ")[2])
    sites = proved_sites(model, family, names, list(family.found), n_layers, model_config.get_hidden_size())
    refused = dict(family.refused)
    if known is not None:  # what the search does not look for is where the table says
        others = [site for site in (*known.block, *known.model) if site not in sites]
        sites |= proved_sites(model, known, names, others, n_layers, model_config.get_hidden_size())
        refused |= known.refused
    return msgspec.structs.replace(outcome, sites=sites, names=dict((known or family).names), refused={
        site: why for site, why in refused.items() if site not in sites})
