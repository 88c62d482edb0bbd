"""Attention layers whose keys and values cannot be changed by number and heads: refused by name, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_side.seams.kept.keys_values import heads_of
from schemas.errors import StartError


class Attention:
    """What is asked of a layer of vLLM's."""

    def __init__(self, head_size_v: int = 32) -> None:
        self.num_kv_heads, self.head_size, self.head_size_v = 2, 32, head_size_v
        self.kv_sharing_target_layer_name, self.kv_cache_dtype = None, "auto"
        self.impl = SimpleNamespace(do_kv_cache_update=None)
        self.attn_backend = SimpleNamespace(forward_includes_kv_cache_update=False)


def engine(layers: dict[str, Attention]) -> Any:
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(layers))]),
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)))
    return SimpleNamespace(collective_rpc=lambda call: [call(SimpleNamespace(model_runner=runner))])


def test_layers_are_told_by_number() -> None:
    assert heads_of(engine({f"model.layers.{at}.self_attn.attn": Attention() for at in (0, 3)})) == {
        0: (2, 32), 3: (2, 32)}


@pytest.mark.parametrize(("layers", "match"), [
    ({"model.layers.1.self_attn.attn": Attention(16)},
     r"keys and values of model.layers.1.self_attn.attn cannot be changed .*: its values have 16 numbers in a head and "
     r"its keys 32"),
    ({"model.layers.1.self_attn.attn": Attention(), "model.layers.1.cross_attn.attn": Attention()},
     r"keys and values of model.layers.1.cross_attn.attn cannot be changed .*: model.layers.1.self_attn.attn has the "
     r"number 1 too")])
def test_layers_that_their_number_and_heads_do_not_tell_are_refused(layers: dict[str, Attention], match: str) -> None:
    with pytest.raises(StartError, match=match):
        heads_of(engine(layers))
