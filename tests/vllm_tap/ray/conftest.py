"""A real Ray of two workers on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.store_helpers import ROOT


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="not installed: ray (make ray-test)")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False,
             runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()
