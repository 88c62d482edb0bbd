"""Edits on the stages of a pipeline: whatever the scheduler does, a stage that is lost or refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest
import torch

from schemas.read.reader import StoreReader
from tests.engine.conftest import Store
from tests.engine.edits.test_edits import check, one, run
from tests.engine.ranks.test_pipeline_edits import (
    BORDER,
    STALE,
    alone,
    asked,
    break_it,
    edit_all,
    held_against,
    repair,
    requests,
    settings,
    staged,
)
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, Captured, Engine, in_this_process
from tests.support.models.families import family_model
from tests.support.models.features import FEATURES, Feature, options, tokens
from tests.support.models.reference import Reference
from tests.support.processes import descendants, runs
from tests.support.store_helpers import ROOT

__all__ = ["alone", "settings"]  # fixtures

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak,
              pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="one GPU cannot hold two ranks")]


@pytest.fixture(scope="module")
def engine(settings: None, alone: Sequence[Captured], reader: StoreReader) -> Iterator[Engine]:
    """Two stages with few blocks of the K/V cache, so that requests are preempted."""
    made = staged(reader, 2, **options("qwen3", "scheduler"))
    yield made
    made.close()


def test_a_stage_with_the_tables_of_the_batch_before_is_seen(engine: Engine, alone: Sequence[Captured]) -> None:
    engine.llm.collective_rpc(break_it, args=(STALE, BORDER))
    found = asked(engine)
    engine.llm.collective_rpc(repair)
    with pytest.raises(AssertionError):
        for captured, edits in zip(found, requests(), strict=True):
            check(engine, captured, edits)
    held_against(engine, alone)


@pytest.mark.parametrize("feature", [one for one in FEATURES if one.group == "scheduler"],
                         ids=lambda feature: feature.name.replace(" ", "_"))
def test_whatever_the_scheduler_does(feature: Feature, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = edit_all(engine, monkeypatch)
    for captured in feature.run(engine):
        check(engine, captured, edits, greedy=feature.name != "n = 2")


def test_a_stage_whose_counts_are_lost_is_named(engine: Engine) -> None:
    """Generation goes on, and what it edits; nothing says that it is complete. Last: the engine has lost its sender."""
    edits = one(site="resid_post", layers=[1, 3], by=0.5)
    whole, = run(engine, [tokens(12, seed=1)], [edits], sites=[])
    assert whole.manifest.status == "empty" and [row["layers"] for row in whole.manifest.edits[0]["rows"]] == [
        [1, 3]]
    os.kill(sender_of(1), signal.SIGKILL)
    found, = run(engine, [tokens(12, seed=1)], [edits], sites=[])
    assert found.tokens == whole.tokens and found.manifest.status == "incomplete"
    first, second = found.manifest.edits[0]["rows"]
    assert first == {"layers": [1], "expected": 17, "applied": 17, "cached": 0, "missing": 0}
    assert second == {"layers": [3], "expected": 17, "applied": 0, "cached": 0, "missing": 17,
                      "reason": "part_lost"}
    other, = run(engine, [tokens(12, seed=2)], [one(site="resid_post.1", by=0.5)], sites=[])
    assert other.manifest.status == "empty", "the first stage alone edits this one"


def sender_of(stage: int) -> int:
    """The process that sends for a stage of the one engine that runs."""
    found = [psutil.Process(pid) for pid in descendants(os.getpid()) if runs(pid)]
    senders = [each.pid for each in found if "engine_side.transport.sender_process" in " ".join(each.cmdline())
               and each.parent() is not None and f"Worker_PP{stage}" in " ".join(each.parent().cmdline())]
    assert len(senders) == 1, [(" ".join(each.cmdline()), each.parent() and each.parent().cmdline()) for each in found]
    return senders[0]


STARTS = """
from vllm import LLM
if __name__ == "__main__":
    LLM({model!r}, dtype={dtype!r}, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, block_size=32,
        pipeline_parallel_size=2, **{more!r})
"""


@pytest.mark.parametrize(("edit", "more", "said"), [
    ("resid_post", {"worker_extension_cls": "tests.engine.ranks.idle_edits.Registers"},
     ["edits of resid_post.3 do not act", "do not act", "(reported by pipeline stage 1)"]),
    ("resid_post.1,resid_post.7", {}, ["cannot arm resid_post.7: this model has resid_post in layers [0, 1, 2, 3]"]),
], ids=["no effect", "no such layer"])
def test_a_start_that_is_refused(store: Store, edit: str, more: dict[str, Any], said: list[str]) -> None:
    """By the stage that cannot, on both."""
    script = STARTS.format(model=str(family_model("qwen3, two K/V heads", DTYPE)), dtype=DTYPE, more={**SHARED, **more})
    run_ = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, timeout=300,
                          env=os.environ | {"VLLM_TAP_EDIT": edit, "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                                            "VLLM_PP_LAYER_PARTITION": "2,2"})
    assert run_.returncode != 0
    for words in said:
        assert words in run_.stdout + run_.stderr, (run_.stdout + run_.stderr)[-6000:]


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("family", ["opt", "gpt_neox", "gemma2", "mixtral"])
def test_one_stage_alone_edits(family: str, layer: int, settings: None, reader: StoreReader,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has no place to edit, whether it leads or not; streams of one tensor travel as others do."""
    monkeypatch.setenv("VLLM_TAP_EDIT", f"resid_post.{layer}" if layer else "resid_pre.1,attn_out.0")
    monkeypatch.setenv("VLLM_TAP_ARM", "resid_pre,resid_post,attn_out")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,2")
    engine = of_family(family, reader)
    edits: list[Any] = [one(site="resid_post.2", op="add", by=None, vector="tone"), one(site="resid_post.2", by=0.5),
                        None] if layer else [one(site="resid_pre.1", op="add", by=None, vector="tone"), [
                            *one(site="attn_out.0", by=0.5), *one(site="resid_pre.1", by=2)], None]
    try:
        for captured, edit in zip(run(engine, [tokens(60 + number, seed=number) for number in range(3)], edits), edits,
                                  strict=True):
            check(engine, captured, edit)
    finally:
        engine.close()


def of_family(family: str, reader: StoreReader) -> Engine:
    """A model of another family on two stages."""
    from vllm import LLM

    folder = family_model(family, DTYPE)
    with pytest.MonkeyPatch.context() as patch, in_this_process(False):
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        llm: Any = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, seed=0,
                       block_size=32, max_num_batched_tokens=48, pipeline_parallel_size=2, **SHARED)
    return Engine(llm, reader, Reference(folder))
