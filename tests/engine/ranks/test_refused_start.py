"""One rank of two whose model is another than the other's, as the search or the nudge sees: the start ends on both,
with that rank's words on each. None waits for one that does not come, and nothing is left of it.
"""

from __future__ import annotations

import os
import re
import sqlite3
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import Store
from tests.engine.ranks.damaged import damaged
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, in_this_process
from tests.support.models.families import family_model
from tests.support.processes import descendants, runs
from tests.support.store_helpers import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.soak,
              pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="one GPU cannot hold two ranks")]


def streams(store: Store) -> int:
    with sqlite3.connect(f"file:{store.path}/catalog.sqlite?mode=ro", uri=True) as db:
        return int(db.execute("SELECT count(*) FROM streams WHERE role = 'engine'").fetchone()[0])


@pytest.mark.parametrize(("family", "damage", "rank", "said"), [
    ("granite", "no number", 1, "the search for its sites failed: .*no norm after the last block has it as its only"),
    ("granite", "another factor", 0, "the search for its sites failed: blocks 0 and 1 .* differ in attn_out, mlp_out"),
    ("granite", "stale", 1, r"continues with other tensors than those that taps would copy: .*resid_pre\.2"),
    ("qwen3", "longer", 0, r"rows of Qwen3ForCausalLM do not match the table of architectures: .*resid_pre\.2"),
    ("qwen3", "stale", 1, r"continues with other tensors than those that taps would copy: .*resid_pre\.2"),
])
def test_a_rank_that_refuses_ends_the_start_of_both(
    family: str, damage: str, rank: int, said: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    not_started(family, damage, rank, store, tmp_path, monkeypatch, "tensor")
    own, other = ((tmp_path / str(which)).read_text() for which in (rank, 1 - rank))
    assert re.search(said, own) and other == f"{own} (reported by tensor-parallel rank {rank})", (own, other)


@pytest.mark.parametrize(("family", "damage", "rank", "said"), [
    ("granite", "no number", 1, "failed: on stage 1 of the pipeline: .*no norm after the last block has it"),
    ("granite", "another factor", 0, "failed: blocks 0 and 1 .* differ in attn_out, mlp_out"),
    ("granite", "longer", 0, "failed: on stage 0 of the pipeline: .*the stage hands on no tensor, nor sum"),
    ("qwen3", "longer", 0, r"rows of Qwen3ForCausalLM do not match .*resid_post\.1 is not what the stage hands on"),
])
def test_a_stage_that_refuses_ends_the_start_of_both(
    family: str, damage: str, rank: int, said: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    not_started(family, damage, rank, store, tmp_path, monkeypatch, "pipeline")
    first, last = ((tmp_path / str(which)).read_text() for which in range(2))
    assert re.search(said, first) and last == first, (first, last)


@pytest.mark.parametrize(("family", "rank"), [("granite", 1), ("qwen3", 0)])
def test_a_rank_that_fails_in_mid_step_does_not_wait_for_those_that_wait_for_it(
    family: str, rank: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    not_started(family, "raises", rank, store, tmp_path, monkeypatch, "tensor")
    own = (tmp_path / str(rank)).read_text()
    assert re.search(r"MemoryError\('no room for the MLP'\) \(the other ranks did not come", own), own
    assert not (tmp_path / str(1 - rank)).exists(), "it came out of the step"


def not_started(family: str, damage: str, rank: int, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch,
                parallel: str) -> None:
    """An engine on two ranks, one of which has a damage: it does not start, and none of its processes is left."""
    from vllm import LLM

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    resource_tracker.ensure_running()  # Python starts it beside the first engine, and leaves it
    before, processes = streams(store), set(descendants(os.getpid()))
    with in_this_process(False), pytest.raises(Exception, match="initialization failed"):
        LLM(str(family_model(family, DTYPE)), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8,
            seed=0, block_size=32, **{f"{parallel}_parallel_size": 2}, **damaged(damage, rank, folder), **SHARED)
    assert until(lambda: not any(runs(pid) for pid in set(descendants(os.getpid())) - processes))
    assert streams(store) == before, "a rank joined"
