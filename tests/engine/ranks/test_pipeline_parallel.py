"""Two stages of one model: each sends the rows of its layers, and what is read are those of one rank.

The scheduler's features under a pipeline: TAP_LAYOUT="pipeline parallel" of tests/engine/test_architectures.py.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from schemas.read.reader import StoreReader
from tests.engine.conftest import Store
from tests.engine.ranks.collectives import by_step, count, counted
from tests.engine.ranks.test_tensor_parallel import held_against, rings
from tests.engine.test_architectures import SITES as SITES_OF
from tests.engine.test_architectures import site_errors, tolerance
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, Captured, Engine, in_this_process
from tests.support.models.blocks_reference import BlocksReference
from tests.support.models.families import family_model
from tests.support.models.features import GREEDY, tokens
from tests.support.models.reference import Reference
from tests.support.models.unlisted import UNLISTED

pytestmark = [pytest.mark.soak,
              pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="one GPU cannot hold two ranks")]

FAMILY = "qwen3, two K/V heads"
SPECS: list[dict[str, Any]] = [
    {"codec": "raw"}, {"codec": "raw"}, {"codec": "raw", "sites": ["resid_post"], "layers": [1]},
    {"codec": "raw", "sites": ["resid_mid"], "layers": [2]}, {"codec": "int8b64", "sites": ["z", "resid_post"]},
    {"codec": "raw", "sites": ["resid_mid"], "layers": [0, 3], "probe": ["early", "late"]}]
LENGTHS = (5, 90, 31, 12, 64, 33)
PROBED = {"early": 0, "late": 3}
LAYERS = 3, 1  # of the stages
DIRECTIONS = np.random.default_rng(3).standard_normal((2, 128)).astype("f4")


@pytest.fixture(autouse=True)
def armed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every site, and a probe on each of the stages."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions go to the workers
    monkeypatch.setenv("VLLM_TAP_ARM", ",".join(SITES_OF["qwen3"]))
    save_file({"directions": DIRECTIONS}, tmp_path / "probe.safetensors")
    monkeypatch.setenv("VLLM_TAP_PROBES", ",".join(
        f"{name}={tmp_path}/probe.safetensors@resid_mid.{layer}" for name, layer in PROBED.items()))


def staged(reader: StoreReader, stages: int) -> Engine:
    from vllm import LLM

    folder = family_model(FAMILY, DTYPE)
    with pytest.MonkeyPatch.context() as patch, in_this_process(stages == 1 and not ON_GPU):
        if stages == 2:
            patch.setenv("VLLM_PP_LAYER_PARTITION", ",".join(map(str, LAYERS)))
        llm = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, seed=0,
                  block_size=32, max_num_batched_tokens=48, pipeline_parallel_size=stages, **SHARED)
    return Engine(llm, reader, Reference(folder))


def run(engine: Engine) -> list[Captured]:
    found: list[Captured] = engine.run([tokens(length, seed=length) for length in LENGTHS],
                                       [{"max_tokens": 7, **GREEDY} for _ in SPECS], SPECS)
    return found


def test_every_site_of_two_stages_is_that_of_one(reader: StoreReader, store: Store) -> None:
    found, own, chosen = [], [], []
    for stages in (1, 2):
        had = rings(store)
        engine = staged(reader, stages)
        try:
            own.append([size for path, size in rings(store).items() if path not in had])
            found.append(run(engine))
            chosen.append(steps_of_long_answers(engine))
        finally:
            engine.close()
    info = reader.engine()
    assert info is not None and not info.unproved and set(SITES_OF["qwen3"]) <= set(info.proved)
    assert len(own[1]) == 2 and (ON_GPU or sum(own[1]) == sum(own[0]))
    for one, two in zip(*found, strict=True):
        assert two.manifest.status == "complete" and (ON_GPU or one.tokens == two.tokens)
        assert [(row.site, row.layer, row.captured) for row in one.manifest.rows] == [
            (row.site, row.layer, row.captured) for row in two.manifest.rows]
        assert all(not row.missing for row in two.manifest.rows)
        assert one.manifest.engine["fingerprint"] == two.manifest.engine["fingerprint"]
    for two in found[1][:4]:
        held_against(engine, two)
    scored(reader, found[1][5])
    bytes_of_its_layers(store, found[0][0], found[1][0])
    ((alone, _),), pair = chosen
    for anew, steps in pair:
        assert anew <= 2 * alone, "of two batches each is chosen anew as often as one that has all requests"
        assert 4 * anew < steps, "steps went on with nothing"


def steps_of_long_answers(engine: Engine) -> list[tuple[int, int]]:
    """By rank, steps whose rows were chosen anew while four requests of one length were generating, and all of them."""
    before = engine.llm.collective_rpc(steps_with_rows)
    engine.run([tokens(6, seed=seed) for seed in range(4)], [{"max_tokens": 100, **GREEDY}] * 4,
               [{"codec": "raw", "sites": ["resid_post"]}] * 4)
    after = engine.llm.collective_rpc(steps_with_rows)
    return [(now[0] - then[0], now[1] - then[1]) for now, then in zip(after, before, strict=True)]


def steps_with_rows(_: Any) -> tuple[int, int]:
    """Of a rank's worker: steps whose rows were chosen anew, and all with rows."""
    from engine_side import worker

    assert worker.CURRENT is not None
    return worker.CURRENT.recorder.chosen, worker.CURRENT.recorder.counters.steps


def scored(reader: StoreReader, captured: Captured) -> None:
    """Each stage scores the rows of its layers."""
    for name, layer in PROBED.items():
        rows = reader.slice(captured.id, "resid_mid", [layer]).values()[0]
        scores = reader.slice(captured.id, f"probe.{name}", [layer]).values()[0]
        assert np.allclose(scores, rows @ DIRECTIONS.T, atol=1e-3 if DTYPE == "float32" else 0.3) and len(scores) > 30


def bytes_of_its_layers(store: Store, one: Captured, two: Captured) -> None:
    """A stage has sent what one rank sends of its layers, and no more."""
    with sqlite3.connect(f"file:{store.path}/catalog.sqlite?mode=ro", uri=True) as db:
        sums = [{(part, site): nbytes for part, site, nbytes in db.execute(
            "SELECT part, site, sum(bytes) FROM extents WHERE capture = ? GROUP BY part, site", (each.id,))}
            for each in (one, two)]
    for (_, site), nbytes in sums[0].items():
        shares = {"embed": (1, 0), "final_norm": (0, 1)}.get(site, tuple(layers / 4 for layers in LAYERS))
        assert [sums[1].get((part, site), 0) for part in (0, 1)] == [round(nbytes * share) for share in shares], site


@pytest.mark.parametrize("family", ["granite", "gpt2", "deepseek_v2", "gpt_oss", "olmo2"])
def test_a_model_in_no_table_on_two_stages(reader: StoreReader, store: Store, monkeypatch: pytest.MonkeyPatch,
                                           family: str) -> None:
    """Its sites are found by both stages together, also where the last has a single block, and proved on each."""
    from vllm import LLM

    monkeypatch.setenv("VLLM_TAP_ARM", ",".join(SITES_OF[family]))
    monkeypatch.delenv("VLLM_TAP_PROBES")
    folder, unlisted = family_model(family, DTYPE), UNLISTED[family]
    with in_this_process(False):
        llm = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, seed=0,
                  max_num_batched_tokens=48, pipeline_parallel_size=2, **SHARED,
                  **{"block_size": 32, **unlisted.engine})
    engine = Engine(llm, reader, BlocksReference(folder, unlisted))
    try:
        captured = engine.run([tokens(length, seed=length) for length in LENGTHS],
                              [{"max_tokens": 7, **GREEDY}] * len(LENGTHS), [{"codec": "raw"}] * len(LENGTHS))
    finally:
        engine.close()
    info = reader.engine()
    assert info is not None and info.sources == dict.fromkeys(SITES_OF[family], "structure") and not info.unproved
    for one in captured:
        assert max(site_errors(engine, one, family).values()) <= tolerance(family)


@pytest.mark.parametrize("layer", [1, 3])
def test_one_stage_alone_has_what_is_armed(reader: StoreReader, store: Store, monkeypatch: pytest.MonkeyPatch,
                                           layer: int) -> None:
    """The other has no tap, whether it leads or not."""
    monkeypatch.setenv("VLLM_TAP_ARM", f"resid_post.{layer}")
    monkeypatch.delenv("VLLM_TAP_PROBES")
    engine = staged(reader, 2)
    try:
        captured = engine.run([tokens(60, seed=1), tokens(9, seed=2)], [{"max_tokens": 7, **GREEDY}] * 2,
                              [{"codec": "raw"}] * 2)
    finally:
        engine.close()
    for one in captured:
        assert one.manifest.status == "complete" and [(row.layer, row.captured) for row in one.manifest.rows] == [
            (layer, one.prompt_len + 6)]
        held_against(engine, one)


def test_no_collective_is_added_to_a_step(reader: StoreReader, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks tell each other in a step is counted with every row captured, and without a tap."""
    said = []
    for tapped in (True, False):
        if not tapped:
            monkeypatch.delenv("VLLM_TAP_ENDPOINT")
            monkeypatch.delenv("VLLM_TAP_PROBES")
        engine = staged(reader, 2)
        try:
            engine.llm.collective_rpc(count)
            engine.run([tokens(20, seed=seed) for seed in range(4)], [{"max_tokens": 20, **GREEDY}] * 4,
                       [{"codec": "raw"} if tapped else None] * 4)
            said.append(by_step(engine.llm.collective_rpc(counted)))
        finally:
            engine.close()
    assert said[0] == said[1]
