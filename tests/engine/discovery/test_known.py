"""Families of the table, looked for by structure as if they were in none: the same rows, held against Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest

from engine_side.seams import tapping
from engine_side.tap.architectures import BY_STRUCTURE
from schemas.read.reader import StoreReader
from tests.engine.test_architectures import SITES
from tests.support.engines.engines import DTYPE, ON_GPU, Engine, in_this_process
from tests.support.models.families import FAMILIES, family_model
from tests.support.models.reference import Reference

HERE = [family for family in FAMILIES if family != "gpt_neox"]  # vLLM changes Hugging Face's classes of that one
FAST = ("mixtral",)


@pytest.mark.skipif(ON_GPU, reason="the engine is in a process of its own there")
@pytest.mark.parametrize("family", [family if family in FAST else pytest.param(family, marks=pytest.mark.soak)
                                    for family in HERE])
def test_the_table_and_the_search_agree(family: str, reader: StoreReader) -> None:
    from vllm import LLM

    sites = [site for site in BY_STRUCTURE if site in SITES[family]]
    with pytest.MonkeyPatch.context() as patch, in_this_process():
        patch.setattr(tapping, "is_known", lambda _names: False)
        patch.setenv("VLLM_TAP_ARM", ",".join(sites))
        llm: Any = LLM(str(family_model(family, DTYPE)), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256,
                       max_num_seqs=8, max_num_batched_tokens=64, seed=0)
    engine = Engine(llm, reader, Reference(family_model(family, DTYPE)))
    try:
        (captured,) = engine.run([list(range(20, 90))], [{"max_tokens": 6, "ignore_eos": True}], [{"codec": "raw"}])
        assert {row.site for row in captured.manifest.rows} == set(sites)
        assert all("found by structure" in site.meaning for site in captured.manifest.sites)
        assert engine.check(captured) > 0
    finally:
        engine.close()
