"""A drafter that was trained on stored rows: how many of its tokens the model accepts, by what the rows went through.

It is small, and the same for all codecs: five linear heads, as Medusa's. Each makes, of a row of the last norm, the row
that stands one to five positions behind it. The heads are fitted by least squares with a penalty. The model's own head
makes tokens of their rows. Each drafter is fitted on rows out of a codec. It then drafts on the model's exact rows, as
it would beside an engine. The result says how much of a drafter's training a codec spoils, and nothing of how good
drafters are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from vllm_tap.fidelity import coding
from vllm_tap.fidelity.bench import Answer, Bench, Unpublished
from vllm_tap.fidelity.distributions import F64, I64
from vllm_tap.fidelity.statistics import Interval, interval
from vllm_tap.verify.laboratory import F32

__all__ = ["DRAFTED", "SHUFFLED", "Drafted", "accepted", "fitted", "share", "study_drafter"]

DRAFTED: Final = 5  # tokens at a time
SHUFFLED: Final = "shuffled"
_ROWS_MAX: Final = 32_768  # that are fitted on
_ROWS_A_NUMBER: Final = 4  # of a row, at least: fewer are learnt by heart
_LEARNT: Final = 0.9  # of the drafts accepted: who gives as many on shuffled rows has learnt nothing of rows
_PENALTY: Final = 1e-3  # of a column's mean square


@dataclass(slots=True)
class Drafted:
    """Tokens that a step of the model gives with a drafter: 1 + those accepted of five, the mean by prompt.

    ``exact``: fitted on exact rows. ``lengths``: fitted on the rows of each codec, and on shuffled ones. ``sizes``: by
    codec, bytes of a row. ``rows``: so many were fitted on. ``starts``: drafts of a prompt.
    """

    rows: int
    starts: int
    exact: list[float]
    sizes: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, list[float]] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)


def study_drafter(bench: Bench, fitted_on: I64, judged: I64, codecs: Sequence[str], batch: int) -> Drafted:
    """Drafters fitted on the prompts ``fitted_on`` and judged in the model's greedy answers to ``judged``, both
    [prompts, positions].

    Unpublished where the drafter fitted on exact rows is hardly better than the one fitted on shuffled rows, or where
    rows or answers are too few.
    """
    wanted = fitted_on[: max(1, _ROWS_MAX // fitted_on.shape[1])]
    rows = [answer.norm for answer in _answers(bench, wanted, batch)]
    count, width = sum(map(len, rows)), rows[0].shape[1]
    if count < _ROWS_A_NUMBER * width:
        raise Unpublished(f"{count} rows of width {width} are too few to fit drafters on: "
                          f"{_ROWS_A_NUMBER * width} or more are needed (--prompts, --tokens)")
    live = [(answer.norm[len(answer.norm) - len(answer.tokens):].copy(), answer.tokens)  # the prompt's are let go
            for answer in _answers(bench, judged, batch, generated=True)]
    starts = len(live[0][1]) - DRAFTED
    if starts < 1:
        raise Unpublished(f"answers of {len(live[0][1])} tokens are too short for drafts of {DRAFTED}")

    def lengths(coded: Sequence[F32]) -> list[float]:
        heads = fitted(coded)
        return [_accepted(bench, heads, *each) for each in live]

    found = Drafted(sum(map(len, rows)), starts, lengths(rows))
    for name in (*codecs, SHUFFLED):
        coded = [coding.shuffled(each, at) if name == SHUFFLED else coding.round_trip(name, each, bench.dtype)
                 for at, each in enumerate(rows)]
        if not all(np.isfinite(each).all() for each in coded):
            found.told[name] = "broken here: it decodes to what is no number"
            continue
        found.lengths[name] = lengths(coded)
        if name != SHUFFLED:
            found.sizes[name] = coding.row_bytes(name, rows[0].shape[1], bench.dtype)
    worse = interval(np.array(found.exact) - np.array(found.lengths[SHUFFLED]))
    if worse.low <= 0 or accepted_share(found.exact, found.lengths[SHUFFLED]).high > _LEARNT:
        raise Unpublished(f"fitted on exact rows it gives {np.mean(found.exact):.3g} tokens a step, and on shuffled "
                          f"ones {np.mean(found.lengths[SHUFFLED]):.3g}: it has learnt nothing of this model")
    cost = float(np.mean(found.lengths[SHUFFLED]))
    as_bad = [name for name in found.sizes if np.mean(found.lengths[name]) <= cost]
    found.told[SHUFFLED] = f"{cost:.3g} tokens a step, " + (
        f"no fewer than with {', '.join(as_bad)}" if as_bad else "fewer than with every codec")
    return found


def share(exact: Sequence[float] | F64, coded: Sequence[float] | F64) -> Interval:
    """Tokens a step with a drafter fitted on coded rows, over those with one fitted on exact rows."""
    return interval(np.array([coded, exact]), lambda one, other, axis=-1: np.mean(one, axis=axis) / np.mean(
        other, axis=axis))


def accepted_share(exact: Sequence[float], coded: Sequence[float]) -> Interval:
    """Drafts accepted a step with a drafter fitted on coded rows, over those with one fitted on exact rows. The model's
    own token of each step is left out, because even a drafter that is never right gives it.
    """
    return share(np.array(exact) - 1, np.array(coded) - 1)


def fitted(prompts: Iterable[F32]) -> F64:
    """Heads float64 [drafted, width + 1, width], fitted on ``prompts``, rows [positions, width] each, without position
    0.

    A head makes, of a row and 1, the row so many positions behind it: the first head 1 position, the last one
    ``DRAFTED``. All heads are fitted on the same rows.
    """
    squares: F64 | None = None
    for rows in prompts:
        given, behind = _ones(rows[1:-DRAFTED]), [rows[1 + at:len(rows) - DRAFTED + at] for at in range(1, DRAFTED + 1)]
        if squares is None:
            width = rows.shape[1]
            squares, products = np.zeros((width + 1, width + 1)), np.zeros((DRAFTED, width + 1, width))
        squares += given.T @ given
        products += np.stack([given.T @ each.astype(np.float64) for each in behind])
    assert squares is not None
    penalty = _PENALTY * np.trace(squares) / len(squares)
    regular = squares + penalty * np.diag(np.r_[np.ones(len(squares) - 1), 0.0])
    found: F64 = np.linalg.solve(regular, np.concatenate(list(products), 1)).reshape(len(regular), DRAFTED, -1)
    return found.transpose(1, 0, 2)


def accepted(drafts: I64, tokens: Sequence[int]) -> float:
    """The mean of 1 + the number of accepted drafts. ``drafts`` is [starts, drafted]; those of start i are for the
    answer's tokens from i + 1 on. A draft is accepted where it and all before it are the model's own.
    """
    right = np.stack([drafts[at] == np.array(tokens[at + 1:at + 1 + drafts.shape[1]]) for at in range(len(drafts))])
    return float(1 + np.logical_and.accumulate(right, axis=1).sum(1).mean())


def _accepted(bench: Bench, heads: F64, norm: F32, tokens: Sequence[int]) -> float:
    """Drafts behind each token of an answer; ``norm``: the row that made each of its tokens."""
    given = _ones(norm[: len(tokens) - DRAFTED])
    drafted = np.stack([bench.logits((given @ head).astype(np.float32)).argmax(-1) for head in heads], 1)
    return accepted(drafted, tokens)


def _ones(rows: F32) -> F64:
    return np.concatenate([rows.astype(np.float64), np.ones((len(rows), 1))], 1)


def _answers(bench: Bench, tokens: I64, batch: int, generated: bool = False) -> Iterator[Answer]:
    for start in range(0, len(tokens), batch):
        yield from bench.unedited(tokens[start:start + batch], generated)
