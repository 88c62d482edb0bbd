"""What ranks say to each other, counted in their workers: calls of Python's, and operators, which a compiled graph
calls by itself. An engine's ``collective_rpc`` runs the functions, which takes VLLM_ALLOW_INSECURE_SERIALIZATION.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch

_CALLS: Final = (
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "reduce",
    "broadcast_object_list", "gather", "gather_object", "scatter", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier",
    "monitored_barrier", "send_object_list", "recv_object_list", "broadcast_object", "send_object", "recv_object",
    "broadcast_tensor_dict", "send_tensor_dict", "recv_tensor_dict", "isend_tensor_dict", "irecv_tensor_dict")
_OPERATORS: Final = ("c10d::", "_C::shm_", "vllm::all_", "vllm::reduce_", "nccl", "gloo")  # how their names begin
_SAID: Counter[str] = Counter()  # of a worker
_PROFILES: list[Any] = []  # of a worker, while it counts


def count(wrapper: Any) -> None:
    """Count in a rank's worker what it says to others, and its steps with tokens."""
    worker = getattr(wrapper, "worker", wrapper)
    worker.model_runner._dummy_run(2)  # without a warm-up vLLM's CPU runner has no room for what a stage is handed on

    def counting(name: str, call: Any, counts: Any = lambda *_: True) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            _SAID[name] += bool(counts(*args))
            return call(*args, **kwargs)
        return called

    from vllm.distributed.parallel_state import GroupCoordinator

    for where in (torch.distributed, GroupCoordinator):  # whose device may have ways of its own
        for name in _CALLS:
            if (call := getattr(where, name, None)) is not None:
                setattr(where, name, counting(f"{where.__name__}.{name}", call))
    worker.execute_model = counting("steps", worker.execute_model,
                                    lambda output, *_: output.total_num_scheduled_tokens)
    _PROFILES.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
    _PROFILES[-1].start()


def counted(_: Any) -> dict[str, int]:
    """What was counted in a rank's worker; it counts no longer."""
    profile = _PROFILES.pop()
    profile.stop()
    _SAID.update({event.key: event.count for event in profile.key_averages() if event.key.startswith(_OPERATORS)})
    return {name: number for name, number in _SAID.items() if number}


def by_step(said: list[dict[str, int]]) -> list[dict[str, float]]:
    """What each rank says in a step with tokens, of which there were many."""
    steps = [each.pop("steps") for each in said]
    assert min(steps) > 30 and all(said), "nothing was counted"
    return [{name: number / of for name, number in each.items()} for each, of in zip(said, steps, strict=True)]
