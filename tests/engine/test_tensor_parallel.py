"""Two ranks of one model: every rank holds the whole rows of the armed sites, one of them hands them over."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

import pytest

from schemas.read.reader import StoreReader
from tests.engine.conftest import Store
from tests.support.engines.engines import ALL_ROWS, DTYPE, ON_GPU, SITES, Engine, in_this_process, start
from tests.support.models.blocks_reference import BlocksReference
from tests.support.models.families import family_model
from tests.support.models.features import GREEDY, tokens
from tests.support.models.reference import Reference
from tests.support.models.unlisted import UNLISTED

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak,
              pytest.mark.skipif(ON_GPU, reason="one GPU cannot hold two ranks")]


def two_ranks(family: str, reader: StoreReader, reference_of: Callable[[str], Reference]) -> Engine:
    """An engine of a family of the table, or of one whose sites are found by structure, by all ranks at once."""
    if family not in UNLISTED:
        return start(reader, reference_of(family), family, here=False, tensor_parallel_size=2)
    from vllm import LLM

    folder = family_model(family, DTYPE)
    with in_this_process(False):
        llm = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, seed=0,
                  block_size=32, tensor_parallel_size=2)
    return Engine(llm, reader, BlocksReference(folder, UNLISTED[family]))


@pytest.mark.parametrize(("family", "rows"), [("qwen3", ALL_ROWS), ("granite", 3 * len(SITES))])
def test_rows_of_two_ranks_arrive_once(
    family: str, rows: int, reader: StoreReader, store: Store, reference_of: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engine_streams() -> int:
        with sqlite3.connect(f"file:{store.path}/catalog.sqlite?mode=ro", uri=True) as db:
            return int(db.execute("SELECT count(*) FROM streams WHERE role = 'engine'").fetchone()[0])

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    before = engine_streams()
    engine = two_ranks(family, reader, reference_of)
    try:
        captured = engine.run([tokens(length, seed=length) for length in (5, 90, 31)],
                              [{"max_tokens": 7, **GREEDY}] * 3, [{"codec": "raw"}] * 3)
        for one in captured:
            assert one.manifest.status == "complete"
            assert engine.check(one) == rows * (one.prompt_len + 6)
        assert engine_streams() - before == 1
    finally:
        engine.close()
