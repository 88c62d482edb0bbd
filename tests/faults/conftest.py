"""How long: ``make test`` runs a small part of each case, ``make faults`` (TAP_FAULTS set) all of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.nursery import Nursery

FULL = "TAP_FAULTS" in os.environ
SEED = int(os.environ.get("TAP_FAULTS_SEED", "1"))


def times(fast: int, full: int) -> int:
    """How often a case is done here."""
    return full if FULL else fast


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def rng(record_property: Callable[[str, object], None]) -> random.Random:
    record_property("seed", SEED)
    print(f"seed {SEED}")
    return random.Random(SEED)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"
