"""A step of torch's compiler that may be left out, and asserts that what it was given is alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor.codegen.cpp import CppScheduling

from engine_side.seams.compiled.loop_split import connect
from engine_side.seams.patching import is_wrapped


def test_loops_that_are_not_alike_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def splits(_self: Any, nodes: list[Any]) -> list[str]:
        assert len({node.sizes for node in nodes}) == 1
        for node in nodes:
            node._body = "split"
        assert len({node.reads for node in nodes}) == 1
        return ["split"]

    def node(sizes: str, reads: str = "") -> SimpleNamespace:
        return SimpleNamespace(sizes=sizes, reads=reads, _body=sizes)

    monkeypatch.setattr(CppScheduling, "try_loop_split", splits)
    connect()
    assert is_wrapped(CppScheduling.try_loop_split)
    scheduling: Any = object()
    assert CppScheduling.try_loop_split(scheduling, whole := [node("a"), node("b")]) == whole
    assert CppScheduling.try_loop_split(scheduling, [node("a"), node("a")]) == ["split"]
    with pytest.raises(AssertionError):  # in the middle of its work
        CppScheduling.try_loop_split(scheduling, [node("a", "x"), node("a", "y")])
