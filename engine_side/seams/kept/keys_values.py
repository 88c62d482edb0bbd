"""Keys and values on their way into the cache of an engine in this process. A function is handed those of each layer.
Its results are written into their slots by vLLM's own code, so the layout of a backend's cache need not be known.

Attention must read the cache for the tokens of the step as well; backends that do not are refused. The function's
changes are outside the compiled graph, so the engine must run without CUDA graphs (``--enforce-eager``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine_side.seams.runner import rows_of_step
from schemas.errors import StartError

__all__ = ["Change", "Heads", "Rows", "heads_of", "layers_of", "rewritten", "runner_of"]

Heads = dict[int, tuple[int, int]]  # by layer its heads of keys, and numbers of each


@dataclass(frozen=True, slots=True)
class Rows:
    """Keys and values [rows, heads, head] of a layer that go into ``slots`` int64 [rows]. Row i has position
    ``positions[i]`` of the request ``requests[owners[i]]``; ``positions`` and ``owners`` are int64 [rows] on the host.
    """

    requests: list[str]
    owners: torch.Tensor
    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor


# Of a layer and the rows of its step, what is written, one after the other: keys, values, slots.
Change = Callable[[int, Rows], Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]


def heads_of(engine: Any) -> Heads:
    """The layers whose keys and values can be changed; StartError where those of a layer cannot."""
    return {layer: (part.num_kv_heads, part.head_size) for layer, part in layers_of(runner_of(engine)).items()}


@contextmanager
def rewritten(engine: Any, change: Change) -> Iterator[None]:
    """Steps whose keys and values are what ``change`` makes of them. An exception of it ends the step."""
    runner = runner_of(engine)
    laid: list[tuple[list[str], torch.Tensor, torch.Tensor]] = []
    name = "_prepare_inputs" if hasattr(runner, "_prepare_inputs") else "prepare_inputs"
    prepare = getattr(runner, name)

    def prepared(*args: Any, **kwargs: Any) -> Any:
        result = prepare(*args, **kwargs)
        requests, starts, positions = rows_of_step(runner, result)
        counts = torch.as_tensor(starts[: len(requests) + 1]).diff().to(torch.int64)
        owners = torch.repeat_interleave(torch.arange(len(requests)), counts)
        laid[:] = [(list(requests), owners, positions[: len(owners)].to("cpu", torch.int64, copy=True))]
        return result

    def update(layer: int, original: Any, part: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        if not laid:  # a step without requests
            original(part, key, value, cache, slots)
            return
        requests, owners, positions = laid[0]
        n = len(owners)
        for keys, values, there in change(layer, Rows(requests, owners, positions, key[:n], value[:n], slots[:n])):
            original(part, keys.contiguous(), values.contiguous(), cache, there)

    changed = [part.impl for part in layers_of(runner).values()]
    setattr(runner, name, prepared)
    for layer, part in layers_of(runner).items():
        part.impl.do_kv_cache_update = partial(update, layer, part.impl.do_kv_cache_update)
    try:
        yield
    finally:
        delattr(runner, name)
        for impl in changed:
            del impl.do_kv_cache_update


def runner_of(engine: Any) -> Any:
    """The runner of an engine of one rank; StartError of one of several."""
    found = engine.collective_rpc(lambda worker: worker.model_runner)
    if len(found) != 1:
        raise StartError("keys and values can be changed in an engine with one rank only, and this one has "
                         f"{len(found)}; leave out --tensor-parallel-size and --pipeline-parallel-size")
    return found[0]


def layers_of(runner: Any) -> dict[int, Any]:
    """vLLM's attention layers by number; StartError, naming the layer, where its cache is written in another way."""
    from vllm.model_executor.models.utils import extract_layer_index

    found: dict[int, Any] = {}
    names: dict[int, str] = {}
    there = runner.vllm_config.compilation_config.static_forward_context  # routers of experts as well
    for name in (name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names):
        part = there[name]
        why = _refused(part)
        if not why and (at := extract_layer_index(name)) in found:
            why = f"{names[at]} has the number {at} too, and nothing tells the two apart"
        if why:
            raise StartError(f"keys and values of {name} cannot be changed on their way into the cache: {why}")
        found[at], names[at] = part, name
    if not found:
        raise StartError("keys and values cannot be changed: the model has no attention layer with a cache")
    return found


def _refused(part: Any) -> str:
    kind = type(part).__name__
    if kind != "Attention":
        return f"it is of the kind {kind}, whose cache has no keys and values"
    if not hasattr(part.impl, "do_kv_cache_update") or part.attn_backend.forward_includes_kv_cache_update:
        return f"{type(part.impl).__name__} writes it within attention; choose another --attention-backend"
    if part.kv_sharing_target_layer_name is not None:
        return f"it reads those of {part.kv_sharing_target_layer_name}"
    if part.kv_cache_dtype != "auto":
        return f"the cache is kept as {part.kv_cache_dtype}: leave out --kv-cache-dtype"
    if part.head_size_v != part.head_size:
        return f"its values have {part.head_size_v} numbers in a head and its keys {part.head_size}"
    return ""
