"""Rules by which vLLM's attention layers weigh keys. The writer is told them, so that a reader of queries and keys need
not know the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from torch import nn

from schemas.wire.engine_info import Attends

__all__ = ["attends_of", "joined", "one_window"]


def attends_of(model: nn.Module, vllm_config: Any, layers: Iterable[int]) -> list[Attends]:
    """The attention rules of these layers, as far as this rank has them and they tell; alike layers together."""
    wanted, mine = set(layers), {id(module) for module in model.modules()}
    context = vllm_config.compilation_config.static_forward_context  # a drafter's layers as well, routers of experts
    parts = [(layer, part) for name, part in context.items() if id(part) in mine and hasattr(part, "impl")
             and hasattr(part, "head_size") and (layer := _number(name)) is not None]
    count = Counter(layer for layer, _ in parts)
    return joined([_of(layer, part, count[layer]) for layer, part in parts if layer in wanted])


def one_window(vllm_config: Any) -> int | None:
    """The window that all attention layers of this rank share; None if one has none, or another."""
    context = vllm_config.compilation_config.static_forward_context
    windows = {part.sliding_window for part in context.values() if hasattr(part, "sliding_window")}
    return windows.pop() if len(windows) == 1 else None


def _number(name: str) -> int | None:
    """The layer's number in a name such as ``model.layers.3.self_attn.attn``; None where there is not one number."""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    return int(numbers[0]) if len(numbers) == 1 else None


def joined(told: Iterable[Attends | None]) -> list[Attends]:
    """Layers that do the same in one, in order."""
    layers: dict[Attends, set[int]] = {}
    for each in told:
        if each is not None:
            layers.setdefault(msgspec.structs.replace(each, layers=()), set()).update(each.layers)
    made = [msgspec.structs.replace(each, layers=sorted(numbers)) for each, numbers in layers.items()]
    return sorted(made, key=lambda each: each.layers)


def _of(layer: int, part: Any, count: int) -> Attends | None:
    """The rule of one layer; None where its back end does not tell."""
    impl = part.impl
    scale, cap = getattr(impl, "scale", None), getattr(impl, "logits_soft_cap", None)
    if not isinstance(scale, int | float) or not isinstance(part.head_size, int) or not hasattr(part, "sliding_window"):
        return None
    return Attends([layer], part.head_size, float(scale), part.sliding_window, float(cap) if cap else None,
                   _beyond(part, count), _cache(part))


def _cache(part: Any) -> str:
    """The dtype that its cache rounds keys to, "" where they stay as they were computed."""
    dtype = str(getattr(part, "kv_cache_dtype", "auto")).removeprefix("torch.")
    return "" if dtype in ("auto", "float16", "bfloat16", "float32", "float", "half") else dtype


def _beyond(part: Any, count: int) -> str:
    """The part of a layer's attention that no rule says; "" for none."""
    impl, kind = part.impl, type(part).__name__
    if count > 1:
        return f"{count} attention layers of one number"
    if kind != "Attention":
        return f"a kind of its own ({kind})"
    if getattr(part, "has_sink", False) or getattr(impl, "sinks", None) is not None:
        return "attention sinks"
    if getattr(impl, "chunk_lookback", -1) > -1:
        return "chunks of positions that see the chunk before"
    if getattr(impl, "alibi_slopes", None) is not None or getattr(part, "use_alibi_sqrt", False):
        return "ALiBi"
    if getattr(part, "kv_sharing_target_layer_name", None) is not None:
        return f"the keys of another layer ({part.kv_sharing_target_layer_name})"
    if getattr(part, "use_mm_prefix", False):
        return "parts of a prompt that attend to later tokens"
    if str(getattr(part, "attn_type", "decoder")) not in ("decoder", "AttentionType.DECODER"):
        return f"attention of another kind ({part.attn_type})"
    return ""
