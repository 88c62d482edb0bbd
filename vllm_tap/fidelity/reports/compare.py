"""Two reports of the same prompts: what has become worse, as after an upgrade."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from schemas.errors import ArgumentError
from vllm_tap.fidelity.distributions import F64
from vllm_tap.fidelity.reports.report import Report, codecs_of, numbers_of
from vllm_tap.fidelity.statistics import CONFIDENCE, Interval, interval
from vllm_tap.fidelity.study import name_of

__all__ = ["DIFFER", "Change", "compared", "line_of"]

DIFFER: Final = ("worse", "missing", "broken")  # words of which one makes the two reports differ
_MUST_EQUAL: Final = ("prompts", "tokens")
_NONE: Final = Interval(float("nan"), float("nan"), float("nan"))


@dataclass(frozen=True, slots=True)
class Change:
    """A codec at a place: KL in nats ``before``, and how much ``more`` it is now. The interval of ``more`` holds for
    all codecs together.

    ``word``: worse, better, same (the interval has 0 in it, or nothing differs), broken (no finite KL in either
    report), missing (in OLD alone) or added (in NEW alone). ``before`` is NaN for added. ``more`` is NaN for broken,
    missing and added.
    """

    site: str
    layer: int
    codec: str
    before: float
    more: Interval
    word: str


def compared(old: Report, new: Report) -> list[Change]:
    """The change of each codec at each place, prompt by prompt, and codecs that one of the two lacks.

    ArgumentError where the reports are not of the same kind, model, dtype and prompts, or have nothing in common.
    """
    for what, one, other in (("kind", *(each.settings.get("lab", "codecs") for each in (old, new))),
                             ("text", old.text["digest"], new.text["digest"]),
                             *((name, old.settings[name], new.settings[name]) for name in _MUST_EQUAL),
                             ("model", old.model["config"], new.model["config"]),
                             ("dtype", old.model["dtype"], new.model["dtype"])):
        if one != other:
            raise ArgumentError("NEW", other, f"is of another {what} than OLD ({one}): run it again with the same")
    before, after = _costs(old), _costs(new)
    both = [key for key in after if key in before]
    if not both:
        raise ArgumentError("NEW", new.model["name"], "has no codec at any place of OLD")
    confidence = 1 - (1 - CONFIDENCE) / len(both)
    found = [_change(key, before[key], after[key], confidence) for key in both]
    found += [Change(*key, float(cost.mean()), _NONE, "missing") for key, cost in before.items() if key not in after]
    found += [Change(*key, float("nan"), _NONE, "added") for key in after if key not in before]
    return found


def _costs(report: Report) -> dict[tuple[str, int, str], F64]:
    """KL by prompt [prompts] of each codec at each place; infinite where the codec broke the model."""
    return {(place.site, place.layer, one.name): numbers_of(one, "kl") for place in report.places
            for one in codecs_of(report, place)}


def _change(key: tuple[str, int, str], was: F64, now: F64, confidence: float) -> Change:
    if was.shape != now.shape:
        raise ArgumentError("NEW", f"{key[0]}.{key[1]} {key[2]}", f"has {len(now)} prompts, and OLD has {len(was)}")
    before, after = float(was.mean()), float(now.mean())
    if not np.isfinite(before) or not np.isfinite(after):
        if np.isfinite(before):
            return Change(*key, before, Interval(np.inf, np.inf, np.inf), "worse")
        if np.isfinite(after):
            return Change(*key, before, Interval(-np.inf, -np.inf, -np.inf), "better")
        return Change(*key, before, _NONE, "broken")
    more = interval(now - was, confidence=confidence)
    return Change(*key, before, more, "worse" if more.low > 0 else "better" if more.high < 0 else "same")


def line_of(one: Change) -> str:
    """The line for people."""
    named = f"{one.word:<7} {name_of(one.site, one.layer)} {one.codec}: "
    if one.word == "missing":
        return f"{named}KL {_nats(one.before)} in OLD, not in NEW"
    if one.word == "added":
        return f"{named}not in OLD"
    if one.word == "broken":
        return f"{named}no finite KL in either report"
    if not np.isfinite(one.more.value):
        broke = "it breaks the model now" if one.word == "worse" else "it broke the model before, and does not now"
        return f"{named}KL {_nats(one.before)} before: {broke}"
    return (f"{named}KL {one.before:.3g} → {one.before + one.more.value:.3g} nats "
            f"({one.more.low:+.2g} to {one.more.high:+.2g})")


def _nats(cost: float) -> str:
    return f"{cost:.3g} nats" if np.isfinite(cost) else "broken"
