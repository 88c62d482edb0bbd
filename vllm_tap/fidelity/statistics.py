"""Intervals over prompts, and the verdicts that follow from them.

The unit is the prompt, never the token: rows of one prompt depend on each other. Everything is paired, the codec's run
against the reference of the same prompts, which is worth a factor of hundreds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Interval", "Verdict", "interval", "verdict"]

F64 = npt.NDArray[np.float64]

CONFIDENCE: Final = 0.95
DRAWS: Final = 10_000
_SEED: Final = 11
_MORE_MAX: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the bounds of its interval; ``low`` and ``high`` are the estimate where nothing varies."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """``word``: free, within, beyond, undecided or broken; ``more``: prompts still needed by an undecided one, as far
    as its interval's width tells (0: unknown).
    """

    word: str
    more: int = 0


def interval(values: F64, statistic: Callable[..., Any] | None = None, *, confidence: float = CONFIDENCE,
             draws: int = DRAWS) -> Interval:
    """The paired bootstrap over prompts of ``values`` float64 [prompts] or [quantities, prompts].

    ``statistic``: of the quantities, each [..., prompts], over the last axis (``axis=-1``); default: the mean. Bounds
    are BCa's, and percentiles where BCa has none. All three are the estimate where a value is not finite: infinite, or
    no number. ValueError with fewer than two prompts.
    """
    from scipy import stats

    data = np.atleast_2d(np.asarray(values, np.float64))
    if data.shape[1] < 2:
        raise ValueError(f"an interval over prompts takes two prompts at least, not {data.shape[1]}")
    chosen: Callable[..., Any] = np.mean if statistic is None else statistic
    with np.errstate(invalid="ignore"):  # infinity less infinity is no number, and stays none
        estimate = float(chosen(*data, axis=-1))
    if not np.isfinite(data).all() or (data == data[:, :1]).all():
        return Interval(estimate, estimate, estimate)
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SciPy's word on degenerate samples, which is looked for below
            found = stats.bootstrap(tuple(data), chosen, paired=True, vectorized=True, n_resamples=draws, axis=-1,
                                    confidence_level=confidence, method=method, rng=np.random.default_rng(_SEED),
                                    batch=1000).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            return Interval(estimate, float(found.low), float(found.high))
    return Interval(estimate, estimate, estimate)


def verdict(found: Interval, free: float, bar: float, prompts: int) -> Verdict:
    """The verdict on the bounds of a cost, of which a smaller one is better.

    *Free*: at or below ``free``. *Within*: at or below ``bar``. *Beyond*: above it. *Undecided*: the interval lies on
    both sides of the bar, or ``free`` or ``bar`` is no finite number. *Broken*: the cost is no finite number.
    """
    if not all(map(math.isfinite, (found.value, found.low, found.high))):
        return Verdict("broken")
    if not math.isfinite(free) or not math.isfinite(bar):
        return Verdict("undecided")
    if found.high <= free:
        return Verdict("free")
    if found.high <= bar:
        return Verdict("within")
    if found.low > bar:
        return Verdict("beyond")
    away = abs(found.value - bar)
    reach = max(found.high - found.value, found.value - found.low)
    more = _MORE_MAX if away == 0 else min(_MORE_MAX, math.ceil(prompts * ((reach / away) ** 2 - 1)))
    return Verdict("undecided", max(1, more))
