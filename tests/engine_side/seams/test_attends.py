"""Rules of attention layers as vLLM's modules have them; real models are in tests/engine/test_attention.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine_side.seams.kept.attends import attends_of, one_window


class Attention(nn.Module):
    """As much of vLLM's layer as is read of it."""

    def __init__(self, impl: dict[str, Any], **own: Any) -> None:
        super().__init__()
        self.impl = SimpleNamespace(**{"scale": 0.25, "logits_soft_cap": 0, **impl})
        self.head_size, self.sliding_window, self.kv_cache_dtype = 16, None, "auto"
        for name, value in own.items():
            setattr(self, name, value)


def told(part: nn.Module) -> Any:
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"model.layers.3.attn": part}))
    return attends_of(nn.Sequential(part), config, [3])[0]


@pytest.mark.parametrize(("impl", "own", "beyond"), [
    ({}, {}, ""), ({"chunk_lookback": -1}, {}, ""), ({"chunk_lookback": 1}, {"sliding_window": 1024}, "chunks"),
    ({"sinks": torch.ones(4)}, {}, "sinks"), ({"alibi_slopes": [1.0]}, {}, "ALiBi"),
])
def test_what_no_rule_says_is_named(impl: dict[str, Any], own: dict[str, Any], beyond: str) -> None:
    found = told(Attention(impl, **own))
    assert beyond in found.beyond and bool(found.beyond) is bool(beyond)


@pytest.mark.parametrize(("dtype", "cache"), [
    ("auto", ""), ("bfloat16", ""), (torch.float16, ""), ("fp8", "fp8"), ("turboquant_4bit_nc", "turboquant_4bit_nc")])
def test_a_cache_that_rounds_keys_is_told(dtype: Any, cache: str) -> None:
    assert told(Attention({}, kv_cache_dtype=dtype)).cache == cache


@pytest.mark.parametrize(("windows", "shared"), [([32, 32], 32), ([32, None], None), ([32, 64], None), ([None], None)])
def test_a_window_is_that_of_every_layer(windows: list[int | None], shared: int | None) -> None:
    parts: dict[str, Any] = {f"layers.{number}.attn": Attention({}, sliding_window=window)
                             for number, window in enumerate(windows)}
    parts["layers.0.experts"] = nn.Identity()  # no attention
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=parts))
    assert one_window(config) == shared
