"""Projections by the kernels of a serving engine are as near to the product as those of the reference encoders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.programs import printed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make bench-gpu on one")


def test_projections_of_an_engine(tmp_path: Path) -> None:
    (found, *_), _ = printed("captures_projected", str(tmp_path / "store"))
    assert len(found) == 4
    for codec in {name.rpartition(" ")[0] for name in found}:
        reference, kernel = found[f"{codec} reference"], found[f"{codec} kernel"]
        assert kernel["kernel"] and not reference["kernel"]
        assert 0 < reference["error"] < (0.02 if codec.startswith("rp8") else 0.4)
        assert kernel["error"] == pytest.approx(reference["error"], rel=0.01)
