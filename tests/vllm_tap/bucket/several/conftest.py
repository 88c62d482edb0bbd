"""Three nodes, each with a writer and a store of its own: one on this disk, two pushed below one prefix of a bucket."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from schemas.ids import new_ulid
from tests.support.store_helpers import Sender, WriterProcess, engine_info, until
from vllm_tap.bucket.push import push

NODES: Final = ("a", "b", "c")
CAPTURES: Final = 7  # of each node
BEGAN_MS: Final = 1_769_860_800_000


@dataclass(frozen=True)
class Nodes:
    """Stores of nodes by name, and the captures of each, oldest first; ``number[capture]`` is what its rows are of.

    Captures of all nodes were made in turns, those of one turn in the same millisecond. ``shared`` is an alias that a
    capture of each node has; that of node c is the newest.
    """

    stores: dict[str, Path]
    captures: dict[str, list[str]]
    number: dict[str, int]

    @property
    def every(self) -> list[str]:
        """All captures, newest first."""
        turns = [[self.captures[name][turn] for name in NODES] for turn in range(CAPTURES)]
        return [capture for turn in reversed(turns) for capture in sorted(turn, reverse=True)]


def fill(store: Path, ids: Sequence[str], first: int, name: str = "a", began_ms: int = BEGAN_MS) -> None:
    """Captures of eight rows in four layers, whose rows are those of capture ``first`` and on, in sealed blocks."""
    before = len(list((store / "blocks").glob("*.zarr")))
    with WriterProcess(store, "--seal-idle-s", "0.3", "--keep-s", "1000") as writer:
        with Sender(writer.endpoint, role="api") as api, Sender(writer.endpoint, engine=engine_info()) as engine:
            for turn, capture in enumerate(ids):
                aliases = ["shared"] if turn == NODES.index(name) else []
                api.own(capture, owner="anna" if turn % 3 == 2 else "", created_ms=began_ms + turn,
                        aliases=[*aliases, f"cmpl-{capture}"], tags={"node": name, "turn": str(turn)})
            api.wait()
            for turn, capture in enumerate(ids):
                engine.open(capture, prompt_len=8)
                engine.frame([(capture, first + turn, range(8))])
                engine.finish(capture, end=8)
            engine.wait()
            assert until(lambda: len(list((store / "blocks").glob("*.zarr"))) > before)
        writer.stop()


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    folder = tmp_path_factory.mktemp("nodes")
    stores = {name: folder / name for name in NODES}
    captures = {name: [new_ulid() for _ in range(CAPTURES)] for name in NODES}
    for number, name in enumerate(NODES):
        fill(stores[name], captures[name], 100 * number, name)
    return Nodes(stores, captures, {capture: 100 * number + turn for number, name in enumerate(NODES)
                                    for turn, capture in enumerate(captures[name])})


@pytest.fixture
def nodes(filled: Nodes, tmp_path: Path) -> Nodes:
    """Copies of the stores."""
    return Nodes({name: Path(shutil.copytree(store, tmp_path / name)) for name, store in filled.stores.items()},
                 filled.captures, filled.number)


@pytest.fixture
def places(nodes: Nodes, url: str) -> list[str]:
    """Node a's folder, and where b and c were pushed to, below ``url``."""
    for name in "bc":
        push(nodes.stores[name], f"{url}/node-{name}")
    return [str(nodes.stores["a"]), *(f"{url}/node-{name}" for name in "bc")]


@pytest.fixture
def pushed(nodes: Nodes, url: str) -> list[str]:
    """Where all three nodes were pushed to, below ``url``."""
    for name, store in nodes.stores.items():
        push(store, f"{url}/node-{name}")
    return [f"{url}/node-{name}" for name in nodes.stores]
