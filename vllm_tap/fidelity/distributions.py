"""Next-token distributions compared with each other: how a model differs with rows out of a codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["MARGIN", "Compared", "compare", "first_divergence", "log_softmax"]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

MARGIN: Final = 0.1  # between the reference's two likeliest tokens: nearer ones are close calls
_ROUNDING: Final = -1e-9  # KL is not negative; sums in float64 may be by so much


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt's positions, compared between the reference and another run.

    ``kl`` in nats, ``same_top`` and ``clear`` are [positions]. ``clear`` tells whether the reference's choice has the
    margin. ``nll`` and ``nll_other`` are the nats of the true next token, of the reference and of the other, [positions
    − 1].
    """

    kl: F64
    same_top: npt.NDArray[np.bool_]
    clear: npt.NDArray[np.bool_]
    nll: F64
    nll_other: F64


def log_softmax(logits: F32) -> F64:
    """Log-probabilities [..., vocabulary], in float64: float32 would end at 1e-8 nats."""
    from scipy.special import log_softmax as of

    found: F64 = of(logits.astype(np.float64), axis=-1)
    return found


def compare(reference: F64, other: F64, tokens: I64) -> Compared:
    """Two runs of one prompt, by log-probabilities [positions, vocabulary]; ``tokens`` [positions] are the prompt's.

    KL is Σ p (log p − log p'), p the reference. ArithmeticError where it is negative beyond rounding.
    """
    p = np.exp(reference)
    with np.errstate(invalid="ignore"):  # a token that the reference rules out costs nothing
        kl: F64 = np.where(p > 0, p * (reference - other), 0.0).sum(-1)
    if kl.size and kl.min() < _ROUNDING:
        raise ArithmeticError(f"KL of {kl.min():.3g} nats: what came in are no log-probabilities")
    best = reference.argmax(-1)
    two = np.partition(p, -2, axis=-1)[..., -2:]
    following = tokens[1:, None]
    return Compared(kl, best == other.argmax(-1), two[..., 1] - two[..., 0] > MARGIN,
                    -np.take_along_axis(reference[:-1], following, -1)[:, 0],
                    -np.take_along_axis(other[:-1], following, -1)[:, 0])


def first_divergence(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of tokens before two answers differ; their length where they do not."""
    return next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
