"""Effects of a codec on rows, without a model: noise by group of columns, geometry, which neurons stand out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vllm_tap.fidelity.statistics import Interval

__all__ = ["Geometry", "Neurons", "Noise", "geometry", "neurons", "noise"]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MASSIVE: Final = 20.0  # times the median column's root mean square
_ROWS: Final = 512  # of which all pairs are looked at
_NEAREST: Final = 10
_DRAWS: Final = 2000


@dataclass(frozen=True, slots=True)
class Noise:
    """Signal over noise in dB, 10·log10(Σx² / Σ(x − x̂)²), None where nothing differs.

    ``all``: of all columns. ``massive``: of the massive ones, None as well where there are none. ``rest``: of the
    others. These three leave out position 0; ``first`` is of position 0 alone.
    """

    all: float | None
    massive: float | None
    rest: float | None
    first: float | None
    massive_columns: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """Cosines of pairs of centred rows, decoded against exact: Pearson's correlation, root mean square error, and the
    share of each row's ten nearest that stay so.
    """

    pearson: float
    rmse: float
    nearest: float


@dataclass(frozen=True, slots=True)
class Neurons:
    """Spearman's correlation, over neurons, of three numbers that make a neuron special, decoded against exact.

    They are mean magnitude, kurtosis, and how well it tells a concept, |AUROC − ½|. The interval of ``concept`` is over
    neurons; it is None without labels.
    """

    magnitude: float
    kurtosis: float
    concept: Interval | None


def noise(exact: F32, decoded: F32) -> Noise:
    """Noise of rows [prompts, positions, width]; position 0 of each prompt is told apart."""
    body, coded = exact[:, 1:].reshape(-1, exact.shape[-1]), decoded[:, 1:].reshape(-1, exact.shape[-1])
    size = np.sqrt(np.square(body, dtype=np.float64).mean(0))
    massive = size > MASSIVE * np.median(size)
    return Noise(_db(body, coded), _db(body[:, massive], coded[:, massive]) if massive.any() else None,
                 _db(body[:, ~massive], coded[:, ~massive]), _db(exact[:, 0], decoded[:, 0]), int(massive.sum()))


def _db(exact: F32, decoded: F32) -> float | None:
    error = np.square(exact.astype(np.float64) - decoded).sum()
    signal = np.square(exact, dtype=np.float64).sum()
    if error == 0:
        return None
    return float(10 * np.log10(signal / error)) if signal else float("-inf")


def geometry(exact: F32, decoded: F32, seed: int = 0) -> Geometry:
    """Geometry of rows [rows, width], position 0 left out by the caller. They are centred on the exact rows' mean:
    uncentred rows of a residual stream are all alike, and every codec then scores 0.999.
    """
    chosen = np.sort(np.random.default_rng(seed).permutation(len(exact))[:_ROWS])
    mean = exact.mean(0, dtype=np.float64)
    one, other = (_cosines(each[chosen] - mean) for each in (exact, decoded))
    pairs = np.triu_indices(len(chosen), 1)
    nearest = min(_NEAREST, len(chosen) - 1)
    both = [np.isin(_nearest(a, nearest), _nearest(b, nearest)).mean() for a, b in zip(
        _without_self(one), _without_self(other), strict=True)]
    return Geometry(float(np.corrcoef(one[pairs], other[pairs])[0, 1]),
                    float(np.sqrt(np.square(one[pairs] - other[pairs]).mean())), float(np.mean(both)))


def _cosines(rows: F64) -> F64:
    unit: F64 = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-30)
    return unit @ unit.T


def _without_self(cosines: F64) -> F64:
    return np.where(np.eye(len(cosines), dtype=bool), -np.inf, cosines)


def _nearest(row: F64, count: int) -> Any:
    return np.argpartition(-row, count - 1)[:count]


def neurons(exact: F32, decoded: F32, labels: Bools | None) -> Neurons:
    """Neurons of activations [rows, neurons] with a label each row."""
    from scipy import stats

    # Mean magnitude and kurtosis are of each column by itself: even rows in another order keep them. The concept's
    # score alone sees which row is whose.
    pairs = [(_magnitude(exact), _magnitude(decoded)), (_kurtosis(exact), _kurtosis(decoded))]
    first, second = (float(stats.spearmanr(*pair).statistic) for pair in pairs)
    if labels is None or labels.all() or not labels.any():
        return Neurons(first, second, None)
    scores = _concept(exact, labels), _concept(decoded, labels)
    found = float(stats.spearmanr(*scores).statistic)
    bounds = stats.bootstrap(scores, lambda a, b: stats.spearmanr(a, b).statistic, paired=True, vectorized=False,
                             n_resamples=_DRAWS // 10, method="percentile",
                             rng=np.random.default_rng(0)).confidence_interval if len(scores[0]) > 1 else None
    low, high = (float(bounds.low), float(bounds.high)) if bounds else (found, found)
    return Neurons(first, second, Interval(found, low, high))


def _magnitude(rows: F32) -> F64:
    size: F64 = np.abs(rows).mean(0, dtype=np.float64)
    return size


def _kurtosis(rows: F32) -> F64:
    squares = np.square(rows, dtype=np.float64)
    found: F64 = np.square(squares).mean(0) / np.maximum(np.square(squares.mean(0)), 1e-300)
    return found


def _concept(rows: F32, labels: Bools) -> F64:
    """|AUROC − ½| of each column; ranks of ties are averaged, as codes of few levels are nothing but ties."""
    from scipy import stats

    ranks = stats.rankdata(rows, axis=0)
    positive = int(labels.sum())
    area = (ranks[labels].sum(0) - positive * (positive + 1) / 2) / (positive * (len(labels) - positive))
    found: F64 = np.abs(area - 0.5)
    return found
