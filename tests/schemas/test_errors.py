"""Errors go whole from process to process."""

from __future__ import annotations

import copy

import pytest

from schemas.errors import (
    ArgumentError,
    CatalogError,
    CorruptError,
    LimitError,
    NoHeadError,
    NotFoundError,
    TapError,
)
from schemas.manifest import Missing
from vllm_tap.errors import MissingRows, NotFound


@pytest.mark.parametrize("error", [
    NotFoundError("gone"), CorruptError("read rows", "block 3", "cut", "fsck"), LimitError("tasks", 9, 8, "fewer"),
    ArgumentError("layers", 3, "no"), MissingRows("01J", "resid_post", [Missing(2, 4, "dropped")]),
    CatalogError("read", "postgresql://host/db", "gone", "again"), NoHeadError("open store", "s3://b", "none", "push"),
    NotFound(404, "not_found", "gone", None)], ids=lambda error: type(error).__name__)
def test_an_error_of_a_worker_process_is_the_same_error_here(error: TapError) -> None:
    again = copy.copy(error)  # by what a process sends of it
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)
