"""One step of a model that is loaded and no more: no cache, no compiled graph, noise where attention would attend."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import msgspec
import torch
from torch import nn

from engine_side.discovery.calls import put_back
from engine_side.discovery.discover import FAILED, ROWS, Contradicted, Crossing, Discovery, Shape
from engine_side.discovery.identities import ROUNDINGS
from engine_side.discovery.joined import Part, joined
from engine_side.discovery.nudge import Nudge
from engine_side.discovery.outcome import Outcome, proved_sites
from engine_side.discovery.parts import Roles
from engine_side.front.media import EMBEDDED_OUTSIDE, EXPERTS_APART
from engine_side.seams.media.models import check_media, embeds_outside, language_model, positions_of, takes_media
from engine_side.seams.ranks.agreement import Alone, of_stages, together
from engine_side.seams.ranks.pipeline import arriving, stage_of
from engine_side.tap import taps
from engine_side.tap.architectures import Family, TapPoint, every_point, family_of, found_names, is_known
from engine_side.tap.stages import Stage
from schemas.errors import StartError

logger = logging.getLogger("vllm.tap")


def discover(model: nn.Module, vllm_config: Any) -> Family:
    """The sites of a model, found in one step of it; StartError says why they are not."""
    family = _searched(model, vllm_config, (), False)
    _nudge(model, vllm_config, family)
    return family


def prove(model: nn.Module, vllm_config: Any, family: Family) -> Family:
    """Hold a family of the table against what is found in one step; StartError where its rows are others.

    Returns the family with the proofs of its places. What the search cannot tell (weights that are all but nothing,
    say) it does not hold against the table, which then says why it is ``unproved``.
    """
    stage = stage_of(vllm_config)
    claims = list(every_point(model, family, vllm_config.model_config.get_hidden_size(), stage))
    try:
        found = _searched(model, vllm_config, claims, family.sums)
    except (Contradicted, Alone):
        raise
    except Exception as error:  # whatever a step outside of a running engine can meet
        why = str(error).rpartition(FAILED)[2]
        return unproved(model, family, why if isinstance(error, StartError) else f"{type(error).__name__}: {why}")
    _nudge(model, vllm_config, family)
    held = set().union(*of_stages({point.site for point in claims})) & found.found.keys()
    logger.info("vllm-tap: sites of %s proved by structure: %s", type(model).__name__, ", ".join(sorted(held)))
    return replace(family, proofs=tuple(proof for proof in found.proofs if proof.site in held))


def unproved(model: nn.Module, family: Family, why: str) -> Family:
    """The family of a model that goes on with its table, and says why nothing was proved of it."""
    logger.info("vllm-tap: sites of %s come from its table and are not proved by structure: %s",
                type(model).__name__, why)
    return replace(family, unproved=why)


def _searched(model: nn.Module, vllm_config: Any, claims: Sequence[TapPoint], sums: bool) -> Family:
    """The family of a model, of what every stage of the engine finds of it; StartError on each if one finds nothing."""
    part, failed, stage = None, None, stage_of(vllm_config)
    try:
        with together():  # what follows is a step of all ranks again
            part = _part(model, vllm_config, claims, sums, stage)
    except Exception as error:
        if stage.count == 1 or isinstance(error, Alone):
            raise
        failed = error
    told = of_stages((part, None if failed is None else (isinstance(failed, Contradicted), str(failed))))
    wrong = [(contradicted, number, why) for number, (_, refusal) in enumerate(told) if refusal is not None
             for contradicted, why in (refusal,)]
    if wrong:
        contradicted, number, why = max(wrong, key=lambda one: (one[0], -one[1]))
        begin, _, reason = why.rpartition(FAILED)
        kind = Contradicted if contradicted else StartError
        raise kind(f"{begin}{FAILED}on stage {number} of the pipeline: {reason}" if begin else why) from failed
    with together():  # so is what follows this
        family = joined([each for each, _ in told if each is not None])
    return replace(family, names=found_names(vllm_config.model_config.architectures, family.names))


def _part(model: nn.Module, vllm_config: Any, claims: Sequence[TapPoint], sums: bool, stage: Stage) -> Part:
    """The part of the search's outcome for the blocks that this process has."""
    model_config, draws = vllm_config.model_config, torch.Generator().manual_seed(0)
    ids = _ids(vllm_config, draws)
    _adopt_kernels(model, vllm_config, ids)
    shape = Shape(model_config.get_total_num_hidden_layers(), model_config.get_hidden_size(), model_config.dtype,
                  _factors(model_config), language_model(model, model_config), stage)
    search = Discovery(model, shape, ids, _roles(), claims, sums)

    def noise(result: torch.Tensor) -> None:
        """Fill with rows of different lengths: if all had one, a norm of them would be a multiple."""
        lengths = 0.25 + 1.5 * torch.rand((*result.shape[:-1], 1), generator=draws)
        result.copy_(torch.randn(result.shape, generator=draws) * lengths)

    with _a_step(model, vllm_config) as step:
        with search.recorded(noise) as outside:
            crossing = step(ids)
        return search.found(outside, crossing)


def _adopt_kernels(model: nn.Module, vllm_config: Any, ids: torch.Tensor) -> None:
    """Put attention kernels that a model keeps beside its modules into the modules that call them, as a step shows.

    Older vLLM's Transformers back end has them in a dictionary by layer; newer vLLM has them in those modules itself.
    """
    beside: dict[int, nn.Module] = getattr(model, "attention_instances", {})
    if not beside:
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS["vllm"]

    def attending(module: Any, *args: Any, **kwargs: Any) -> Any:
        module.vllm_attention = beside[module.layer_idx]
        return attend(module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["vllm"] = attending
    try:
        with _a_step(model, vllm_config) as step:
            step(ids)
    finally:
        ALL_ATTENTION_FUNCTIONS["vllm"] = attend


def _factors(model_config: Any) -> list[float]:
    """Numbers that a model may multiply by: those of its configuration, and over the root of its layers' number."""
    said = [number for number in model_config.hf_text_config.to_dict().values()
            if isinstance(number, int | float) and not isinstance(number, bool) and number > 0]
    root = float(model_config.get_total_num_hidden_layers()) ** 0.5
    return [*(number for number in said if isinstance(number, float)), *(number / root for number in said)]


def _nudge(model: nn.Module, vllm_config: Any, family: Family) -> None:
    """Move what a family says is added to the stream; StartError where the stream does not move by that."""
    draws = torch.Generator().manual_seed(1)
    points = every_point(model, family, vllm_config.model_config.get_hidden_size(), stage_of(vllm_config))
    with _a_step(model, vllm_config) as step, _noisy(model, draws), Nudge(points, ROWS, draws) as nudged:
        step(_ids(vllm_config, draws))
    if wrong := list(nudged.wrong(family.sums, ROUNDINGS[vllm_config.model_config.dtype])):
        raise StartError(f"vllm-tap: {type(model).__name__} continues with other tensors than those that taps would "
                         f"copy: {'; '.join(wrong[:3])}. Captured rows would be wrong; arm other sites, and report it")


def _ids(vllm_config: Any, draws: torch.Generator) -> torch.Tensor:
    return torch.randperm(int(vllm_config.model_config.get_vocab_size()), generator=draws)[:ROWS]


@contextmanager
def _noisy(model: nn.Module, draws: torch.Generator) -> Iterator[None]:
    """Noise in place of what attention returns."""
    is_kernel = _roles().is_kernel
    kernels = [module for module in model.modules() if is_kernel(module)]

    def noisy(forward: Callable[..., Any]) -> Callable[..., Any]:
        places = {name: place for place, name in enumerate(inspect.signature(forward).parameters)}

        @wraps(forward)  # its arguments keep their names for code that looks at them
        def attend(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            written = result if isinstance(result, torch.Tensor) else taps.Call(places, args, kwargs).get("output")
            written.copy_(torch.randn(written.shape, generator=draws))
            return result
        return attend

    before = [(kernel, kernel.__dict__.get("forward")) for kernel in kernels]
    for kernel in kernels:
        kernel.forward = noisy(kernel.forward)
    try:
        yield
    finally:
        put_back(before)


@contextmanager
def _a_step(model: nn.Module, vllm_config: Any) -> Iterator[Callable[[torch.Tensor], Crossing]]:
    """A function that runs the model on tokens, as it is written, outside of a running engine, and says what came and
    left.
    """
    from vllm.forward_context import set_forward_context

    device = next(model.parameters()).device
    given = arriving(model, stage_of(vllm_config), ROWS, vllm_config.model_config.dtype,
                     torch.Generator().manual_seed(2))

    def step(ids: torch.Tensor) -> Crossing:
        came = {name: tensor.clone() for name, tensor in getattr(given, "tensors", {}).items()}  # some add to it
        # As vLLM's runners call it: there are models that take no less.
        left = model(input_ids=ids.to(device), positions=positions_of(len(ids), vllm_config.model_config, device),
                     intermediate_tensors=given, inputs_embeds=None)
        return Crossing(came, dict(getattr(left, "tensors", {})))

    with torch.inference_mode(), set_forward_context(None, vllm_config, num_tokens=ROWS), _as_written(model):
        yield step


def _roles() -> Roles:
    """The roles of vLLM's own modules."""
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


def search(model: nn.Module, vllm_config: Any) -> Outcome:
    """The outcome of ``discover`` on a model that is loaded and no more. The places of the table stand beside those
    that were found. StartError where the model is not looked into.
    """
    import vllm

    model_config = vllm_config.model_config
    names, n_layers = list(model_config.architectures), model_config.get_total_num_hidden_layers()
    check_media(model_config)
    outcome = Outcome(str(model_config.dtype).removeprefix("torch."), ROUNDINGS[model_config.dtype],
                      str(vllm.__version__), n_layers)
    known = family_of(names, model_config.hf_text_config) if is_known(names) else None
    try:
        family = discover(model, vllm_config)
        if known is not None:
            prove(model, vllm_config, known)
    except StartError as error:
        return msgspec.structs.replace(outcome, failed=str(error).rpartition(FAILED)[2])
    sites = proved_sites(model, family, names, list(family.found), n_layers, model_config.get_hidden_size())
    refused = dict(family.refused)
    if known is not None:  # what the search does not look for is where the table says
        others = [site for site in (*known.block, *known.model) if site not in sites]
        sites |= proved_sites(model, known, names, others, n_layers, model_config.get_hidden_size())
        refused |= known.refused
    if embeds_outside(model_config):
        sites.pop("embed", None)
        refused["embed"] = EMBEDDED_OUTSIDE
    if takes_media(model_config):
        for site in {"router_logits", "experts"} & set(sites):
            del sites[site]
            refused[site] = EXPERTS_APART
    return msgspec.structs.replace(outcome, sites=sites, names=dict((known or family).names), refused={
        site: why for site, why in refused.items() if site not in sites})
