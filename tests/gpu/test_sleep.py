"""Rows, scores, projections and edits are the same after the engine slept, and after its weights were loaded anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.captures_around_sleep import ROUNDS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make bench-gpu on one")


@pytest.mark.parametrize("runner", ["1", "0"], ids=["V2", "V1"])
def test_rows_after_a_sleep_are_those_before_it(runner: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_TAP_")}
    run = subprocess.run([sys.executable, "-m", "tests.gpu.captures_around_sleep", str(tmp_path / "store")],
                         env=environment | {"VLLM_USE_V2_MODEL_RUNNER": runner}, cwd=Path(__file__).parents[2],
                         text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False)
    seen = [json.loads(line.removeprefix("SEEN ")) for line in run.stdout.splitlines() if line.startswith("SEEN ")]
    assert [one["round"] for one in seen] == list(ROUNDS), run.stdout[-4000:]
    different = {one["round"]: [name for name, digest in one["digests"].items() if digest != seen[0]["digests"][name]]
                 for one in seen}
    assert not any(different.values()), different
    assert max(one["codes off"] for one in seen) < 2.1  # of a row's 253
