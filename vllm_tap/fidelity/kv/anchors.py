"""Figures that others have published in the metric of this laboratory, with date and source; none is measured here.

The metric is KL in nats, the mean over positions, of a model with a coded cache against the same model's logits: what
in-forward measures. Figures in another metric (perplexity alone, answers to benchmarks) are left out, and so are those
of which keys and values cannot be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ANCHORS", "Anchor"]


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published figure: the codec by its own name, bits a number, KL in nats, of which model, where and when."""

    codec: str
    bits: float
    kl: float
    of: str
    source: str
    date: str


_THEIRS: Final = ("a model in float16 whose perplexity is 6.232", "https://github.com/ggml-org/llama.cpp/pull/7412",
                  "2024-05-20")
ANCHORS: Final = (Anchor("f16, their own floor", 16.0, 0.000189, *_THEIRS),
                  Anchor("q8_0, keys and values", 8.5, 0.000980, *_THEIRS))
