"""Projections by the kernels of a serving engine are as near to the product as those of the reference encoders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make bench-gpu on one")


def test_projections_of_an_engine(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_TAP_")}
    done = subprocess.run([sys.executable, "-m", "tests.gpu.captures_projected", str(tmp_path / "store")],
                          env=environment, cwd=Path(__file__).parents[2], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, done.stdout[-4000:]
    found = json.loads(lines[0].removeprefix("SEEN "))
    assert len(found) == 4
    for codec in {name.rpartition(" ")[0] for name in found}:
        reference, kernel = found[f"{codec} reference"], found[f"{codec} kernel"]
        assert kernel["kernel"] and not reference["kernel"]
        assert 0 < reference["error"] < (0.02 if codec.startswith("rp8") else 0.4)
        assert kernel["error"] == pytest.approx(reference["error"], rel=0.01)
