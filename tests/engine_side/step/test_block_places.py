"""Where blocks lie in the ring: large ones where a disk may take them from, and small ones take no more room for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.step.block import EntryLayout, EntryRows, layout_of
from engine_side.step.burst import Burst
from engine_side.tap.staging import Staging
from engine_side.transport.events import Entry
from engine_side.transport.ring import ALIGN, DISK_ALIGN, Ring

LAYERS, WIDTH = 4, 1056
LARGE, SMALL = 64, 3  # rows: 540,672 and 25,344 bytes of bfloat16


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    found = Ring(8 << 20, pinned=False)
    yield found
    found.close()


@pytest.fixture(scope="module")
def layout() -> EntryLayout:
    staging = Staging({"resid_post": torch.empty(LAYERS, LARGE + 2, WIDTH, dtype=torch.bfloat16)},
                      {"resid_post": tuple(range(LAYERS))})
    return layout_of(Entry("resid_post", "raw16", tuple(range(LAYERS))), staging, "bfloat16", 4 << 20, compiled=False)


def burst(layout: EntryLayout, rows: list[Any], steps: int = 1) -> Burst:
    nothing = np.zeros(0, np.int64)
    entries = [EntryRows(layout, np.asarray(row), np.asarray(row), np.asarray(row), np.asarray(row)) for row in rows]
    return Burst(entries, steps, steps, [], nothing, 0, 0.0, (nothing, nothing))


def placed(ring: Ring, made: Burst) -> list[tuple[int, int, int]]:
    """(offset, bytes, bytes to the next step's) of each main stream, as events tell them."""
    offset, mark = ring.allocate(made.nbytes, made.alignment) or pytest.fail("an empty ring refused")
    made.assign_region(ring.memory, offset, ring.memory, offset)
    made.steps_done = made.steps_max
    found = [(*next(iter(run.extents.values())), run.stride) for run in made.runs(mark)]
    assert [int(rows.begins[0]) for rows in made.entries] == [at for at, _, _ in found]
    ring.shared.tail = ring.head
    return found


def test_large_blocks_begin_where_a_disk_takes_them(ring: Ring, layout: EntryLayout) -> None:
    """Beside small ones, behind the numbers of gathered rows, in every step of a burst, and after odd regions."""
    gathered = [*range(LARGE - 1), LARGE + 1]
    for rows in ([range(LARGE)], [gathered], [range(SMALL), range(LARGE), range(SMALL), gathered]):
        for steps in (1, 3):
            ring.allocate(100)
            made = burst(layout, rows, steps)
            for at, size, stride in placed(ring, made):
                if size > 256 * 1024:
                    assert at % DISK_ALIGN == 0 and (steps == 1 or stride % DISK_ALIGN == 0)


def test_blocks_do_not_overlap(layout: EntryLayout) -> None:
    made = burst(layout, [range(SMALL), range(LARGE), range(SMALL), range(LARGE)], 2)
    ends = [rows.offset + rows.block.nbytes for rows in made.entries]
    assert all(end <= following.offset for end, following in zip(ends, made.entries[1:], strict=False))
    assert ends[-1] <= made.step_bytes


def test_small_blocks_take_no_more_room(layout: EntryLayout) -> None:
    made = burst(layout, [[0, 2, 4], range(SMALL)], 5)
    assert made.alignment == ALIGN
    assert made.step_bytes == sum(rows.block.nbytes for rows in made.entries) and made.index_bytes == ALIGN


@pytest.mark.parametrize("rows", [32, 33, LARGE])
def test_a_large_block_takes_little_more(layout: EntryLayout, rows: int) -> None:
    made = burst(layout, [range(rows)])
    assert made.alignment == DISK_ALIGN
    assert made.step_bytes - sum(row.block.nbytes for row in made.entries) < DISK_ALIGN <= made.step_bytes / 64
