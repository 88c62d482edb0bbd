"""What edits make of keys and values stays finite in the K/V cache.

vLLM's attention on CPUs multiplies what its mask leaves out by 0, and reads blocks to their end: a NaN that one request
has left in a block is then in the answer of the next that gets the block, and in what it leaves. Kernels on a GPU take
what lies behind a request's last token for 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch

_KEPT: Final = frozenset({"key", "value", "kv_c_normed", "k_pe"})  # arguments that go into the cache
MOST: Final = 1e30  # of products of these none is infinite that a mask leaves out


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
