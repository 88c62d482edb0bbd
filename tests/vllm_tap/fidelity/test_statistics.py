"""Intervals, verdicts and distances between distributions against answers that are known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vllm_tap.fidelity.distributions import Compared, compare, first_divergence, log_softmax
from vllm_tap.fidelity.reports.report import perplexity_change
from vllm_tap.fidelity.statistics import Interval, interval, verdict
from vllm_tap.fidelity.study import tally

DRAWN = np.random.default_rng(0).normal(3.0, 1.0, 200)


def test_the_interval_of_a_mean_is_students_where_numbers_are_normal() -> None:
    found = interval(DRAWN)
    low, high = stats.t.interval(0.95, len(DRAWN) - 1, DRAWN.mean(), stats.sem(DRAWN))
    assert found.value == pytest.approx(DRAWN.mean())
    assert found.low == pytest.approx(low, abs=0.02) and found.high == pytest.approx(high, abs=0.02)
    wider = interval(DRAWN, confidence=0.99)
    assert wider.low < found.low and wider.high > found.high


def test_it_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    found = [interval(rng.exponential(1.0, 40), draws=500) for _ in range(150)]
    covered = np.mean([one.low <= 1 <= one.high for one in found])
    assert 0.88 <= covered <= 0.99


def test_pairs_are_worth_more_than_two_samples() -> None:
    before = np.random.default_rng(2).normal(4.0, 0.4, 24)  # prompts differ by far more than codecs do
    after = before + np.random.default_rng(3).normal(1e-4, 1e-5, 24)
    found = interval(np.stack([before, after]), perplexity_change)
    assert 0 < found.low < 1e-4 < found.high < 2e-4


def test_what_does_not_vary_has_no_width() -> None:
    assert interval(np.zeros(16)) == Interval(0.0, 0.0, 0.0) and interval(np.full(3, 2.5)) == Interval(2.5, 2.5, 2.5)
    with pytest.raises(ValueError, match="two prompts at least, not 1"):
        interval(np.ones(1))


@pytest.mark.parametrize(("bounds", "word"), [
    ((0.0, 0.0, 0.0), "free"), ((1.0, 0.9, 1.9), "within"), ((5.0, 2.1, 9.0), "beyond"),
    ((2.1, 1.5, 2.7), "undecided")])
def test_a_verdict_is_what_the_bounds_say(bounds: tuple[float, float, float], word: str) -> None:
    found = verdict(Interval(*bounds), free=0.1, bar=2.0, prompts=16)
    assert found.word == word and (found.more > 0) == (word == "undecided")


def test_an_undecided_one_says_how_many_prompts_would_do() -> None:
    found = verdict(Interval(2.1, 1.9, 2.3), free=0.0, bar=2.0, prompts=16)
    assert found.more == 48  # twice as narrow takes four times as many
    assert verdict(Interval(2.0, 1.9, 2.1), 0.0, 2.0, 16).more == 10_000_000


def test_kl_of_two_coins_and_of_nothing() -> None:
    even, uneven = np.log([[0.5, 0.5]] * 3), np.log([[0.9, 0.1]] * 3)
    tokens = np.array([0, 1, 0])
    found = compare(even, uneven, tokens)
    assert found.kl == pytest.approx([0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)] * 3)
    assert found.nll == pytest.approx([np.log(2)] * 2)
    assert found.nll_other == pytest.approx([-np.log(0.1), -np.log(0.9)])
    assert not found.clear.any()  # neither side of an even coin is likelier
    assert compare(uneven, uneven, tokens).kl.max() == 0 and compare(uneven, uneven, tokens).clear.all()


def test_small_distances_are_not_lost_in_rounding() -> None:
    logits = np.random.default_rng(4).normal(0, 3, (4, 500)).astype(np.float32)
    other = log_softmax(logits) + 0
    other[:, 0] += 1e-4
    other -= np.log(np.exp(other).sum(-1, keepdims=True))
    p = np.exp(log_softmax(logits))[:, 0]
    assert compare(log_softmax(logits), other, np.zeros(4, np.int64)).kl == pytest.approx(
        p * (1 - p) * 1e-8 / 2, rel=1e-2, abs=1e-14)


def test_a_negative_kl_is_no_number_to_go_on_with() -> None:
    one = np.log([[0.5, 0.5]])
    with pytest.raises(ArithmeticError, match="no log-probabilities"):
        compare(one, one + 1, np.array([0]))


def test_a_token_that_is_ruled_out_costs_nothing() -> None:
    with np.errstate(divide="ignore"):
        one = np.log([[1.0, 0.0]])
    assert compare(one, one, np.array([0])).kl.tolist() == [0]


def test_answers_part_at_their_first_difference() -> None:
    assert first_divergence((1, 2, 3), (1, 9, 3)) == 1 and first_divergence((1, 2), (1, 2)) == 2


@pytest.mark.parametrize(("first", "positions", "shown"), [(1, 20_000, False), (1, 20_001, True), (64, 20_063, False),
                                                           (64, 20_064, True)])
def test_a_p999_is_of_20000_scored_positions_at_least_or_is_not_there(first: int, positions: int, shown: bool) -> None:
    """Of fewer it would be the twentieth largest, and say nothing of a tail."""
    kl = np.full(positions, 1.0)
    kl[-positions // 500:] = 7.0
    half = positions // 2
    found = tally("c", "codec", 1, [Compared(kl, kl > 0, kl > 0, kl[1:], kl[1:])], [1.0], first)
    assert (found.tail["p99.9"] == 7.0) if shown else found.tail["p99.9"] is None
    assert found.tail["p99"] == 1.0 and found.tail["max"] == 7.0
    parts = [Compared(each, each > 0, each > 0, each[1:], each[1:]) for each in (kl[:half], kl[half:])]
    together = tally("c", "codec", 1, parts, [1.0, 1.0], first)  # it is of all prompts together
    assert (together.tail["p99.9"] is None) == (positions - 2 * first < 20_000)
