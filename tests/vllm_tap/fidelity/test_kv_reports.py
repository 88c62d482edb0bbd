"""Reports of codecs of keys and values: terms that add up, the page, and what they are no answer to."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pytest

from bench.fidelity_page import written
from bench.kv_page import tables
from schemas.errors import ArgumentError
from tests.vllm_tap.fidelity.test_reports import DOCS, PLAIN, PROMPTS, load_copy, patched
from vllm_tap.fidelity.bench import Unpublished
from vllm_tap.fidelity.kv.anchors import ANCHORS
from vllm_tap.fidelity.kv.job import _check_shuffled
from vllm_tap.fidelity.kv.modes import MODES, PARTS
from vllm_tap.fidelity.kv.terms import terms_of
from vllm_tap.fidelity.reports.compare import compared, line_of
from vllm_tap.fidelity.reports.page import page_of, ratios_of
from vllm_tap.fidelity.reports.recommend import recommend
from vllm_tap.fidelity.reports.report import Report
from vllm_tap.fidelity.study import PlaceStudy

COSTS = {"snapshot": 1e-4, "direct": 8e-4, "in-forward": 1e-3}
SHARES = {"kv": 1.0, "k": 0.6, "v": 0.3}


def report(sites: dict[str, float] | None = None) -> Report:
    """A report of every mode and part, whose in-forward costs 1e-3 nats; each token takes a quarter of 16 bits."""
    found = sites or {f"{mode}/{part}": COSTS[mode] * SHARES[part] for mode in MODES for part in PARTS}
    places = [PlaceStudy(site, -1, 512, [0.0] * PROMPTS, [patched("kv4", 256, cost), patched(
        "shuffled", 0, 2.0, "control")], {"identity": "the same bits"}) for site, cost in found.items()]
    return replace(PLAIN, settings={**PLAIN.settings, "lab": "kv", "context": 32}, places=places)


def test_terms_add_up_to_the_total_twice() -> None:
    terms = {one.name: one for one in terms_of(report())}
    assert len(terms) == 7
    for which in ("kl", "nll"):
        value: dict[str, float] = {name: getattr(one, which).value for name, one in terms.items()}
        total = value.pop("in-forward")
        by_mode = [value[name] for name in value if "snapshot" in name or "direct" in name]
        assert len(by_mode) == 3 and sum(by_mode) == pytest.approx(total, rel=1e-12)
        assert sum(value.values()) - sum(by_mode) == pytest.approx(total, rel=1e-12)
    assert terms["= keys alone"].kl.value == pytest.approx(6e-4, rel=0.1)
    assert all(one.kl.low <= one.kl.value <= one.kl.high for one in terms.values())


def test_terms_are_those_of_which_both_runs_are_there() -> None:
    assert [one.name for one in terms_of(report({"in-forward/kv": 1e-3, "in-forward/v": 3e-4}))] == [
        "in-forward", "+ values alone"]
    assert list(terms_of(PLAIN)) == []


def test_what_in_forward_costs_beyond_direct_is_not_called_compounding_where_one_layer_alone_is_coded() -> None:
    """What drifts is then what is not coded, which direct writes as it was."""
    whole = report()
    alone = replace(whole, places=[replace(place, layer=1) for place in whole.places])
    assert [one.name for one in terms_of(whole) if "beyond direct" in one.name] == [
        "+ compounding: in-forward, beyond direct"]
    assert [one.name for one in terms_of(alone) if "beyond direct" in one.name] == [
        "+ drift of what is not coded: in-forward, beyond direct"]
    assert "compounding" not in page_of(alone) and "compounding" in page_of(whole)
    for part in "kv":
        costs = {f"{mode}/{part}": cost for mode, cost in COSTS.items()}
        assert not any("beyond direct" in one.name for one in terms_of(report(costs)))


def test_the_page_has_ratios_and_terms_and_nothing_of_rows_without_a_model() -> None:
    page = page_of(report())
    assert "in-forward/kv</td>" in page and "4.00 ×" in page and "What it is made of" in page
    assert "positions from 32 on are scored" in page and "Without patching" not in page and ".-1" not in page
    assert page.count("<svg") == 1 and "Left out" not in page
    odd = replace(report(), settings={**report().settings, "left_out": "rot4: turns heads of a power of two"})
    assert "Left out: rot4: turns heads of a power of two." in page_of(odd)
    assert ratios_of(PLAIN) == {} and "Without patching" in page_of(PLAIN)


def test_what_is_copied_stands_on_the_page_with_what_others_have_published() -> None:
    copied = {"in-forward/kv": {"kv4": [0.75] * PROMPTS, "shuffled": [0.25] * PROMPTS}}
    found = replace(report(), retrieval={"positions": 31, "exact": [1.0] * PROMPTS, "copied": copied, "told": {}})
    page = page_of(found)
    assert "<td>in-forward/kv</td><td>kv4</td><td>256</td>" in page and "0.750 <small>" in page and "+0.250" in page
    assert ANCHORS and all(f"{one.source}, {one.date}" in page and f"KL {one.kl} nats" in page for one in ANCHORS)
    assert "Published elsewhere" not in page_of(PLAIN)  # another metric


def test_published_figures_have_a_date_a_source_and_a_size() -> None:
    for one in ANCHORS:
        assert one.source.startswith("https://") and date.fromisoformat(one.date).year >= 2020 and one.of
        assert 0 < one.kl < 1 and 0 < one.bits <= 16


def test_what_shuffled_rows_cost_is_the_bound_of_what_may_be_said() -> None:
    one = report()
    _check_shuffled(one, one.places[0])
    assert one.places[0].told["shuffled"].endswith("nats, worse than every codec")
    one.places[1].patched[0].prompts["kl"] = [9.0] * PROMPTS
    _check_shuffled(one, one.places[1])
    assert one.places[1].told["shuffled"].endswith("nats, no more than kv4")
    one.places[2].patched[1].prompts["kl"] = [1e-6] * PROMPTS
    with pytest.raises(Unpublished, match=r"shuffled rows at snapshot/v cost 1e-06 nats, within the bar of 0.0001"):
        _check_shuffled(one, one.places[2])


def test_two_reports_of_keys_and_values_are_compared_and_other_kinds_are_refused() -> None:
    old, new = report(), load_copy(report())
    for place in new.places:
        place.patched[0].prompts["kl"] = [2 * value for value in place.patched[0].prompts["kl"]]
    changes = compared(old, new)
    assert {one.word for one in changes} == {"worse"} and line_of(changes[0]).startswith("worse   snapshot/kv kv4: KL")
    with pytest.raises(ArgumentError, match=r"NEW = 'kv': is of another kind than OLD \(codecs\)"):
        compared(PLAIN, old)
    with pytest.raises(ArgumentError, match=r"REPORT = 'plain': is of codecs of keys and values"):
        recommend([old], "lens")


def test_the_tables_of_the_page_are_made_of_what_stands_beside_it() -> None:
    page, found = (DOCS / "kv.md").read_text(), json.loads((DOCS / "kv.json").read_text())
    assert written(page, tables(found)) == page


def lines(found: dict[str, Any], pilot: str, site: str) -> dict[str, float]:
    return {one["name"]: one["kl"]["value"] for one in found[pilot]["lines"] if one["site"] == site}


def test_what_the_page_says_holds_for_what_stands_beside_it() -> None:
    """Identity exactly 0, in-forward above snapshot, a scale a head below a pooled one, shuffled the worst."""
    found = json.loads((DOCS / "kv.json").read_text())
    for name, pilot in found.items():
        assert [one["harness"] for one in pilot["told"]] == [0.0] * len(MODES) * len(PARTS)
        assert all(one["shuffled"].endswith("worse than every codec") for one in pilot["told"])
        for part in PARTS:
            snapshot, forward = lines(found, name, f"snapshot/{part}"), lines(found, name, f"in-forward/{part}")
            assert all(forward[codec] > snapshot[codec] for codec in forward if codec != "shuffled")
            assert all(each["kv8"] < each["kv8-pooled"] for each in (snapshot, forward))
        undecided = {"kv4"} if name == "planted" else set()
        assert {codec for codec, cost in pilot["pooled"].items() if cost["low"] <= 0} == undecided
        assert np.isclose(sum(one["kl"]["value"] for one in pilot["terms"] if one["codec"] == "kv4"), 3 * lines(
            found, name, "in-forward/kv")["kv4"])
        terms = {(one["codec"], one["name"]): one["kl"]["value"] for one in pilot["terms"]}
        for codec in (one for one, term in terms if term == "in-forward"):
            total = terms[codec, "in-forward"]
            assert abs(terms[codec, "+ compounding: in-forward, beyond direct"]) < total / 4
            assert abs(terms[codec, "+ what the two make together"]) < total / 4
            assert 1.6 < total / terms[codec, "= snapshot"] < 6.2
            assert terms[codec, "+ direct, beyond the snapshot"] > (0.5 if name == "plain" else 0.3) * total
            assert codec in ("k8v4",) or terms[codec, "= keys alone"] > terms[codec, "+ values alone"]
        fp8 = next(one for one in pilot["lines"] if one["site"] == "in-forward/kv" and one["name"] == "fp8")
        assert fp8["kl"]["low"] > pilot["bar"] and fp8["perplexity"]["low"] < 0 < fp8["perplexity"]["high"]
    plain, planted = (lines(found, name, "in-forward/kv") for name in ("plain", "planted"))
    assert planted["fp8"] == pytest.approx(plain["fp8"], rel=1e-3) and planted["fp8"] < planted["kv8"]
    assert planted["kv8"] > 20 * plain["kv8"]
    for each in (plain, planted):  # principal components cost least at equal bits, by far
        assert each["pca4"] < 0.25 * min(each["kv4"], each["kv4-pooled"], each["nf4"], each["rot4"])
        assert each["pca2"] < 0.25 * each["rot2"]
    assert all(6 < one["structure"] < 13 for one in found["planted"]["lines"]
               if one["site"] == "in-forward/kv" and one["name"] in ("pca4", "pca2"))
    assert planted["kv4"] / plain["kv4"] > 2 * planted["rot4"] / plain["rot4"]  # a rotation spreads a massive column
