"""The rate in tokens a second at which a model server computes each of its requests, by vLLM's own metrics."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Rates", "Speed"]

_METRIC: Final = re.compile(
    r"^vllm:(prompt_tokens_total|generation_tokens_total|num_requests_running|num_requests_waiting)(?:\{.*\})? (\S+)",
    re.MULTILINE)
_WINDOW_S: Final = 15.0
_APART_S: Final = 0.2  # at least: else a moment would count for much
_KNOWN_S: Final = 600.0  # that a rate is good for, where nothing has been computed since


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of one request that the server has, on average: of its prompt, and generated."""

    prompt: float
    generated: float


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    prompt: float
    generated: float
    running: float


@dataclass(slots=True)
class Speed:
    """The speed of one model server, from what its ``/metrics`` answered in the last seconds."""

    _samples: deque[_Sample] = field(default_factory=deque)
    _rates: Rates | None = None
    _known_s: float = 0.0

    def rates(self, now: float | None = None) -> Rates | None:
        """The last that was seen while tokens were computed; None where that is not known, or long ago."""
        now = time.monotonic() if now is None else now
        return self._rates if now - self._known_s < _KNOWN_S else None

    def take(self, text: str, now: float) -> None:
        """Add what was answered at ``now``; what lacks a metric, or is malformed, is passed over."""
        found = {"prompt_tokens_total": 0.0, "generation_tokens_total": 0.0, "num_requests_running": 0.0,
                 "num_requests_waiting": 0.0}
        missing = set(found) - {"num_requests_waiting"}
        try:
            for name, number in _METRIC.findall(text):
                found[name] += float(number)
                missing.discard(name)
        except ValueError:
            return
        prompt, generated, running, waiting = found.values()
        sample = _Sample(now, prompt, generated, running + waiting)
        samples = self._samples
        if missing or not all(abs(value) < 1e18 for value in found.values()):  # NaN is not below it
            return
        if samples and (sample.prompt < samples[-1].prompt or sample.generated < samples[-1].generated):
            samples.clear()  # another server has begun to count
        samples.append(sample)
        while samples[-1].at_s - samples[0].at_s > _WINDOW_S and len(samples) > 2:
            samples.popleft()
        seconds = sample.at_s - samples[0].at_s
        prompt, generated = sample.prompt - samples[0].prompt, sample.generated - samples[0].generated
        if seconds < _APART_S or not prompt + generated:
            return
        running = max(sum(each.running for each in samples) / len(samples), 1.0)
        self._rates, self._known_s = Rates(prompt / seconds / running, generated / seconds / running), now
