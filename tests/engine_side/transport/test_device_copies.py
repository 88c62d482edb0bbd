"""Scratch: bytes are used again only behind the copy of what they held, and lie where kernels may write them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_side.transport.device_copies import Scratch
from engine_side.transport.ring import ALIGN

CAPACITY = 1 << 12


class Stream:
    """Remembers the last copy that it was told to wait for; copies end in order."""

    def __init__(self) -> None:
        self.waited = 0

    def wait_event(self, event: int) -> None:
        self.waited = max(self.waited, event)


@settings(max_examples=300, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, CAPACITY // 2), st.booleans(), st.integers(0, 3)), max_size=400))
def test_what_overlaps_waits_for_the_copy_before_it(sizes: list[tuple[int, bool, int]]) -> None:
    """Copies are enqueued late: some takes find what they need not even on its way, and the rest of some is unused."""
    scratch, stream = Scratch(CAPACITY, torch.device("cpu")), Stream()
    written: list[tuple[int, int, int]] = []  # begin, end, scratch's head
    copies = 0

    def copy() -> None:
        nonlocal copies
        if copies < len(written):
            scratch.add_copy(written[-1][2], len(written))
            copies = len(written)

    for size, fails, unused in sizes:
        at = scratch.allocate(size, stream)
        for _ in range(2):
            if at is None:
                if copies == len(written):  # what was taken and never copied is in the way
                    scratch.discard()
                copy()
                at = scratch.allocate(size, stream)
        assert at is not None, "everything is on its way, and still there is no room"
        assert at >= 0 and at + size <= CAPACITY
        assert at % ALIGN == 0, "kernels write at the multiple before it"
        overlapping = [number for number, (begin, end, _) in enumerate(written, 1) if begin < at + size and at < end]
        assert max(overlapping, default=0) <= min(stream.waited, copies)
        if fails:  # its encoder failed: nothing is copied, and nothing waits for it
            continue
        scratch.give_back(unused if unused < size else 0)
        written.append((at, at + size - (unused if unused < size else 0), scratch.head))
        if unused:
            copy()
