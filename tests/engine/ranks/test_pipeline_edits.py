"""Edits on the two stages of a pipeline: in each, at the border between them, and beside requests that are not edited.

Every row is held against Hugging Face with hooks; what was done is counted by each stage, and put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from schemas.read.reader import StoreReader
from tests.engine.edits.test_edits import check, one, rows, run
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, Captured, Engine, in_this_process
from tests.support.models.common import COMMON
from tests.support.models.edited import vector
from tests.support.models.families import family_model
from tests.support.models.features import tokens
from tests.support.models.reference import Reference

pytestmark = [pytest.mark.timeout(600),
              pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="one GPU cannot hold two ranks")]

FAMILY = "qwen3, two K/V heads"
LAYERS = 4
BORDER = 2  # the first layer of the second stage
HIDDEN = COMMON["hidden_size"]
EDIT = "resid_post,resid_pre.0,resid_pre.2,resid_mid.1,resid_mid.2,attn_out.1,mlp_out.2,mlp_post.3,q.2,v.0,z.1,z.3"
ARM = "resid_pre,resid_mid,resid_post,attn_out,mlp_out,mlp_post,q,v,z"


def staged(reader: StoreReader, stages: int, **more: Any) -> Engine:
    from vllm import LLM

    folder = family_model(FAMILY, DTYPE)
    with pytest.MonkeyPatch.context() as patch, in_this_process(stages == 1 and not ON_GPU):
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if stages == 2:
            patch.setenv("VLLM_PP_LAYER_PARTITION", f"{BORDER},{LAYERS - BORDER}")
        llm: Any = LLM(str(folder), **{
            "dtype": DTYPE, "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 8, "seed": 0,
            "block_size": 32, "max_num_batched_tokens": 48, "pipeline_parallel_size": stages, **SHARED, **more})
    return Engine(llm, reader, Reference(folder))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Edits in both stages, and a vector called ``tone``."""
    save_file({"vector": vector(HIDDEN, 11)}, path := tmp_path_factory.mktemp("vectors") / "tone.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TAP_VECTORS", f"tone={path}")
        patch.setenv("VLLM_TAP_EDIT_ROWS", "200")
        patch.setenv("VLLM_TAP_EDIT", EDIT)
        patch.setenv("VLLM_TAP_ARM", ARM)
        yield


@pytest.fixture(scope="module")
def alone(settings: None, reader: StoreReader) -> Iterator[list[Captured]]:
    """What the same engine with one stage makes of the requests."""
    made = staged(reader, 1)
    try:
        yield asked(made)
    finally:
        made.close()


@pytest.fixture(scope="module")
def engine(settings: None, alone: list[Captured], reader: StoreReader) -> Iterator[Engine]:
    """Two stages."""
    made = staged(reader, 2)
    yield made
    made.close()


def requests() -> list[list[dict[str, Any]] | None]:
    """The edits of each: one in a stage, in both, at the border, and none."""
    v = vector(HIDDEN, 8).tolist()
    return [
        None,
        one(site="resid_post.0", op="add", by=None, vector=v, scale=2.5),  # the first stage alone
        one(site="resid_post.3", op="ablate", by=None, vector="tone"),  # the second
        one(site="resid_post.1", by=0.5, positions="generated"),  # what travels
        one(site="resid_pre.2", op="add", by=None, vector="tone"),  # the same, as the next stage calls it
        [*one(site="resid_post.1", op="set", by=None, rows=rows(HIDDEN, 4), positions=[60, 7, 50, 6]),
         *one(site="resid_mid.2", op="cap", by=None, vector=v, low=-0.1, high=0.05)],
        [*one(site="resid_post", layers=[0, 1, 2, 3], op="add", by=None, vector="tone", positions=[[2, 71]]),
         *one(site="resid_pre.0", by=0.5, positions=[[3, 32]])],
        [*one(site="attn_out.1", by=0), *one(site="mlp_out.2", op="add", by=None, vector=v),
         *one(site="resid_mid.1", by=1.5)],
        [*one(site="z.1", heads=[2], by=0), *one(site="z.3", op="set", by=None, positions=[[7, 9]], heads=[3],
                                                   rows=rows(32, 2)), *one(site="q.2", by=0.5), *one(site="v.0", by=2)],
        one(site="mlp_post.3", by=0.25, positions="prompt"),
        None,
    ]


def asked(engine: Engine) -> list[Captured]:
    """All requests at once: more than run side by side, so that several batches of them are under way."""
    return run(engine, [tokens(70, seed=90 + number) for number in range(len(requests()))], requests(), most=8)


def test_edits_in_each_stage_and_at_the_border(engine: Engine, alone: Sequence[Captured]) -> None:
    """Prompts of 70 tokens in chunks of 48; two batches are under way at once."""
    for edits, one_stage, captured in zip(requests(), alone, asked(engine), strict=True):
        check(engine, captured, edits)
        assert captured.manifest.status == "complete"
        assert ON_GPU or captured.tokens == one_stage.tokens
        assert captured.manifest.edits == one_stage.manifest.edits
        for row in one_stage.manifest.rows:
            found, right = (engine.reader.slice(each.id, row.site, [row.layer]) for each in (captured, one_stage))
            there = np.isin(right.positions, found.positions)
            assert ON_GPU or np.allclose(found.values()[0], right.values()[0][there], rtol=1e-4, atol=1e-4)
