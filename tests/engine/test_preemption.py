"""Preempted requests are computed again: every row once in the store's answer, the latest computation, none missing.

Their rows go to the writer as from another host, over TCP with keys, without shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from schemas.read.reader import StoreReader
from tests.engine.conftest import Store
from tests.support.engines.engines import ALL_ROWS, Engine, prompt, start
from tests.support.models.reference import Reference


@pytest.fixture(scope="module", params=[pytest.param("qwen3", marks=[pytest.mark.versions, pytest.mark.soak]),
                                        pytest.param("llama", marks=pytest.mark.soak)])
def engine(request: pytest.FixtureRequest, store: Store, reader: StoreReader,
           reference_of: Callable[[str], Reference]) -> Iterator[Engine]:
    """Ten blocks of 32 tokens for six requests that want twice as many."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.remote.items():
            patch.setenv(name, value)
        engine = start(reader, reference_of(request.param), request.param, max_num_batched_tokens=48,
                       max_model_len=256, num_gpu_blocks_override=10, enable_prefix_caching=False)
    yield engine
    engine.close()


def test_rows_survive_preemption(engine: Engine) -> None:
    prompts = [prompt(length, seed=length) for length in (30, 90, 17, 61, 5, 75, 44, 8)]
    captured = engine.run(prompts, [{"max_tokens": 60, "ignore_eos": True}] * 8, [{"codec": "raw"}] * 8)
    assert sum(one.manifest.recomputed for one in captured) > 0, "nothing was preempted: the test shows nothing"
    for one in captured:
        assert one.manifest.status == "complete"
        assert engine.check(one) == ALL_ROWS * (one.prompt_len + 60 - 1)
