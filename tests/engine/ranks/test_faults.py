"""What happens to one rank of two, under traffic: generation goes on as it was, and what is missing says why."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import psutil
import pytest
import torch

from schemas.read.reader import StoreReader
from tests.engine.conftest import Store
from tests.engine.test_architectures import SITES as SITES_OF
from tests.support.engines.engines import ON_GPU, Captured, Engine, start
from tests.support.models.features import GREEDY, tokens
from tests.support.models.reference import Reference
from tests.support.processes import descendants, runs
from tests.support.store_helpers import until
from writer_service.tools.fsck import fsck

pytestmark = [pytest.mark.soak,
              pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="one GPU cannot hold two ranks")]
PROMPTS = [tokens(length, seed=length) for length in (5, 40, 31, 12)]
LAYERS = 4
WHOLE = ("resid_pre", "resid_post", "attn_out")  # of which each rank sends every second layer
REASONS = {"part_lost", "dropped"}


@pytest.fixture(scope="module")
def engine(reader: StoreReader, reference_of: Callable[[str], Reference], request: pytest.FixtureRequest
           ) -> Iterator[Engine]:
    """On two ranks; its parameter is the size of their rings together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_TAP_ARM", ",".join(SITES_OF["qwen3"]))
        patch.setenv("VLLM_TAP_ON_FULL", "drop")
        patch.setenv("VLLM_TAP_RING_BYTES", str(request.param))
        engine = start(reader, reference_of("qwen3"), "qwen3", here=False, tensor_parallel_size=2)
    yield engine
    engine.close()


def sender_of(rank: int) -> int:
    """The process that sends for a rank of the one engine that runs."""
    found = [psutil.Process(pid) for pid in descendants(os.getpid()) if runs(pid)]
    senders = [one.pid for one in found if "engine_side.transport.sender_process" in " ".join(one.cmdline())
               and one.parent() is not None and f"Worker_TP{rank}" in " ".join(one.parent().cmdline())]
    assert len(senders) == 1, senders
    return senders[0]


def generate(engine: Engine, generated: int, captured: bool = True) -> list[Captured]:
    """All prompts at once; manifests are waited for where captured."""
    found: list[Captured] = engine.run(PROMPTS, [{"max_tokens": generated, **GREEDY} for _ in PROMPTS],
                                       [{"codec": "raw"} if captured else None for _ in PROMPTS])
    return found


def gaps(one: Captured) -> dict[tuple[str, int], set[str]]:
    """Reasons of missing rows, by site and layer."""
    return {(row.site, row.layer): {gap.reason for gap in row.missing} for row in one.manifest.rows if row.missing}


def meanwhile(do: Callable[[], None], then: Callable[[], list[Captured]]) -> list[Captured]:
    """What ``then`` gives, while ``do`` happens a little later."""
    helper = threading.Thread(target=do)
    helper.start()
    try:
        return then()
    finally:
        helper.join()


LARGE, SMALL = (pytest.mark.parametrize("engine", [nbytes], indirect=True) for nbytes in (256 << 20, 8 << 20))


@LARGE
def test_the_writer_is_killed_and_started_again(engine: Engine, store: Store) -> None:
    """Both ranks keep what it had not on the disk, and send it again: nothing is missing."""
    plain = [list(one.outputs[0].token_ids) for one in generate(engine, 150, captured=False)]

    def again() -> None:
        assert until(lambda: furthest(store) > 50), "nothing was under way"
        store.writer.kill()
        store.writer.wait()
        assert store.writer.stdout is not None
        store.writer.stdout.close()
        store.writer = subprocess.Popen(store.writer.args, stdout=subprocess.PIPE, text=True)
        assert store.writer.stdout is not None and "writer ready" in store.writer.stdout.readline()

    found = meanwhile(again, lambda: generate(engine, 150))
    assert [list(one.tokens[one.prompt_len:]) for one in found] == plain
    for one in found:
        assert engine.check(one) == one.manifest.expected
        assert one.manifest.status == "complete" and not gaps(one)
        assert {part.state for part in one.manifest.parts} == {"finished"}
    assert fsck(store.path).bad == []


def furthest(store: Store) -> int:
    """The last position of which the first rank's rows are in the catalog, of captures that have not ended; else -1."""
    with closing(sqlite3.connect(f"file:{store.path}/catalog.sqlite?mode=ro", uri=True)) as db:
        return int(db.execute("SELECT coalesce(max(pos_max), -1) FROM extents JOIN captures ON id = capture "
                              "WHERE finish_seq IS NULL AND lost = 0 AND part = 0").fetchone()[0])


@LARGE
def test_a_rank_whose_sender_is_killed(engine: Engine) -> None:
    """The other's rows are all there and right, the dead one's are named, captures that begin later too."""
    plain = [list(one.outputs[0].token_ids) for one in generate(engine, 150, captured=False)]
    whole = generate(engine, 3)
    assert not any(map(gaps, whole)), [gaps(one) for one in whole]
    victim = sender_of(1)

    def kill() -> None:
        time.sleep(0.5)
        os.kill(victim, signal.SIGKILL)

    for when, found in (("under way", meanwhile(kill, lambda: generate(engine, 150))),
                        ("from the start", generate(engine, 150))):
        assert [list(one.tokens[one.prompt_len:]) for one in found] == plain
        for one in found:
            engine.check(one)
            assert one.manifest.status == "incomplete", when
            missing = gaps(one)
            assert set().union(*missing.values()) <= REASONS
            for site in WHOLE:
                assert {layer for layer in range(LAYERS) if (site, layer) in missing} == {1, 3}
            assert all((site, layer) in missing for site in ("q", "z", "mlp_post") for layer in range(LAYERS))
    parts = {part.rank: part.state for part in engine.reader.manifest(found[0].id).parts}
    assert parts[0] == "finished" and parts[1] in ("lost", "awaited")
    assert until(lambda: (info := engine.reader.engine()) and engine.reader.lost_ranks(info.group) == [1])


@SMALL
def test_the_writer_stands_still_while_both_rings_fill(engine: Engine, store: Store) -> None:
    """Rows are dropped by each rank for itself; what adds up, adds up; then all is as before."""
    plain = [list(one.outputs[0].token_ids) for one in generate(engine, 300, captured=False)]

    def stop() -> None:
        store.writer.send_signal(signal.SIGSTOP)
        time.sleep(6)
        store.writer.send_signal(signal.SIGCONT)

    found = meanwhile(stop, lambda: generate(engine, 300))
    assert [list(one.tokens[one.prompt_len:]) for one in found] == plain
    for one in found:
        engine.check(one)
        assert set().union(*gaps(one).values(), {"dropped"}) == {"dropped"}
    assert any(gaps(one) for one in found), "no ring was full"
    assert all(one.manifest.status == "complete" and not gaps(one) for one in generate(engine, 3))


@SMALL
def test_the_ring_of_one_rank_alone_is_full(engine: Engine, store: Store) -> None:
    """Its rows are dropped, and whole rows of which it has columns; the other's are all there."""
    plain = [list(one.outputs[0].token_ids) for one in generate(engine, 300, captured=False)]
    slow = sender_of(1)

    def stand_still() -> None:
        os.kill(slow, signal.SIGSTOP)
        until(lambda: furthest(store) > 200, 12)  # not as long as a rank may be silent
        os.kill(slow, signal.SIGCONT)

    found = meanwhile(stand_still, lambda: generate(engine, 300))
    assert [list(one.tokens[one.prompt_len:]) for one in found] == plain
    assert any(gaps(one) for one in found), "the ring was not full"
    for one in found:
        engine.check(one)
        missing = gaps(one)
        assert set().union(*missing.values(), {"dropped"}) == {"dropped"}
        assert {layer for site, layer in missing if site in WHOLE} <= {1, 3}
        assert {part.rank: part.state for part in one.manifest.parts} == {0: "finished", 1: "finished"}
    assert all(one.manifest.status == "complete" and not gaps(one) for one in generate(engine, 3))
