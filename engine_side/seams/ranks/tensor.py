"""The ranks of a tensor-parallel engine, as vLLM has them: who this one is, how wide whole rows are, and what all of
them agree on while they start. Nothing here is asked in a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from engine_side.config import GROUP
from engine_side.seams.front_end import widths_of
from engine_side.tap.architectures import SHARED_OUT, TapPoint, of_model
from engine_side.worker import Seat
from schemas.errors import StartError

__all__ = ["group_of", "seat_of", "the_same", "together", "whole_heads", "whole_width"]


def seat_of(parallel: Any) -> Seat:
    """The place of this process among the ranks of its engine."""
    if parallel.tensor_parallel_size == 1:
        return Seat()
    from vllm.distributed import get_tensor_model_parallel_rank

    return Seat(int(get_tensor_model_parallel_rank()),
                max(1, parallel.tensor_parallel_size // max(1, getattr(parallel, "nnodes_within_dp", 1))))


def group_of(vllm_config: Any) -> str:
    """The name of the engine that this rank is one of: the same on each, another of every other engine; "" of one rank.

    StartError where who started the engine gave its processes none.
    """
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size == 1:
        return ""
    if not (started := os.environ.get(GROUP, "")):
        raise StartError(f"vllm-tap: {GROUP} is not set in this process: give all ranks of an engine the same one")
    return f"{started}-{vllm_config.instance_id}-{getattr(parallel, 'data_parallel_rank', 0)}"


def whole_width(point: TapPoint, model_config: Any) -> int:
    """Numbers in a whole row of a point, of which the rank may have a share."""
    if point.site not in SHARED_OUT:
        return point.width
    module = of_model(point.module)
    heads = {"q": "total_num_heads", "k": "total_num_kv_heads", "v": "total_num_kv_heads"}.get(point.rule, "")
    if hasattr(module, heads) and hasattr(module, "head_size"):
        return int(getattr(module, heads) * module.head_size)
    if point.rule == "operand":
        return int(getattr(module, "input_size", point.width))
    return int(widths_of(model_config)[point.site] or point.width)


def the_same(text: str) -> str:
    """What the first rank says, on every rank."""
    if not _several():
        return text
    from vllm.distributed import get_tp_group

    return str(get_tp_group().broadcast_object(text, src=0))


@contextmanager
def together() -> Iterator[None]:
    """StartError on every rank where one of them raised it: the others would wait for it in the next step."""
    error: StartError | None = None
    try:
        yield
    except StartError as raised:
        error = raised
    if _several():
        from vllm.distributed import get_tp_group

        told: list[str] = [""] * get_tp_group().world_size
        torch.distributed.all_gather_object(told, "" if error is None else str(error), group=get_tp_group().cpu_group)
        rank, other = next(((rank, text) for rank, text in enumerate(told) if text), (0, ""))
        if error is None and other:
            raise StartError(f"{other} (said by tensor-parallel rank {rank})")
    if error is not None:
        raise error


def whole_heads(model: nn.Module) -> dict[int, torch.Tensor]:
    """By id, of weights whose columns ranks share out, the first rows put together: [rows, all columns]."""
    if not _several():
        return {}
    from vllm.distributed import get_tp_group

    found = {}
    for module in model.modules():
        width, share = (getattr(module, name, 0) for name in ("input_size", "input_size_per_partition"))
        weight = getattr(module, "weight", None)
        if share < width and isinstance(weight, nn.Parameter) and weight.shape[1:] == (share,):
            rows = weight.detach()[: -(-_NUMBERS // width)].float().cpu()
            told: list[Any] = [None] * get_tp_group().world_size
            torch.distributed.all_gather_object(told, rows.numpy(), group=get_tp_group().cpu_group)
            found[id(weight)] = torch.cat([torch.from_numpy(each) for each in told], dim=1)
    return found


_NUMBERS = 256  # of a parameter that a fingerprint sees


def _several() -> bool:
    from vllm.distributed import model_parallel_is_initialized

    if not model_parallel_is_initialized():
        return False
    from vllm.distributed import get_tensor_model_parallel_world_size

    return bool(get_tensor_model_parallel_world_size() > 1)
