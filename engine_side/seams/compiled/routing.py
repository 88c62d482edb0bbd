"""Routers of the compiled model: whether they choose by the numbers of their own tokens.

Inductor may pad the columns of a router's projection to a multiple of 16 bytes and hand on a view of it. It may do so
if the number of experts is not a multiple of 8, and decides by timing at each compilation. vLLM's kernels that choose
experts read rows as if nothing lay between them (https://github.com/vllm-project/vllm/issues/56900). All tokens of a
step but the first are then sent to experts by numbers of other tokens, or by the padding. That happens with taps and
without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from schemas.errors import StartError

logger = logging.getLogger("vllm.tap")

_CHOOSES: Final = "_compute_routing"  # vLLM's name for what chooses experts: hidden states and logits, to weights, ids
_ALIGNED: Final = 8  # columns of 16 bits that Inductor pads to; of 32 bits it pads to 4
_SHOWN: Final = 3


def padded(model: nn.Module) -> dict[str, Any]:
    """Routers whose logits the compiler may pad, each by the path of one layer."""
    layers: list[tuple[str, Any]] = [(path, getattr(module, "router", None)) for path, module in model.named_modules()]
    found = {id(router): (path, router) for path, router in layers
             if hasattr(router, _CHOOSES) and getattr(router, "global_num_experts", 0) % _ALIGNED}
    return dict(found.values())


def check_routing(routers: dict[str, Any], step: Callable[[], object], armed: list[str]) -> None:
    """Run a ``step`` of the compiled model, without a graph. StartError where one of its routers would choose other
    experts if the same logits lay side by side, and sites of routers are ``armed``. Where none are, a warning.
    """
    with _held_against(routers) as misled:
        step()
    if not misled:
        return
    named = ", ".join(sorted(misled)[:_SHOWN]) + (f" and {len(misled) - _SHOWN} more" if len(misled) > _SHOWN else "")
    says = (f"vllm-tap: tokens are sent to wrong experts in {named}, with vllm-tap or without: vLLM's compiler pads "
            "the router logits, and vLLM's kernel reads them as if they were not padded (vllm-project/vllm#56900). "
            """Start with --compilation-config '{"inductor_compile_config": {"shape_padding": false}}'""")
    if armed:
        raise StartError(f"{says}, or do not arm {', '.join(armed)}")
    logger.warning("%s", says)


@contextmanager
def _held_against(routers: dict[str, Any]) -> Iterator[set[str]]:
    """Paths of routers that choose other experts by noise that lies as their logits do than by the same side by side.
    (A dummy step's own logits may all be nothing.)
    """
    misled: set[str] = set()

    def twice(path: str, choose: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **options: Any) -> Any:
            if not router_logits.is_contiguous():
                noise = _noise_like(router_logits)
                by_noise, right = (choose(hidden_states, logits, *args, **options)[1]
                                   for logits in (noise, noise.contiguous()))
                if not torch.equal(by_noise, right):
                    misled.add(path)
            return choose(hidden_states, router_logits, *args, **options)  # the last to write, where it is tapped

        return chosen

    before = [(router, vars(router).get(_CHOOSES)) for router in routers.values()]
    for path, router in routers.items():
        setattr(router, _CHOOSES, twice(path, getattr(router, _CHOOSES)))
    try:
        yield misled
    finally:
        for router, own in before:
            if own is None:
                delattr(router, _CHOOSES)
            else:
                setattr(router, _CHOOSES, own)


def _noise_like(logits: torch.Tensor) -> torch.Tensor:
    """Noise with the shape and the strides of ``logits``, and between its rows."""
    rows, columns = logits.shape
    memory = torch.randn(rows * logits.stride(0) + columns, generator=torch.Generator().manual_seed(0))
    return memory.to(logits.device, logits.dtype).as_strided(logits.shape, logits.stride())
