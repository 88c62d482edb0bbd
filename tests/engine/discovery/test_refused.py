"""A model whose sites are not to be found by structure is refused as the engine starts."""

from __future__ import annotations

import pytest

from schemas.read.reader import StoreReader
from tests.support.engines.engines import DTYPE, ON_GPU, in_this_process, refused_start
from tests.support.models.families import family_model


def test_a_model_of_several_streams_is_refused(reader: StoreReader) -> None:
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch, in_this_process(not ON_GPU):
        patch.setenv("VLLM_TAP_ARM", "resid_post")
        with refused_start(r"the search for its sites failed: several streams: model\.layers\.0 returns 4 rows "
                           r"of 128 numbers a token", Exception):
            LLM(str(family_model("gemma3n_text", DTYPE)), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256,
                max_num_seqs=8, seed=0)
