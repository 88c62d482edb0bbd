"""Terms of a codec's cost: each term is the difference of two runs of one report, so that they add up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_tap.fidelity.distributions import F64
from vllm_tap.fidelity.reports.report import Report, numbers_of
from vllm_tap.fidelity.statistics import Interval, interval
from vllm_tap.fidelity.study import Patched

__all__ = ["Term", "terms_of"]

_COMPOUNDING: Final = "+ compounding: in-forward, beyond direct"
_DRIFT: Final = "+ drift of what is not coded: in-forward, beyond direct"  # where one layer alone is coded
# A total, and what it is made of: places whose costs are added, and those whose are taken off.
_TERMS: Final = (
    ("in-forward", ("in-forward/kv",), ()),
    ("= snapshot", ("snapshot/kv",), ()),
    ("+ direct, beyond the snapshot", ("direct/kv",), ("snapshot/kv",)),
    (_COMPOUNDING, ("in-forward/kv",), ("direct/kv",)),
    ("= rolling", ("rolling/kv",), ()),
    ("+ what the window keeps exact: in-forward, beyond rolling", ("in-forward/kv",), ("rolling/kv",)),
    ("= keys alone", ("in-forward/k",), ()),
    ("+ values alone", ("in-forward/v",), ()),
    ("+ what the two make together", ("in-forward/kv",), ("in-forward/k", "in-forward/v")),
)


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a codec's cost with 95 % intervals over prompts, in nats: of KL, and of the text's own NLL."""

    codec: str
    layer: int
    name: str
    kl: Interval
    nll: Interval


def terms_of(report: Report) -> Iterator[Term]:
    """The terms of each codec, as far as the report has both of a difference; none of one that is broken."""
    found: dict[tuple[str, int, str], Patched] = {
        (place.site, place.layer, one.name): one for place in report.places for one in place.patched
        if one.kind == "codec"}
    for codec, layer in dict.fromkeys((name, layer) for _, layer, name in found):
        for term, more, less in _TERMS:
            if all((site, layer, codec) in found for site in (*more, *less)):
                kl, nll = (sum((of(found[site, layer, codec]) for site in more), np.zeros(1))
                           - sum((of(found[site, layer, codec]) for site in less), np.zeros(1)) for of in (_kl, _nll))
                name = _DRIFT if term == _COMPOUNDING and layer >= 0 else term
                yield Term(codec, layer, name, interval(kl), interval(nll))


def _kl(one: Patched) -> F64:
    return numbers_of(one, "kl")


def _nll(one: Patched) -> F64:
    return numbers_of(one, "nll_other") - numbers_of(one, "nll")
