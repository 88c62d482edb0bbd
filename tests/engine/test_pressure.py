"""A writer that stands still: generation goes on, rows are dropped once the ring is full, and every one is named."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from schemas.read.reader import StoreReader
from tests.engine.conftest import Store
from tests.support.engines.engines import ALL_ROWS, Engine, prompt, start
from tests.support.models.reference import Reference

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def engine(reader: StoreReader, reference_of: Callable[[str], Reference]) -> Iterator[Engine]:
    """The smallest ring there is, and an engine that never waits for it."""
    before = dict(os.environ)
    os.environ.update(VLLM_TAP_RING_BYTES=str(4 << 20), VLLM_TAP_ON_FULL="drop")
    try:
        engine = start(reader, reference_of("qwen3"), "qwen3", max_num_batched_tokens=512)
    finally:
        os.environ.clear()
        os.environ.update(before)
    yield engine
    engine.close()


def test_a_frozen_writer_costs_rows_not_generation(engine: Engine, store: Store) -> None:
    prompts = [prompt(200, seed=seed) for seed in range(8)]
    params = [{"max_tokens": 40, "ignore_eos": True}] * 8
    plain = [list(output.outputs[0].token_ids) for output in engine.run(prompts, params, [None] * 8)]

    os.kill(store.writer.pid, signal.SIGSTOP)
    thaw = threading.Timer(6.0, lambda: os.kill(store.writer.pid, signal.SIGCONT))
    thaw.start()
    begin = time.monotonic()
    try:
        captured = engine.run(prompts, params, [{"codec": "raw"}] * 8)
    finally:
        thaw.join()
    generated = [list(one.output.outputs[0].token_ids) for one in captured]
    assert sum(a == b for a, b in zip(plain, generated, strict=True)) >= 7
    assert time.monotonic() - begin < 60

    dropped = 0
    for one in captured:
        engine.check(one)  # rows that are there are right; expected = captured + missing
        assert {entry.expected for entry in one.manifest.rows} == {239}
        reasons = {missing.reason for entry in one.manifest.rows for missing in entry.missing}
        assert reasons <= {"dropped"}
        assert one.manifest.status == ("incomplete" if reasons else "complete")
        dropped += sum(missing.rows for entry in one.manifest.rows for missing in entry.missing)
    assert 0 < dropped < ALL_ROWS * 239 * 8, "the ring never filled, or nothing was kept: the test shows nothing"

    (after,) = engine.run([prompt(50, seed=99)], [{"max_tokens": 4}], [{"codec": "raw"}])
    assert after.manifest.status == "complete"
