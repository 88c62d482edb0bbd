"""Engines of a data-parallel group, each of which serves requests of its own.

A model without experts makes engines that know nothing of each other. One with experts makes them step together, since
each has some of the experts, or some of their columns: an engine without requests takes *dummy steps*, whose rows are
nobody's. Taps write them into staging, and no one reads them there: rows are taken within the step that made them.
"""

from __future__ import annotations

from typing import Any

from schemas.errors import StartError

__all__ = ["check_exchange"]


def check_exchange(vllm_config: Any) -> None:
    """StartError where the engines of a group cannot exchange tokens, so that the first step would end them."""
    engines, model = vllm_config.parallel_config.data_parallel_size, vllm_config.model_config
    if engines == 1 or not getattr(model, "is_moe", False) or vllm_config.device_config.device_type != "cpu":
        return
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    if getattr(CpuCommunicator, "all_gatherv", None) is getattr(DeviceCommunicatorBase, "all_gatherv", None):
        raise StartError(f"vllm-tap: data_parallel_size={engines}: on a CPU this vLLM cannot exchange the tokens of a "
                         "model with experts (CpuCommunicator has no all_gatherv), and would end in its first step; "
                         "set data_parallel_size to 1, or run on GPUs")
