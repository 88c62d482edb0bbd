"""Attention and drafts out of coded rows, on rows whose answers are known."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from schemas.attended import Attention
from schemas.attention import AttentionRule, summarize
from vllm_tap.fidelity import coding
from vllm_tap.fidelity.bench import Answer, Bench, Unpublished
from vllm_tap.fidelity.unpatched.attention import FIRST, TOP, held_against
from vllm_tap.fidelity.unpatched.drafting import DRAFTED, accepted, accepted_share, fitted, share, study_drafter

RNG = np.random.default_rng(0)
LENGTH, HEAD = 40, 16
RULE = AttentionRule(head_size=HEAD, scale=0.5, window=None, soft_cap=None)
QUERIES, KEYS = (RNG.standard_normal((LENGTH, heads * HEAD)).astype(np.float32) for heads in (4, 2))


def attention(queries: Any, keys: Any, top: int) -> Attention:
    at = np.arange(FIRST, LENGTH, dtype=np.uint32)
    found = summarize(queries[FIRST:], keys, at, np.arange(LENGTH, dtype=np.uint32), RULE, top)
    return Attention("c", 0, RULE, ("raw", "raw"), at, at, found.keys, found.weights, found.entropy, [])


def weights_of(queries: Any, keys: Any) -> Any:
    """Softmax of all heads, as anybody would write it: [heads, queries, keys]."""
    each = queries.reshape(LENGTH, 4, HEAD).transpose(1, 0, 2).astype(np.float64)
    shared = keys.reshape(LENGTH, 2, HEAD).transpose(1, 0, 2).repeat(2, 0).astype(np.float64)
    scores = np.where(np.tri(LENGTH, dtype=bool), 0.5 * each @ shared.transpose(0, 2, 1), -np.inf)
    made = np.exp(scores - scores.max(-1, keepdims=True))
    return (made / made.sum(-1, keepdims=True))[:, FIRST:]


def test_what_a_codec_does_to_attention_is_what_the_whole_matrices_say() -> None:
    queries, keys = (coding.round_trip("nf4b64", rows, "float32") for rows in (QUERIES, KEYS))
    exact, coded = weights_of(QUERIES, KEYS), weights_of(queries, keys)
    best, kept = (np.argsort(-each, -1)[..., :TOP] for each in (exact, coded))
    common = np.array([[len({*a} & {*b}) for a, b in zip(*heads, strict=True)]
                       for heads in zip(best, kept, strict=True)])
    mass = [np.take_along_axis(exact, each, -1).sum(-1) for each in (kept, best)]
    entropy = [-(each * np.log(each, where=each > 0, out=np.zeros_like(each))).sum(-1) for each in (exact, coded)]
    found = held_against(attention(QUERIES, KEYS, LENGTH), attention(queries, keys, TOP))
    assert found == pytest.approx({"overlap": common.mean() / TOP, "all": (common == TOP).mean(), "mass": (
        mass[0] / mass[1]).mean(), "entropy": np.abs(entropy[0] - entropy[1]).mean()}, rel=1e-5)
    assert 0.5 < found["overlap"] < found["mass"] < 1 and found["all"] < 1


def test_exact_rows_keep_everything_and_shuffled_ones_little() -> None:
    exact = attention(QUERIES, KEYS, LENGTH)
    assert held_against(exact, attention(QUERIES, KEYS, TOP)) == {"overlap": 1, "all": 1, "mass": 1, "entropy": 0}
    mixed = held_against(exact, attention(coding.shuffled(QUERIES, 1), coding.shuffled(KEYS, 2), TOP))
    assert mixed["overlap"] < 0.5 and mixed["mass"] < 0.6 and mixed["all"] == 0


# ── a drafter ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_heads_find_the_rule_that_rows_follow() -> None:
    turn = np.linalg.qr(RNG.standard_normal((8, 8)))[0]
    shift = RNG.standard_normal(8)

    def walk() -> Any:
        rows = [RNG.standard_normal(8)]
        for _ in range(49):
            rows.append(turn @ rows[-1] + shift)
        return np.array(rows, np.float32)

    heads, rows = fitted([walk() for _ in range(6)]), walk()
    assert heads.shape == (DRAFTED, 9, 8)
    for behind, head in enumerate(heads, 1):
        made = np.concatenate([rows, np.ones((50, 1))], 1) @ head
        assert np.abs(made[:-behind] - rows[behind:]).max() < 0.05 * np.abs(rows).max()


def test_a_draft_counts_up_to_its_first_wrong_token() -> None:
    answer = [7, 1, 2, 3, 4]
    assert accepted(np.array([[1, 2, 3], [2, 3, 4]]), answer) == 4
    assert accepted(np.array([[1, 9, 3], [9, 3, 4]]), answer) == (2 + 1) / 2  # behind a wrong one nothing counts


def test_the_share_is_of_means_and_paired() -> None:
    exact, coded = [2.0, 3.0, 4.0, 3.0], [1.0, 1.5, 2.0, 1.5]
    assert asdict(share(exact, coded)) == pytest.approx({"value": 0.5, "low": 0.5, "high": 0.5})


class Turning(Bench):
    """A model whose last norm turns by one step a token, from where its prompt put it; its answers are 12 tokens."""

    read = np.random.default_rng(7).normal(size=(16, 50)).astype(np.float32)
    turn: Any = np.linalg.qr(np.random.default_rng(8).normal(size=(16, 16)))[0]

    def __init__(self) -> None: ...

    @property
    def dtype(self) -> str:
        return "float32"

    def logits(self, norm: Any) -> Any:
        return norm @ self.read

    def unedited(self, prompts: Any, generated: bool = False) -> list[Answer]:
        found = []
        for prompt in prompts:
            rows = [np.random.default_rng(int(prompt[0])).standard_normal(16)]
            for _ in range(len(prompt) + 10):
                rows.append(self.turn @ rows[-1])
            every = np.array(rows, np.float32)
            tokens = tuple(self.logits(every[len(prompt) - 1:]).argmax(-1).tolist())
            found.append(Answer(tokens, every if generated else every[: len(prompt)], None))
        return found


class Chance(Turning):
    """Another turn each time."""

    @property
    def turn(self) -> Any:
        return RNG.standard_normal((16, 16)) / 4


def test_a_drafter_of_a_model_that_goes_by_a_rule_is_right_and_one_of_shuffled_rows_is_not() -> None:
    prompts = np.arange(40)[:, None] * np.ones((1, 30), np.int64)
    found = study_drafter(Turning(), prompts[:24], prompts[24:], ["raw16", "nf4b64", "topk8:density=0.04"], 5)
    assert found.exact == [6.0] * 16 and found.rows == 24 * 30 and found.starts == 12 - DRAFTED
    assert found.lengths["raw16"] == [6.0] * 16 and 2 < np.mean(found.lengths["nf4b64"]) < 6
    assert np.mean(found.lengths["shuffled"]) < 1.5 and found.sizes["raw16"] == 32
    assert found.told["shuffled"].endswith("fewer than with every codec") or "topk8" in found.told["shuffled"]
    with pytest.raises(Unpublished, match=r"it has learnt nothing of this model"):
        study_drafter(Chance(), prompts[:24], prompts[24:], [], 5)


def test_a_drafter_is_judged_without_the_models_own_token() -> None:
    """One that is never right gives a token a step too: of the tokens it would have nearly all of a weak one's."""
    exact, never = [1.02, 1.01, 1.03, 1.02] * 4, [1.0] * 16
    assert share(exact, never).low > 0.97 and accepted_share(exact, never).high == 0
    assert accepted_share([1.5, 1.25] * 8, [1.25, 1.125] * 8).value == pytest.approx(0.5)
