"""Rows that lie in staging without a copy are those that a copy would have taken, and generation is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make bench-gpu on one")


def test_rows_written_in_place_are_the_copied_ones(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_TAP_")}
    ways = ("in_place", "copied")
    runs = [subprocess.Popen([sys.executable, "-m", "tests.gpu.captures_in_place", str(tmp_path / way), way],
                             env=environment, cwd=Path(__file__).parents[2], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT) for way in ways]
    seen: list[dict[str, Any]] = []
    for run in runs:
        text, _ = run.communicate(timeout=300)
        lines = [line for line in text.splitlines() if line.startswith("SEEN ")]
        assert lines, text[-4000:]
        seen.append(json.loads(lines[0].removeprefix("SEEN ")))
    # Of 12 layers; the first gets no residual.
    assert [one.pop("in_place") for one in seen] == [{"vllm_tap_straight": 12, "vllm_tap_stream": 11},
                                                     {"vllm_tap_straight": 0, "vllm_tap_stream": 0}]
    different = [name for mine, other in zip(*(one["digests"] for one in seen), strict=True) for name in mine
                 if mine[name] != other[name]]
    assert not different
    assert seen[0] == seen[1]
