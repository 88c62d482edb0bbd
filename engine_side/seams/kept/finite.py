"""Keys, values and logits stay finite, whatever edits make of them.

Where a logit is NaN, the index that samplers take for the largest may lie behind the vocabulary. A model that is given
such a token reads beyond its embedding. On a GPU that ends the engine.

vLLM's attention on CPUs multiplies what its mask leaves out by 0, and reads blocks to their end. So a NaN that one
request has left in a block gets into the answer of the next request with that block, and into what that one leaves.
Kernels on a GPU take what lies behind a request's last token for 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch

from engine_side import worker

_KEPT: Final = frozenset({"key", "value", "kv_c_normed", "k_pe"})  # arguments that go into the cache
MOST: Final = 1e30  # of products of these none is infinite that a mask leaves out


def keep_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Logits in steps with edited requests: 0 for what is no number, the largest there is for what is infinite.

    In a graph that is recorded always: it may be replayed in any step.
    """
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits = original(self, *args, **kwargs)
        editor = None if torch.compiler.is_compiling() or worker.CURRENT is None else worker.CURRENT.editor
        if logits is not None and editor is not None and (
                editor.busy or (logits.is_cuda and torch.cuda.is_current_stream_capturing())):
            torch.nan_to_num_(logits, nan=0.0, neginf=-torch.inf)  # that is how tokens are ruled out
        return logits

    return forward


def guard(model: torch.nn.Module) -> None:
    """Make a model's attention on a CPU keep 0 for what is no number, and at most ``MOST``."""
    found = (getattr(module, "impl", None) for module in model.modules())
    kernels = {id(kernel): kernel for kernel in found if kernel is not None}
    for kernel in kernels.values():
        for name in ("do_kv_cache_update", "forward"):
            if callable(write := getattr(kernel, name, None)):
                setattr(kernel, name, _finite(write))
                break


def _finite(write: Callable[..., Any]) -> Callable[..., Any]:
    kept = [name in _KEPT for name in inspect.signature(write).parameters]

    def writing(*args: Any, **kwargs: Any) -> Any:
        return write(*(bounded(value) if here else value for value, here in zip(args, kept, strict=False)),
                     *args[len(kept) :],
                     **{name: bounded(value) if name in _KEPT else value for name, value in kwargs.items()})

    return writing


def bounded(numbers: torch.Tensor | None) -> torch.Tensor | None:
    """Numbers as they are where they are finite and no larger than ``MOST``."""
    if numbers is None:
        return None
    most = min(MOST, torch.finfo(numbers.dtype).max)
    return torch.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0).clamp_(-most, most)
