"""Codecs of keys and values on other architectures: controls behave there too, or the cache is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_side.seams.kept.keys_values import heads_of
from schemas.errors import StartError
from schemas.read.reader import StoreReader
from tests.engine.edits.test_fidelity_kv import MADE, PROMPTS, running
from tests.support.engines.engines import DTYPE, ON_GPU
from tests.support.models.families import family_model
from tests.support.models.unlisted import UNLISTED
from vllm_tap.fidelity.job import FidelityJob
from vllm_tap.fidelity.kv.job import KVJob, study

pytestmark = [pytest.mark.skipif(ON_GPU, reason="an engine in this process")]


@pytest.mark.parametrize(("family", "dtype"), [
    pytest.param("gemma2", DTYPE, marks=pytest.mark.soak), ("mixtral", DTYPE),
    pytest.param("qwen3", "bfloat16", marks=pytest.mark.soak)])
def test_controls_behave_on_soft_caps_and_windows_on_experts_and_in_16_bits(family: str, dtype: str, tmp_path: Path,
                                                                            reader: StoreReader) -> None:
    model = family_model(family, dtype)
    asked = KVJob(FidelityJob(str(model), tmp_path, bar=1e-9), ("snapshot", "in-forward"), ("kv",), ("kv8", "rot2"))
    with running(reader, model, dtype) as bench:
        places = study(asked, MADE, bench).places
    for place in places:
        cost = {one.name: float(np.mean(one.prompts["kl"])) for one in place.patched}
        assert place.harness == [0.0] * PROMPTS and 0 < cost["kv8"] < cost["rot2"] < cost["shuffled"]


def test_a_cache_without_keys_and_values_is_refused_by_name(reader: StoreReader) -> None:
    options = UNLISTED["deepseek_v3"].engine
    with running(reader, family_model("deepseek_v3", DTYPE), **options) as bench, pytest.raises(
            StartError, match=r"keys and values of model.layers.0.* cannot be changed on their way into the cache: it "
                              r"is of the kind MLAAttention, whose cache has no keys and values"):
        heads_of(bench.engine)
