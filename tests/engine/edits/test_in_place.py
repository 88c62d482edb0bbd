"""Edits by the operation of GPUs, which changes rows where they lie, in the graph of a CPU.

Nobody else may see them changed. What the kernel does to a row is compared in
tests/engine_side/kernels/test_edits.py; here, where the operation is put.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from safetensors.numpy import save_file

from engine_side.edits import in_graph
from schemas.read.reader import StoreReader
from tests.engine.edits.test_edits import (
    UNTABLED,
    armed,
    check,
    eight_at_most,
    operations,
    places_of,
    run,
    started,
)
from tests.engine.edits.test_edits import test_a_model_that_is_in_no_table as untabled
from tests.support.engines.engines import ON_GPU, Engine
from tests.support.models.common import COMMON
from tests.support.models.edited import at_every_place, vector
from tests.support.models.families import FAMILIES as KNOWN
from tests.support.models.features import tokens

FAMILIES = os.environ.get("TAP_FAMILIES", "qwen3").replace("all", ",".join(KNOWN)).split(",")
pytestmark = [pytest.mark.skipif(ON_GPU, reason="all edits are made so there")]


@pytest.fixture(autouse=True, scope="module")
def on_a_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_graph, "DEVICES", {"cpu"})
        yield


def an_engine(family: str, group: str, reader: StoreReader, folder: Any) -> Iterator[Engine]:
    save_file({"vector": vector(COMMON["hidden_size"], 11)}, path := folder / "tone.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TAP_VECTORS", f"tone={path}")
        patch.setenv("VLLM_TAP_ARM", ",".join(dict.fromkeys(
            place.partition(".")[0] for place in armed(family).split(","))))
        made = started(reader, family, group)
    yield made
    made.close()


@pytest.fixture(scope="module", params=[*((family, "scheduler") for family in FAMILIES), *(
    pytest.param((family, group), marks=pytest.mark.soak) for family in KNOWN for group in ("scheduler", "compiled")
    if family not in FAMILIES or group != "scheduler")], ids="-".join)
def engine(request: pytest.FixtureRequest, reader: StoreReader, tmp_path_factory: pytest.TempPathFactory
           ) -> Iterator[Engine]:
    yield from an_engine(*request.param, reader, tmp_path_factory.mktemp("vectors"))


@pytest.mark.parametrize("heads", [False, True], ids=["rows", "heads"])
def test_every_operation_at_every_place(engine: Engine, heads: bool) -> None:
    """Rows that are staged before an edit are those before it, those of neighbours are theirs."""
    edits: list[Any] = [None, *eight_at_most(at_every_place(places_of(engine, heads), heads)), *operations(engine),
                        None]
    prompts = [tokens(70, seed=700 + number) for number in range(len(edits))]
    for captured, edit in zip(run(engine, prompts, edits), edits, strict=True):
        check(engine, captured, edit)


@pytest.mark.soak
@pytest.mark.parametrize("family", UNTABLED)
def test_a_model_that_is_in_no_table(family: str, reader: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    untabled(family, reader, monkeypatch)
