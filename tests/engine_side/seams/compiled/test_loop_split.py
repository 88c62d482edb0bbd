"""A step of torch's compiler that may be left out, and asserts that what it was given is alike."""

from __future__ import annotations

from typing import Any

import pytest
from torch._inductor.codegen.cpp import CppScheduling

from engine_side.seams.compiled.loop_split import connect
from engine_side.seams.patching import is_wrapped


def test_loops_that_are_not_alike_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def splits(_self: Any, nodes: list[str]) -> list[str]:
        assert len(set(nodes)) == 1
        return ["split"]

    monkeypatch.setattr(CppScheduling, "try_loop_split", splits)
    connect()
    assert is_wrapped(CppScheduling.try_loop_split)
    scheduling: Any = object()
    assert CppScheduling.try_loop_split(scheduling, ["a", "b"]) == ["a", "b"]
    assert CppScheduling.try_loop_split(scheduling, ["a", "a"]) == ["split"]
