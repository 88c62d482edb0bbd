"""The notebooks of docs/notebooks, cell by cell, with a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from schemas.probes import Registered, load_probe
from tests.engine.conftest import ENVIRONMENT
from tests.support.processes import PATIENCE_S
from vllm_tap import open_store
from vllm_tap.tiny_model import cache_dir

ROOT = Path(__file__).parents[3]


def test_the_notebooks_run_as_they_stand(tmp_path: Path) -> None:
    environment = {key: value for key, value in (os.environ | ENVIRONMENT).items() if not key.startswith("VLLM_TAP_")}
    environment |= {"VLLM_CACHE_ROOT": str(cache_dir() / "vllm"), "MPLBACKEND": "Agg"}
    run = subprocess.run([sys.executable, "-m", "tests.programs.notebooks", "logit_lens", "first_probe"], text=True,
                         cwd=tmp_path, env=environment, timeout=PATIENCE_S, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT)
    lines = [line for line in run.stdout.splitlines() if line.startswith("LEFT ")]
    assert run.returncode == 0 and lines, run.stdout[-6000:]
    left = json.loads(lines[0].removeprefix("LEFT "))
    assert left["logit_lens"]["layers"] == [0, 1, 2, 3] and all(left["logit_lens"]["agree"])
    assert all(left["first_probe"]["fitted"]) and len(left["first_probe"]["fitted"]) == 16
    # The file that the notebook saves gives the same scores to whoever registers it.
    probe = load_probe(Registered("tone", tmp_path / "tone.safetensors"))
    with open_store(tmp_path / "captures") as store:
        newest, *before = store.captures()
        assert {row.status for row in (newest, *before)} == {"complete"} and len(before) == 21
        rows = store[newest.id]["resid_post", 2]
    assert np.allclose(rows @ probe.directions[0] + probe.bias[0], left["first_probe"]["scores"], atol=1e-3)


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in (ROOT / "docs" / "notebooks").iterdir()} == {"logit_lens", "first_probe"}
