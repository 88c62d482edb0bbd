"""Rows, scores, projections and edits are the same after the engine slept, and after its weights were loaded anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.captures_around_sleep import ROUNDS
from tests.gpu.programs import printed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make bench-gpu on one")


@pytest.mark.parametrize("runner", ["1", "0"], ids=["V2", "V1"])
def test_rows_after_a_sleep_are_those_before_it(runner: str, tmp_path: Path) -> None:
    seen, text = printed("captures_around_sleep", str(tmp_path / "store"), VLLM_USE_V2_MODEL_RUNNER=runner)
    assert [one["round"] for one in seen] == list(ROUNDS), text[-4000:]
    different = {one["round"]: [name for name, digest in one["digests"].items() if digest != seen[0]["digests"][name]]
                 for one in seen}
    assert not any(different.values()), different
    assert max(one["codes off"] for one in seen) < 2.1  # of a row's 253
