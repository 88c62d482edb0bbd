"""Rows that lie in staging without a copy are those that a copy would have taken, and generation is the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.programs import printed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make bench-gpu on one")


def test_rows_written_in_place_are_the_copied_ones(tmp_path: Path) -> None:
    def run(way: str) -> dict[str, Any]:
        return printed("captures_in_place", str(tmp_path / way), way)[0][0]

    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(run, ("in_place", "copied")))
    # Of 12 layers; the first gets no residual.
    assert [one.pop("in_place") for one in seen] == [{"vllm_tap_straight": 12, "vllm_tap_stream": 11},
                                                     {"vllm_tap_straight": 0, "vllm_tap_stream": 0}]
    different = [name for mine, other in zip(*(one["digests"] for one in seen), strict=True) for name in mine
                 if mine[name] != other[name]]
    assert not different
    assert seen[0] == seen[1]
