"""Scratch: bytes are used again only behind the copy of what they held."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_side.device import Scratch

CAPACITY = 1 << 12


class Stream:
    """Remembers the last copy that it was told to wait for; copies end in order."""

    def __init__(self) -> None:
        self.waited = 0

    def wait_event(self, event: int) -> None:
        self.waited = max(self.waited, event)


@settings(max_examples=300, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, CAPACITY // 2), st.booleans()), max_size=400))
def test_what_overlaps_waits_for_the_copy_before_it(sizes: list[tuple[int, bool]]) -> None:
    scratch, stream = Scratch(CAPACITY, torch.device("cpu")), Stream()
    copies: list[tuple[int, int]] = []  # of each copy, what it reads
    for size, fails in sizes:
        at = scratch.take(size, stream)
        assert at >= 0 and at + size <= CAPACITY
        overlapping = [number for number, (begin, end) in enumerate(copies, 1) if begin < at + size and at < end]
        assert stream.waited >= max(overlapping, default=0)
        if not fails:  # else its encoder failed: nothing is copied, and nothing waits for it
            copies.append((at, at + size))
            scratch.copied(len(copies))
