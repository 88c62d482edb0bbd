"""The hazards between streams, each provoked with its ordering removed and gone with it in place. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.front.ticket import Ticket
from engine_side.step.burst import Burst
from engine_side.step.recorder import Recorder
from engine_side.step.selection import Step
from engine_side.tap.staging import Staging
from engine_side.transport.device_copies import DeviceToHost, Scratch
from engine_side.transport.events import EditsCounted, Run
from engine_side.transport.ring import Ring, view
from schemas.ids import new_ulid
from schemas.spec import Armed, parse_spec, resolve

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make bench-gpu on one")

LAYERS, TOKENS, WIDTH = 4, 512, 1024
SLOW = 200_000_000  # cycles: a tenth of a second on the device


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    device = torch.device("cuda")
    ring = Ring(256 << 20, pinned=True)
    staging = Staging({"resid_post": torch.zeros(LAYERS, TOKENS, WIDTH, dtype=torch.bfloat16, device=device)},
                      {"resid_post": list(range(LAYERS))})
    found = Recorder(staging, "bfloat16", "drop", DeviceToHost(device, ring, Scratch(32 << 20, device)))
    cache = found.layouts.kernel_cache
    cache.precompile(Armed({"resid_post": list(range(LAYERS))}, LAYERS))
    assert cache.has("raw16", "resid_post"), "no kernel: this would test the reference encoders alone"
    yield found
    torch.cuda.synchronize()
    ring.close()


def opened(recorder: Recorder) -> None:
    capture = new_ulid()
    spec = parse_spec({"codec": "raw16", "id": capture})
    resolved = resolve(spec, Armed({"resid_post": list(range(LAYERS))}, LAYERS))
    recorder.open("r", Ticket(capture, spec.to_json(), resolved, 0, 1, 1), [1] * (1 << 20), 0)


def step(recorder: Recorder, number: int, rows: int = TOKENS, has_prompt: bool = False) -> None:
    """The model writes ``number`` into every row, as its graph does on the model's stream."""
    recorder.before_step(rows, has_prompt)
    recorder.staging.buffers["resid_post"].fill_(number)
    positions = torch.arange(number * TOKENS, number * TOKENS + rows, device="cuda")
    recorder.after_step(Step(["r"], np.array([0, rows]), np.array([number * TOKENS]), positions,
                             positions.to(torch.int32)))


def runs(recorder: Recorder) -> list[Run]:
    return [event for event in recorder.outbox if isinstance(event, Run)]


def values(recorder: Recorder, run: Run) -> set[float]:
    """What lies in the ring now."""
    offset, size = run.extents["x"]
    return set(view(recorder.to_host.ring.memory, offset, (size // 2,), torch.bfloat16).float().unique().tolist())


def late_copies(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus is slow."""
    start_copies = DeviceToHost.start_copies

    def late(self: DeviceToHost, budget: float) -> None:
        with torch.cuda.stream(self._copying):
            torch.cuda._sleep(SLOW)
        start_copies(self, budget)

    monkeypatch.setattr(DeviceToHost, "start_copies", late)


@pytest.mark.parametrize("ordered", [True, False])
def test_staging_is_not_rewritten_while_it_is_encoded(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    """What orders them is that encoding is on the model's stream; on another one the next step overwrites its rows."""
    opened(recorder)
    step(recorder, 1)  # compiles what there is to compile
    torch.cuda.synchronize()
    encode, other = Burst.encode, torch.cuda.Stream()

    def slow(self: Burst, *args: Any) -> None:
        with torch.cuda.stream(torch.cuda.current_stream() if ordered else other):
            torch.cuda._sleep(SLOW)
            encode(self, *args)

    monkeypatch.setattr(Burst, "encode", slow)
    step(recorder, 2)
    step(recorder, 3)
    torch.cuda.synchronize()
    recorder.flush()
    torch.cuda.synchronize()
    found = [values(recorder, run) for run in runs(recorder)]
    right = [{1.0}, {2.0}, {3.0}]
    assert (found == right) is ordered, found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("ordered", [True, False])
def test_rows_of_a_late_step_are_taken_before_the_next_overwrites_them(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, ordered: bool, ahead: bool
) -> None:
    """Those of steps with a prompt, and ``ahead`` of all that are selected anew."""
    opened(recorder)
    recorder.defer_to_next_call, recorder.async_scheduling = True, ahead
    if not ordered:
        monkeypatch.setattr(Recorder, "before_step",
                            lambda self, tokens, has_prompt: setattr(self, "steps_since_prompt", int(not has_prompt)))
    for number in range(1, 7):
        step(recorder, number, has_prompt=number not in (3, 5))
    recorder.flush()
    torch.cuda.synchronize()
    found = [values(recorder, run) for run in runs(recorder)]
    right = [{float(number)} for number in range(1, 7)]
    assert (found == right) is ordered, found


@pytest.mark.parametrize("ordered", [True, False])
def test_scratch_is_not_used_again_before_it_was_copied(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    opened(recorder)
    step(recorder, 1)
    torch.cuda.synchronize()
    late_copies(recorder, monkeypatch)
    if not ordered:
        monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)
    for number in range(2, 12):  # 4 MiB a step through 32 MiB
        step(recorder, number)
    recorder.flush()
    torch.cuda.synchronize()
    found = [values(recorder, run) for run in runs(recorder)]
    right = [{float(number)} for number in range(1, 12)]
    assert (found == right) is ordered, found


@pytest.mark.parametrize("ordered", [True, False])
def test_the_ring_is_not_read_before_it_was_written(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    opened(recorder)
    step(recorder, 1)
    recorder.flush()
    torch.cuda.synchronize()
    recorder.to_host.ring.memory.zero_()
    late_copies(recorder, monkeypatch)
    step(recorder, 2)
    recorder.flush()
    run = runs(recorder)[-1]
    shared = recorder.to_host.ring.shared
    assert run.copied > shared.over(), "the copy was over already: the test shows nothing"
    if ordered:  # as the sender does: what is not there yet is left for later
        while run.copied > shared.over():
            pass
    assert (values(recorder, run) == {2.0}) is ordered


def test_steps_of_decode_share_a_copy_and_every_row_is_its_own(recorder: Recorder) -> None:
    """Bursts, an index of rows that do not follow one another, and a codec without a kernel, in one batch."""
    wanted = {"a": {"codec": "raw16", "layers": [1, 3]}, "b": None, "c": {"codec": "raw16", "layers": [1, 3]},
              "d": {"codec": "rp8:k=32", "layers": [0]}}
    for name, asked in wanted.items():
        if asked is not None:
            capture = new_ulid()
            spec = parse_spec({**asked, "id": capture})
            resolved = resolve(spec, Armed({"resid_post": list(range(LAYERS))}, LAYERS))
            recorder.open(name, Ticket(capture, spec.to_json(), resolved, 0, 1, 1), [1], 0)
    names, buffer = list(wanted), recorder.staging.buffers["resid_post"]
    for number in range(1, 60):
        recorder.before_step(4)
        buffer[:, :4] = (torch.arange(4, device="cuda") + 4 * number).to(torch.bfloat16)[None, :, None]
        positions = torch.full((4,), number, device="cuda")
        recorder.after_step(Step(names, np.arange(5), np.full(4, number), positions,
                                 (torch.arange(4, device="cuda") + 4 * number).to(torch.int32)))
    recorder.before_step(0)
    torch.cuda.synchronize()
    seen: dict[tuple[str, int], int] = {}
    for run in runs(recorder):
        n = len(run.slot)
        for k in range(run.steps):
            at = {name: offset + k * run.stride for name, (offset, _) in run.extents.items()}
            tokens = view(recorder.to_host.ring.memory, run.tokens + k * run.stride, (n,), torch.int32).tolist()
            used = view(recorder.to_host.ring.memory, run.positions + k * run.stride, (n,), torch.int64).tolist()
            assert used == (run.position + k).tolist()
            assert tokens == [4 * p + (i * 2 if n == 2 else 3) for i, p in enumerate(used)]
            if run.entry.codec == "raw16":
                found = view(recorder.to_host.ring.memory, at["x"], (2, n, WIDTH), torch.bfloat16)
                right = torch.tensor(tokens, dtype=torch.bfloat16)[None, :, None].expand(2, n, WIDTH)
                assert torch.equal(found, right)
            for i, p in enumerate(used):
                seen[run.entry.codec, p * 4 + i] = seen.get((run.entry.codec, p * 4 + i), 0) + 1
    assert set(seen.values()) == {1} and len(seen) == 59 * 3
    assert max(run.steps for run in runs(recorder)) > 4


def test_rows_after_the_counts_of_an_edited_request_are_their_own(recorder: Recorder) -> None:
    """Nine numbers are no whole vector: kernels wrote the next rows 28 bytes too early, positions among them."""
    recorder.to_host.enqueue_numbers(EditsCounted("edited", [], [], []),
                                     torch.arange(9, dtype=torch.int32, device="cuda"))
    opened(recorder)
    for number in (1, 2, 3):
        step(recorder, number, rows=7)
    recorder.before_step(0)
    torch.cuda.synchronize()
    found = [view(recorder.to_host.ring.memory, run.positions + k * run.stride, (7,), torch.int64).tolist()
             for run in runs(recorder) for k in range(run.steps)]
    assert found == [list(range(number * TOKENS, number * TOKENS + 7)) for number in (1, 2, 3)]
    assert [values(recorder, run) for run in runs(recorder)] == [{1.0}, {2.0}, {3.0}]
