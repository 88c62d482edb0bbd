"""Nodes of edits in a graph: which are on at each replay, with the driver's call recorded. tests/gpu has the driver."""

from __future__ import annotations

import random

import pytest
import torch

from engine_side.edits import nodes
from engine_side.edits.tables import Size, tables

PLACES = 5
BY_PLACE = {1 << place: [100 * place, 100 * place + 1] for place in range(PLACES)}


class Driver:
    """Nodes of a graph that are on, as the driver has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.calls = {node for of in BY_PLACE.values() for node in of}, 0
        monkeypatch.setattr(nodes, "enable_node", self.enable)

    def enable(self, executable: int, node: int, on: bool) -> None:
        assert executable == 7
        self.calls += 1
        (self.on.add if on else self.on.discard)(node)

    def has(self, acting: int) -> bool:
        return {node for place, of in BY_PLACE.items() if place & acting for node in of} <= self.on


@pytest.mark.parametrize("seed", range(20))
def test_what_a_replay_needs_is_on(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches change at every step, or stay for longer than nodes stay on without need. Places of other graphs have
    bits too.
    """
    driver, chance, found = Driver(monkeypatch), random.Random(seed), nodes.Nodes(BY_PLACE)
    for _ in range(60):
        acting, length = chance.randrange(1 << PLACES + 2), chance.choice([1, 2, 2 * nodes._IDLE_MAX + 2])
        for _ in range(length):
            found.follow(7, acting)
            assert driver.has(acting)
        if length > 2:
            assert len(driver.on) == 2 * (acting & (1 << PLACES) - 1).bit_count()


def test_nodes_are_not_turned_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two batches in turns each finds on what the other needs."""
    driver, found = Driver(monkeypatch), nodes.Nodes(BY_PLACE)
    found.follow(7, 0)
    assert not driver.on and driver.calls == 2 * PLACES, "a graph that was just captured is idle at once"
    for step in range(1000):
        found.follow(7, 0b11 if step % 2 else 0b110)
    assert driver.calls <= 2 * PLACES + 2 * 3


@pytest.mark.parametrize("requests", range(1, 9))
def test_tables_of_a_place_begin_where_the_compiler_does_not_copy_them(requests: int) -> None:
    places = {("resid_post", layer): 6 for layer in range(4)}
    made = tables(places, Size(16, requests, 3, 2), {}, torch.device("cpu"))
    starts = [made.slots[place].data_ptr() for place in places] + [made.counts_of(place).data_ptr() for place in places]
    assert all((start - made.every_slot.data_ptr()) % 16 == 0 for start in starts[:4])
    assert all((start - made.counts.data_ptr()) % 16 == 0 for start in starts[4:])
