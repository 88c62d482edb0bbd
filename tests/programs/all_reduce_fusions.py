"""Which of vLLM's own patterns of an all-reduce and a norm match beside a tap or an edit, as JSON: by case, whether one
does.

The CPU build lacks kernels that the patterns' module names; no pattern that is looked at here has one.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.pattern_matcher as matcher
import vllm._custom_ops
import vllm.distributed.parallel_state  # its operators
import vllm.ir
from torch._subclasses.fake_tensor import FakeTensorMode

EPSILON = 1e-6
lacking = torch.library.Library("_C", "FRAGMENT")


def patterns_of_vllm() -> Any:
    """The module of them."""
    while True:
        try:
            return importlib.import_module("vllm.compilation.passes.fusion.allreduce_rms_fusion")
        except AttributeError as error:
            found = re.search(r"'_C' object has no attribute '(\w+)'", str(error))
            if found is None:
                raise
            lacking.define(f"{found[1]}(Tensor x) -> Tensor")


fusion = patterns_of_vllm()


def reduce(x: torch.Tensor) -> torch.Tensor:
    """As a linear layer of a tensor-parallel rank does."""
    made: torch.Tensor = torch.ops.vllm.all_reduce(x, group_name="played")
    return made


def patterns() -> list[Any]:
    """What vLLM looks for, with the sum in front of the norm and without."""
    found: list[Any] = []

    def note(search: Any, _replace: Any, inputs: Any, trace: Any, _into: Any, **_options: Any) -> None:
        found.append(matcher.gen_pattern(search, inputs, trace))

    fusion.tensor_model_parallel_all_reduce, register = reduce, matcher.register_replacement
    matcher.register_replacement = note
    try:
        for name in ("", "FusedAdd", "Gemma", "FusedAddGemma"):
            kind = getattr(fusion, f"AllReduce{name}RMSNormPattern")
            made = object.__new__(kind)  # without a group of ranks
            made.epsilon, made.dtype, made.device = EPSILON, torch.bfloat16, "cpu"
            made.register(None)
    finally:
        matcher.register_replacement = register
    return found


def added(read: Callable[..., torch.Tensor] | None = None, edit: bool = False) -> Callable[..., Any]:
    """A norm that adds what was reduced to the stream; ``read`` gets what was made, the stream before, and after."""
    def block(x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor) -> Any:
        made = reduce(x)
        if edit:
            made = made * 2
        normed, total = vllm.ir.ops.fused_add_rms_norm(made, stream, weight, EPSILON)
        return normed, total, *([] if read is None else [read(made, stream, total)])
    return block


def normed(read: bool = False, edit: bool = False, gemma: bool = False) -> Callable[..., Any]:
    """A norm alone of what was reduced: the first of a model, or Gemma's before it is added."""
    def block(x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor) -> Any:
        made = reduce(x)
        if edit:
            made = made * 2
        result = vllm.ir.ops.rms_norm(made, weight.float() + 1.0 if gemma else weight, EPSILON)
        goes_on = () if gemma else (made,)  # it is the stream
        return result + stream, *goes_on, *([made * 3] if read else [])
    return block


CASES = {
    "nothing": added(),
    "what was made, read": added(lambda made, stream, total: made * 3),
    "its sum with the stream, read": added(lambda made, stream, total: made + stream),
    "the norm's sum, read": added(lambda made, stream, total: total * 3),
    "what was made, edited": added(edit=True),
    "first: nothing": normed(),
    "first: read": normed(read=True),
    "first: edited": normed(edit=True),
    "normed: nothing": normed(gemma=True),
    "normed: read": normed(read=True, gemma=True),
    "normed: edited": normed(edit=True, gemma=True),
}

with FakeTensorMode():
    known, told = patterns(), {}
    for case, block in CASES.items():
        rows = [torch.empty(5, 16, dtype=torch.bfloat16) for _ in range(2)]
        graph = matcher.fwd_only(block, [*rows, torch.empty(16, dtype=torch.bfloat16)]).graph
        told[case] = any(matcher.is_match(pattern.match(node)) for pattern in known for node in graph.nodes)
print(json.dumps(told))
