"""What goes wrong in a step, and what arrives beside it, costs no more than its own rows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from engine_side import kernels, worker
from engine_side.front.ticket import Ticket
from engine_side.seams import scheduler
from engine_side.step import block, burst
from engine_side.step.kernel_cache import KernelCache
from engine_side.step.recorder import Recorder
from engine_side.step.selection import Step
from engine_side.tap.staging import Staging
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import Freed, Lost, Run
from engine_side.transport.ring import Ring
from schemas.ids import new_ulid
from schemas.spec import Armed, parse_spec, resolve

ARMED = Armed({"resid_post": [0, 1, 2], "mlp_out": [0, 1, 2]}, 3)


@pytest.fixture
def ring() -> Iterator[Ring]:
    found = Ring(1 << 16, pinned=False)
    yield found
    found.close()


def recorder_on(ring: Ring, on_full: str = "drop") -> Recorder:
    staging = Staging({site: torch.zeros(3, 64, 16) for site in ARMED.sites}, ARMED.sites)
    return Recorder(staging, "float32", on_full, DeviceToHost(torch.device("cpu"), ring))


def opened(recorder: Recorder, name: str, prompt: int = 1, **asked: Any) -> None:
    spec = parse_spec({"codec": "raw", "id": new_ulid(), **asked})
    recorder.open(name, Ticket(str(spec.id), spec.to_json(), resolve(spec, ARMED), 0, 1, 1), [1] * prompt, 0)


def step(recorder: Recorder, rows: list[tuple[str, int, int]], drafts: list[int] | None = None) -> None:
    """Each request with its first position and its number of rows."""
    counts = [n for _, _, n in rows]
    positions = torch.tensor([first + k for _, first, n in rows for k in range(n)])
    recorder.before_step(sum(counts))
    recorder.after_step(Step([name for name, _, _ in rows], np.cumsum([0, *counts]),
                             np.array([first for _, first, _ in rows]), positions, positions.to(torch.int32),
                             None if drafts is None else np.array(drafts)))


def release(recorder: Recorder) -> None:
    """As the sender does when the writer has everything."""
    while recorder.outbox:
        event = recorder.outbox.popleft()
        if isinstance(event, Run | Freed):
            recorder.to_host.ring.shared.tail = event.mark[0]


def failing(*_: Any) -> NoReturn:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("positions", ["all", [0, 2, 5]])
@pytest.mark.parametrize("on_full", ["drop", "wait"])
def test_failed_encodings_give_their_room_back(
    ring: Ring, monkeypatch: pytest.MonkeyPatch, on_full: str, positions: Any
) -> None:
    recorder = recorder_on(ring, on_full)
    opened(recorder, "bad", 60, positions=positions)
    with monkeypatch.context() as broken:
        broken.setattr(burst.Burst, "encode", failing)
        for _ in range(200):
            step(recorder, [("bad", 0, 60)])
            release(recorder)
    opened(recorder, "good", 40)
    step(recorder, [("good", 0, 40)])
    assert not any(isinstance(event, Lost) for event in recorder.outbox)


def test_a_step_that_fails_in_a_burst_loses_its_own_rows_alone(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_on(ring)
    opened(recorder, "a", sites=["mlp_out"], layers=[0])
    for position in range(6):
        step(recorder, [("a", position, 1)])
    with monkeypatch.context() as broken:
        broken.setattr(burst.Burst, "encode", failing)
        step(recorder, [("a", 6, 1)])
    for position in range(7, 10):
        step(recorder, [("a", position, 1)])
    recorder.flush()
    lost = [p for event in recorder.outbox if isinstance(event, Lost) for p in event.position.tolist()]
    runs = [event for event in recorder.outbox if isinstance(event, Run)]
    taken = [int(run.position[0]) + k for run in runs for k in range(run.steps)]
    assert lost == [6] and taken == [0, 1, 2, 3, 4, 5, 7, 8, 9]


def test_a_missed_step_in_a_burst_names_its_own_positions(ring: Ring) -> None:
    recorder = recorder_on(ring)
    opened(recorder, "a", sites=["mlp_out"], layers=[0])
    step(recorder, [("a", 0, 1)])
    step(recorder, [("a", 1, 3)], drafts=[2])
    for position in range(2, 22):
        step(recorder, [("a", position, 1)])
    recorder.miss_step()
    lost = [p for event in recorder.outbox if isinstance(event, Lost) for p in event.position.tolist()]
    assert lost and min(lost) == 22


def test_the_end_reaches_the_sender_whatever_the_device_says(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(Recorder, "flush", failing)
    monkeypatch.setattr(worker, "CURRENT", SimpleNamespace(sender=SimpleNamespace(close=lambda: closed.append(True)),
                                                           recorder=recorder_on(ring), pid=os.getpid()))
    worker.stop()
    assert closed


def test_an_engine_that_rests_in_mid_request_keeps_nothing_back(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_on(ring)
    opened(recorder, "a", sites=["mlp_out"])
    monkeypatch.setattr(worker, "CURRENT", SimpleNamespace(recorder=recorder))
    for position in range(10):
        step(recorder, [("a", position, 1)])
    assert scheduler._has_work(lambda self: True)(None)
    assert sum(event.steps for event in recorder.outbox if isinstance(event, Run)) < 10, "no burst: this shows nothing"
    assert not scheduler._has_work(lambda self: False)(None)
    assert sum(event.steps for event in recorder.outbox if isinstance(event, Run)) == 10


def test_one_kernel_is_compiled_at_a_time(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, names = threading.Event(), list[str]()

    def slow(identity: str, *_: Any) -> None:
        names.append(identity)
        hold.wait(10)

    monkeypatch.setattr(kernels, "supported", lambda *a: True)
    monkeypatch.setattr(kernels, "warm", slow)
    recorder = recorder_on(ring)
    cache = KernelCache(recorder.staging, True, recorder.layouts.forget)
    before = threading.active_count()
    for k in range(1, 400):
        cache.compile_later(f"topk:k={k}", "resid_post")
    threads = threading.active_count() - before
    hold.set()
    assert threads == 1 and len(cache._requested) == 256
    while len(names) < 256:  # all of them, one after the other
        hold.wait(0.01)


def test_a_kernel_that_came_serves_a_burst_that_goes_on(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, used, layout_of = recorder_on(ring), list[int](), block.layout_of
    opened(recorder, "a", sites=["mlp_out"])

    def with_kernel(*args: Any) -> block.EntryLayout:
        found = layout_of(*args)
        found.kernel = lambda *_: used.append(1)
        return found

    for position in range(40):
        if position == 5:
            monkeypatch.setattr("engine_side.step.layouts.layout_of", with_kernel)
            recorder.layouts.forget("raw")
        step(recorder, [("a", position, 1)])
        release(recorder)
    assert len(used) > 15
    assert recorder.counters.steps == 40


def test_a_step_knows_the_bytes_that_all_its_sites_make(ring: Ring) -> None:
    recorder = recorder_on(ring)
    opened(recorder, "a", 10)
    step(recorder, [("a", 0, 10)])
    made = sum(size for event in recorder.outbox if isinstance(event, Run) for _, size in event.extents.values())
    assert made == 10 * 6 * 64
    assert made <= 10 * recorder.schedule.bytes_a_token < 1.5 * made


def test_drafts_of_a_step_long_ago_do_not_decide_what_a_missed_step_loses(ring: Ring) -> None:
    recorder = recorder_on(ring)
    opened(recorder, "a", 2, layers=[1], sites=["resid_post"])
    step(recorder, [("a", 0, 2)])
    step(recorder, [("b", 9, 3)], drafts=[2])  # nobody captures it, and "a" waits
    for position in range(2, 9):
        step(recorder, [("a", position, 1)])
    release(recorder)
    recorder.miss_step()
    assert [event.position.tolist() for event in recorder.outbox if isinstance(event, Lost)] == [[9, 10]]
