"""Edits on two stages of two tensor-parallel ranks each: all ranks of a stage edit alike, and one of them counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from schemas.read.reader import StoreReader
from tests.engine.edits.test_edits import check, one, run
from tests.engine.ranks import test_pipeline_edits as stages
from tests.engine.ranks.test_pipeline_edits import BORDER, LAYERS, settings
from tests.support.engines.engines import ON_GPU, Captured, Engine
from tests.support.models.features import FEATURES, Feature, options, tokens

__all__ = ["settings"]  # a fixture

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak,
              pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 4, reason="NOT RUN: needs four GPUs")]
WHOLE = "resid_post,resid_pre.0,resid_pre.2,resid_mid.1,resid_mid.2,attn_out.1,mlp_out.2"


@pytest.fixture(scope="module")
def engine(settings: None, reader: StoreReader) -> Iterator[Engine]:
    """Four ranks with few blocks of the K/V cache; edits of the sites that no rank has a share of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TAP_EDIT", WHOLE)
        made = stages.staged(reader, 2, tensor_parallel_size=2, **options("qwen3", "scheduler"))
    yield made
    made.close()


def requests() -> list[list[dict[str, Any]] | None]:
    """Those of two stages that are about whole rows."""
    return [edits for edits in stages.requests()
            if edits is None or not {edit["site"].partition(".")[0] for edit in edits} & {"q", "v", "z", "mlp_post"}]


def asked(engine: Engine) -> list[Captured]:
    return run(engine, [tokens(70, seed=90 + number) for number in range(len(requests()))], requests(), most=8)


def test_rows_and_counts_of_four_ranks(engine: Engine) -> None:
    for edits, captured in zip(requests(), asked(engine), strict=True):
        check(engine, captured, edits)
        assert captured.manifest.status == "complete" and len(captured.manifest.parts) == 4


@pytest.mark.parametrize("feature", [one for one in FEATURES if one.group == "scheduler"],
                         ids=lambda feature: feature.name.replace(" ", "_"))
def test_whatever_the_scheduler_does(feature: Feature, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    edits = stages.edit_all(engine, monkeypatch)
    for captured in feature.run(engine):
        check(engine, captured, edits, greedy=feature.name != "n = 2")


@pytest.mark.parametrize(("layer", "rank"), [(BORDER - 1, 1), (BORDER, 0), (BORDER, 1)])
def test_a_rank_that_edits_nothing_is_seen(engine: Engine, layer: int, rank: int) -> None:
    """Its stream is another from there on: the comparison is one that can fail for each rank."""
    edits = one(site="resid_post", layers=list(range(LAYERS)), by=0.5)
    engine.llm.collective_rpc(stages.break_it, args=(stages.UNDONE, layer, rank))
    found, = run(engine, [tokens(20, seed=50 + layer + 10 * rank)], [edits])
    engine.llm.collective_rpc(stages.repair)
    with pytest.raises(AssertionError):
        check(engine, found, edits)
    right, = run(engine, [tokens(20, seed=70 + layer + 10 * rank)], [edits])
    check(engine, right, edits)
