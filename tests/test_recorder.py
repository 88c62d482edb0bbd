"""The recorder where a model's site is missing in some of its blocks, as the MLP activation is in sparse ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine_side.device import SideStream
from engine_side.events import Opened
from engine_side.recorder import Recorder
from engine_side.ring import Ring
from engine_side.staging import Staging
from engine_side.ticket import Ticket
from schemas.ids import new_ulid
from schemas.spec import Armed, parse_spec, resolve

ASKED = Armed({"mlp_post": [0, 1, 2, 3]}, n_layers=4)  # what the front end believes
HAS = [0, 2]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    ring = Ring(4 << 20, pinned=False)
    staging = Staging({"mlp_post": torch.zeros(len(HAS), 8, 16)}, {"mlp_post": HAS})
    yield Recorder(staging, ring, "float32", "drop", SideStream(torch.device("cpu")))
    ring.close()


@pytest.mark.parametrize(
    ("layers", "expected", "absent"),
    [("all", [0, 2], {}), ([0], [0], {}), ([0, 1], [0, 1], {"mlp_post": [1]}), ("1::2", [1, 3], {"mlp_post": [1, 3]})],
)
def test_layers_that_the_model_lacks(
    recorder: Recorder, layers: object, expected: list[int], absent: dict[str, list[int]]
) -> None:
    ulid = new_ulid()
    spec = parse_spec({"layers": layers, "id": ulid})
    recorder.open("r", Ticket(ulid, spec.to_json(), resolve(spec, ASKED), 0, 1, 1), [1, 2, 3], 0)
    (opened,) = recorder.outbox
    assert isinstance(opened, Opened)
    assert opened.resolved.layers == {"mlp_post": expected} and opened.absent == absent
    taken = [entry.layers for entry in recorder.captures.plans[0]]
    assert taken == ([tuple(layer for layer in expected if layer in HAS)] if set(expected) & set(HAS) else [])
