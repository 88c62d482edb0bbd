"""What vLLM's CPU communicator lacks to run experts in a data-parallel group, as its GPUs have it: a vLLM plugin.

Loaded where ``plugin(folder)`` is on PYTHONPATH. Sums and rows are torch's own over gloo; of vLLM nothing else changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["plugin", "register"]


def plugin(folder: Path) -> Path:
    """A folder below ``folder`` that has the entry point."""
    info = folder / "exchange" / "cpu_exchange-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-exchange\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\ncpu_exchange = {__name__}:register\n")
    return info.parent


def register() -> None:
    """Give the CPU's communicator both exchanges, unless it has them."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for name, function in (("all_gatherv", all_gatherv), ("reduce_scatterv", reduce_scatterv)):
        if getattr(CpuCommunicator, name, None) is getattr(DeviceCommunicatorBase, name, None):
            setattr(CpuCommunicator, name, function)


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of every rank, ``sizes`` of each: [sum of sizes, …]."""
    assert dim == 0
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    own = input_.new_zeros((max(sizes), *input_.shape[1:]))
    own[: input_.shape[0]] = input_
    found = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(found, own, group=self.device_group)
    return torch.cat([rows[:size] for rows, size in zip(found, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """Of the sum over ranks the rows of this one."""
    assert dim == 0
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    whole = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=self.device_group)
    start = sum(sizes[: self.rank_in_group])
    return whole[start : start + sizes[self.rank_in_group]]
