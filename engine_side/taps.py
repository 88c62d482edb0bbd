"""Taps: the forward of chosen module *instances* also copies its result into staging, inside the compiled graph.

Only instances of the target model are touched, so drafters and other models in the process stay as they are. The
wrapped forward is ordinary traced code: Dynamo and CUDA graphs see a tensor copy, no hook and no opaque operation.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from engine_side.architectures import Point
from engine_side.staging import Staging

Forward = Callable[..., Any]


def install(points: Iterable[Point], staging: Staging) -> int:
    """Wrap every point; returns how many."""
    count = 0
    for point in points:
        _wrap(point.module, staging.buffers[point.site][point.layer], _RESULTS[point.result])
        count += 1
    return count


def _sum_rows(result: Any) -> torch.Tensor:
    hidden, residual = result
    return hidden + residual


def _tensor_rows(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


_RESULTS: dict[str, Callable[[Any], torch.Tensor]] = {"sum": _sum_rows, "tensor": _tensor_rows}


def _wrap(module: nn.Module, buffer: torch.Tensor, rows_of: Callable[[Any], torch.Tensor]) -> None:
    module.register_buffer("vllm_tap_rows", buffer, persistent=False)
    own = module.__dict__.get("forward")
    if own is not None:
        # Some vLLM back ends put a fused forward on the instance; it would shadow a swapped class silently.
        module.forward = types.MethodType(_tapped(own.__func__, rows_of), module)
    else:
        original = type(module)
        module.__class__ = type(original.__name__, (original,), {"forward": _tapped(original.forward, rows_of)})


def _tapped(forward: Forward, rows_of: Callable[[Any], torch.Tensor]) -> Forward:
    def tapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        rows = rows_of(result)
        rows = rows.reshape(-1, rows.shape[-1])
        self.vllm_tap_rows[: rows.shape[0]].copy_(rows)
        return result

    return tapped
