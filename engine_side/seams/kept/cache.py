"""A request's blocks of vLLM's K/V cache, read back: for an engine in this process, between two steps.

A block is found by the dimension of a layer's cache that counts blocks, so nothing is asked of a backend's layout.
Where no dimension, or more than one, can be it, the cache is not read, and ``Unread`` says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

Blocks = list[list[int]]  # numbers of blocks by group of layers, in the order of the tokens; 0: it was given back


class Unread(Exception):
    """The cache cannot be read."""


def blocks_of_running(engine: Any) -> Blocks | None:
    """The blocks of the only request that an ``LLMEngine`` runs; None where none is running."""
    scheduler = engine.engine_core.engine_core.scheduler
    if not scheduler.running:
        return None
    found = scheduler.kv_cache_manager.get_block_ids(scheduler.running[0].request_id)
    return [list(each) for each in found]


def digests(engine: Any, blocks: Blocks) -> dict[str, str]:
    """The XXH3 of what the blocks hold, by layer (and rank, of several); Unread where that cannot be told."""
    found = engine.collective_rpc(_digests, args=(blocks,))
    if refused := [each for each in found if isinstance(each, str)]:
        raise Unread(refused[0])
    return {name if len(found) == 1 else f"{name} of rank {rank}": digest for rank, each in enumerate(found)
            for name, digest in each.items()}


def _digests(worker: Any, blocks: Blocks) -> dict[str, str] | str:
    """The digests of a worker, or why it cannot be read. Sent to workers in processes of their own as it is."""
    runner = worker.model_runner
    layers = runner.vllm_config.compilation_config.static_forward_context
    try:
        return _of_groups(layers, runner.kv_cache_config, blocks)
    except Unread as error:
        return str(error)


def _of_groups(layers: Mapping[str, Any], config: Any, blocks: Blocks) -> dict[str, str]:
    found = {}
    for group, numbers in zip(config.kv_cache_groups, blocks, strict=True):
        for name in group.layer_names:
            kept = layers[name].kv_cache
            digest = xxhash.xxh3_128()
            for tensor in [kept] if isinstance(kept, torch.Tensor) else kept:
                for part in _parts(name, tensor, config.num_blocks, numbers):
                    digest.update(part.contiguous().view(torch.uint8).cpu().numpy().tobytes())
            found[name] = digest.hexdigest()
    return found


def _parts(name: str, tensor: torch.Tensor, count: int, numbers: Sequence[int]) -> list[torch.Tensor]:
    """The tensors of a layer in these blocks; a kernel's blocks may be pieces of the scheduler's."""
    axes = [axis for axis, size in enumerate(tensor.shape) if size >= count and size % count == 0]
    if len(axes) != 1:
        raise Unread(f"the K/V cache of {name} has shape {list(tensor.shape)}: which of it counts the {count} blocks "
                     "is not to be told")
    pieces = tensor.shape[axes[0]] // count
    return [tensor.narrow(axes[0], number * pieces, pieces) for number in numbers if number]
