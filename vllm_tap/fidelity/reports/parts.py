"""Parts of a report about the whole model beside its places, by lines with intervals over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_tap.fidelity.statistics import Interval, interval
from vllm_tap.fidelity.unpatched.drafting import share

__all__ = ["PartLine", "attention_lines", "drafter_lines", "retrieval_lines"]


@dataclass(frozen=True, slots=True)
class PartLine:
    """A codec, or a control, at a ``place`` ("" where there is but one); ``row_bytes``: of what it stores for a token,
    0 of a control; ``values`` by name.
    """

    place: str
    name: str
    row_bytes: int
    values: dict[str, Interval]


def attention_lines(found: dict[str, Any]) -> Iterator[PartLine]:
    """Lines of an ``Attended`` as it stands in a report; bytes are a query's and a key's."""
    for name, numbers in found["prompts"].items():
        yield PartLine(f"layer {found['layer']}", name, sum(found["sizes"].get(name, ())),
                       {what: interval(np.array(each)) for what, each in numbers.items()})


def drafter_lines(found: dict[str, Any]) -> Iterator[PartLine]:
    """Lines of a ``Drafted``: tokens a step, and what share that is of those with a drafter of exact rows."""
    yield PartLine("", "exact", 0, {"tokens": interval(np.array(found["exact"])), "share": Interval(1.0, 1.0, 1.0)})
    for name, numbers in found["lengths"].items():
        yield PartLine("", name, found["sizes"].get(name, 0),
                       {"tokens": interval(np.array(numbers)), "share": share(found["exact"], numbers)})


def retrieval_lines(found: dict[str, Any], sizes: Callable[[str, str], int] = lambda place, name: 0
                    ) -> Iterator[PartLine]:
    """Lines of a ``Retrieved``: what is copied, and how much less than without a codec; ``sizes``: by place and codec.
    """
    exact = np.array(found["exact"])
    for place, shares in found["copied"].items():
        for name, numbers in shares.items():
            yield PartLine(place, name, sizes(place, name), {
                "copied": interval(np.array(numbers)), "lost": interval(exact - np.array(numbers))})
