"""What is measured without a model, on rows whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from sklearn.metrics import roc_auc_score

from schemas.errors import ArgumentError
from vllm_tap.fidelity import coding
from vllm_tap.fidelity.bench import Bench
from vllm_tap.fidelity.study import same_rows
from vllm_tap.fidelity.texts import Prompts
from vllm_tap.fidelity.unpatched.features import Probing, _area, _wins, load_autoencoder, survival
from vllm_tap.fidelity.unpatched.rows import geometry, neurons, noise
from vllm_tap.fidelity.unpatched.science import Science

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((12, 40, 64)).astype(np.float32)
FLAT = ROWS.reshape(-1, 64)


def test_noise_of_a_known_size_is_found_in_its_columns() -> None:
    rows = ROWS.copy()
    rows[..., 7] *= 1000
    wrong = rows.copy()
    wrong[..., :7] += np.float32(0.1) * np.sign(wrong[..., :7])
    found = noise(rows, wrong)
    assert found.massive_columns == 1 and found.massive is None  # nothing differs there
    assert found.rest is not None and found.rest == pytest.approx(10 * np.log10(63 / (7 * 0.01)), abs=0.2)
    assert found.all is not None and found.all > found.rest + 30  # the massive column hides it
    assert noise(rows, rows).all is None and noise(rows, rows).first is None


@pytest.mark.parametrize("codec", ["int8b64", "nf4b64", "topk:density=0.25", "topk8:density=0.25"])
def test_another_choice_among_equal_magnitudes_is_no_other_encoder(codec: str) -> None:
    """As a GPU's kernels make it: here the columns in reverse. Codes that are wrong, or another's row, are told."""
    rows = torch.from_numpy(RNG.standard_t(4, (200, 256)).astype(np.float32)).bfloat16().float().numpy()
    judged = coding.round_trip(codec, rows, "bfloat16")
    made = coding.round_trip(codec, rows[:, ::-1].copy(), "bfloat16")[:, ::-1].copy()
    bits, alike = same_rows(made, judged, rows)
    assert bits < alike, "no magnitudes were equal: the test shows nothing"
    assert alike >= 0.99
    largest = np.abs(rows) == np.abs(rows).max(axis=-1, keepdims=True)
    for wrong in (np.roll(made, 1, axis=0), made * 2, np.where(largest, 0, made)):
        assert same_rows(wrong, judged, rows)[1] < 0.1


def test_full8_hides_the_columns_beside_a_massive_one_and_fp8row_does_not() -> None:
    rows = FLAT.copy()
    rows[:, 3] *= 1024
    loss = {name: noise(rows[None], coding.round_trip(name, rows, "float32")[None]) for name in ("full8", "fp8row")}
    assert loss["full8"].all is not None and loss["full8"].all > 30
    assert loss["full8"].rest is not None and loss["full8"].rest < 3
    assert loss["fp8row"].rest is not None and loss["fp8row"].rest > 25


def test_geometry_is_centred() -> None:
    shifted = FLAT + 100  # uncentred all cosines are 1, whatever is done
    mixed = shifted[RNG.permutation(len(shifted))]
    assert geometry(shifted, shifted).pearson == pytest.approx(1) and geometry(shifted, shifted).nearest == 1
    found = geometry(shifted, mixed)
    assert abs(found.pearson) < 0.1 and found.nearest < 0.1 and found.rmse > 0.1


def test_only_the_concept_sees_whose_rows_are_whose() -> None:
    labels = RNG.random(len(FLAT)) < 0.3
    rows = FLAT * RNG.uniform(0.5, 4, 64).astype(np.float32)
    rows[labels] += RNG.normal(0, 1, 64).astype(np.float32)
    same, mixed = neurons(rows, rows, labels), neurons(rows, coding.shuffled(rows), labels)
    assert same.concept is not None and same.concept.value == pytest.approx(1)
    assert mixed.magnitude == pytest.approx(1) and mixed.kurtosis == pytest.approx(1)
    assert mixed.concept is not None and mixed.concept.high < 0.7
    assert neurons(rows, rows, None).concept is None and neurons(rows, rows, np.ones_like(labels)).concept is None


def test_the_area_of_all_prompts_is_scikit_learns() -> None:
    labels, scores = RNG.random((12, 40)) < 0.4, RNG.integers(0, 9, (12, 40)).astype(float)  # with ties
    assert _area(_wins(scores, labels), labels) == pytest.approx(roc_auc_score(labels.ravel(), scores.ravel()))


def test_a_probe_loses_nothing_on_exact_rows_and_all_on_shuffled_ones() -> None:
    labels = RNG.random((12, 40)) < 0.4
    rows = ROWS + labels[..., None] * np.linspace(-1, 1, 64, dtype=np.float32)
    probing = Probing(rows[:6], labels[:6], rows[6:], labels[6:])
    exact = probing.judge(rows[:6], rows[6:])
    assert exact.exact > 0.95 and exact.frozen == exact.exact and exact.lost.low == exact.lost.high == 0
    assert exact.spearman == pytest.approx(1) and exact.recall == exact.recall_exact
    assert exact.false_positives == exact.false_positives_exact < 0.2
    # The threshold stays where exact rows of the fitted documents have put it: scores that all sink pass it no more.
    direction = probing._frozen[-1].coef_[0] * probing._frozen[0].scale_
    sunk = probing.judge(rows[:6], (rows[6:] - 9 * direction / np.linalg.norm(direction)).astype(np.float32))
    assert sunk.frozen > 0.95 and sunk.recall < 0.1 < 0.5 < sunk.recall_exact == exact.recall_exact
    mixed = probing.judge(rows[:6], np.stack([coding.shuffled(each) for each in rows[6:]]))
    assert mixed.lost.low > 0.2 and mixed.frozen < 0.7


# ── rows that are wrong on purpose ──────────────────────────────────────────────────────────────────────────────


def test_controls_are_what_they_say() -> None:
    rows = ROWS[0]
    mixed, behind, wrong = coding.shuffled(rows), coding.late(rows), coding.one_wrong(rows, 5)
    assert not (mixed == rows).all(-1).any() and sorted(mixed[:, 0]) == sorted(rows[:, 0])
    assert (behind[1:] == rows[:-1]).all() and (wrong != rows).any(-1).nonzero()[0].tolist() == [5]


def test_noise_of_equal_power_has_each_rows_power() -> None:
    decoded = coding.round_trip("nf4b64", FLAT, "float32")
    drawn = coding.noise_like(FLAT, decoded)
    seeds = [coding.seed_of(*each) for each in ((("resid_post", 1), 0), (("resid_post", 1), 9), (("resid_post", 2), 0),
                                                (("mlp_post", 1), 0))]
    assert len({coding.noise_like(FLAT, decoded, seed).tobytes() for seed in seeds}) == 4
    assert len({coding.shuffled(FLAT, seed).tobytes() for seed in seeds}) == 4
    sizes = [np.linalg.norm(each - FLAT, axis=-1) for each in (decoded, drawn)]
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-4) and not np.allclose(drawn, decoded)


@pytest.mark.parametrize("name", coding.DEFAULT_CODECS)
def test_bytes_that_are_declared_are_bytes_that_are_made(name: str) -> None:
    identity, = coding.codecs_for("resid_post", (name,), 0)
    assert coding.row_bytes(identity, 64, "float32") == coding.bits_counted(identity, FLAT, "float32")


def test_codecs_that_cannot_be_put_back_are_refused_and_those_for_heads_filled_in() -> None:
    with pytest.raises(ArgumentError, match=r"--codecs = 'sketch'.*a projection"):
        coding.codecs_for("resid_post", ("sketch",), 0)
    assert coding.codecs_for("v", ("kv8", "raw16"), 64) == ["kv8:head=64", "raw16"]
    assert coding.codecs_for("mlp_post", ("kv8",), 0) == []


# ── sparse autoencoders ─────────────────────────────────────────────────────────────────────────────────────────


UNIT = np.eye(64, dtype=np.float32)
TENSORS = {"W_enc": UNIT, "b_enc": np.zeros(64, np.float32), "W_dec": UNIT, "b_dec": np.zeros(64, np.float32)}


def saved(folder: Path, rule: str = "standard", tensors: dict[str, np.ndarray[Any, Any]] | None = None,
          **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "sae_weights.safetensors").unlink(missing_ok=True)
    save_file(TENSORS | (tensors or {}), folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"architecture": rule, **settings}))
    return folder


def test_features_survive_where_nothing_happens_and_shrink_with_noise(tmp_path: Path) -> None:
    coder = load_autoencoder(saved(tmp_path), 64)
    same, coarse = survival(coder, FLAT, FLAT), survival(
        coder, FLAT, coding.round_trip("topk8:density=0.04", FLAT, "float32"))
    assert same is not None and coarse is not None
    assert same.alive == 64 and same.shares == {"0.5": 1, "0.9": 1, "0.99": 1} and same.jaccard == 1
    assert coarse.shares["0.9"] == 0 and coarse.jaccard < 0.2 and coarse.unexplained > same.unexplained
    few = load_autoencoder(saved(tmp_path, "topk", k=4), 64).features(FLAT)
    assert ((few > 0).sum(-1) == 4).all()


@pytest.mark.parametrize(("rule", "width", "more", "match"), [
    ("gated", 64, {}, "architecture = 'gated'"), ("jumprelu", 64, {}, "has no threshold"),
    ("standard", 32, {}, "rows of 64 numbers, not of 32"), ("topk", 64, {}, "k = 0"),
    ("standard", 64, {"normalize_activations": "layer_norm"}, "fold the scale")])
def test_a_file_that_is_no_autoencoder_is_refused_by_name(tmp_path: Path, rule: str, width: int, more: dict[str, str],
                                                          match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        load_autoencoder(saved(tmp_path, rule, **more), width)


@pytest.mark.parametrize(("name", "value", "match"), [
    ("W_enc", np.zeros(64), r"W_enc of .* has the shape \[64\]: valid: \[width, features\]"),
    ("W_dec", UNIT[:, :9], r"W_dec of .* has the shape \[64, 9\]; W_enc with \[64, 64\] takes \[64, 64\]"),
    ("b_enc", np.zeros(9), r"b_enc of .* has the shape \[9\]; W_enc .* takes \[64\]"),
    ("b_dec", np.zeros((1, 64)), r"b_dec of .* has the shape \[1, 64\]; .* takes \[64\]"),
    ("threshold", np.zeros(65), r"threshold of .* has the shape \[65\]; .* takes \[64\]"),
    ("b_enc", np.full(64, np.nan), r"b_enc of .* holds what is no number")])
def test_tensors_that_do_not_fit_are_refused_by_file_name_and_shape(tmp_path: Path, name: str, match: str,
                                                                    value: np.ndarray[Any, Any]) -> None:
    tensors = {"threshold": np.zeros(64, np.float32), name: np.ascontiguousarray(value, np.float32)}
    with pytest.raises(ArgumentError, match=rf"--sae = .*{tmp_path.name}.*{match}"):
        load_autoencoder(saved(tmp_path, "jumprelu", tensors), 64)


def test_an_autoencoder_without_a_live_feature_says_so_and_has_no_percentages(tmp_path: Path) -> None:
    dead = load_autoencoder(saved(tmp_path, tensors={"b_enc": np.full(64, -1e6, np.float32)}), 64)
    assert survival(dead, FLAT, FLAT) is None
    prompts = Prompts(np.zeros((12, 40), np.int64), np.arange(12), None)
    nothing: Any = SimpleNamespace(model_config=SimpleNamespace(dtype="float32"))  # vLLM's, of which no more is asked
    science = Science(Bench(nothing, nothing), prompts, prompts, 12, {"resid_post.1": dead})
    tables, lacking = science.tables(("resid_post", 1), ROWS, ["int8b64"], False)
    assert "features" not in tables["int8b64"]
    assert lacking["features"].startswith("not measured: none of the autoencoder's 64 is active on 20 of 468 tokens")


def test_a_folder_without_one_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--sae = .*no autoencoder in SAELens's format"):
        load_autoencoder(tmp_path, 64)
