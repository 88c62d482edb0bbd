"""The cheapest codec whose bound holds wherever rows are to be stored, from reports: no model runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from schemas.errors import ArgumentError
from vllm_tap.fidelity.reports.report import Report
from vllm_tap.fidelity.statistics import CONFIDENCE, interval
from vllm_tap.fidelity.study import Patched, PlaceStudy

__all__ = ["USES", "Offer", "Recommendation", "recommend", "shown"]

_LOST_MAX: Final = 0.005
_RECALL_MIN: Final = 0.98
_LEAST: Final = 0.95


@dataclass(frozen=True, slots=True)
class Offer:
    """A codec at all places asked for: bytes of a token, whether the criterion holds everywhere, and where it is missed
    most and by how much (``miss`` times the bound); None of the last two where it holds.
    """

    codec: str
    bytes_per_token: int
    holds: bool
    worst: str
    miss: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """``chosen`` holds and fits the budget (None: nothing does); ``nearest`` is then what fits it and misses least;
    ``fewer`` says what else fits: the cheapest that holds, on fewer layers.
    """

    use: str
    criterion: str
    chosen: Offer | None
    nearest: Offer | None
    fewer: str
    offers: list[Offer]
    spec: dict[str, Any]


# A use's criterion of one codec at one place: how far it is from its bound, as a ratio (1 or less: it holds); None
# where the place was not judged by it.
Criterion = Callable[[Report, PlaceStudy, Patched], float | None]


def _exact(_report: Report, _place: PlaceStudy, one: Patched) -> float:
    return 0.0 if not any(one.prompts["kl"]) and not any(one.prompts["kl_first"]) else float("inf")


def _behaviour(report: Report, place: PlaceStudy, one: Patched) -> float:
    count = max(1, sum(each.kind == "codec" for each in place.patched))
    bound = interval(one.prompts["kl"], confidence=1 - (1 - CONFIDENCE) / count).high  # type: ignore[arg-type]
    return bound / report.bar if report.bar else (0.0 if bound == 0 else float("inf"))


def _probe(_report: Report, place: PlaceStudy, one: Patched) -> float | None:
    found = place.rows.get(one.name, {}).get("probe")
    if found is None:
        return None
    recalled = found["recall"] / found["recall_exact"] if found["recall_exact"] else 1.0
    lost = max(found["lost"]["high"], found["lost_refitted"]["high"])
    return float(max(lost / _LOST_MAX, _RECALL_MIN / max(recalled, 1e-9)))


def _features(_report: Report, place: PlaceStudy, one: Patched) -> float | None:
    found = place.rows.get(one.name, {}).get("features")
    return None if found is None else _LEAST / max(found["shares"]["0.9"] or 0.0, 1e-9)


def _neurons(_report: Report, place: PlaceStudy, one: Patched) -> float | None:
    found = place.rows.get(one.name, {}).get("neurons")
    if found is None or found["concept"] is None:  # the other two see no wrong row at all
        return None
    least = min(found["magnitude"] or 0.0, found["kurtosis"] or 0.0, found["concept"]["low"] or 0.0)
    return float(_LEAST / max(least, 1e-9))


def _geometry(_report: Report, place: PlaceStudy, one: Patched) -> float | None:
    found = place.rows.get(one.name, {}).get("geometry")
    return None if found is None else _LEAST / max(found["nearest"], 1e-9)


USES: Final[dict[str, tuple[str, Criterion]]] = {
    "audit": ("the same bits everywhere", _exact),
    "lens": ("KL's upper bound at most the bar, with the rows patched back", _behaviour),
    "probe": (f"AUROC lost at most {_LOST_MAX} (upper bound), frozen and refitted, and {_RECALL_MIN:.0%} of the exact "
              "rows' recall at 1 % false positives", _probe),
    "sae": (f"{_LEAST:.0%} of the autoencoder's features keep r ≥ 0.9", _features),
    "neurons": (f"Spearman of magnitude, kurtosis and concept (lower bound) at least {_LEAST}", _neurons),
    "geometry": (f"{_LEAST:.0%} of each row's ten nearest stay so", _geometry),
}


def recommend(reports: Sequence[Report], use: str, budget: int | None = None, sites: Sequence[str] = (),
              layers: Sequence[int] = ()) -> Recommendation:
    """The cheapest codec that holds at every place asked for in every report; ``budget``: bytes of a token, of all
    places together. ArgumentError where a report cannot tell.
    """
    if use not in USES:
        raise ArgumentError("--use", use, f"valid: {', '.join(USES)}")
    if budget is not None and budget < 1:
        raise ArgumentError("--bytes-per-token", budget, "at least 1")
    places = _places(reports, sites, layers)
    offers = sorted(_offers(places, use), key=lambda one: one.bytes_per_token)
    fits = [one for one in offers if budget is None or one.bytes_per_token <= budget]
    chosen = next((one for one in fits if one.holds), None)
    nearest = None if chosen or not fits else min(fits, key=lambda one: one.miss)
    holding = next((one for one in offers if one.holds), None)
    spec: dict[str, Any] = {"sites": sorted({place.site for _, place in places}),
                            "layers": sorted({place.layer for _, place in places})}
    fewer = ""
    if chosen is None and holding is not None and budget is not None:
        every = -(-holding.bytes_per_token // budget)
        fewer = (f"{holding.codec} holds and takes {holding.bytes_per_token} bytes a token: store one layer in "
                 f"{every}, or capture one request in {every}")
    best = chosen or nearest
    return Recommendation(use, USES[use][0], chosen, nearest, fewer, offers,
                          {} if best is None else {**spec, "codec": best.codec})


def _places(reports: Sequence[Report], sites: Sequence[str], layers: Sequence[int]) -> list[tuple[Report, PlaceStudy]]:
    found = [(report, place) for report in reports for place in report.places
             if (not sites or place.site in sites) and (not layers or place.layer in layers)]
    have = {place.site for report in reports for place in report.places}
    if lost := [site for site in sites if site not in have]:
        raise ArgumentError("--sites", lost[0], f"is in no report; these are: {', '.join(sorted(have))}")
    if lost_layers := [layer for layer in layers if layer not in {place.layer for _, place in found}]:
        raise ArgumentError("--layers", lost_layers[0], "is in no report")
    return found


def _offers(places: Sequence[tuple[Report, PlaceStudy]], use: str) -> list[Offer]:
    criterion = USES[use][1]
    common = set.intersection(*({one.name for one in place.patched if one.kind == "codec"} for _, place in places))
    found = []
    for name in sorted(common):
        size, judged = dict[tuple[str, int], int](), []
        for report, place in places:
            one = next(each for each in place.patched if each.kind == "codec" and each.name == name)
            size[place.site, place.layer] = one.row_bytes
            if (far := criterion(report, place, one)) is not None:
                judged.append((far, f"{place.site}.{place.layer} of {report.model['name']}"))
        if not judged:
            raise ArgumentError("--use", use, "none of the places was judged by it: neurons takes mlp_post, sae a "
                                              "report made with --sae, probe text that has labels")
        far, where = max(judged)
        found.append(Offer(name, sum(size.values()), far <= 1, "" if far <= 1 else where, 0.0 if far <= 1 else far))
    return found


def shown(found: Recommendation) -> str:
    """What is said to people."""
    said = [f"{found.use}: {found.criterion}"]
    said += [f"  {one.codec:<24} {one.bytes_per_token:>10,} bytes a token   "
             + ("holds" if one.holds else f"misses by {one.miss:.3g} times at {one.worst}") for one in found.offers]
    if found.chosen is not None:
        said.append(f"take {found.chosen.codec}, the cheapest that holds:")
    elif found.nearest is not None:
        said.append(f"nothing that fits holds; nearest is {found.nearest.codec}, which misses by "
                    f"{found.nearest.miss:.3g} times:")
    else:
        said.append("nothing fits")
    if found.spec:
        said.append(f'  "capture": {json.dumps(found.spec)}')
    if found.fewer:
        said.append(f"or: {found.fewer}")
    return "\n".join(said)
