"""A run without its engine: which model it was of, what its controls must show, and what is left of one that ended."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from schemas.errors import ArgumentError
from tests.vllm_tap.fidelity.test_reports import PLAIN, PROMPTS, load_copy
from tests.vllm_tap.fidelity.test_rows import saved
from vllm_tap.fidelity import job
from vllm_tap.fidelity.distributions import Compared
from vllm_tap.fidelity.job import FidelityJob, publish
from vllm_tap.fidelity.kept import Kept, config_digest, weights_digest
from vllm_tap.fidelity.reports.page import page_of
from vllm_tap.fidelity.reports.report import Report, load_report
from vllm_tap.fidelity.study import Patched, PlaceStudy, Unpublished, Variant, add
from vllm_tap.fidelity.unpatched.features import digest_of
from vllm_tap.tiny_model import tiny_model


def patched(name: str, size: int, kl: float, kind: str = "codec") -> Patched:
    return replace(PLAIN.places[0].patched[0], name=name, kind=kind, row_bytes=size,
                   prompts={**PLAIN.places[0].patched[0].prompts, "kl": [kl] * PROMPTS})


def with_controls(shuffled: float, late: float = 9.0) -> Report:
    found = load_copy(PLAIN)
    found.places[0].patched += [patched("shuffled", 0, shuffled, "control"), patched("one late", 0, late, "control")]
    return found


# ── controls ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_codec_as_bad_as_shuffled_rows_is_told_and_discards_nothing() -> None:
    fine, bad = with_controls(5.0), with_controls(5.0)
    bad.places[0].patched.append(patched("awful", 8, 50.0))
    for one in (fine, bad):
        job._check_controls(one)
    assert fine.places[0].told["shuffled"].endswith("nats, worse than every codec")
    assert bad.places[0].told["shuffled"].endswith("nats, no more than awful")


@pytest.mark.parametrize(("shuffled", "late", "match"), [
    (0.0, 9.0, r"shuffled rows at mlp_post.1 cost 0 nats, no more than none at all"),
    (5.0, 1e-5, r"rows one position late at mlp_post.1 cost .*e-0[56] nats, within the bar")])
def test_controls_that_cost_nothing_publish_nothing(shuffled: float, late: float, match: str) -> None:
    with pytest.raises(Unpublished, match=match):
        job._check_controls(with_controls(shuffled, late))


def compared(kl: float) -> Compared:
    every = np.ones(8, bool)
    return Compared(np.full(8, kl), every, every, np.ones(7), np.ones(7))


def test_a_codec_whose_kl_is_no_number_is_broken_at_its_place_alone(tmp_path: Path) -> None:
    place = PlaceStudy("mlp_post", 1, 64, [0.0] * PROMPTS)
    good = Variant("codec", "raw16", [compared(1e-6)] * PROMPTS, [16.0] * PROMPTS, "", 9, True)
    wrong = Variant("codec", "fp8row", [compared(float("nan")), *[compared(1e-6)] * (PROMPTS - 1)],
                     [16.0] * PROMPTS, "KL of the model with its rows is no number", 9, True)
    noise = Variant("noise", "fp8row", [compared(1e-6)] * PROMPTS, [16.0] * PROMPTS, "", 9, True)
    add(place, [good, wrong, noise], {"raw16": 128, "fp8row": 66})
    assert [one.name for one in place.patched] == ["raw16"]
    assert place.told == {"fp8row": "broken here: KL of the model with its rows is no number"}
    report = load_copy(PLAIN)
    report.places.append(place)
    (tmp_path / "report.json").write_text(report.to_json())
    again = load_report(tmp_path / "report.json")
    assert again.places[1].broken["fp8row"]["kl"] == [None, *[pytest.approx(1e-6)] * (PROMPTS - 1)]
    assert "broken here: KL of the model with its rows is no number" in page_of(again)


def test_a_control_whose_kl_is_no_number_publishes_nothing_and_rows_that_change_nothing_neither() -> None:
    place = PlaceStudy("mlp_post", 1, 64, [0.0])
    with pytest.raises(Unpublished, match=r"shuffled at mlp_post.1: KL is no number"):
        add(place, [Variant("control", "shuffled", [None], [], "KL is no number")], {})
    with pytest.raises(Unpublished, match=r"raw16 at mlp_post.1: 3 rows were set to others and KL is 0 for all"):
        add(place, [Variant("codec", "raw16", [compared(0.0)], [16.0], "", 3, False)], {"raw16": 128})


# ── which model, which autoencoder ──────────────────────────────────────────────────────────────────────────────


def test_a_model_is_known_by_its_weights_and_not_by_who_read_its_configuration(tmp_path: Path) -> None:
    one = {"hidden_size": 64, "text_config": {"layers": 2, "transformers_version": "5.1"}}
    other = {**one, "text_config": {"layers": 2, "transformers_version": "5.2"}, "_name_or_path": "/a/b"}
    assert config_digest(json.dumps(one)) == config_digest(json.dumps(other))
    assert config_digest(json.dumps(one)) != config_digest(json.dumps({**one, "hidden_size": 65}))
    weights = np.zeros(300_000, np.float32)
    digests = []
    for at in (None, 0, 150_000, 299_999):  # at the start, in the middle and at the end
        if at is not None:
            weights[at] = 1
        save_file({"w": weights}, tmp_path / "model.safetensors")
        digests.append(weights_digest(str(tmp_path), None))
    assert len(set(digests)) == 4
    assert weights_digest("some/model", "abc") == "revision abc"


def test_an_autoencoder_is_known_by_its_content_and_not_by_its_folder(tmp_path: Path) -> None:
    assert digest_of(saved(tmp_path / "a")) == digest_of(saved(tmp_path / "b"))
    assert digest_of(tmp_path / "a") != digest_of(saved(tmp_path / "b", "topk", k=4))


@pytest.mark.parametrize(("place", "match"), [("resid_post.9", "resid_post.9.*is no place that is measured"),
                                              ("resid_post.1", "is for rows of 64 numbers, not of 256")])
def test_an_autoencoder_is_held_against_the_model_before_any_engine(tmp_path: Path, place: str, match: str) -> None:
    asked = FidelityJob(str(tiny_model()), tmp_path / "out", sites=("resid_post",),
                        sae={place: saved(tmp_path / "sae")})
    with pytest.raises(ArgumentError, match=rf"--sae = .*{match}"):
        job.run(asked)
    assert not (tmp_path / "out").exists()


# ── what is left of a run that ended ────────────────────────────────────────────────────────────────────────────


def test_results_are_added_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    path, report = tmp_path / "progress.jsonl", load_copy(PLAIN)
    kept = Kept(path, report)
    kept.floors(lambda: report.floors)
    inode = path.stat().st_ino
    with path.open("a") as file:
        file.write('{"job": "half')
    kept = Kept(path, report)
    assert kept.floors(lambda: pytest.fail("is there")) == report.floors
    kept.place(("mlp_post", 1), lambda: report.places[0])
    assert path.stat().st_ino == inode and len(path.read_text().splitlines()) == 2
    assert Kept(path, report).place(("mlp_post", 1), lambda: pytest.fail("is there")) == report.places[0]


@pytest.mark.parametrize("changed", [
    {"model": {**PLAIN.model, "weights": "w"}}, {"settings": {**PLAIN.settings, "layers": [2]}},
    {"settings": {**PLAIN.settings, "sites": ["z"]}}, {"settings": {**PLAIN.settings, "sae": {"mlp_post.1": "d"}}}])
def test_results_of_another_run_are_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    path, report = tmp_path / "progress.jsonl", load_copy(PLAIN)
    Kept(path, report).floors(lambda: report.floors)
    with pytest.raises(ArgumentError, match=r"--out = .*progress.jsonl of another run"):
        Kept(path, replace(report, **changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["report.html", "report.json"])
def test_what_was_measured_is_kept_until_page_and_report_are_whole(tmp_path: Path, which: str,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "progress.jsonl").write_text("kept")
    right = job.write_durable

    def full(path: Path, data: bytes) -> None:
        if path.name == which:
            raise OSError(28, os.strerror(28))
        right(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_durable", full)
        with pytest.raises(OSError, match="No space"):
            publish(tmp_path, PLAIN)
    assert (tmp_path / "progress.jsonl").read_text() == "kept" and not (tmp_path / "report.json").exists()
    publish(tmp_path, PLAIN)
    assert load_report(tmp_path / "report.json") == PLAIN and "</html>" in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "progress.jsonl").exists()
