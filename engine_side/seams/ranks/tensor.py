"""The ranks of an engine, as vLLM has them: the place of this one, the name of its engine, and the width of whole rows.
A fingerprint tells the model apart from others, however many ranks there are. No step asks anything here.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import xxhash
from torch import nn

from engine_side.config import DRAWN, GROUP
from engine_side.seams.front_end import widths_of
from engine_side.seams.ranks.agreement import of_shares, of_stages, the_same
from engine_side.tap.architectures import SHARED_OUT, TapPoint, of_model
from engine_side.worker import Seat
from schemas.errors import StartError

__all__ = ["fingerprint", "group_of", "instance_of", "seat_of", "whole_width"]


def seat_of(parallel: Any) -> Seat:
    """The place of this process among the ranks of its engine."""
    shares, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if shares * stages == 1:
        return Seat()
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    return Seat(int(get_pp_group().rank_in_group * shares + get_tensor_model_parallel_rank()),
                max(1, shares * stages // max(1, getattr(parallel, "nnodes_within_dp", 1))), stages)


def group_of(vllm_config: Any) -> str:
    """The name of the engine of this rank: the same on each of its ranks, another for every other engine; "" for an
    engine of one rank.

    StartError where the processes of the engine were given no name.
    """
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size == 1:
        return ""
    if not (name := instance_of(vllm_config)):
        raise StartError(f"vllm-tap: {GROUP} is not set in this process; set it to the same text for all ranks of an "
                         "engine")
    return name


def instance_of(vllm_config: Any) -> str:
    """The name that this engine's server gave it, "" where it gave none. An engine of one rank has a name too, because
    it does not know whether its server has other engines.
    """
    if not (started := os.environ.get(GROUP, "")):
        return ""
    # A model without mixtures runs as several engines that know nothing of each other; each is then number 0 of one.
    parallel = vllm_config.parallel_config
    number = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
    if not started.startswith(DRAWN):  # who named it did so on every host, each of which has an instance of its own
        return f"{started}-{number}"
    return f"{started.removeprefix(DRAWN)}-{vllm_config.instance_id.removesuffix(f'_dp{number}')}-{number}"


def whole_width(point: TapPoint, model_config: Any) -> int:
    """Numbers in a whole row of a point, of which the rank may have a share. A rank has no share of a row that was
    found by structure.
    """
    if point.site not in SHARED_OUT or point.source == "structure":
        return point.width
    module = of_model(point.module)
    heads = {"q": "total_num_heads", "k": "total_num_kv_heads", "v": "total_num_kv_heads"}.get(point.rule, "")
    if hasattr(module, heads) and hasattr(module, "head_size"):
        return int(getattr(module, heads) * module.head_size)
    if point.rule == "operand":
        return int(getattr(module, "input_size", point.width))
    return int(widths_of(model_config)[point.site] or point.width)


def fingerprint(model: nn.Module, model_config: Any) -> str:
    """xxh3 of the model's configuration and of the first bytes of a few of its parameters: the same on every rank, and
    of one rank.
    """
    digest = xxhash.xxh3_128(model_config.hf_config.to_json_string().encode())
    # The same with vLLM's layers for adapters around the model's own.
    own = {name.replace(".base_layer.", "."): parameter for name, parameter in model.named_parameters()}
    parameters = sorted({name for names in of_stages(list(own)) for name in names})
    chosen, whole = parameters[:: max(1, len(parameters) // 16)], _whole_heads(model)
    first = {name: whole.get(id(own[name]), own[name].detach()).flatten()[:_NUMBERS].float().cpu().numpy().tobytes()
             for name in chosen if name in own}
    told = of_stages(first)
    for name in chosen:
        digest.update(name.encode())
        digest.update(next(stage[name] for stage in told if name in stage))
    return the_same(digest.hexdigest())


def _whole_heads(model: nn.Module) -> dict[int, torch.Tensor]:
    """The first rows of weights whose columns ranks share out, put together: [rows, all columns], by id of the weight.
    """
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        width, share = (getattr(module, name, 0) for name in ("input_size", "input_size_per_partition"))
        weight = getattr(module, "weight", None)
        if share < width and isinstance(weight, nn.Parameter) and weight.shape[1:] == (share,):
            told = of_shares(weight.detach()[: -(-_NUMBERS // width)].float().cpu().numpy())
            found[id(weight)] = torch.cat([torch.from_numpy(each) for each in told], dim=1)
    return found


_NUMBERS = 256  # of a parameter that a fingerprint sees
