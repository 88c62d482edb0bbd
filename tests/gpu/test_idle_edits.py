"""Nodes of edits in CUDA graphs: on in every replay that needs them, and off once none does. Needs a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from engine_side.edits import nodes
from engine_side.edits.editor import Editor
from engine_side.edits.tables import Size, tables
from schemas.edits.resolved import REPLACED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make bench-gpu on one")

PLACES, WIDTH, ROWS = [("resid_post", layer) for layer in range(3)], 256, 8
SLOW = 20_000_000  # cycles: a hundredth of a second on the device


@pytest.fixture
def editor() -> Iterator[Editor]:
    """Every row has a program that sets it to ones, at every place, whether or not the editor says so."""
    made = Editor(tables(dict.fromkeys(PLACES, WIDTH), Size(64, 2, 2, 8), {}, torch.device("cuda")))
    made.tables.programs.fill_(1)
    for slots in made.tables.slots.values():
        slots[1, 0] = 1
    made.tables.pools[WIDTH].vectors[1] = 1
    made.tables.pools[WIDTH].forms[1] = torch.tensor(REPLACED)
    nodes.install(made)
    yield made
    nodes.uninstall()
    assert torch.cuda.CUDAGraph is torch.cuda.graphs.CUDAGraph


def captured(editor: Editor, places: list[tuple[str, int]], wait: int = 0) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that zeroes rows [3, ROWS, WIDTH] and edits those of these places, after ``wait`` cycles."""
    from engine_side.kernels.edits import change_rows

    rows, pool = torch.zeros(len(PLACES), ROWS, WIDTH, dtype=torch.bfloat16, device="cuda"), editor.tables.pools[WIDTH]

    def step() -> None:
        if wait:
            torch.cuda._sleep(wait)
        rows.zero_()
        for place in places:
            made = editor.tables
            change_rows(rows[place[1]], None, (made.programs, made.ordinals, made.slots[place], pool.vectors,
                                               pool.forms, made.counts_of(place)), None)

    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    editor.tables.counts.zero_()
    return graph, rows


def edited(rows: torch.Tensor) -> list[bool]:
    return [bool((of == 1).all()) for of in rows]


def test_only_the_places_that_a_step_edits_are_on(editor: Editor) -> None:
    graph, rows = captured(editor, PLACES)
    for acting in (0, 0b010, 0b101, 0b111):  # each needs places that the one before did not
        editor.acting = acting
        graph.replay()
        assert all(now for layer, now in enumerate(edited(rows)) if acting >> layer & 1), f"{acting:b}"
    for acting in (0b001, 0b000, 0b100):
        editor.acting = acting
        for _ in range(2 * nodes._IDLE_MAX + 2):
            graph.replay()
        assert edited(rows) == [bool(acting >> layer & 1) for layer in range(3)], f"{acting:b}"


def test_graphs_are_turned_one_by_one(editor: Editor) -> None:
    """The pieces of a step, and steps of another size, that were not replayed in between."""
    first, second, without = captured(editor, PLACES[:1]), captured(editor, PLACES[1:]), captured(editor, [])
    for acting, right in ((0, [False] * 3), (0b011, [True, True, False]), (0b110, [False, True, True])):
        editor.acting = acting
        for _ in range(2 * nodes._IDLE_MAX + 2):
            for graph, _ in (first, second, without):
                graph.replay()
        assert edited(first[1])[:1] + edited(second[1])[1:] == right
        assert edited(without[1]) == [False] * 3


def test_replays_that_are_under_way_stay_as_they_were(editor: Editor) -> None:
    """Turning a node on or off is of the launches to come: those that wait on the device are not changed."""
    graph, _ = captured(editor, PLACES, SLOW)
    total = 0
    for acting in (0, 0b111) * 3:
        editor.acting = acting
        graph.nodes._used, graph.nodes._replays = 0, nodes._IDLE_MAX  # type: ignore[attr-defined]  # off at once too
        for _ in range(3):
            graph.replay()
            total += ROWS * bool(acting)
    assert not torch.cuda.current_stream().query(), "nothing was under way"
    torch.cuda.synchronize()
    assert editor.tables.counts[:3, 1].tolist() == [total] * 3


def test_where_the_driver_refuses_all_stay_on(editor: Editor, monkeypatch: pytest.MonkeyPatch,
                                              caplog: pytest.LogCaptureFixture) -> None:
    graph, rows = captured(editor, PLACES)
    graph.replay()
    assert edited(rows) == [False] * 3
    calls: list[int] = []

    def refuses(executable: int, node: int, on: bool) -> None:
        calls.append(node)
        if len(calls) > 1:
            raise RuntimeError("cuGraphNodeSetEnabled: error 999")

    monkeypatch.setattr(nodes, "enable_node", refuses)
    editor.acting = 0b111
    with caplog.at_level(logging.ERROR, "vllm.tap"):
        for _ in range(3):
            graph.replay()
    assert edited(rows) == [True] * 3 and len(calls) == 2
    assert caplog.text.count("they stay on") == 1
