"""vLLM as it comes: Inductor's compiled graph, and an engine inside the caller's own process.

The other modules leave Inductor's C++ compilation out to save time; here nothing is left out. An engine in the
caller's process stops stepping after its last request, so this also shows that the last finish is delivered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.support.engines.engines import ALL_ROWS, Captured, Engine
from tests.support.models.reference import Reference
from tests.support.store_helpers import until


def test_rows_of_a_default_engine_in_the_callers_process(
    reader: StoreReader, reference_of: Callable[[str], Reference]
) -> None:
    *ids, aborted = [new_ulid() for _ in range(5)]
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_CPU_CI_ENV"}
    command = [sys.executable, "-m", "tests.support.engines.in_process", *ids, aborted]
    run = subprocess.run(command, env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2])
    said = [line for line in run.stdout.splitlines() if line.startswith("GENERATED ")]
    assert run.returncode == 0 and said, run.stdout[-4000:]
    assert "vLLM 0.99.0 is outside the tested range 0.26 to 0.32; the start-up self-test decides" in run.stdout
    assert "\nMADE 1\n" in run.stdout, "a projection's matrix was left to the steps"
    engine = Engine(None, reader, reference_of("qwen3"))
    for id_, tokens in zip(ids, json.loads(said[0].removeprefix("GENERATED ")), strict=True):
        one = Captured(id_, tuple(tokens), len(tokens) - 7, None, engine.final(id_))
        assert one.manifest.status == "complete"
        assert engine.check(one) == ALL_ROWS * (len(tokens) - 1)
    manifest = until(lambda: (found := reader.manifest(aborted)).status != "running" and found)
    assert manifest, "the abort was never told"
    assert (manifest.status, manifest.finish_reason) == ("complete", "abort")
    assert {(entry.expected, entry.captured) for entry in manifest.rows} == {(5 + 2, 5 + 2)}
