"""A step of torch's compiler for CPUs that may be left out, and that ends the compilation in some of our graphs.

``CppScheduling.try_loop_split`` (torch 2.13) splits the loops of operations that were fused, and asserts that these
are alike. It compares the number of tokens by its symbol, which vLLM's graph has two of: of the tokens, and of their
positions. Where queries or keys are captured and edited behind the rotary embedding, one loop has the one and another
the other. That assertion comes before the step changes anything; a later one ends the compilation as before.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from engine_side.seams.patching import when_imported, wrap


def connect() -> None:
    """Install the wrapper, where torch has that step."""
    when_imported("torch._inductor.codegen.cpp", _wrap)


def _wrap(module: types.ModuleType) -> None:
    if hasattr(module.CppScheduling, "try_loop_split"):
        wrap(module, "CppScheduling.try_loop_split", _or_whole)


def _or_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    def try_loop_split(self: Any, nodes: Any) -> Any:
        bodies = [node._body for node in nodes]
        try:
            return original(self, nodes)
        except AssertionError:
            if any(node._body is not body for node, body in zip(nodes, bodies, strict=True)):
                raise
            return nodes

    return try_loop_split
