"""Nodes of edits in CUDA graphs: those of places that no request of a step edits are turned off.

An armed place is a kernel of every captured graph. A kernel that ends at once still takes 1 µs of a graph's chain on an
H200, and beside kernels that are launched early 2 to 2.5 µs. The driver runs a node that is off as an empty one, for
0.3 µs.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch

from engine_side.edits.editor import Editor
from engine_side.transport.cuda_calls import enable_node

__all__ = ["Nodes", "install", "uninstall"]

logger = logging.getLogger("vllm.tap")

_told = False
_IDLE_MAX: Final = 32  # replays with nodes that nobody needs: to turn one off takes 3 µs, and the next launch 50 more


class Nodes:
    """Nodes of one graph that edit, by the bit of their place. ``on``: bits of the places whose nodes are on."""

    __slots__ = ("_by_place", "_replays", "_used", "on")

    def __init__(self, by_place: dict[int, list[int]]) -> None:
        self._by_place, self._used, self._replays = by_place, 0, _IDLE_MAX
        self.on = sum(by_place)

    def follow(self, executable: int, acting: int) -> None:
        """Turn on what a replay needs that edits the places ``acting``, at once. Turn off what none has needed for
        some replays. RuntimeError if the driver refuses: then it is unknown which nodes are on.
        """
        needed = sum(place for place in self._by_place if place & acting)
        self._used |= needed
        self._replays += 1
        if missing := needed & ~self.on:
            self._turn(executable, missing, on=True)
        elif self._replays > _IDLE_MAX:
            self._turn(executable, self.on & ~self._used, on=False)
            self._used = self._replays = 0

    def _turn(self, executable: int, places: int, *, on: bool) -> None:
        for place, nodes in self._by_place.items():
            if place & places:
                for node in nodes:
                    enable_node(executable, node, on)
        self.on ^= places


def install(editor: Editor) -> None:
    """Have the graphs that this process captures from now on follow the editor, where torch hands out its graphs."""
    before: Any = torch.cuda.CUDAGraph
    if not (editor.tables.programs.is_cuda and hasattr(before, "raw_cuda_graph_exec")):
        return
    from engine_side.kernels import edits

    places = {one.data_ptr(): 1 << number for number, one in enumerate(editor.tables.counts[:-1])}

    class Graph(before):  # type: ignore[misc]
        """A CUDA graph whose idle edits are turned off. ``plain``: the class that it stands in for."""

        plain = before
        nodes: Nodes | None = None  # None where nothing is turned off

        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(True)  # the nodes are those of the graph that was captured
            self.kept = keep_graph

        def capture_end(self) -> None:
            super().capture_end()
            if not self.kept:
                self.instantiate()
            by_place: dict[int, list[int]] = {}
            try:
                for node, address in edits.nodes(self.raw_cuda_graph()):
                    if address in places:  # else it is a copy of the compiler's, and stays on
                        by_place.setdefault(places[address], []).append(node)
                self.nodes = Nodes(by_place) if by_place else None
            except Exception:
                _leave_on()

        def replay(self) -> None:
            nodes = self.nodes
            if nodes is not None and nodes.on != editor.acting:
                try:
                    nodes.follow(self.raw_cuda_graph_exec(), editor.acting)
                except Exception:
                    _leave_on()
                    self.nodes = None
                    self.instantiate()  # with all of them on
            super().replay()

    torch.cuda.CUDAGraph = Graph


def uninstall() -> None:
    """Have graphs captured by the class that was there before ``install``, if that was called."""
    torch.cuda.CUDAGraph = getattr(torch.cuda.CUDAGraph, "plain", torch.cuda.CUDAGraph)


def _leave_on() -> None:
    """Tell of a graph whose nodes stay on; logged once, not for each of many graphs."""
    global _told
    if not _told:
        _told = True
        logger.exception("vllm-tap: turning the nodes of idle edits off in a CUDA graph failed; they stay on, which is "
                         "slower, and edits are made as before (logged once)")
