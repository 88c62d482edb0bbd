"""The ring: regions never overlap while they are held, and a full ring says so."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_side.transport.ring import ALIGN, DISK_ALIGN, Ring, view

CAPACITY = 1 << 16


@pytest.fixture(scope="module")
def shared_ring() -> Ring:
    return Ring(CAPACITY, pinned=False)


@settings(max_examples=200, deadline=None)
@given(actions=st.lists(st.one_of(st.just(0), st.integers(1, CAPACITY // 2)), max_size=60))
def test_regions_held_at_once_never_overlap(shared_ring: Ring, actions: list[int]) -> None:
    ring = shared_ring
    ring.shared.tail = ring.head  # as if everything earlier had been released
    held: deque[tuple[int, int, int]] = deque()
    for number, size in enumerate(actions):
        if size == 0:
            if held:
                ring.shared.tail = held.popleft()[2]
            continue
        alignment = (ALIGN, DISK_ALIGN)[(number + size) % 2]
        size = -(-size // alignment) * alignment
        before = ring.head
        region = ring.allocate(size, alignment)
        if region is None:
            assert held, "an empty ring must take half its capacity"
            continue
        offset, mark = region
        if size % 3 == 0:
            ring.give_back(size)
            assert ring.head == before, "what was skipped would be held for ever"
            assert ring.allocate(size, alignment) == region
        assert offset % alignment == 0 and offset >= 0 and offset + size <= ring.capacity
        assert all(offset + size <= o or o + s <= offset for o, s, _ in held)
        held.append((offset, size, mark))


def test_what_a_tensor_writes_is_what_the_file_holds() -> None:
    ring = Ring(CAPACITY, pinned=False)
    try:
        offset, _ = ring.allocate(300) or pytest.fail("an empty ring refused")
        view(ring.memory, offset, (3, 25), torch.float32).copy_(torch.arange(75.0).view(3, 25))
        with ring.path.open("rb") as file:
            file.seek(offset)
            assert np.array_equal(np.frombuffer(file.read(300), np.float32), np.arange(75, dtype=np.float32))
        assert ring.path.stat().st_mode & 0o077 == 0, "activations are user data: nobody else may read the ring"
    finally:
        ring.close()
    assert not ring.path.exists()


def test_the_ring_of_a_killed_engine_is_removed_by_the_next_and_a_living_one_is_not() -> None:
    living = Ring(CAPACITY, pinned=False)
    program = ("import os, signal; from engine_side.transport.ring import Ring; "
               "print(Ring(1 << 16, pinned=False).path, flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    died = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    orphan = Path(died.stdout.strip())
    assert orphan.exists(), "nothing was left: the test shows nothing"
    following = Ring(CAPACITY, pinned=False)
    try:
        assert not orphan.exists() and living.path.exists() and following.path.exists()
    finally:
        following.close()
        living.close()
