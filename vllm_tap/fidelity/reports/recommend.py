"""The cheapest codec that meets a use's criterion wherever rows are to be stored, found in reports: no model runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from schemas.errors import ArgumentError
from vllm_tap.fidelity.bench import NORM
from vllm_tap.fidelity.reports.report import Report, codecs_of, numbers_of
from vllm_tap.fidelity.statistics import CONFIDENCE, interval
from vllm_tap.fidelity.study import Patched, PlaceStudy
from vllm_tap.fidelity.unpatched.attention import SITES
from vllm_tap.fidelity.unpatched.drafting import accepted_share

__all__ = ["USES", "WHOLE", "Offer", "Recommendation", "recommend", "shown"]

_LOST_MAX: Final = 0.005
_RECALL_MIN: Final = 0.98
_LEAST: Final = 0.95
_REGAINED: Final = 0.99
_BROKEN: Final = math.inf  # times the bound, of what is no number

Pair = tuple[str, int]  # a site and a layer


@dataclass(frozen=True, slots=True)
class Offer:
    """A codec at all judged places.

    ``bytes_per_token``: bytes of a token, the largest of the reports. ``holds``: whether the criterion holds at all
    places. ``worst``: where it is missed most, "" where it holds. ``miss``: by how many times the bound, 0 where it
    holds, infinite where the codec is broken there.
    """

    codec: str
    bytes_per_token: int
    holds: bool
    worst: str
    miss: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The codec that is recommended for a ``use``, and what else the reports say.

    ``chosen``: the cheapest that holds and fits the budget; None: nothing does. ``nearest`` is then the one that fits
    and misses least; None where all that fits is broken somewhere. ``fewer`` says what else fits: the cheapest that
    holds, on fewer layers or requests.

    ``specs``: captures of judged places alone, one for all sites of the same layers. ``judged``: those places, such as
    resid_post.1. ``unjudged``: places of the reports that were asked for and that nothing is said of. ``partly``:
    judged places that not every report has, with the models that have them. ``lacking``: codecs not judged at all of
    them.
    """

    use: str
    criterion: str
    chosen: Offer | None
    nearest: Offer | None
    fewer: str
    offers: list[Offer]
    specs: list[dict[str, Any]]
    judged: list[str]
    unjudged: list[str]
    partly: list[str]
    lacking: list[str]


@dataclass(frozen=True, slots=True)
class _Judged:
    """A place of one report. ``far``: by codec that was judged, how far it is from its bound. ``size``: by codec, its
    bytes.
    """

    model: str
    pair: Pair
    far: dict[str, float]
    size: dict[str, int]


# A use's criterion of one codec at one place: how far it is from its bound, as a ratio (1 or less: it holds; infinite:
# what it goes by is no number); None where the place was not judged by it.
Criterion = Callable[[Report, PlaceStudy, Patched], float | None]


def _exact(_report: Report, place: PlaceStudy, one: Patched) -> float | None:
    """0 where all rows are the same, infinite where they are not; None where they were not compared.

    A KL of 0 is no proof, because rows that differ may cost nothing. A report's noise is null where nothing differs. It
    is null too where it is no number, so the other numbers are looked at as well.
    """
    found = place.rows.get(one.name, {})
    if "noise" not in found or "geometry" not in found:
        return None
    same = (found["noise"]["all"] is None and found["noise"]["first"] is None and found["geometry"]["rmse"] == 0
            and not numbers_of(one, "kl").any() and not numbers_of(one, "kl_first").any())
    return 0.0 if same else _BROKEN


def _behaviour(report: Report, place: PlaceStudy, one: Patched) -> float:
    count = max(1, len(codecs_of(report, place)))
    bound = interval(numbers_of(one, "kl"), confidence=1 - (1 - CONFIDENCE) / count).high
    return bound / report.bar if report.bar else (0.0 if bound == 0 else _BROKEN)


def _probe(_report: Report, place: PlaceStudy, one: Patched) -> float | None:
    found = place.rows.get(one.name, {}).get("probe")
    if found is None:
        return None
    lost = [_number(found[part]["high"]) for part in ("lost", "lost_refitted")]
    recall, exact = _number(found["recall"]), _number(found["recall_exact"])
    if not all(map(math.isfinite, (*lost, recall, exact))):
        return _BROKEN
    return max(max(lost) / _LOST_MAX, _short(_RECALL_MIN, recall / exact if exact else 1.0))


def _features(_report: Report, place: PlaceStudy, one: Patched) -> float | None:
    found = place.rows.get(one.name, {}).get("features")
    return None if found is None else _short(_LEAST, found["shares"]["0.9"])


def _neurons(_report: Report, place: PlaceStudy, one: Patched) -> float | None:
    found = place.rows.get(one.name, {}).get("neurons")
    if found is None or found["concept"] is None:  # the other two see no wrong row at all
        return None
    return max(_short(_LEAST, each) for each in (found["magnitude"], found["kurtosis"], found["concept"]["low"]))


def _geometry(_report: Report, place: PlaceStudy, one: Patched) -> float | None:
    found = place.rows.get(one.name, {}).get("geometry")
    if found is None:
        return None
    return _BROKEN if found.get("rmse", 0.0) is None else _short(_LEAST, found["nearest"])


def _number(value: float | None) -> float:
    """NaN for null, which is what a report has for it."""
    return math.nan if value is None else float(value)


def _short(least: float, value: float | None) -> float:
    """The factor by which a value is too small."""
    found = _number(value)
    return least / max(found, 1e-9) if math.isfinite(found) else _BROKEN


USES: Final[dict[str, tuple[str, Criterion]]] = {
    "audit": ("the same numbers in every row, but for a zero's sign", _exact),
    "lens": ("KL's upper bound at most the bar, with the rows patched back", _behaviour),
    "probe": (f"AUROC lost at most {_LOST_MAX} (upper bound), frozen and refitted, and {_RECALL_MIN:.0%} of the exact "
              "rows' recall at 1 % false positives (estimate)", _probe),
    "sae": (f"{_LEAST:.0%} of the autoencoder's features keep r ≥ 0.9 (estimate)", _features),
    "neurons": (f"Spearman of magnitude, kurtosis (estimates) and concept (lower bound) at least {_LEAST}", _neurons),
    "geometry": (f"{_LEAST:.0%} of each row's ten nearest stay so (estimate)", _geometry),
}


def _attention(report: Report) -> list[_Judged]:
    part = report.attention
    if part is None or "why" in part:
        return []
    far = {name: _short(_REGAINED, interval(np.array(numbers["mass"])).low) for name, numbers in part["prompts"].items()
           if name in part["sizes"]}
    return [_Judged(report.model["name"], (site, part["layer"]), dict(far), {
        name: part["sizes"][name][at] for name in far}) for at, site in enumerate(SITES)]


def _drafter(report: Report) -> list[_Judged]:
    part = report.drafter
    if part is None or "why" in part:
        return []
    far = {name: _short(_REGAINED, accepted_share(part["exact"], numbers).low)
           for name, numbers in part["lengths"].items() if name in part["sizes"]}
    return [_Judged(report.model["name"], NORM, far, {name: part["sizes"][name] for name in far})]


# Uses of what a report has of the whole model: the criterion in words, and what was judged where.
WHOLE: Final[dict[str, tuple[str, Callable[[Report], list[_Judged]]]]] = {
    "attention": (f"heads regain {_REGAINED:.0%} of the mass of the eight keys (lower bound)", _attention),
    "drafter": (f"a drafter has {_REGAINED:.0%} of the drafts accepted that one of exact rows has (lower bound)",
                _drafter),
}


def recommend(reports: Sequence[Report], use: str, budget: int | None = None, sites: Sequence[str] = (),
              layers: Sequence[int] = ()) -> Recommendation:
    """The cheapest codec that holds at every judged place of those asked for, in every report that has it.

    ``budget``: bytes of a token, of all places together. ArgumentError where a report cannot tell, or where a site or
    layer was asked for by name and was not judged.
    """
    if use not in USES and use not in WHOLE:
        raise ArgumentError("--use", use, f"valid: {', '.join((*USES, *WHOLE))}")
    if budget is not None and budget < 1:
        raise ArgumentError("--bytes-per-token", budget, "at least 1")
    if any(report.settings.get("lab") == "kv" for report in reports):
        raise ArgumentError("REPORT", next(one.model["name"] for one in reports if one.settings.get("lab") == "kv"),
                            "is of codecs of keys and values, which no capture takes: what they cost stands in it")
    found = _judged(reports, use, sites, layers)
    pairs = list(dict.fromkeys(one.pair for one in found))
    unjudged = [pair for pair in pairs if not all(one.far for one in found if one.pair == pair)]
    judged = [pair for pair in pairs if pair not in unjudged]
    _check_asked(use, judged, unjudged, sites, layers)
    found = [one for one in found if one.pair in judged]
    offers = sorted(_offers(found), key=lambda one: one.bytes_per_token)
    fits = [one for one in offers if budget is None or one.bytes_per_token <= budget]
    chosen = next((one for one in fits if one.holds), None)
    near = [] if chosen else [one for one in fits if math.isfinite(one.miss)]
    nearest = min(near, key=lambda one: one.miss) if near else None
    best = chosen or nearest
    models = list(dict.fromkeys(report.model["name"] for report in reports))
    partly = [f"{_named(pair)} (of {', '.join(have)} alone)" for pair in judged
              if len(have := dict.fromkeys(one.model for one in found if one.pair == pair)) < len(models)]
    criterion = WHOLE[use][0] if use in WHOLE else USES[use][0]
    return Recommendation(use, criterion, chosen, nearest, _fewer(offers, budget) if chosen is None else "", offers,
                          [] if best is None else _specs(judged, best.codec), list(map(_named, judged)),
                          list(map(_named, unjudged)), partly,
                          sorted({name for one in found for name in one.size} - {one.codec for one in offers}))


def _judged(reports: Sequence[Report], use: str, sites: Sequence[str], layers: Sequence[int]) -> list[_Judged]:
    """The judgements of a use at the places asked for, and places without one."""
    if use in USES:
        return [_judge(report, place, use) for report, place in _places(reports, sites, layers)]
    found = [one for report in reports for one in WHOLE[use][1](report)
             if (not sites or one.pair[0] in sites) and (not layers or one.pair[1] in layers)]
    if not found:
        raise ArgumentError("--use", use, "no report has it at what was asked for; a report of fidelity says why it "
                                          "shows none")
    return found


def _fewer(offers: Sequence[Offer], budget: int | None) -> str:
    holding = next((one for one in offers if one.holds), None)
    if holding is None or budget is None:
        return ""
    every = -(-holding.bytes_per_token // budget)
    return (f"{holding.codec} holds and takes {holding.bytes_per_token} bytes a token: store one layer in "
            f"{every}, or capture one request in {every}")


def _named(pair: Pair) -> str:
    return f"{pair[0]}.{pair[1]}"


def _specs(judged: Sequence[Pair], codec: str) -> list[dict[str, Any]]:
    """Captures that take the judged places and no other: a capture takes all its layers at all its sites."""
    of_layers: dict[tuple[int, ...], list[str]] = {}
    for site in sorted({site for site, _ in judged}):
        of_layers.setdefault(tuple(sorted(layer for name, layer in judged if name == site)), []).append(site)
    return [{"sites": sites, "layers": list(layers), "codec": codec} for layers, sites in of_layers.items()]


def _places(reports: Sequence[Report], sites: Sequence[str], layers: Sequence[int]) -> list[tuple[Report, PlaceStudy]]:
    if not reports:
        raise ArgumentError("REPORT", "", "name one at least")
    if bare := [report.model["name"] for report in reports if not report.places]:
        raise ArgumentError("REPORT", bare[0], "has no places: nothing of this model was measured")
    have = {(place.site, place.layer) for report in reports for place in report.places}
    if lost := [site for site in sites if site not in {site for site, _ in have}]:
        raise ArgumentError("--sites", lost[0], "is in no report; these are: "
                            + ", ".join(sorted({site for site, _ in have})))
    if lost_layers := [layer for layer in layers if not any(at == layer and (not sites or site in sites)
                                                            for site, at in have)]:
        raise ArgumentError("--layers", lost_layers[0], "is in no report")
    if absent := [(site, layer) for site in sites for layer in layers if (site, layer) not in have]:
        raise ArgumentError("--layers", absent[0][1], f"{', '.join(map(_named, absent))}: in no report; leave out what "
                                                      "was not measured")
    return [(report, place) for report in reports for place in report.places
            if (not sites or place.site in sites) and (not layers or place.layer in layers)]


def _judge(report: Report, place: PlaceStudy, use: str) -> _Judged:
    codecs = codecs_of(report, place)
    far = {one.name: value for one in codecs if one.name not in place.broken
           and (value := USES[use][1](report, place, one)) is not None}
    if far or use in ("audit", "lens"):  # broken ones alone do not make a place one that a use is judged at
        far |= dict.fromkeys(place.broken, _BROKEN)
    return _Judged(report.model["name"], (place.site, place.layer),
                   {name: _BROKEN if math.isnan(value) else value for name, value in far.items()},
                   {one.name: one.row_bytes for one in codecs})


def _check_asked(use: str, judged: Sequence[Pair], unjudged: Sequence[Pair], sites: Sequence[str],
                 layers: Sequence[int]) -> None:
    """Check that each name asked for is judged: a site somewhere, a layer somewhere, both in every pair of them."""
    if not judged:
        raise ArgumentError("--use", use, f"none of the places was judged by it ({', '.join(map(_named, unjudged))}): "
                            "neurons takes mlp_post and text that has labels, sae a report made with --sae, probe text "
                            "that has labels, and only the middle one of a site's layers is judged by it")
    lost = [pair for pair in unjudged
            if (sites and layers) or (sites and pair[0] not in {site for site, _ in judged})
            or (layers and pair[1] not in {layer for _, layer in judged})]
    if lost:
        raise ArgumentError("--layers" if layers else "--sites", ",".join(map(str, layers or sites)),
                            f"{', '.join(map(_named, lost))}: not judged by {use}; judged are: "
                            + ", ".join(map(_named, judged)))


def _offers(places: Sequence[_Judged]) -> list[Offer]:
    common = set.intersection(*(set(one.far) for one in places))
    if not common:
        raise ArgumentError("REPORT", ", ".join(dict.fromkeys(one.model for one in places)),
                            "no codec was judged at all places: " + "; ".join(
                                f"{_named(one.pair)} of {one.model} has {', '.join(sorted(one.far))}"
                                for one in places) + "; name fewer with --sites or --layers")
    found = []
    for name in sorted(common):
        size: dict[Pair, int] = {}
        for one in places:
            size[one.pair] = max(size.get(one.pair, 0), one.size[name])
        worst = max(places, key=lambda one: one.far[name])
        far = worst.far[name]
        found.append(Offer(name, sum(size.values()), far <= 1, "" if far <= 1 else
                           f"{_named(worst.pair)} of {worst.model}", 0.0 if far <= 1 else far))
    return found


def shown(found: Recommendation) -> str:
    """The text for people."""
    said = [f"{found.use}: {found.criterion}"]
    said += [f"  {one.codec:<24} {one.bytes_per_token:>10,} bytes a token   "
             + ("holds" if one.holds else f"misses by {one.miss:.3g} times at {one.worst}"
                if math.isfinite(one.miss) else f"{'differs' if found.use == 'audit' else 'is broken'} at {one.worst}")
             for one in found.offers]
    said.append(f"judged at {', '.join(found.judged)}")
    if found.unjudged:
        said.append(f"not judged, and not in what follows: {', '.join(found.unjudged)}")
    if found.partly:
        said.append(f"not in every report: {', '.join(found.partly)}")
    if found.lacking:
        said.append(f"not judged at all of these places, and not offered: {', '.join(found.lacking)}")
    if found.chosen is not None:
        said.append(f"take {found.chosen.codec}, the cheapest that holds at the places judged:")
    elif found.nearest is not None:
        said.append(f"nothing that fits holds; nearest is {found.nearest.codec}, which misses by "
                    f"{found.nearest.miss:.3g} times:")
    else:
        said.append("nothing fits, or all that fits " + ("differs" if found.use == "audit" else "is broken somewhere"))
    said += [f'  "capture": {json.dumps(spec)}' for spec in found.specs]
    if len(found.specs) > 1:
        said.append("sites of other layers take a capture, and so a request, of their own")
    if found.fewer:
        said.append(f"or: {found.fewer}")
    return "\n".join(said)
