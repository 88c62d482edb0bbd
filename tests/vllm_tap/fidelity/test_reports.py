"""Reports: read back, compared, and asked for advice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import fidelity_families
from bench.fidelity_page import tables, written
from schemas.errors import ArgumentError
from vllm_tap.fidelity import coding
from vllm_tap.fidelity.reports.compare import compared
from vllm_tap.fidelity.reports.page import page_of
from vllm_tap.fidelity.reports.parts import drafter_lines
from vllm_tap.fidelity.reports.recommend import recommend, shown
from vllm_tap.fidelity.reports.report import Report, lines_of, load_report
from vllm_tap.fidelity.study import Patched, PlaceStudy
from vllm_tap.fidelity.unpatched.rows import geometry, noise

DOCS = Path(__file__).parents[3] / "docs" / "evidence"
PROMPTS = 16


def patched(name: str, size: int, kl: float, kind: str = "codec") -> Patched:
    spread = kl * np.random.default_rng(0).uniform(0.9, 1.1, PROMPTS)  # whichever tests ran before
    numbers = {"kl": spread, "kl_first": spread, "top1": 1 - np.minimum(spread, 1), "clear": np.full(PROMPTS, 50.0),
               "clear_same": np.full(PROMPTS, 49.0), "nll": np.full(PROMPTS, 5.0), "nll_other": 5 + spread,
               "same_tokens": np.full(PROMPTS, 16.0)}
    return Patched(name, kind, size, {key: value.tolist() for key, value in numbers.items()},
                   {"median": kl, "p99": 2 * kl, "p99.9": None, "max": 3 * kl})


def report(costs: dict[str, tuple[int, float]], name: str = "plain", rows: dict[str, Any] | None = None) -> Report:
    """A report of one place; the bar is 1e-4 nats."""
    place = PlaceStudy("mlp_post", 1, 512, [0.0] * PROMPTS, [patched(codec, *cost) for codec, cost in costs.items()],
                       {"identity": "the same bits"}, rows or {})
    return Report({"name": name, "config": "c", "dtype": "float32", "device": "cpu", "vllm": "v", "torch": "t"},
                  {"prompts": PROMPTS, "tokens": 64, "bar": None, "arithmetic": "so"},
                  {"name": "stdlib", "digest": "d" * 32, "documents": 9},
                  {"engine": [0.0] * PROMPTS, "arithmetic": [1e-4] * PROMPTS}, [place])


PLAIN = report({"raw16": (1024, 1e-8), "full8": (516, 2e-5), "fp8row": (520, 4e-5)})
# As the planted columns do: one scale a row is then that of the massive ones.
PLANTED = report({"raw16": (1024, 1e-8), "full8": (516, 0.3), "fp8row": (520, 4e-5)}, "planted")


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(PLAIN.to_json())
    assert load_report(path) == PLAIN
    assert len(load_report(path).places[0].patched[0].prompts["kl"]) == PROMPTS  # by prompt: to draw from again


@pytest.mark.parametrize(("text", "match"), [
    ("{", "is no report"), ("[]", "no object"), ('{"version": 1}', "it has no model"),
    (json.dumps({**json.loads(PLAIN.to_json()), "version": 9}), "version = 9: this vllm-tap reads 1"),
    (json.dumps({**json.loads(PLAIN.to_json()), "places": [{"site": "z"}]}), "is damaged")])
def test_what_is_no_report_is_refused_by_name(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=rf"REPORT = .*{match}"):
        load_report(path)


def test_words_follow_from_bounds_and_the_bar() -> None:
    words = {one.name: one.verdict.word for one in lines_of(report(
        {"same": (8, 0.0), "within": (8, 4e-5), "near": (8, 1e-4), "beyond": (8, 1e-3)}))}
    assert words == {"same": "free", "within": "within", "near": "undecided", "beyond": "beyond"}


# ── recommend ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_cheapest_that_holds_is_taken_and_planted_columns_change_which() -> None:
    easy, both = recommend([PLAIN], "lens"), recommend([PLAIN, PLANTED], "lens")
    assert easy.chosen is not None and easy.chosen.codec == "full8"
    assert both.chosen is not None and both.chosen.codec == "fp8row" and both.specs == [
        {"sites": ["mlp_post"], "layers": [1], "codec": "fp8row"}]
    full8 = next(one for one in both.offers if one.codec == "full8")
    assert not full8.holds and full8.worst == "mlp_post.1 of planted" and full8.miss == pytest.approx(3000, rel=0.1)
    assert '"codec": "fp8row"' in shown(both)


def test_what_fits_no_budget_is_said_with_what_would() -> None:
    found = recommend([PLANTED], "lens", budget=518)
    assert found.chosen is None and found.nearest is not None and found.nearest.codec == "full8"
    assert found.fewer.startswith("fp8row holds and takes 520 bytes a token: store one layer in 2")
    nothing = recommend([PLANTED], "lens", budget=10)
    assert nothing.chosen is None and nothing.nearest is None and "nothing fits" in shown(nothing)


def audited(**more: float | None) -> dict[str, Any]:
    found = {"all": None, "first": None, "rmse": 0.0, **more}
    return {"noise": {"all": found["all"], "first": found["first"]}, "geometry": {"rmse": found["rmse"], "nearest": 1}}


@pytest.mark.parametrize("more", [{"all": 90.0}, {"first": 90.0}, {"rmse": None}])
def test_an_audit_takes_what_changes_no_row_and_a_kl_of_0_is_no_proof(more: dict[str, float | None]) -> None:
    codecs = {"raw16": (1024, 0.0), "full8": (516, 0.0)}
    exact = recommend([report(codecs, rows={"raw16": audited(), "full8": audited(**more)})], "audit")
    assert exact.chosen is not None and exact.chosen.codec == "raw16"
    assert "full8" in shown(exact) and "differs at mlp_post.1 of plain" in shown(exact)
    with pytest.raises(ArgumentError, match="--use = 'audit': none of the places was judged"):
        recommend([report(codecs)], "audit")  # whether rows are the same is not known


def test_geometry_is_judged_by_the_nearest_ten() -> None:
    exact = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)
    rows: dict[str, Any] = {}
    for name in ("raw16", "topk8:density=0.04"):
        decoded = coding.round_trip(name, exact, "float32")
        near = geometry(exact, decoded)
        rows[name] = {"noise": {"all": noise(exact[None], decoded[None]).all}, "geometry": {"nearest": near.nearest}}
    found = recommend([report({"raw16": (128, 0.0), "topk8:density=0.04": (20, 0.1)}, rows=rows)], "geometry")
    assert found.chosen is not None and found.chosen.codec == "raw16"


@pytest.mark.parametrize(("use", "more", "match"), [
    ("art", {}, "--use = 'art'"), ("sae", {}, "none of the places was judged"), ("lens", {"budget": 0}, "at least 1"),
    ("lens", {"sites": ["z"]}, "--sites = 'z': is in no report"), ("lens", {"layers": [7]}, "--layers = 7")])
def test_what_a_report_cannot_tell_is_refused(use: str, more: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        recommend([PLAIN], use, **more)


# ── compare ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_got_worse_is_found_and_the_rest_is_the_same() -> None:
    now = load_copy(PLAIN)
    cut = next(one for one in now.places[0].patched if one.name == "fp8row")
    cut.prompts["kl"] = [3 * value for value in cut.prompts["kl"]]  # as a codec that truncates in secret
    words = {one.codec: one.word for one in compared(PLAIN, now)}
    assert words == {"raw16": "same", "full8": "same", "fp8row": "worse"}
    assert {one.codec: one.word for one in compared(now, PLAIN)}["fp8row"] == "better"


@pytest.mark.parametrize(("changed", "match"), [
    ({"text": {**PLAIN.text, "digest": "e"}}, "another text"),
    ({"settings": {**PLAIN.settings, "tokens": 9}}, "tokens"),
    ({"model": {**PLAIN.model, "config": "d"}}, "another model"), ({"places": []}, "no codec at any place")])
def test_reports_that_cannot_be_compared_are_refused(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        compared(PLAIN, replace(PLAIN, **changed))


def test_the_tables_of_the_page_are_made_of_what_stands_beside_it() -> None:
    page = (DOCS / "fidelity.md").read_text()
    assert written(page, tables(json.loads((DOCS / "fidelity.json").read_text()))) == page


def test_the_second_pilot_changes_which_codec_comes_first_and_both_pilots_copy() -> None:
    """As the pages say of their runs."""
    plain, planted = (json.loads((DOCS / "fidelity.json").read_text())["pilots"][name]["middle"]
                      for name in ("plain", "planted"))
    assert plain["full8"] < plain["fp8row"] and planted["full8"] > 100 * planted["fp8row"]
    for pilot in json.loads((DOCS / "kv.json").read_text()).values():
        copied = {one["name"]: one["values"]["copied"] for one in pilot["retrieval"]["lines"]}
        assert np.mean(pilot["retrieval"]["exact"]) > 0.9 and copied["shuffled"]["high"] < 0.25
        assert copied["kv8"]["low"] > 0.9


def test_the_page_of_other_architectures_is_made_of_what_stands_beside_it_and_its_controls_held() -> None:
    page, found = (DOCS / "fidelity-families.md").read_text(), json.loads((DOCS / "fidelity-families.json").read_text())
    assert written(page, fidelity_families.tables(found), fidelity_families.COMMAND) == page
    for name, report in found.items():
        worst = {one["name"]: one["kl"]["value"] for one in report["lines"]}
        assert worst["shuffled"] > max(report["bar"], report["free"])
        assert all(one["harness"] == 0.0 for one in report["told"])
        if name.endswith("-kv"):
            assert np.mean(report["retrieval"]["exact"]) > 0.9
    assert all(one["tail"]["p99.9"] for one in found["tail"]["lines"])


def load_copy(one: Report) -> Report:
    from vllm_tap.fidelity.reports.report import place_of

    found = json.loads(one.to_json())
    return replace(one, places=[place_of(each) for each in found["places"]])


def test_attention_and_the_drafter_stand_on_the_page_or_why_they_do_not() -> None:
    numbers = np.linspace(0.9, 1.0, PROMPTS).tolist()
    attention = {"layer": 2, "sizes": {"full8": [64, 32]}, "told": {"kernel": "as it follows"}, "prompts": {
        name: dict.fromkeys(("overlap", "all", "mass", "entropy"), numbers) for name in ("full8", "shuffled")}}
    drafter = {"rows": 9, "starts": 3, "exact": [2.0] * PROMPTS, "sizes": {"full8": 516}, "told": {},
               "lengths": {"full8": [1.5] * PROMPTS, "shuffled": [1.0] * PROMPTS}}
    page = page_of(replace(PLAIN, attention=attention, drafter=drafter))
    assert "<td>layer 2</td><td>full8</td><td>96</td>" in page and "0.95000 <small>" in page
    assert "kernel: as it follows" in page and "Retrieval" not in page and "Not shown" not in page
    assert "1.500 <small>" in page and "0.750 <small>[0.750, 0.750]" in page and "2.000 <small>" in page
    page = page_of(replace(PLAIN, attention={"why": "it has sinks"}, drafter={"why": "answers are too short"}))
    assert "Not shown: it has sinks." in page and "Not shown: answers are too short." in page
    assert "Attention" not in page_of(PLAIN)
    assert [line.values["share"].value for line in drafter_lines(drafter)] == [1.0, 0.75, 0.5]


def test_attention_and_a_drafter_have_the_cheapest_codec_whose_bound_holds() -> None:
    def masses(low: float) -> dict[str, list[float]]:
        return {"mass": np.linspace(low, low + 0.01, PROMPTS).tolist()}

    sizes = {"raw16": [512, 256], "full8": [258, 130], "nf4b64": [160, 80]}
    attention = {"layer": 2, "sizes": sizes, "told": {}, "prompts": {
        "raw16": masses(0.99), "full8": masses(0.99), "nf4b64": masses(0.984), "shuffled": masses(0.2)}}
    found = recommend([replace(PLAIN, attention=attention)], "attention")
    assert found.chosen is not None and (found.chosen.codec, found.chosen.bytes_per_token) == ("full8", 388)
    assert found.specs == [{"sites": ["k_rot", "q_rot"], "layers": [2], "codec": "full8"}]
    assert [(one.codec, one.holds) for one in found.offers] == [("nf4b64", False), ("full8", True), ("raw16", True)]
    drafter = {"rows": 9, "starts": 3, "exact": [2.0] * PROMPTS, "told": {}, "sizes": {"full8": 516, "nf4b64": 320},
               "lengths": {"full8": [1.99] * PROMPTS, "nf4b64": [1.9] * PROMPTS, "shuffled": [1.0] * PROMPTS}}
    found = recommend([replace(PLAIN, drafter=drafter)], "drafter")
    assert found.chosen is not None and found.specs == [{"sites": ["final_norm"], "layers": [0], "codec": "full8"}]
    with pytest.raises(ArgumentError, match=r"--use = 'drafter': no report has it at what was asked for"):
        recommend([replace(PLAIN, drafter={"why": "too short"})], "drafter")


def test_the_page_is_one_file_and_names_are_text_in_it() -> None:
    text = page_of(report({"full8": (516, 2e-5), "<script>x": (520, 4e-5)}, "<b>bold</b>"))
    assert "<b>bold" not in text and "&lt;b&gt;bold" in text and "<script>" not in text
    assert text.count("<svg") == 2 and 'src="' not in text and "@import" not in text
    assert "the control against a run without any edit: 0 nats" in text and "within" in text and "full8" in text
