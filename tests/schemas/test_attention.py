"""Attention out of queries and keys, against sums written out one number at a time."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from schemas import limits
from schemas.attention import AttentionRule, Summary, answerable, summarize
from schemas.errors import ArgumentError, LimitError

F32 = npt.NDArray[np.float32]
PLAIN = {"head_size": 8, "scale": 8**-0.5, "window": None, "soft_cap": None}


def rule(**changed: Any) -> AttentionRule:
    return AttentionRule(**{**PLAIN, **changed})


def rows(count: int, heads: int, seed: int, spread: float = 2.0) -> F32:
    return (spread * np.random.default_rng(seed).standard_normal((count, heads * 8))).astype(np.float32)


def written_out(query: F32, keys: F32, position: int, of: AttentionRule) -> dict[int, float]:
    """The weight of every key that one head's query sees, by position; key ``i`` is at position ``i``."""
    first = 0 if of.window is None else max(0, position - of.window + 1)
    scores = {}
    for at in range(first, position + 1):
        score = of.scale * math.fsum(float(a) * float(b) for a, b in zip(query, keys[at], strict=True))
        scores[at] = score if of.soft_cap is None else of.soft_cap * math.tanh(score / of.soft_cap)
    most = max(scores.values())
    total = math.fsum(math.exp(score - most) for score in scores.values())
    return {at: math.exp(score - most) / total for at, score in scores.items()}


def columns_of(head: int) -> slice:
    return slice(8 * head, 8 * head + 8)


def check(found: Summary, q: F32, k: F32, positions: list[int], of: AttentionRule, top: int) -> None:
    heads, group = q.shape[1] // 8, q.shape[1] // k.shape[1]
    for head in range(heads):
        columns, key_columns = columns_of(head), columns_of(head // group)
        for number, position in enumerate(positions):
            weights = written_out(q[number, columns], k[:, key_columns], position, of)
            best = sorted(weights, key=lambda at: (-weights[at], at))[:top]
            assert found.keys[head, number].tolist() == best + [-1] * (top - len(best))
            expected = [weights[at] for at in best] + [0.0] * (top - len(best))
            assert np.abs(found.weights[head, number] - expected).max() < 1e-6
            entropy = -math.fsum(w * math.log(w) for w in weights.values() if w > 0)
            assert abs(found.entropy[head, number] - entropy) < 1e-6


@pytest.mark.parametrize("memory", [limits.attention_bytes_max, 48 * 40, 48 * 130])
@pytest.mark.parametrize("changed", [
    {}, {"window": 1}, {"window": 7}, {"window": 400}, {"soft_cap": 4.0}, {"scale": 3.0},
    {"window": 5, "soft_cap": 3.0}])
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (6, 2), (4, 1)])
def test_every_head_query_and_key(heads: int, key_heads: int, changed: dict[str, Any], memory: int,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "attention_bytes_max", memory)  # one query at a time, some, all
    q, k, at = rows(40, heads, 1), rows(40, key_heads, 2), np.arange(40, dtype=np.uint32)
    of = rule(**changed)
    check(summarize(q, k, at, at, of, 4), q, k, list(range(40)), of, 4)


def test_values_are_added_up_by_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "attention_bytes_max", 48 * 130)
    q, k, v, at = rows(20, 4, 14), rows(20, 2, 15), rows(20, 1, 16), np.arange(20)  # heads of 4 columns
    found = summarize(q, k, at, at, rule(window=6), 2, v)
    assert found.outputs is not None and found.outputs.shape == (20, 16)
    for head, position in ((0, 0), (1, 7), (2, 19), (3, 11)):
        weights = written_out(q[position, columns_of(head)], k[:, columns_of(head // 2)], position, rule(window=6))
        expected = sum(weight * v[key, 4 * (head // 2) : 4 * (head // 2) + 4] for key, weight in weights.items())
        assert np.abs(found.outputs[position, 4 * head : 4 * head + 4] - expected).max() < 1e-5
    assert summarize(q, k, at, at, rule(), 2).outputs is None
    with pytest.raises(ArgumentError, match=r"values = \(20, 7\): valid: a row for each of 20 keys, .* 2 key heads"):
        summarize(q, k, at, at, rule(), 2, v[:, :7])


def test_some_queries_with_the_keys_that_they_see() -> None:
    """Under a window later keys are enough, and a gap that no query looks into does no harm."""
    q, k, of = rows(30, 4, 3), rows(30, 2, 4), rule(window=4)
    asked, there = [9, 10, 11, 25, 29], [*range(6, 12), *range(22, 30)]
    found = summarize(q[asked], k[there], np.asarray(asked), np.asarray(there), of, 6)
    check(found, q[asked], k, asked, of, 6)


def test_which_queries_can_be_answered() -> None:
    at, there = np.arange(12), np.asarray([0, 1, 2, 5, 6, 7, 8, 9, 11])
    assert np.flatnonzero(answerable(at, there, rule())).tolist() == [0, 1, 2]
    assert np.flatnonzero(answerable(at, there, rule(window=3))).tolist() == [0, 1, 2, 7, 8, 9]
    assert np.flatnonzero(answerable(at, there, rule(window=1))).tolist() == there.tolist()


def test_scores_that_would_overflow_and_weights_that_vanish() -> None:
    q, k, at = rows(20, 1, 5, 1e15), rows(20, 1, 6, 1e15), np.arange(20)
    found = summarize(q, k, at, at, rule(), 20)
    assert (found.weights[0, :, 0] == 1).all() and (found.entropy == 0).all()
    assert all(sorted(found.keys[0, n, : n + 1]) == list(range(n + 1)) for n in range(20))  # weights of 0 are keys too


def test_equal_keys_come_by_position() -> None:
    q, k, at = rows(10, 1, 7), np.zeros((10, 8), np.float32), np.arange(10)
    found = summarize(q, k, at, at, rule(), 10)
    assert found.keys[0, 9].tolist() == list(range(10))
    assert np.allclose(found.entropy[0], np.log(np.arange(1, 11)), atol=1e-6)


def test_memory_does_not_grow_with_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "attention_bytes_max", 1 << 20)
    q, k, at = rows(3000, 1, 8), rows(3000, 1, 9), np.arange(3000)
    tracemalloc.start()
    try:
        summarize(q, k, at, at, rule(), 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20  # the matrix is 72 MB


@pytest.mark.parametrize(("changed", "says"), [
    ({"head_size": 0}, r"head_size = 0: valid: a whole number from 1$"),
    ({"head_size": 2.0}, r"head_size = 2\.0: valid: a whole number"),
    ({"window": 0}, r"window = 0: valid: a whole number from 1, or None"),
    ({"window": True}, r"window = True: valid"),
    ({"scale": None}, r"scale = None: valid: a number above 0$"),
    ({"scale": float("nan")}, r"scale = nan: valid"),
    ({"scale": -1}, r"scale = -1: valid"),
    ({"soft_cap": 0}, r"soft_cap = 0: valid: a number above 0, or None"),
])
def test_rules_that_no_model_has(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        rule(**changed)


@pytest.mark.parametrize("name", list(PLAIN))
def test_nothing_of_a_rule_is_assumed(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        AttentionRule(**{key: value for key, value in PLAIN.items() if key != name})  # type: ignore[arg-type]


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
GEMMA = {"model_type": "gemma2", "num_hidden_layers": 2, "head_dim": 16, "query_pre_attn_scalar": 100,
         "attn_logit_softcapping": 50.0, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


def test_rules_of_configurations() -> None:
    assert AttentionRule.of_config(LLAMA, 1) == AttentionRule(head_size=16, scale=0.25, window=None, soft_cap=None)
    assert AttentionRule.of_config(GEMMA, 0) == AttentionRule(head_size=16, scale=0.1, window=4, soft_cap=50.0)
    assert AttentionRule.of_config(GEMMA, 1) == AttentionRule(head_size=16, scale=0.1, window=None, soft_cap=50.0)
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": None}
    assert AttentionRule.of_config(mistral, 0).window is None


@pytest.mark.parametrize(("config", "layer", "says"), [
    ({**LLAMA, "model_type": "bloom"}, 0, r"config\.model_type = 'bloom': valid: llama, mistral, .*check=True"),
    ({}, 0, r"config\.model_type = None"),
    (LLAMA, 2, r"layer = 2: the model has 2, counted from 0"),
    (LLAMA, True, r"layer = True"),
    ({**LLAMA, "sliding_window": 8}, 0, r"config\.sliding_window = 8: no llama has one"),
    ({**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}, 0, r"config\.layer_types = .* of a llama"),
    ({**LLAMA, "num_attention_heads": 0}, 0, r"config\.num_attention_heads = 0: not what"),
    ({**LLAMA, "num_hidden_layers": "2"}, 0, r"config\.num_hidden_layers = '2': not what"),
    ({**GEMMA, "layer_types": ["sliding_attention"]}, 1, r"config\.layer_types = .*of each layer"),
    ({**GEMMA, "layer_types": "full_attention"}, 0, r"config\.layer_types = 'full_attention': not what"),
    ({**LLAMA, "model_type": "mistral"}, 0, r"config\.sliding_window: missing; its default is the library's"),
    ({**LLAMA, "model_type": "qwen3"}, 0, r"config\.head_dim: missing; .*AutoConfig"),
    ({**LLAMA, "model_type": "qwen2"}, 0, r"config\.use_sliding_window: missing"),
    ({**LLAMA, "model_type": "qwen2", "use_sliding_window": True}, 0, r"config\.use_sliding_window = True: give the"),
    ({k: v for k, v in GEMMA.items() if k != "attn_logit_softcapping"}, 0, r"config\.attn_logit_softcapping: missing"),
    ({k: v for k, v in GEMMA.items() if k != "layer_types"}, 0, r"config\.layer_types: missing"),
    ({**GEMMA, "layer_types": ["chunked_attention"] * 2}, 0, r"config\.layer_types = 'chunked_att.*: valid: sliding_"),
    ({**GEMMA, "query_pre_attn_scalar": None}, 0, r"config\.query_pre_attn_scalar = None: its default"),
    ({**GEMMA, "model_type": "gemma3_text"}, 0, r"config\.attn_logit_softcapping = 50\.0: no Gemma 3 has one"),
])
def test_configurations_that_may_mean_something_else(config: dict[str, Any], layer: int, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        AttentionRule.of_config(config, layer)


def test_rows_that_give_no_attention() -> None:
    q, k, at = rows(6, 4, 10), rows(6, 2, 11), np.arange(6)
    with pytest.raises(ArgumentError, match="head_size = 5: does not divide rows of 32 and 16 columns"):
        summarize(q, k, at, at, rule(head_size=5), 2)
    with pytest.raises(ArgumentError, match="head_size = 8: 3 query heads do not share 2 key heads"):
        summarize(q[:, :24], k, at, at, rule(), 2)
    with pytest.raises(ArgumentError, match="query_positions = 3: a key that this query sees is not among"):
        summarize(q, k[[0, 1, 2, 4, 5]], at, at[[0, 1, 2, 4, 5]], rule(), 2)
    with pytest.raises(ArgumentError, match=r"key_positions = .*ascend"):
        summarize(q, k, at, at[::-1], rule(), 2)
    for broken, what in ((q, "query"), (k, "key")):
        kept, broken[3, 9] = broken[3, 9], np.inf
        with pytest.raises(ArgumentError, match=f"{what} = 3: the {what} at this position has numbers, in head 1"):
            summarize(q, k, at, at, rule(), 2)
        broken[3, 9] = kept
    for top in (0, -1, 2.0, True):
        with pytest.raises(ArgumentError, match=r"top = .*a whole number of keys from 1"):
            summarize(q, k, at, at, rule(), top)  # type: ignore[arg-type]


def test_sizes_are_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, at = rows(6, 4, 12), rows(6, 2, 13), np.arange(6)
    with pytest.raises(LimitError, match=r"bytes of attention summaries: \d+ asked, limit \d+; ask for fewer"):
        summarize(q, k, at, at, rule(), 1 << 40)
    monkeypatch.setattr(limits, "attention_bytes_max", 48 * 5)
    with pytest.raises(LimitError, match="keys of a query: 6 asked, limit 5"):
        summarize(q, k, at, at, rule(), 2)
