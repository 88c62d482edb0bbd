"""Every operation at every place where Inductor compiles the graph, and where a block's stream is one tensor."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.read.reader import StoreReader
from tests.engine.edits.test_edits import PLACES, check, eight_at_most, places_of, run, started
from tests.support.engines.engines import ON_GPU
from tests.support.models.edited import at_every_place
from tests.support.models.features import tokens

pytestmark = [pytest.mark.soak, pytest.mark.skipif(ON_GPU, reason="held against float32")]


@pytest.mark.parametrize(("family", "group"), [
    ("qwen3", "compiled"), ("opt", "compiled"), ("gpt_neox, sequential", "scheduler")])
def test_every_operation_at_every_place(family: str, group: str, reader: StoreReader, monkeypatch: pytest.MonkeyPatch
                                        ) -> None:
    """Of rows and of heads, beside requests without any edit."""
    there = ["resid_post", *(place for place, lacking in PLACES.items() if family.partition(",")[0] not in lacking)]
    if "sequential" in family:
        there.append("resid_mid.1")
    monkeypatch.setenv("VLLM_TAP_ARM", ",".join(dict.fromkeys(place.partition(".")[0] for place in there)))
    engine = started(reader, family, group, ",".join(there))
    try:
        for heads in (False, True):
            edits: list[Any] = [None, *eight_at_most(at_every_place(places_of(engine, heads), heads)), None]
            prompts = [tokens(70, seed=700 + number) for number in range(len(edits))]
            for captured, edit in zip(run(engine, prompts, edits), edits, strict=True):
                check(engine, captured, edit)
    finally:
        engine.close()
