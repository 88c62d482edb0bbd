"""The stages of a pipeline-parallel engine, as vLLM deals a model's layers out, and what stages are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine_side.tap.stages import Stage

__all__ = ["arriving", "fill", "stage_of", "stages_of"]


def stages_of(vllm_config: Any) -> list[Stage]:
    """The stages of an engine, one where it has no pipeline."""
    count = vllm_config.parallel_config.pipeline_parallel_size
    n_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if count == 1:
        return [Stage(0, 1, 0, n_layers)]
    from vllm.distributed.utils import get_pp_indices

    return [Stage(number, count, *get_pp_indices(n_layers, number, count)) for number in range(count)]


def stage_of(vllm_config: Any) -> Stage:
    """The stage of this process."""
    stages = stages_of(vllm_config)
    if len(stages) == 1:
        return stages[0]
    from vllm.distributed import get_pp_group

    return stages[int(get_pp_group().rank_in_group)]


def arriving(model: Any, stage: Stage, rows: int, dtype: torch.dtype, draws: torch.Generator) -> Any:
    """Noise in the place of what the stage before hands on, for a step of ``rows``; None on the first stage."""
    if stage.first:
        return None
    device = next(nn.Module.parameters(model)).device
    tensors = model.make_empty_intermediate_tensors(batch_size=rows, dtype=dtype, device=device)
    fill(tensors, draws, rows)
    return tensors


def fill(tensors: Any, draws: torch.Generator, rows: int) -> None:
    """Noise in the first rows of all that a stage is handed on."""
    for tensor in tensors.tensors.values():
        some = tensor[:rows]
        some.copy_(torch.randn(some.shape, generator=draws))
