"""Two reports of the same prompts: what has become worse, as after an upgrade."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from schemas.errors import ArgumentError
from vllm_tap.fidelity.reports.report import Report
from vllm_tap.fidelity.statistics import CONFIDENCE, Interval, interval

__all__ = ["Change", "compared"]

_MUST_EQUAL: Final = ("prompts", "tokens")


@dataclass(frozen=True, slots=True)
class Change:
    """A codec at a place: KL in nats before, and by how much it is more now, with an interval that holds for all codecs
    together. ``word``: worse, better or same (the interval has 0 in it, or nothing differs).
    """

    site: str
    layer: int
    codec: str
    before: float
    more: Interval
    word: str


def compared(old: Report, new: Report) -> list[Change]:
    """Each codec at each place that both have, prompt by prompt; ArgumentError where they are not of the same prompts
    or have nothing in common.
    """
    for what, one, other in (("text", old.text["digest"], new.text["digest"]),
                             *((name, old.settings[name], new.settings[name]) for name in _MUST_EQUAL),
                             ("model", old.model["config"], new.model["config"])):
        if one != other:
            raise ArgumentError("NEW", other, f"is of another {what} than OLD ({one}): run it again with the same")
    before = {(place.site, place.layer, one.name): np.array(one.prompts["kl"]) for place in old.places
              for one in place.patched if one.kind == "codec"}
    pairs = [(place.site, place.layer, one.name, before[place.site, place.layer, one.name], np.array(one.prompts["kl"]))
             for place in new.places for one in place.patched
             if one.kind == "codec" and (place.site, place.layer, one.name) in before]
    if not pairs:
        raise ArgumentError("NEW", new.model["name"], "has no codec at any place of OLD")
    confidence = 1 - (1 - CONFIDENCE) / len(pairs)
    found = []
    for site, layer, name, was, now in pairs:
        more = interval(now - was, confidence=confidence)
        word = "worse" if more.low > 0 else "better" if more.high < 0 else "same"
        found.append(Change(site, layer, name, float(was.mean()), more, word))
    return found
