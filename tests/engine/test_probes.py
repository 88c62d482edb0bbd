"""Scores of probes against NumPy on the same rows, stored beside them: ragged batches in chunks, many specs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from schemas.errors import SpecError, StartError
from schemas.read.reader import StoreReader
from tests.support.engines.engines import ON_GPU, Captured, Engine, prompt, start
from tests.support.models.reference import Reference
from vllm_tap import rows
from vllm_tap.tiny_model import HIDDEN

F64 = npt.NDArray[np.float64]
NUMBERS = np.random.default_rng(5)
DIRECTIONS, BIAS, MEAN = (NUMBERS.standard_normal(shape) for shape in ((3, HIDDEN), 3, HIDDEN))
KNOWN: dict[str, tuple[str, int, Callable[[F64], F64]]] = {
    "tone": ("resid_post", 2, lambda x: (x - MEAN) @ DIRECTIONS.T + BIAS),
    "lie": ("mlp_out", 1, lambda x: 1 / (1 + np.exp(-(x @ DIRECTIONS[:1].T)))),
    "inner": ("resid_mid", 3, lambda x: x @ DIRECTIONS.T),  # which nobody has armed
}


@pytest.fixture(scope="module")
def engine(reader: StoreReader, reference_of: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
           ) -> Iterator[Engine]:
    """A model of 16 bits, as people serve: its rows as ``raw16`` are those that the probes saw."""
    folder = tmp_path_factory.mktemp("probes")
    save_file({"directions": DIRECTIONS.astype("f4"), "bias": BIAS.astype("f4"), "mean": MEAN.astype("f4")},
              folder / "tone.safetensors", {"site": "resid_post", "layer": "2", "names": "glad, sad, angry"})
    save_file({"directions": DIRECTIONS[0].astype("f4")}, folder / "lie.safetensors",
              {"site": "blocks.1.hook_mlp_out", "activation": "sigmoid"})
    save_file({"directions": DIRECTIONS.astype("f4")}, folder / "inner.safetensors")
    os.environ["VLLM_TAP_PROBES"] = (f"tone={folder}/tone.safetensors, lie={folder}/lie.safetensors,"
                                     f"inner={folder}/inner.safetensors@resid_mid.3")
    os.environ["VLLM_TAP_ENGINE"] = "gauge"
    try:
        made = start(reader, reference_of("qwen3"), "qwen3", dtype="bfloat16", max_num_batched_tokens=48)
    finally:
        del os.environ["VLLM_TAP_PROBES"], os.environ["VLLM_TAP_ENGINE"]
    yield made
    made.close()


def scores(engine: Engine, captured: Captured, name: str) -> tuple[npt.NDArray[np.uint32], F64]:
    """The positions and the stored scores of a probe; the manifest has none missing."""
    (entry,) = (entry for entry in captured.manifest.rows if entry.site == f"probe.{name}")
    assert entry.captured == entry.expected and not entry.missing and entry.layer == KNOWN[name][1]
    found = engine.reader.slice(captured.id, entry.site, [entry.layer])
    assert found.dtype == "float32" and found.pieces["x"].dtype == np.float32
    assert np.array_equal(found.token_ids, np.asarray(captured.tokens, np.uint32)[found.positions])
    return found.positions, found.values()[0].astype(np.float64)


def assert_right(engine: Engine, captured: Captured, name: str) -> None:
    """Within 1e-3 of NumPy's scores of the rows that were stored beside them."""
    site, layer, score = KNOWN[name]
    positions, got = scores(engine, captured, name)
    stored = engine.reader.slice(captured.id, site, [layer])
    at = np.isin(stored.positions, positions)
    assert np.array_equal(stored.positions[at], positions) and len(positions)
    want = score(stored.values()[0][at].astype(np.float64))
    error = np.abs(got - want) / np.maximum(np.abs(want), 1e-2)
    assert error.max() < 1e-3, (name, error.max())
    wrong = np.abs(np.roll(got, 1, axis=0) - want) / np.maximum(np.abs(want), 1e-2)
    assert len(positions) == 1 or wrong.max() > 0.01, "rows of other positions score the same: nothing is shown"


def test_scores_are_those_of_the_rows_in_a_ragged_batch_with_many_specs(engine: Engine) -> None:
    both = {"sites": ["resid_post", "mlp_out"], "codec": "raw16"}
    specs: list[dict[str, Any] | None] = [
        {**both, "probe": ["tone"]}, None, {**both, "probe": ["lie", "tone"], "layers": [1, 2]}, {"probe": ["tone"]},
        {**both, "probe": ["lie"], "positions": "generated"}, {"codec": "raw16"}, {"probe": ["inner", "lie"]},
        {**both, "probe": ["tone"], "positions": [[3, 9], [40, 70]]},
        {**both, "probe": ["tone"], "positions": "last_prompt"},
    ]
    lengths = (1, 30, 90, 47, 48, 7, 60, 70, 49)
    outputs = engine.run([prompt(length, length) for length in lengths],
                         [{"max_tokens": 3 + 4 * number, "ignore_eos": True} for number in range(len(specs))], specs)
    checked = 0
    for spec, one in zip(specs, outputs, strict=True):
        if spec is None:
            continue
        assert one.manifest.status == "complete"
        sites = set(spec.get("sites", () if "probe" in spec else ("resid_post", "attn_out", "mlp_out")))
        probes = {f"probe.{name}" for name in spec.get("probe", ())}
        assert {info.site for info in one.manifest.sites} == sites | probes
        for name in spec.get("probe", ()):
            if KNOWN[name][0] in sites:
                assert_right(engine, one, name)
                checked += 1
    assert checked == 6
    assert len(scores(engine, outputs[6], "inner")[0]) == len(outputs[6].tokens) - 1


def test_a_probe_alone_stores_scores_and_no_row(engine: Engine) -> None:
    (alone,) = engine.run([prompt(60, 1)], [{"max_tokens": 20, "ignore_eos": True}], [{"probe": ["tone"]}])
    manifest = alone.manifest
    assert [(info.site, info.width, info.dtype, info.codec) for info in manifest.sites] == [
        ("probe.tone", 3, "float32", "raw")]
    assert manifest.resolved["layers"] == {"probe.tone": [2]} and manifest.captured == 79
    assert manifest.engine["name"] == "gauge" and engine.reader.engine_name(alone.id) == "gauge"
    found = engine.reader.engine("gauge")
    assert found is not None and found.armed.probes.keys() == KNOWN.keys()
    assert engine.reader.engine("gaug") is None
    about = manifest.engine["armed"]["probes"]["tone"]
    assert about["names"] == ["glad", "sad", "angry"] and about["fingerprint"]
    assert "directions @ (x - mean) + bias" in manifest.sites[0].meaning
    (again,) = engine.run([prompt(60, 1)], [{"max_tokens": 20, "ignore_eos": True}],
                          [{"probe": ["tone"], "sites": ["resid_post"], "layers": [2], "codec": "raw16"}])
    assert again.tokens == alone.tokens
    assert_right(engine, again, "tone")
    assert np.allclose(scores(engine, alone, "tone")[1], scores(engine, again, "tone")[1], rtol=1e-3, atol=1e-3)


def test_scores_are_trained_on_as_any_rows(engine: Engine) -> None:
    tags = {"run": "loader"}
    (one,) = engine.run([prompt(40, 2)], [{"max_tokens": 9, "ignore_eos": True}],
                        [{"probe": ["tone"], "tags": tags, "sites": ["resid_post"], "layers": [2]}])
    found = list(rows(engine.reader.path, ["probe.tone", "resid_post"], 2, batch=64, where=tags))
    by_position = {int(at): score for batch in found
                   for at, score in zip(batch["position"], batch["probe.tone.2"].numpy(), strict=True)}
    positions, want = scores(engine, one, "tone")
    assert np.array_equal([by_position[int(at)] for at in positions], want) and len(by_position) == len(positions) == 48


@pytest.mark.parametrize(("spec", "says"), [
    ({"probe": ["mood"]}, "no such probe; registered: tone, lie, inner"),
    ({"probe": ["inner"], "sites": ["resid_mid"]}, "not armed; armed: resid_post, attn_out, mlp_out"),
])
def test_what_is_not_there_is_refused(engine: Engine, spec: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        engine.run([prompt(3, 1)], [{"max_tokens": 1}], [spec])


@pytest.mark.skipif(ON_GPU, reason="the engine is in another process")
@pytest.mark.parametrize(("width", "place", "says"), [
    (HIDDEN + 1, "resid_post.2", rf"directions = \[1, {HIDDEN + 1}\]: rows of resid_post have {HIDDEN} numbers"),
    (HIDDEN, "resid_post.4", r"layer = 4: this model has resid_post in layers \[0, 1, 2, 3\]"),
    (HIDDEN, "router_logits.1", "probe 'p': .*site = 'router_logits': .*cannot arm router_logits"),
])
def test_a_probe_that_fits_nothing_ends_the_start(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, place: str, says: str
) -> None:
    from engine_side.config import from_environment
    from engine_side.seams.tapping import plan_arming, tap_model

    save_file({"directions": np.ones(width, np.float32)}, tmp_path / "p.safetensors")
    monkeypatch.setenv("VLLM_TAP_PROBES", f"p={tmp_path}/p.safetensors@{place}")
    config, core = from_environment(), engine.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    assert config is not None and {"vllm_tap_directions_tone", "vllm_tap_bias_tone"} <= {
        name for name, _ in runner.get_model().named_buffers()}  # which a deep sleep keeps
    vllm_config = engine.llm.llm_engine.vllm_config
    with pytest.raises(StartError, match=says):
        tap_model(runner.get_model(), vllm_config, plan_arming(vllm_config, config))


def test_a_probe_ends_a_request_where_nothing_is_armed_for_edits(engine: Engine) -> None:
    """The same request with and without, by a score that it comes to in the midst of its answer."""
    asked: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.0}
    spec = {"probe": ["tone"]}
    (plain,) = engine.run([prompt(30, 3)], [asked], [spec])
    found = scores(engine, plain, "tone")[1][plain.prompt_len - 1 :, 1]
    high = float(np.sort(found)[-2])
    first = plain.prompt_len + int(np.argmax(found >= high))
    when = {"probe": "tone", "score": "sad", "above": high}
    (ended,) = engine.run([prompt(30, 3)], [{**asked, "edit": [{"op": "stop", "when": when}]}], [spec])
    assert ended.output.outputs[0].stop_reason == ended.manifest.stop_reason == "probe:tone"
    assert ended.tokens == plain.tokens[: len(ended.tokens)] and first <= len(ended.tokens) - 1 <= first + 1
    assert ended.manifest.edits == [{"op": "stop", "when": when, "switched": [first]}]
