"""A report: what was measured, prompt by prompt, so that anybody can draw intervals of it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from schemas.errors import ArgumentError, json_fault
from vllm_tap.fidelity import coding
from vllm_tap.fidelity.distributions import F64
from vllm_tap.fidelity.statistics import CONFIDENCE, Interval, Verdict, interval, verdict
from vllm_tap.fidelity.study import Patched, PlaceStudy, name_of

__all__ = ["VERSION", "Line", "Report", "codecs_of", "lines_of", "load_report", "numbers_of"]

VERSION: Final = 1
_COSTS: Final = ("kl", "kl_first", "nll_other")  # what is no number here is of a model that a codec broke
_NUMBERS: Final = (*_COSTS, "top1", "clear", "clear_same", "nll", "same_tokens")
_FIELDS: Final = ("version", "model", "settings", "text", "floors", "places")


@dataclass(slots=True)
class Report:
    """A model's. ``floors``: by name KL by prompt, in nats: ``engine`` (a batch against alone) and ``arithmetic``
    (bfloat16 against float32 in another implementation); empty: not measured, and ``settings`` says why. ``attention``,
    ``drafter`` and ``retrieval``: an ``Attended``, a ``Drafted`` and a ``Retrieved`` as they stand in JSON, or ``why``
    there is none; None: not of this kind of report.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    text: dict[str, Any]
    floors: dict[str, list[float]]
    places: list[PlaceStudy] = field(default_factory=list)
    version: int = VERSION
    attention: dict[str, Any] | None = None
    drafter: dict[str, Any] | None = None
    retrieval: dict[str, Any] | None = None

    @property
    def free(self) -> float:
        """KL in nats that the engine itself makes between runs in other company."""
        return _mean(self.floors.get("engine"))

    @property
    def bar(self) -> float:
        """KL in nats that a codec may cost: what bfloat16 costs, or what was asked for; never under the engine's
        own. NaN where a floor is no number: nothing holds then.
        """
        asked = self.settings.get("bar")
        found = float(asked) if asked is not None else _mean(self.floors.get("arithmetic"))
        return float(np.maximum(found, self.free))

    @property
    def bar_source(self) -> str:
        """Words for where the bar comes from."""
        if self.settings.get("bar") is not None:
            asked = float(self.settings["bar"])
            return "as asked" if asked >= self.free else f"the engine's own floor; {asked:.3g} was asked for"
        told = str(self.settings.get("arithmetic") or "what bfloat16 costs was not measured")
        if self.floors.get("arithmetic") and _mean(self.floors["arithmetic"]) >= self.free:
            return told
        return f"the engine's own floor; {told}"

    def to_json(self) -> str:
        """The report as JSON; what is no number stands as null."""
        return json.dumps(plain(asdict(self)), indent=1, allow_nan=False) + "\n"


def _mean(floor: list[float] | None) -> float:
    """KL by prompt in the mean; 0 where it was not measured, NaN where one is no number."""
    return float(np.mean(np.array(floor, np.float64))) if floor else 0.0


def numbers_of(one: Patched, name: str) -> F64:
    """Numbers by prompt, float64 [prompts]. A cost that is no number, null in a report, is infinite: the codec broke
    the model.
    """
    found = np.array(one.prompts[name], np.float64)
    return np.where(np.isfinite(found), found, np.inf) if name in _COSTS else found


def codecs_of(report: Report, place: PlaceStudy) -> list[Patched]:
    """The codecs of a place; those that broke the model there have no finite KL."""
    found = [one for one in place.patched if one.kind == "codec"]
    dtype = report.model["dtype"]
    for name, wrong in place.broken.items():
        none = dict.fromkeys(_NUMBERS, [float("nan")] * len(wrong["kl"]))
        size = wrong.get("row_bytes") or coding.row_bytes(name, place.width, dtype)
        found.append(Patched(name, "codec", size, none,
                             dict.fromkeys(("median", "p99", "p99.9", "max"))))
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """A codec or control at one place, with intervals at 95 %; ``verdict`` is by bounds that hold for all codecs of the
    place together (Bonferroni). ``structure``: its KL over that of Gaussian noise of the same power; None: not
    measured, or one of the two broke the model. What broke it costs infinitely much.
    """

    site: str
    layer: int
    name: str
    kind: str
    row_bytes: int
    kl: Interval
    top1: Interval
    clear: float | None
    perplexity: Interval
    tail: dict[str, float | None]
    same_tokens: float
    verdict: Verdict
    structure: float | None

    @property
    def place(self) -> str:
        """The place by its name."""
        return name_of(self.site, self.layer)


def lines_of(report: Report, places: list[PlaceStudy] | None = None) -> Iterator[Line]:
    """All lines, place by place."""
    for place in report.places if places is None else places:
        codecs = codecs_of(report, place)
        noise = {one.name: one for one in place.patched if one.kind == "noise"}
        for one in (*codecs, *(each for each in place.patched if each.kind != "codec")):
            yield _line(report, place, one, len(codecs), noise.get(one.name) if one.kind == "codec" else None)


def _line(report: Report, place: PlaceStudy, one: Patched, count: int, noise: Patched | None) -> Line:
    numbers = {name: numbers_of(one, name) for name in one.prompts}
    strict = interval(numbers["kl"], confidence=1 - (1 - CONFIDENCE) / count)
    clear = numbers["clear"].sum()
    return Line(
        place.site, place.layer, one.name, one.kind, one.row_bytes, interval(numbers["kl"]), interval(numbers["top1"]),
        float(numbers["clear_same"].sum() / clear) if clear > 0 else None,
        interval(np.stack([numbers["nll"], numbers["nll_other"]]), perplexity_change), one.tail,
        float(np.median(numbers["same_tokens"])), verdict(strict, report.free, report.bar, len(numbers["kl"])),
        _structure(numbers["kl"], None if noise is None else numbers_of(noise, "kl")))


def _structure(kl: F64, noise: F64 | None) -> float | None:
    if noise is None or not noise.any() or not np.isfinite(kl).all() or not np.isfinite(noise).all():
        return None
    return float(kl.mean() / noise.mean())


def perplexity_change(nll: Any, other: Any, axis: int = -1) -> Any:
    """exp(mean NLL' − mean NLL) − 1: by how much perplexity is more."""
    return np.expm1(np.mean(other, axis=axis) - np.mean(nll, axis=axis))


def load_report(path: Path, field_name: str = "REPORT") -> Report:
    """The report of a file; ArgumentError where it is none, or of another version."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ArgumentError(field_name, str(path), f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(field_name, str(path), f"is no report: {json_fault(error)}") from None
    if not isinstance(found, dict) or (lacking := [name for name in _FIELDS if name not in found]):
        what = "no object" if not isinstance(found, dict) else f"it has no {', '.join(lacking)}"
        raise ArgumentError(field_name, str(path), f"is no report of vllm-tap fidelity: {what}")
    if found["version"] != VERSION:
        raise ArgumentError(field_name, str(path), f"version = {found['version']!r}: this vllm-tap reads {VERSION}")
    try:
        places = [place_of(each) for each in found["places"]]
        report = Report(found["model"], found["settings"], found["text"], found["floors"], places,
                        attention=found.get("attention"), drafter=found.get("drafter"),
                        retrieval=found.get("retrieval"))
        if not np.isfinite(report.bar):
            raise ValueError("a floor is no number: the model itself makes none")
        return report
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(field_name, str(path), f"is damaged: {type(error).__name__}: {error}") from None


def place_of(found: dict[str, Any]) -> PlaceStudy:
    """A place as it was written."""
    return PlaceStudy(**{**found, "patched": [Patched(**each) for each in found["patched"]]})


def plain(value: Any) -> Any:
    """JSON has neither infinities nor what is no number."""
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


