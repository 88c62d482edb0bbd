"""The hazards between streams, each provoked with its ordering removed and gone with it in place. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.device import Scratch, SideStream
from engine_side.events import Run
from engine_side.recorder import Recorder, Step
from engine_side.ring import Ring, view
from engine_side.staging import Staging
from engine_side.ticket import Ticket
from schemas.ids import new_ulid
from schemas.spec import Armed, parse_spec, resolve

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make bench-gpu on one")

LAYERS, TOKENS, WIDTH = 4, 1024, 1024
SLOW = 200_000_000  # cycles: a tenth of a second on the device


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    device = torch.device("cuda")
    ring = Ring(256 << 20, pinned=True)
    staging = Staging({"resid_post": torch.zeros(LAYERS, TOKENS, WIDTH, dtype=torch.bfloat16, device=device)},
                      {"resid_post": list(range(LAYERS))})
    found = Recorder(staging, ring, "bfloat16", "drop", SideStream(device, Scratch(32 << 20, device)))
    yield found
    torch.cuda.synchronize()
    ring.close()


def opened(recorder: Recorder) -> None:
    capture = new_ulid()
    spec = parse_spec({"codec": "raw16", "id": capture})
    resolved = resolve(spec, Armed({"resid_post": list(range(LAYERS))}, LAYERS))
    recorder.open("r", Ticket(capture, spec.to_json(), resolved, 0, 1, 1), [1] * (1 << 20), 0)


def step(recorder: Recorder, number: int, rows: int = TOKENS) -> None:
    """The model writes ``number`` into every row, as its graph does on the model's stream."""
    recorder.before_step()
    recorder.staging.buffers["resid_post"].fill_(number)
    positions = torch.arange(number * TOKENS, number * TOKENS + rows, device="cuda")
    recorder.after_step(Step(["r"], np.array([0, rows]), np.array([number * TOKENS]), positions,
                             positions.to(torch.int32)))


def runs(recorder: Recorder) -> list[Run]:
    return [event for event in recorder.outbox if isinstance(event, Run)]


def values(recorder: Recorder, run: Run) -> set[float]:
    """What lies in the ring now."""
    offset, size = run.extents["x"]
    return set(view(recorder.ring.memory, offset, (size // 2,), torch.bfloat16).float().unique().tolist())


def slowed(side: SideStream, monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    """Everything on a stream comes late."""
    taken = side.room if stream == "_encoding" else side.deliver

    def late(*args: Any) -> Any:
        with torch.cuda.stream(getattr(side, stream)):
            torch.cuda._sleep(SLOW)
        return taken(*args)

    monkeypatch.setattr(SideStream, taken.__name__, lambda _self, *args: late(*args))


@pytest.mark.parametrize("ordered", [True, False])
def test_staging_is_not_rewritten_while_it_is_encoded(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    opened(recorder)
    step(recorder, 1)  # compiles what there is to compile
    torch.cuda.synchronize()
    slowed(recorder.side, monkeypatch, "_encoding")
    if not ordered:
        monkeypatch.setattr(SideStream, "block_main", lambda self: None)
    step(recorder, 2)
    step(recorder, 3)
    torch.cuda.synchronize()
    found = [values(recorder, run) for run in runs(recorder)]
    right = [{1.0}, {2.0}, {3.0}]
    assert (found == right) is ordered, found


@pytest.mark.parametrize("ordered", [True, False])
def test_scratch_is_not_used_again_before_it_was_copied(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    opened(recorder)
    step(recorder, 1)
    torch.cuda.synchronize()
    slowed(recorder.side, monkeypatch, "_copying")
    if not ordered:
        monkeypatch.setattr(Scratch, "take", _careless)
    for number in range(2, 8):  # 8 MiB a step through 32 MiB
        step(recorder, number)
    torch.cuda.synchronize()
    found = [values(recorder, run) for run in runs(recorder)]
    right = [{float(number)} for number in range(1, 8)]
    assert (found == right) is ordered, found


def _careless(self: Scratch, nbytes: int, _stream: Any) -> int:
    """As ``take``, without a wait."""
    start = self._head % self.capacity
    skip = self.capacity - start if start + nbytes > self.capacity else 0
    self._head += skip + nbytes
    return (start + skip) % self.capacity


@pytest.mark.parametrize("ordered", [True, False])
def test_the_ring_is_not_read_before_it_was_written(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    opened(recorder)
    step(recorder, 1)
    torch.cuda.synchronize()
    recorder.ring.memory.zero_()
    slowed(recorder.side, monkeypatch, "_copying")
    step(recorder, 2)
    run = runs(recorder)[-1]
    assert not run.ready.query(), "the copy was over already: the test shows nothing"
    if ordered:  # as the sender does: what is not ready is left for later
        while not run.ready.query():
            pass
    assert (values(recorder, run) == {2.0}) is ordered


def test_rows_that_do_not_follow_one_another_and_a_torch_encoder_arrive_too(recorder: Recorder) -> None:
    capture = new_ulid()
    spec = parse_spec({"codec": "raw16", "id": capture, "positions": [[0, 3], [7, 8], [1000, 1001]], "layers": [1, 3]})
    resolved = resolve(spec, Armed({"resid_post": list(range(LAYERS))}, LAYERS))
    recorder.open("r", Ticket(capture, spec.to_json(), resolved, 0, 1, 1), [1] * TOKENS, 0)
    buffer = recorder.staging.buffers["resid_post"]
    buffer.copy_(torch.arange(TOKENS, device="cuda")[None, :, None] + 0 * buffer)
    positions = torch.arange(TOKENS, device="cuda")
    recorder.after_step(Step(["r"], np.array([0, TOKENS]), np.array([0]), positions, positions.to(torch.int32)))
    torch.cuda.synchronize()
    (run,) = runs(recorder)
    rows = torch.tensor([0, 1, 2, 7, 1000])
    assert view(recorder.ring.memory, run.positions, (5,), torch.int64).tolist() == rows.tolist()
    assert view(recorder.ring.memory, run.tokens, (5,), torch.int32).tolist() == rows.tolist()
    found = view(recorder.ring.memory, run.extents["x"][0], (2, 5, WIDTH), torch.bfloat16)
    assert torch.equal(found, rows.to(torch.bfloat16)[None, :, None].expand(2, 5, WIDTH))
