"""Reports of codecs that break the model, and of places that nobody judged: neither may read as holding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ArgumentError
from tests.vllm_tap.fidelity.test_reports import PLAIN, PROMPTS, load_copy, patched, report
from vllm_tap.fidelity.reports.compare import DIFFER, compared, line_of
from vllm_tap.fidelity.reports.page import page_of
from vllm_tap.fidelity.reports.recommend import recommend, shown
from vllm_tap.fidelity.reports.report import Report, lines_of, load_report
from vllm_tap.fidelity.statistics import Interval, interval, verdict
from vllm_tap.fidelity.study import PlaceStudy

NAN, INF = float("nan"), float("inf")


def broken(how: float | None, *prompts: int) -> Report:
    """PLAIN, with full8 of no finite KL at these prompts (none: all)."""
    found = load_copy(PLAIN)
    one = next(each for each in found.places[0].patched if each.name == "full8")
    for name in ("kl", "kl_first", "nll_other"):
        for at in prompts or range(PROMPTS):
            one.prompts[name][at] = how  # type: ignore[call-overload]
    one.tail = dict.fromkeys(one.tail)
    return found


def apart() -> Report:
    """PLAIN, with full8 kept among what is broken, as a run does that sees it decode to what is no number."""
    found = load_copy(PLAIN)
    place = found.places[0]
    place.patched = [one for one in place.patched if one.name != "full8"]
    place.broken = {"full8": {"why": "it decodes to what is no number", "kl": [None] * PROMPTS}}
    return found


ALL_BROKEN = [broken(None), broken(NAN), broken(INF), broken(NAN, 3), apart()]


@pytest.mark.parametrize("found", ALL_BROKEN)
def test_a_codec_that_breaks_the_model_is_broken_wherever_it_is_told(found: Report, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(found.to_json())
    for one in (found, load_report(tmp_path / "r.json")):
        line = next(each for each in lines_of(one) if each.name == "full8")
        assert line.verdict.word == "broken" and line.kl.value == INF
        assert {each.verdict.word for each in lines_of(one) if each.name != "full8"} == {"within"}
        advice = recommend([one], "lens")
        assert advice.chosen is not None and advice.chosen.codec == "fp8row"  # full8 would be cheaper
        assert "full8" in shown(advice) and "is broken at mlp_post.1" in shown(advice)
        only = recommend([one], "lens", budget=518)
        assert only.chosen is None and only.nearest is None and not only.specs and "broken somewhere" in shown(only)


NONE = {"value": None, "low": None, "high": None}
NULLS: dict[str, Any] = {
    "noise": dict.fromkeys(("all", "massive", "rest", "first")),
    "geometry": {"pearson": None, "rmse": None, "nearest": 0.99},
    "neurons": {"magnitude": None, "kurtosis": None, "concept": NONE}, "features": {"shares": {"0.9": None}},
    "probe": {"frozen": None, "exact": 0.9, "lost": NONE, "lost_refitted": NONE, "recall": None, "recall_exact": 0.5}}


@pytest.mark.parametrize("found", [broken(None), apart()])
def test_the_page_shows_what_is_broken(found: Report) -> None:
    found.places[0].rows = {"full8": NULLS}
    tables = page_of(found).partition("<table>")[2]
    assert '<td class="broken">broken' in tables and "nan" not in tables and "inf" not in tables
    assert tables.partition("Without patching")[2].count("broken") == 18


@pytest.mark.parametrize("use", ["sae", "neurons", "probe", "geometry", "audit"])
def test_nulls_meet_no_criterion(use: str) -> None:
    advice = recommend([several(("mlp_post", 1, NULLS))], use)
    assert advice.chosen is None and advice.nearest is None and advice.offers[0].miss == INF


@pytest.mark.parametrize("found", ALL_BROKEN)
def test_what_is_broken_is_never_the_same(found: Report) -> None:
    word = {(old is found, new is found): next(one for one in compared(old, new) if one.codec == "full8")
            for old, new in ((PLAIN, found), (found, PLAIN), (found, found))}
    assert [one.word for one in word.values()] == ["worse", "better", "broken"] and "broken" in DIFFER
    assert "breaks the model now" in line_of(word[False, True]) and "no finite KL" in line_of(word[True, True])


@pytest.mark.parametrize("cost", [NAN, INF])
def test_what_is_no_number_has_an_interval_and_a_word(cost: float) -> None:
    assert verdict(interval(np.array([1.0, cost, 2.0])), 0.0, 1.0, 3).word == "broken"
    assert verdict(Interval(1.0, 1.0, 1.0), NAN, NAN, 3).word == "undecided"


def test_a_floor_that_is_no_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(replace(PLAIN, floors={"engine": [NAN] * PROMPTS}).to_json())
    with pytest.raises(ArgumentError, match="a floor is no number"):
        load_report(tmp_path / "r.json")


# ── places without a judgement ──────────────────────────────────────────────────────────────────────────────────

PROBED = {"probe": {"lost": {"high": 0.001}, "lost_refitted": {"high": 0.001}, "recall": 0.5, "recall_exact": 0.5}}


def several(*places: tuple[str, int, dict[str, Any]], name: str = "plain", size: int = 64) -> Report:
    """A report of full8 at places, each with its rows' judgement."""
    return replace(report({}, name), places=[
        PlaceStudy(site, layer, 64, [0.0] * PROMPTS, [patched("full8", size, 1e-6)], {}, {"full8": rows})
        for site, layer, rows in places])


def test_advice_is_of_judged_places_alone_and_the_others_are_named() -> None:
    found = several(("resid_post", 0, {}), ("resid_post", 2, PROBED), ("mlp_post", 1, PROBED), ("k", 0, {}))
    advice = recommend([found], "probe")
    assert advice.judged == ["resid_post.2", "mlp_post.1"] and advice.unjudged == ["resid_post.0", "k.0"]
    assert advice.specs == [{"sites": ["mlp_post"], "layers": [1], "codec": "full8"},
                            {"sites": ["resid_post"], "layers": [2], "codec": "full8"}]  # not mlp_post.2
    assert advice.chosen is not None and advice.chosen.bytes_per_token == 128
    assert "not judged, and not in what follows: resid_post.0, k.0" in shown(advice) and "(estimate)" in shown(advice)
    assert recommend([found], "probe", sites=["resid_post"]).specs[0]["layers"] == [2]
    assert recommend([found], "lens").unjudged == []


@pytest.mark.parametrize(("asked", "match"), [
    ({"layers": [0, 2]}, "--layers = '0,2': resid_post.0, k.0: not judged by probe; judged are: resid_post.2"),
    ({"sites": ["k", "mlp_post"]}, "--sites = 'k,mlp_post': k.0: not judged"),
    ({"sites": ["k", "resid_post"], "layers": [0, 2]}, "k.2: in no report"),
    ({"sites": ["resid_post"], "layers": [0, 2]}, "resid_post.0: not judged")])
def test_unjudged_places_that_were_asked_for_are_refused(asked: dict[str, Any], match: str) -> None:
    found = several(("resid_post", 0, {}), ("resid_post", 2, PROBED), ("mlp_post", 1, PROBED), ("k", 0, {}))
    with pytest.raises(ArgumentError, match=match):
        recommend([found], "probe", **asked)


def test_a_place_is_judged_where_every_report_that_has_it_judged_it_and_bytes_are_the_largest() -> None:
    one = several(("resid_post", 0, PROBED), ("resid_post", 1, PROBED), ("v", 0, PROBED), size=100)
    other = several(("resid_post", 0, PROBED), ("resid_post", 1, {}), name="planted", size=64)
    advice = recommend([one, other], "probe")
    assert advice.judged == ["resid_post.0", "v.0"] and advice.unjudged == ["resid_post.1"]
    assert advice.partly == ["v.0 (of plain alone)"] and "not in every report: v.0" in shown(advice)
    for order in ((one, other), (other, one)):
        assert recommend(order, "probe").offers[0].bytes_per_token == 200


def test_reports_that_have_no_codec_or_no_place_in_common_are_refused_by_name() -> None:
    raw = several(("v", 0, {}), name="other")
    raw.places[0].patched = [patched("raw16", 64, 0.0)]
    with pytest.raises(ArgumentError, match=r"all places: resid_post\.0 of plain has full8; v\.0 of other has raw16"):
        recommend([several(("resid_post", 0, {})), raw], "lens")
    with pytest.raises(ArgumentError, match="REPORT = 'empty': has no places"):
        recommend([PLAIN, several(name="empty")], "lens")
    with pytest.raises(ArgumentError, match="REPORT = ''"):
        recommend([], "lens")


# ── compare, and the page's words ───────────────────────────────────────────────────────────────────────────────


def test_what_is_missing_in_new_is_named_and_makes_a_difference() -> None:
    less = load_copy(PLAIN)
    less.places[0].patched.pop(1)
    changes = compared(PLAIN, less)
    assert [(one.codec, one.word) for one in changes if one.word != "same"] == [("full8", "missing")]
    assert "missing" in DIFFER and "in OLD, not in NEW" in line_of(changes[-1])
    assert [(one.codec, one.word) for one in compared(less, PLAIN) if one.word != "same"] == [("full8", "added")]
    more = load_copy(PLAIN)
    more.places.append(replace(more.places[0], layer=3))
    assert [f"{one.site}.{one.layer}" for one in compared(more, PLAIN) if one.word == "missing"] == ["mlp_post.3"] * 3
    with pytest.raises(ArgumentError, match=r"NEW = 'bfloat16': is of another dtype than OLD \(float32\)"):
        compared(PLAIN, replace(PLAIN, model={**PLAIN.model, "dtype": "bfloat16"}))


@pytest.mark.parametrize(("bar", "engine", "said"), [
    (None, 0.0, "so"), (0.5, 0.0, "as asked"), (0.5, 0.7, "the engine's own floor; 0.5 was asked for"),
    (None, 0.7, "the engine's own floor; so")])
def test_a_bar_has_a_source(bar: float | None, engine: float, said: str) -> None:
    assert asked(bar, engine).bar_source == said


def test_the_page_says_where_its_bar_comes_from_and_where_controls_were_seen() -> None:
    text = page_of(asked(0.5, 0.0))
    assert "The bar is 0.5 nats\n(as asked)" in text and "at the place where it was measured" in text


def asked(bar: float | None, engine: float) -> Report:
    """PLAIN with --bar and an engine's floor."""
    return replace(PLAIN, settings={**PLAIN.settings, "bar": bar}, floors={**PLAIN.floors, "engine": [engine] * 4})
