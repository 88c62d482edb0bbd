"""Two ranks of one model: every rank holds the whole rows of the armed sites, one of them hands them over."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

import pytest

from schemas.read.reader import StoreReader
from tests.engine.conftest import Store
from tests.support.engines.engines import ALL_ROWS, ON_GPU, prompt, start
from tests.support.models.reference import Reference

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak,
              pytest.mark.skipif(ON_GPU, reason="one GPU cannot hold two ranks")]


def test_rows_of_two_ranks_arrive_once(
    reader: StoreReader, store: Store, reference_of: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine_streams() -> int:
        with sqlite3.connect(f"file:{store.path}/catalog.sqlite?mode=ro", uri=True) as db:
            return int(db.execute("SELECT count(*) FROM streams WHERE role = 'engine'").fetchone()[0])

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    before = engine_streams()
    engine = start(reader, reference_of("qwen3"), "qwen3", here=False, tensor_parallel_size=2)
    try:
        captured = engine.run([prompt(length, seed=length) for length in (5, 90, 31)],
                              [{"max_tokens": 7, "ignore_eos": True}] * 3, [{"codec": "raw"}] * 3)
        for one in captured:
            assert one.manifest.status == "complete"
            assert engine.check(one) == ALL_ROWS * (one.prompt_len + 6)
        assert engine_streams() - before == 1
    finally:
        engine.close()
