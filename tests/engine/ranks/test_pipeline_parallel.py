"""Two stages of one model: each sends the rows of its layers, and what is read are those of one rank."""

from __future__ import annotations

import pytest

from schemas.read.reader import StoreReader
from tests.engine.conftest import Store
from tests.engine.test_architectures import SITES as SITES_OF
from tests.engine.ranks.test_tensor_parallel import held_against
from tests.support.engines.engines import DTYPE, ON_GPU, Engine, in_this_process
from tests.support.models.families import family_model
from tests.support.models.features import GREEDY, tokens
from tests.support.models.reference import Reference

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak,
              pytest.mark.skipif(ON_GPU, reason="one GPU cannot hold two ranks")]


def staged(family: str, reader: StoreReader, stages: int = 2, **options: object) -> Engine:
    from vllm import LLM

    folder = family_model(family, DTYPE)
    with in_this_process(stages == 1):
        llm = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, seed=0,
                  block_size=32, max_num_batched_tokens=48, pipeline_parallel_size=stages, **options)
    return Engine(llm, reader, Reference(folder))


SPECS = [{"codec": "raw"}, {"codec": "raw"}, {"codec": "raw", "sites": ["resid_post"], "layers": [1]},
         {"codec": "raw", "sites": ["resid_mid"], "layers": [2]}, {"codec": "int8b64", "sites": ["z", "resid_post"]}]


@pytest.mark.parametrize("family", ["qwen3, two K/V heads"])
def test_every_site_of_two_stages_is_that_of_one(
    family: str, reader: StoreReader, store: Store, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_TAP_ARM", ",".join(SITES_OF["qwen3"]))
    runs = []
    for stages in (1, 2):
        engine = staged(family, reader, stages)
        try:
            runs.append(engine.run([tokens(length, seed=length) for length in (5, 90, 31, 12, 64)],
                                   [{"max_tokens": 7, **GREEDY} for _ in SPECS], SPECS))
        finally:
            engine.close()
    for one, two in zip(*runs, strict=True):
        assert one.tokens == two.tokens and two.manifest.status == "complete"
        assert [(row.site, row.layer, row.captured) for row in one.manifest.rows] == [
            (row.site, row.layer, row.captured) for row in two.manifest.rows]
        assert all(not row.missing for row in two.manifest.rows)
        assert one.manifest.engine["fingerprint"] == two.manifest.engine["fingerprint"]
    for two in runs[1][:-1]:
        held_against(engine, two)
