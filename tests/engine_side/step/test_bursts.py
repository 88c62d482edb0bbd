"""Bursts: whatever steps come and however little room there is, each wanted row is handed over once, or named as lost.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_side.front.ticket import Ticket
from engine_side.step.capture_lifecycle import End
from engine_side.step.recorder import Recorder
from engine_side.step.selection import Step
from engine_side.tap.staging import Staging
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import Counted, Finished, Run
from engine_side.transport.ring import Ring
from schemas.ids import new_ulid
from schemas.spec import Armed, parse_spec, resolve
from tests.support.engines.late_copies import HOST, Copies, late_to_host
from tests.support.engines.taken_rows import (
    ARMED,
    LAYERS,
    SPECS,
    TOKENS,
    WIDTH,
    Row,
    Seen,
    staging,
    ticket_of,
    token_of,
    wanted,
    write,
)

kernel_test = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1",
                                 reason="run by tests/engine_side/kernels/test_kernels.py")


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    found = Ring(1 << 16, pinned=False)
    yield found
    found.close()


# In Triton's interpreter an example takes a quarter of a second; the other of these runs in 200 without it.
@settings(max_examples=30 if os.environ.get("TRITON_INTERPRET") == "1" else 200, deadline=None)
@given(
    requests=st.lists(st.tuples(st.sampled_from(SPECS), st.integers(1, 12), st.integers(1, 30), st.integers(0, 10)),
                      min_size=1, max_size=6),
    stalls=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.integers(1, 9)), max_size=8),
    full=st.booleans(),
    has_prompt=st.sets(st.integers(0, 69)), alone=st.booleans(), ahead=st.booleans(), lasting=st.booleans(),
    late=st.none() | st.tuples(st.sampled_from([4096, 8192, 1 << 15]), st.lists(st.integers(0, 5), min_size=70)),
    batches=st.sampled_from([1, 1, 2, 3]),
)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=kernel_test)])
def test_every_row_once_or_lost(
    ring: Ring, compiled: bool, requests: list[tuple[dict[str, object] | None, int, int, int]],
    stalls: list[tuple[int, int, int]], full: bool, has_prompt: set[int], alone: bool, ahead: bool, lasting: bool,
    late: tuple[int, list[int]] | None, batches: int
) -> None:
    """Requests (spec, prompt, answer, step at which they come); a stall (request, step, steps) holds one back; rows of
    steps with a prompt, and ``ahead`` of others that are selected anew, are taken with the next call, of any kind.
    ``lasting``: token ids and positions lie in the same memory in every step, as runners on a GPU have them.
    ``late``: bytes of scratch before the ring, and how many copies between them are made after each step.
    ``batches``: that are under way at once, as a pipeline has them: requests are in one each.
    """
    ring.shared.tail = ring.head
    armed = staging()
    with late_to_host(ring, late[0]) if late else nullcontext((DeviceToHost(HOST, ring), None)) as (to_host, copies):
        recorder = Recorder(armed, "float32", "drop", to_host, alone, alone and ahead, batches=batches)
        recorder.layouts.kernel_cache.on_device = False  # nothing is compiled beside the steps
        if compiled:
            recorder.layouts.kernel_cache.ready.add(("raw", WIDTH))
        play(recorder, armed, requests, stalls, full, has_prompt, lasting, copies, late[1] if late else [])


def play(recorder: Recorder, armed: Staging, requests: list[tuple[dict[str, object] | None, int, int, int]],
         stalls: list[tuple[int, int, int]], full: bool, has_prompt: set[int], lasting: bool, copies: Copies | None,
         pace: list[int]) -> None:
    """Seventy steps, and what came of them held against what was asked."""
    ring = recorder.to_host.ring
    kept = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, dtype=torch.int32)
    tickets: dict[int, Ticket] = {}
    done = dict.fromkeys(range(len(requests)), 0)
    asked, seen = Counter[Row](), Seen(ring, full)

    for number in range(70):
        held = {i for i, begin, n in stalls if begin <= number < begin + n}
        batch = [i for i, (_, prompt, answer, at) in enumerate(requests)
                 if at <= number and done[i] < prompt + answer and i not in held
                 and i % recorder.bursts.batches == number % recorder.bursts.batches]
        for i in batch:
            spec, prompt, _, _ = requests[i]
            if done[i] == 0 and spec is not None:
                tickets[i] = ticket_of(spec)
                recorder.open(str(i), tickets[i], [1] * prompt, 0)
        counts = [requests[i][1] if done[i] == 0 else 1 for i in batch]
        rows = [(i, done[i] + k) for i, count in zip(batch, counts, strict=True) for k in range(count)]
        recorder.before_step(len(rows), number in has_prompt)
        if rows:
            tokens = [token_of(i, p) for i, p in rows]
            write(armed, tokens)
            names, first = [str(i) for i in batch], np.array([done[i] for i in batch], np.int32)
            positions, ids = torch.tensor([p for _, p in rows]), torch.tensor(tokens, dtype=torch.int32)
            if lasting:
                positions, ids = (to[: len(rows)].copy_(it) for to, it in zip(kept, (positions, ids), strict=True))
            # A seam asks first, with whatever lies behind its numbers.
            taken = number % 2 and recorder.bursts.take_next(names, np.append(first, first[-1:]), len(rows), ids,
                                                             positions, number)
            if not taken:
                recorder.after_step(Step(names, np.cumsum([0, *counts]), first, positions, ids, number=number))
        for i, p in rows:
            if i in tickets:
                asked.update(wanted(i, tickets[i], requests[i][1], p))
        for i, count in zip(batch, counts, strict=True):
            done[i] += count
        if number in (7, 20):
            recorder.flush()
            assert all(recorder.captures.computed[slot] == done[int(request)]
                       for request, slot in recorder.captures.slot_of.items())
        for i in batch:
            _, prompt, answer, _ = requests[i]
            if done[i] >= prompt + answer and i in tickets:
                recorder.finish(End(str(i), tickets[i], "length", None, [1] * prompt, [1] * answer, done[i]))
        if copies is not None:
            copies.make(copies.made + pace[number])
        if number % 5 == 0:
            seen.take(recorder.outbox)
    recorder.flush()
    if copies is not None:
        copies.make(copies.begun)
    seen.take(recorder.outbox)
    assert not recorder.outbox and not recorder.to_host.waiting
    assert all(isinstance(event, Finished | Counted) for event in seen.others)
    assert seen.rows == asked
    assert recorder.counters.failures == 0


@pytest.mark.parametrize(("steps", "expected"), [
    ([("a", 6), ("b", 7), ("b", 8)], [("a", 6), ("b", 7), ("b", 8)]),  # another request, as far as the burst would be
    ([("a", 6), ("a", 7), ("a", 7), ("a", 8)], [("a", 6), ("a", 7), ("a", 7), ("a", 8)]),  # computed again
])
def test_what_is_no_next_step_ends_a_burst(
    ring: Ring, steps: list[tuple[str, int]], expected: list[tuple[str, int]]
) -> None:
    ring.shared.tail = ring.head
    staging = Staging({site: torch.zeros(LAYERS, TOKENS, WIDTH) for site in ARMED.sites}, ARMED.sites)
    recorder = Recorder(staging, "float32", "drop", DeviceToHost(torch.device("cpu"), ring))
    for name in ("a", "b"):
        spec = parse_spec({"codec": "raw", "layers": [0], "sites": ["mlp_out"], "id": new_ulid()})
        recorder.open(name, Ticket(str(spec.id), spec.to_json(), resolve(spec, ARMED), 0, 1, 1), [1], 0)
    for name, position in steps:
        positions = torch.tensor([position])
        recorder.before_step(1)
        recorder.after_step(Step([name], np.array([0, 1]), np.array([position]), positions, positions.to(torch.int32)))
    recorder.flush()
    names = {slot: name for name, slot in recorder.captures.slot_of.items()}
    found = [(names[int(run.slot[0])], int(run.position[0]) + k)
             for run in recorder.outbox if isinstance(run, Run) for k in range(run.steps)]
    assert found == expected
    assert {name: int(recorder.captures.computed[slot]) for slot, name in names.items()} == {
        name: max((p + 1 for n, p in steps if n == name), default=0) for name in ("a", "b")}


def test_rows_tell_the_step_that_computed_them_in_bursts_too(ring: Ring) -> None:
    """Steps in which nobody asks for anything are counted, and end what comes before them."""
    ring.shared.tail = ring.head
    recorder = Recorder(staging(), "float32", "drop", DeviceToHost(torch.device("cpu"), ring))
    recorder.open("a", ticket_of({"codec": "raw"}), [1], 0)
    steps = [(number, number) for number in range(7)] + [(9, 7), (10, 8), (11, 9)]
    for number, position in steps:
        at = torch.tensor([position])
        if number == 9:
            recorder.end_burst()
        recorder.before_step(1)
        recorder.after_step(Step(["a"], np.array([0, 1]), np.array([position], np.int32), at, at.int(), number=number))
    recorder.flush()
    runs = [event for event in recorder.outbox if isinstance(event, Run)]
    assert any(run.steps > 2 for run in runs)
    for site in {run.entry.site for run in runs}:
        assert [(run.number + k, int(run.position[0]) + k) for run in runs if run.entry.site == site
                for k in range(run.steps)] == steps


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("batches", [2, 3])
def test_batches_in_turns_are_chosen_anew_no_more_often_than_one(batches: int, empty: bool) -> None:
    """Each goes on with its own burst, and its rows tell the steps that computed them; ``empty``: steps in which nobody
    takes part come in between.
    """
    ring = Ring(1 << 20, pinned=False)

    def chosen(groups: list[list[str]], batches: int) -> tuple[int, dict[str, list[tuple[int, int]]]]:
        to_host = DeviceToHost(torch.device("cpu"), ring)
        recorder = Recorder(staging(), "float32", "drop", to_host, batches=batches)
        for name in [name for group in groups for name in group]:
            recorder.open(name, ticket_of({"codec": "raw", "sites": ["mlp_out"]}), [1], 0)
        number, found = 0, dict[str, list[tuple[int, int]]]()
        for position in range(1, 41):
            for group in groups:
                number += 1
                at = torch.full((len(group),), position)
                recorder.before_step(len(group))
                first = np.full(len(group), position, np.int32)
                if not recorder.bursts.take_next(group, first, len(group), at.int(), at, number):
                    recorder.after_step(Step(group, np.arange(len(group) + 1), first, at, at.int(), number=number))
                if empty:
                    number += 1
                    recorder.before_step(0)
        recorder.flush()
        names = {slot: name for name, slot in recorder.captures.slot_of.items()}
        for run in recorder.outbox:
            if isinstance(run, Run):
                for row, slot in enumerate(run.slot.tolist()):
                    found.setdefault(names[slot], []).extend(
                        (run.number + run.pace * step, int(run.position[row]) + step) for step in range(run.steps))
        return recorder.chosen, found

    groups = [[f"{batch}{request}" for request in "ab"] for batch in range(batches)]
    several, found = chosen(groups, batches)
    assert several == batches * chosen(groups[:1], batches)[0] == batches
    every = 2 if empty else 1
    for batch, group in enumerate(groups):
        for name in group:
            assert found[name] == [(every * (batches * step + batch) + 1, step + 1) for step in range(40)]
    ring.close()


def test_the_region_of_a_burst_is_free_when_all_of_it_is(ring: Ring) -> None:
    """It is freed up to a mark once those before it are: that of its last entry alone is its end."""
    ring.shared.tail = ring.head
    recorder = Recorder(staging(), "float32", "drop", DeviceToHost(torch.device("cpu"), ring))
    recorder.open("a", ticket_of({"codec": "raw"}), [1], 0)
    for position in range(3):
        at = torch.tensor([position])
        recorder.before_step(1)
        recorder.after_step(Step(["a"], np.array([0, 1]), np.array([position], np.int32), at, at.int()))
    recorder.flush()
    runs = [event for event in recorder.outbox if isinstance(event, Run)]
    assert len(runs) > 1 and [run.mark[0] == ring.head for run in runs] == [False] * (len(runs) - 1) + [True]


def test_a_burst_goes_on_with_the_next_positions_of_the_same_requests_alone(ring: Ring) -> None:
    ring.shared.tail = ring.head
    staging = Staging({"resid_post": torch.zeros(LAYERS, TOKENS, WIDTH)}, {"resid_post": [0, 1, 2]})
    recorder = Recorder(staging, "float32", "drop", DeviceToHost(torch.device("cpu"), ring))
    spec = parse_spec({"codec": "raw", "layers": [1]})
    for name in "ab":
        ticket = Ticket(new_ulid(), spec.to_json(), resolve(spec, Armed({"resid_post": [0, 1, 2]}, LAYERS)), 0, 1, 1)
        recorder.open(name, ticket, [1] * 5, 0)

    def goes_on(names: list[str], first: list[int], rows: int = 2) -> bool:
        at = torch.tensor(first)
        return recorder.bursts.take_next(names, np.array(first, np.int32), rows, at.int(), at)

    def begin(first: list[int]) -> None:
        recorder.before_step(2)
        at = torch.tensor(first)
        recorder.after_step(Step(["a", "b"], np.array([0, 1, 2]), np.array(first, np.int32), at, at.int()))

    assert not goes_on(["a", "b"], [5, 9])
    begin([5, 9])
    for step in range(1, 60):  # over several bursts, and more steps than are looked ahead
        assert goes_on(["a", "b"], [5 + step, 9 + step, *[0] * (step % 3)]), step
    wrong = ((["a", "b"], [2, 1], 2), (["a", "b"], [1, 2], 2), (["b", "a"], [1, 1], 2), (["a", "b", "c"], [1, 1, 1], 2),
             (["a"], [1], 1), (["a", "b"], [1, 1], 3))
    for at, (names, more, rows) in enumerate(wrong):
        a, b = 70 + 10 * at, 170 + 10 * at
        begin([a, b])
        assert not goes_on(names, [a + more[0], *(b + one for one in more[1:])], rows)
        assert not goes_on(["a", "b"], [a + 1, b + 1]), "what did not go on has ended"
        begin([a + 2, b + 2])
        assert goes_on(["a", "b"], [a + 3, b + 3])
