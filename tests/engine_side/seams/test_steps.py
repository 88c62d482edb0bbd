"""Steps as both runners lay them out, through the seam: whatever fails in one, each wanted row comes once or is lost.

The kernels are stand-ins that keep the addresses they were made with, as launches by the driver do.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_side import kernels, worker
from engine_side.front.ticket import KEY, Ticket, encode
from engine_side.seams import runner
from engine_side.seams.scheduler import FINISHED
from engine_side.step import bursts, copy_schedule, recorder
from engine_side.step.capture_lifecycle import End
from engine_side.step.recorder import Recorder
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import Counted
from engine_side.transport.ring import Ring, view
from engine_side.transport.shared_memory import Outbox
from schemas.wire.messages import TapCounters
from tests.support.engines.taken_rows import SPECS, TOKENS, Row, Seen, staging, ticket_of, token_of, wanted, write

OURS = str(Path(worker.__file__).parent)
STEPS = 112  # the last request begins in step 10, has 46 steps, and is stalled for 54 at most
at_steps = st.sets(st.integers(0, STEPS - 1))


def patch_clock(patch: pytest.MonkeyPatch, clock: SimpleNamespace) -> None:
    """The recorder's clock, in all its modules."""
    for module in (recorder, bursts, copy_schedule):
        patch.setattr(module, "time", clock)


@dataclass
class Trouble:
    """After how many more calls each thing fails, once; 0: it does not."""

    left: dict[str, int] = field(default_factory=dict)

    def meet(self, where: str) -> None:
        if left := self.left.get(where, 0):
            self.left[where] = left - 1
            if left == 1:
                raise RuntimeError(f"{where} fails, as it is to")


def _behind(numbers: torch.Tensor) -> torch.Tensor:
    """Everything from where it begins to the end of its memory: a launch knows addresses, not how much there is."""
    size = numbers.untyped_storage().nbytes() // numbers.element_size() - int(numbers.storage_offset())
    return numbers.as_strided((size,), (1,))


class Kept:
    """A launch with the addresses that it was made with."""

    def __init__(self, trouble: Trouble, source: kernels.StagedRows, memory: torch.Tensor, offsets: list[int],
                 begins: Any) -> None:
        trouble.meet("bind")
        self.trouble, self.memory, self.offsets = trouble, memory, list(offsets)
        self.source = replace(source, token_ids=_behind(source.token_ids), positions=_behind(source.positions))
        self.table = np.full(len(begins), -1, np.int64)
        self.move(begins)

    def aim(self, rows: Any, n: int, offsets: list[int], begins: Any) -> bool:
        if len(begins) > len(self.table) or n % 3 == 0:  # whatever it is that it cannot do
            return False
        self.source, self.offsets = replace(self.source, rows=rows, n=n), list(offsets)
        self.move(begins)
        return True

    def move(self, begins: Any) -> None:
        assert len(begins) <= len(self.table)
        self.table[: len(begins)] = begins

    def __call__(self, step: int) -> None:
        self.trouble.meet("launch")
        begin, source = int(self.table[step]), self.source
        assert begin >= 0
        rows = torch.arange(source.rows, source.rows + source.n) if isinstance(source.rows, int) else source.rows
        x = source.buffer[source.layers.long()][:, rows]
        for offset, made in zip(self.offsets, (x, source.token_ids[rows].int(), source.positions[rows]), strict=True):
            view(self.memory, begin + offset, tuple(made.shape), made.dtype).copy_(made)


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    found = Ring(1 << 15, pinned=False)
    yield found
    found.close()


class Runner:
    """Arrays as a runner of either kind keeps them; what lies behind a step's own numbers means nothing."""

    def __init__(self, second: bool) -> None:
        self.second, self.requests = second, list[str]()
        self.first, self.starts = np.zeros(64, np.int32), np.zeros(65, np.int32)
        self.ids, self.positions = torch.zeros(TOKENS, dtype=torch.int32), torch.zeros(TOKENS, dtype=torch.int64)

    def step(self, rows: list[tuple[int, int]], batch: list[int], counts: list[int], first: list[int], fresh: bool
             ) -> Any:
        """The runner after a step; ``fresh``: its tensors are others than before."""
        n, ids = len(batch), torch.tensor([token_of(*row) for row in rows]).int()
        positions = torch.tensor([position for _, position in rows])
        self.requests[:] = map(str, batch)  # the first runner changes its list in place
        self.first[:n], self.first[n:] = first, 77
        self.starts[: n + 1], self.starts[n + 1 :] = np.cumsum([0, *counts]), len(rows)
        if not fresh:
            self.ids[: len(rows)], self.positions[: len(rows)] = ids, positions
            ids, positions = self.ids, self.positions
        if not self.second:
            return SimpleNamespace(
                input_batch=SimpleNamespace(req_ids=self.requests, num_reqs=n, num_computed_tokens_cpu=self.first),
                query_start_loc=SimpleNamespace(np=self.starts), input_ids=SimpleNamespace(gpu=ids),
                positions=positions)
        batch_of = SimpleNamespace(
            req_ids=list(self.requests), num_reqs=n, query_start_loc_np=self.starts[: n + 1].copy(),
            num_computed_tokens_np=self.first[:n].copy(), input_ids=ids[: len(rows)], positions=positions[: len(rows)])
        return SimpleNamespace(execute_model_state=SimpleNamespace(input_batch=batch_of), num_speculative_steps=0,
                               scheduler_config=SimpleNamespace(async_scheduling=True))


def scheduled(tokens: int, requests: int = 0, new: Sequence[Any] = (), ended: Sequence[End] = ()) -> Any:
    """What the scheduler says of a step; of more tokens than requests: one with prompts."""
    return SimpleNamespace(
        scheduled_new_reqs=new, scheduled_spec_decode_tokens={}, total_num_scheduled_tokens=tokens,
        num_scheduled_tokens=dict.fromkeys(map(str, range(requests)), 1),
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()), **({FINISHED: ended} if ended else {}))


def request(name: str, ticket: Ticket, prompt: int, computed: int = 0) -> Any:
    """One that begins, as the scheduler says it."""
    return SimpleNamespace(req_id=name, num_computed_tokens=computed, prompt_token_ids=[1] * prompt,
                           sampling_params=SimpleNamespace(extra_args={KEY: encode(ticket)}))


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(st.tuples(st.sampled_from(SPECS), st.integers(1, 12), st.integers(1, 45), st.integers(0, 10)),
                      min_size=1, max_size=6),
    stalls=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.integers(1, 9)), max_size=6),
    fails=st.dictionaries(st.integers(0, STEPS - 1),
                          st.tuples(st.sampled_from(["launch", "room", "bind"]), st.integers(1, 4)), max_size=6),
    missed=st.sets(st.integers(0, STEPS - 1), max_size=3), turned=st.sets(st.integers(0, STEPS - 1), max_size=4),
    has_prompt=at_steps, forgotten=at_steps, slow=at_steps, fresh=at_steps,
    full=st.booleans(), second=st.booleans(), compiled=st.booleans(), ahead=st.booleans(),
)
def test_every_row_once_or_lost(
    ring: Ring, requests: list[tuple[dict[str, object] | None, int, int, int]], stalls: list[tuple[int, int, int]],
    fails: dict[int, tuple[str, int]], missed: set[int], turned: set[int], has_prompt: set[int], forgotten: set[int],
    slow: set[int], fresh: set[int], full: bool, second: bool, compiled: bool, ahead: bool,
) -> None:
    """Requests (spec, prompt, answer, step at which they come). In ``missed`` steps the runner cannot be read; in
    ``turned`` ones requests stand in another order; ``slow`` ones take long; ``forgotten``: a kernel came before.
    """
    now, trouble, patch = [0.0], Trouble(), pytest.MonkeyPatch()
    patch.setattr(runner, "_look_at", lambda *_: None)
    patch.setattr(kernels, "launch", lambda _codec, *args: Kept(trouble, *args))
    patch_clock(patch, SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    ring.shared.tail = ring.head
    armed, to_host = staging(), DeviceToHost(torch.device("cpu"), ring)
    room = to_host.reserve

    def narrow(base: int, nbytes: int) -> tuple[torch.Tensor, int]:
        trouble.meet("room")
        return room(base, nbytes)

    patch.setattr(to_host, "reserve", narrow)
    taken = Recorder(armed, "float32", "drop", to_host)
    patch.setattr(taken.layouts.kernel_cache, "has", lambda _codec, _site: compiled)
    patch.setattr(taken.layouts.kernel_cache, "compile_later", lambda _codec, _site: None)
    patch.setattr(worker, "CURRENT", SimpleNamespace(recorder=taken, editor=None))
    laid, layout = Runner(second), runner._layout_v2 if second else runner._layout_v1
    tickets: dict[int, Ticket] = {}
    unseen, ended = set[int](), list[End]()  # the first: requests whose begin was missed
    done, asked, seen = dict.fromkeys(range(len(requests)), 0), Counter[Row](), Seen(ring, full)
    try:
        for number in range(STEPS):
            now[0] += 0.05 if number in slow else 0.001
            if number in fails:
                trouble.left[fails[number][0]] = fails[number][1]
            held = {i for i, begin, n in stalls if begin <= number < begin + n}
            batch = [i for i, (_, prompt, answer, at) in enumerate(requests)
                     if at <= number and done[i] < prompt + answer and i not in held]
            if number in turned:
                batch.reverse()
            new: list[Any] = []
            for i in batch:
                spec, prompt, _, _ = requests[i]
                if done[i] == 0 and spec is not None:
                    tickets[i] = ticket_of(spec)
                    new.append(request(str(i), tickets[i], prompt))
                    unseen |= {i} if number in missed else set()
            counts = [requests[i][1] if done[i] == 0 else 1 for i in batch]
            rows = [(i, done[i] + k) for i, count in zip(batch, counts, strict=True) for k in range(count)]
            if number in forgotten:
                taken.layouts.forget("raw")
            taken.defer_to_next_call, taken.async_scheduling = number in has_prompt, ahead

            def model(ran: Any, _: Any, number: int = number, rows: Any = rows, batch: Any = batch,
                      counts: Any = counts) -> None:
                if rows:
                    write(armed, [token_of(*row) for row in rows])
                    of = laid.step(rows, batch, counts, [done[i] for i in batch], number in fresh - has_prompt)
                    vars(ran).update({} if number in missed else vars(of))

            before = taken.counters.failures
            runner._execute_model(model, layout)(SimpleNamespace(), scheduled(len(rows), new=new, ended=ended))
            ended = []
            assert number not in missed or not rows or not taken.captures or taken.counters.failures > before
            for i, position in rows if number not in missed else ():
                if i in tickets and i not in unseen:
                    asked.update(wanted(i, tickets[i], requests[i][1], position))
            for i, count in zip(batch, counts, strict=True):
                done[i] += count
                if done[i] >= requests[i][1] + requests[i][2] and i in tickets:
                    ended.append(End(str(i), tickets[i], "length", None, [1] * requests[i][1],
                                     [1] * requests[i][2], done[i]))
            if number % 5 == 0:
                seen.take(taken.outbox)
        runner._execute_model(lambda *_: None, layout)(SimpleNamespace(), scheduled(0, ended=ended))
        taken.flush()
        seen.take(taken.outbox)
        assert seen.rows == asked and not taken.captures
        assert fails or missed or taken.counters.failures == 0
    finally:
        patch.undo()


@dataclass
class One:
    """A recorder under a runner with one request, which an idle engine has had before."""

    patch: pytest.MonkeyPatch
    ring: Ring
    second: bool
    late: bool = False
    outbox: Outbox | None = None
    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.patch.setattr(kernels, "launch", lambda _codec, *args: Kept(Trouble(), *args))
        patch_clock(self.patch, SimpleNamespace(monotonic=lambda: self.now, sleep=self.slept.append))
        self.patch.setattr(runner, "_look_at", lambda *_: None)
        self.ring.shared.tail = self.ring.head
        self.staging = staging()
        to_host = DeviceToHost(torch.device("cpu"), self.ring, outbox=self.outbox)
        self.taken = Recorder(self.staging, "float32", "drop", to_host,
                              defer_to_next_call=self.late, async_scheduling=self.late)
        self.patch.setattr(self.taken.layouts.kernel_cache, "has", lambda _codec, _site: True)
        self.patch.setattr(self.taken.layouts.kernel_cache, "compile_later", lambda _codec, _site: None)
        self.patch.setattr(worker, "CURRENT", SimpleNamespace(recorder=self.taken, editor=None))
        self.laid = Runner(self.second)
        assert self.step(0)[:2] == ["execute_model", "before_step"]
        assert self.step(1) == ["execute_model"], "an engine that captures nothing"

    def step(self, position: int, rows: int = 1, new: Sequence[Any] = (), ended: Sequence[End] = ()) -> list[str]:
        """A step of a millisecond; which of our functions it entered."""
        self.now += 0.001
        found: list[str] = []

        def seen(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(OURS):
                found.append(frame.f_code.co_name)

        def model(ran: Any, _: Any) -> None:
            sys.setprofile(None)
            tokens = [(0, position + k) for k in range(rows)]
            write(self.staging, [token_of(*token) for token in tokens])
            vars(ran).update(vars(self.laid.step(tokens, [0], [rows], [position], False)))
            sys.setprofile(seen)

        execute = runner._execute_model(model, runner._layout_v2 if self.second else runner._layout_v1)
        ran, output = SimpleNamespace(), scheduled(rows, 1, new, ended)
        sys.setprofile(seen)
        try:
            execute(ran, output)
        finally:
            sys.setprofile(None)
        return found

    @property
    def told(self) -> list[TapCounters]:
        """What the sender was told of counters."""
        assert isinstance(self.taken.outbox, deque)
        return [event.counters for event in self.taken.outbox if isinstance(event, Counted)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_step_enters_few_functions(ring: Ring, monkeypatch: pytest.MonkeyPatch, second: bool, late: bool) -> None:
    """Each costs some microseconds, as what a step of three milliseconds finds in its caches is the model's."""
    one, ticket = One(monkeypatch, ring, second, late), ticket_of({"codec": "raw", "layers": [1], "sites": ["mlp_out"]})
    one.step(2, new=[request("0", ticket, 3, 2)])
    steps = [one.step(position) for position in range(3, 40)]
    burst = ["execute_model", "before_step", "_after", "_layout_v2" if second else "_layout_v1", "take_next",
             "continues_with", "_encode_next", "encode", *["view"] * 3]  # the last are the stand-in's
    assert steps.count(burst) > len(steps) * 3 // 4, steps
    assert "finish" in one.step(40, ended=[End("0", ticket, "length", None, [1] * 3, [1] * 37, 40)])
    assert one.step(41) != ["execute_model"], "what was counted is still to be told"
    one.now += 1.0
    one.step(42)
    assert one.told[-1] == one.taken.counters and one.taken.counters.rows == 38
    assert one.step(43) == ["execute_model"]


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_capture_that_begins_in_an_idle_engine_has_all_its_rows(
    ring: Ring, monkeypatch: pytest.MonkeyPatch, second: bool, late: bool
) -> None:
    """Where rows are taken with the next step, that must look whether there are any."""
    one, ticket = One(monkeypatch, ring, second, late), ticket_of({"codec": "raw"})
    one.step(0, rows=6, new=[request("0", ticket, 6)])
    for position in range(6, 12):
        one.step(position)
    one.step(12, ended=[End("0", ticket, "length", None, [1] * 6, [1] * 7, 12)])
    seen = Seen(ring, False)
    seen.take(one.taken.outbox)
    assert seen.rows == Counter(row for position in range(12) for row in wanted(0, ticket, 6, position))
    assert one.taken.counters.dropped == 0 and one.taken.counters.rows == 12 * 6


def test_tokens_are_sent_before_rows_are_taken_late(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sends first tokens gets the interpreter; where there is nothing to take, nobody waits for it."""
    one, ticket = One(monkeypatch, ring, second=True, late=True), ticket_of({"codec": "raw"})
    one.step(0, rows=6, new=[SimpleNamespace(req_id="0", sampling_params=SimpleNamespace(extra_args=None))])
    assert one.step(6) == ["execute_model"] and not one.slept
    one.step(0, rows=6, new=[request("0", ticket, 6)])
    slept = []
    for position in range(6, 20):
        one.step(position)
        slept.append(len(one.slept))
    assert slept == [1, *[2] * 13], "with the rows of the prompt, and of the step in which its token goes out"
    assert max(one.slept) < 1e-3


@pytest.mark.parametrize("positions", ["prompt", "all"])
def test_counters_are_told_while_a_burst_goes_on(ring: Ring, monkeypatch: pytest.MonkeyPatch, positions: str) -> None:
    """Also where nothing is wanted any more, and it goes on for as long as the batch does."""
    one = One(monkeypatch, ring, second=True)
    one.step(0, rows=6, new=[request("0", ticket_of({"codec": "raw", "positions": positions}), 6)])
    for position in range(6, 12):
        one.step(position)
    assert not one.told
    one.now += 1.0
    for position in range(12, 32):
        one.step(position)
    assert one.told[-1].rows >= 6 * 6


def test_what_found_no_room_goes_out_with_the_next_steps(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, outbox = ring.shared, Outbox(ring.shared)
    shared.taken = shared.put
    one, ticket = One(monkeypatch, ring, second=True, outbox=outbox), ticket_of({"codec": "raw"})
    # One that never ran is begun and ended.
    end = End("0", ticket, "length", None, [1] * 3, [70_000] * 2_000_000, 40)
    assert "finish" in one.step(2, ended=[end])
    assert outbox.overflow and shared.put > shared.taken
    for position in range(3, 99):
        if not outbox.overflow:
            break
        assert one.step(position) != ["execute_model"], "nobody would send what is left"
        shared.taken = shared.put
    assert not outbox.overflow
    one.now += 1.0
    one.step(99)
    assert one.step(100) == ["execute_model"]


@pytest.mark.parametrize("where", ["open", "layout"])
def test_failures_of_an_idle_engine_are_told(ring: Ring, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    one = One(monkeypatch, ring, second=True)
    monkeypatch.setattr(*{"open": (Recorder, "open"), "layout": (runner, "_layout_v2")}[where], lambda *_: 1 / 0)
    one.step(2, new=[request("0", ticket_of({"codec": "raw"}), 3, 2)])
    one.now += 1.0
    one.step(3)
    assert one.told[-1].failures == one.taken.counters.failures > 0
    assert one.step(4) == ["execute_model"]
