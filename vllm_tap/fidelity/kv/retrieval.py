"""Retrieval from the cache: whether a model still copies a run of tokens that comes again and again. It has to tell
each token from the one that came at this place the time before.

Runs are random tokens out of the text's commonest eight, so that only the cache tells the next one. The run behind the
context is scored. The run that it copies lies at the context's end, so a snapshot has coded that as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from vllm_tap.fidelity.bench import Answer, Bench, Unpublished
from vllm_tap.fidelity.distributions import I64
from vllm_tap.fidelity.kv.codecs import SHUFFLED, Coded
from vllm_tap.fidelity.kv.modes import Make, shuffled
from vllm_tap.fidelity.kv.study import Batch, Where, batches
from vllm_tap.fidelity.statistics import interval
from vllm_tap.fidelity.texts import RUN, copying

__all__ = ["Retrieved", "study_retrieval"]

_LEAST: Final = 0.5  # of the tokens, that the model itself must copy; a guess among the run's own is right in 1 of 8
_SEED: Final = 17


@dataclass(slots=True)
class Retrieved:
    """Tokens copied rightly, the share by prompt.

    ``exact``: of the exact run. ``copied``: by place and by codec, or shuffled rows. ``told``: what is wrong with a
    codec, and what shuffled rows did. ``positions``: scored of a prompt.
    """

    positions: int
    exact: list[float] = field(default_factory=list)
    copied: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)


def study_retrieval(bench: Bench, tokens: I64, among: I64, places: Sequence[Where], coders: Sequence[Coded],
                    setting: tuple[int, int], tell: Callable[[], None]) -> Retrieved:
    """Copying of tokens out of ``among`` through each codec at these places, with as many prompts and positions as
    ``tokens`` [prompts, positions].

    ``setting``: prompts of a batch, and the context. Unpublished where the model itself does not copy, or where it
    copies as much from shuffled rows.
    """
    size, context = setting
    scored = slice(context, min(context + RUN - 1, tokens.shape[1] - 1))
    if context <= RUN or scored.stop <= scored.start:
        raise Unpublished(f"a context of {context} tokens has no whole run of {RUN} before what is scored")
    prompts = copying(among, len(tokens), tokens.shape[1], np.random.default_rng(_SEED),
                      int(tokens[0, 0]))
    found, bench = Retrieved(scored.stop - scored.start), copy(bench)
    bench.continued = 1  # no answer is looked at
    for where in places:
        exact, copied = list[float](), found.copied.setdefault(where.name, {})
        for chunk in batches(prompts, size):
            run = Batch(bench, chunk, where, context)
            exact += _right(bench, chunk, run.identity, scored)
            if np.mean(exact) < _LEAST:
                raise Unpublished(f"the model itself tells {100 * np.mean(exact):.0f} % of the tokens of a run that "
                                  f"comes again, and at least {100 * _LEAST:.0f} % are needed")
            makes: list[tuple[str, Make]] = [(coder.name, coder.coded) for coder in coders]
            for name, make in (*makes, (SHUFFLED, shuffled(len(exact)))):
                answers, wrong = run.answers(name, make)
                if answers is None:
                    found.told[f"{where.name} {name}"] = f"broken here: {wrong}"
                else:
                    copied.setdefault(name, []).extend(_right(bench, chunk, answers, scored))
                tell()
        found.exact = found.exact or exact
        worse = interval(np.array(exact) - np.array(copied[SHUFFLED]))
        if worse.low <= 0:
            raise Unpublished(f"at {where.name} as much is copied from shuffled rows as from exact ones: nothing tells "
                              "whose rows are whose")
        found.told[where.name] = f"from shuffled rows {100 * np.mean(copied[SHUFFLED]):.0f} % is copied"
    found.copied = {place: {name: shares for name, shares in of_place.items() if f"{place} {name}" not in found.told}
                    for place, of_place in found.copied.items()}
    return found


def _right(bench: Bench, chunk: I64, answers: Sequence[Answer], scored: slice) -> list[float]:
    """The share of each prompt's positions whose likeliest token is the next one."""
    following = slice(scored.start + 1, scored.stop + 1)
    return [float((bench.logits(answer.norm[scored]).argmax(-1) == tokens[following]).mean())
            for answer, tokens in zip(answers, chunk, strict=True)]
