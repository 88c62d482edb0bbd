"""The recorder: a worker's part in every step — select rows, encode them, copy them to the host, hand them over.

Nothing here touches a socket or a file, and no failure here reaches the step: it is counted, logged once, and the
rows are reported as dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Final

import numpy as np

from engine_side.edits.edited import Edited
from engine_side.front.ticket import Ticket
from engine_side.step.bursts import Bursts
from engine_side.step.capture_lifecycle import CaptureLifecycle, End
from engine_side.step.copy_schedule import CopySchedule
from engine_side.step.layouts import Layouts
from engine_side.step.selection import CaptureTable, Selected, Step
from engine_side.tap.staging import Staging
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import I64, Entry, Event, Lost
from engine_side.transport.shared_memory import Outbox
from schemas.wire.engine_info import Divided
from schemas.wire.layout import Part
from schemas.wire.messages import TapCounters

logger = logging.getLogger("vllm.tap")

# The tokens that the engine has just got are sent by a thread of its own, which has to wait for the interpreter. Where
# first tokens may be among them, it gets the chance before something is done that takes a while.
_YIELD_S: Final = 0.00001


@dataclass(slots=True)
class Recorder:
    """Owned by the step thread; the sender's process takes what ``outbox`` is given.

    A seam asks ``bursts.take_next`` first, then ``after_step``.
    """

    staging: Staging
    dtype: InitVar[str]  # of the model
    on_full: InitVar[str]  # "drop" or "wait": see ``bursts``
    to_host: DeviceToHost
    # Nothing overwrites staging, positions and token ids between a step and the next call of any kind: rows of a step
    # with a prompt are taken in that call, when the tokens of the step before theirs are out.
    defer_to_next_call: bool = False
    # A step's tokens are waited for behind the launch of the next: so are rows of any step that are selected anew.
    async_scheduling: bool = False
    number: int = 0  # of the engine's last step: every rank counts those of others' requests too
    idle: bool = False  # nothing is captured, and nothing waits: a step in which no request begins needs no call
    captures: CaptureTable = field(default_factory=CaptureTable)
    counters: TapCounters = field(default_factory=TapCounters)
    layouts: Layouts = field(init=False)
    schedule: CopySchedule = field(init=False)
    bursts: Bursts = field(init=False)
    lifecycle: CaptureLifecycle = field(init=False)
    steps_since_prompt: int = 2  # 0: the last step had one; 2 and more are long ago
    deferred_step: Step | None = None  # its rows are still to be taken
    chosen: int = 0  # steps whose rows were chosen anew
    drafts_max: int = 0  # rows of a request in a step whose positions may be taken again by the next
    computed_before_step: I64 | None = None  # of the step that is being looked at, where it has drafts
    part: InitVar[Part | None] = None  # what this rank sends; None on an engine of one rank
    layers: InitVar[Mapping[str, list[int]] | None] = None  # of each site that the engine has; None: as staging has
    counted: InitVar[Mapping[str, list[int]] | None] = None  # see CaptureLifecycle
    batches: InitVar[int] = 1  # under way at once, of different requests: the stages of a pipeline
    divided: InitVar[Divided | None] = None  # what other writers get; None on an engine with one

    def __post_init__(self, dtype: str, on_full: str, part: Part | None, layers: Mapping[str, list[int]] | None,
                      counted: Mapping[str, list[int]] | None, batches: int, divided: Divided | None) -> None:
        scratch, capacity = self.to_host.scratch, self.to_host.ring.capacity
        block_bytes_max = capacity // 4 if scratch is None else min(capacity // 8, scratch.capacity // 4)
        self.layouts = Layouts(self.staging, dtype, self.captures, block_bytes_max, scratch is not None)
        self.schedule = CopySchedule(self.to_host, self.counters)
        self.bursts = Bursts(self.to_host, on_full, self.counters, self.captures, self.layouts, self.schedule, batches)
        if layers is None:
            layers = {site: self.staging.layers_of(site) for site in (*self.staging.layers, *self.staging.probes)}
        self.lifecycle = CaptureLifecycle(self.to_host, self.captures, self.counters, layers, part, counted or {},
                                          divided)

    @property
    def outbox(self) -> Outbox | deque[Event]:
        """Events for the sender."""
        return self.to_host.outbox

    # ── requests come and go ────────────────────────────────────────────────────────────────────────────────────

    def open(self, request: str, ticket: Ticket, prompt_token_ids: list[int], cached: int) -> None:
        """Begin the capture of a request; see ``CaptureLifecycle.open``."""
        self.end_burst()
        self.idle = False
        self.layouts.prepare(self.lifecycle.open(request, ticket, prompt_token_ids, cached))

    def resume(self, request: str, cached: int) -> None:
        """Go on with a preempted request; see ``CaptureLifecycle.resume``."""
        self.end_burst()
        self.lifecycle.resume(request, cached)

    def finish(self, end: End, edited: Edited | None = None) -> None:
        """End the capture of a request; see ``CaptureLifecycle.finish``."""
        self.end_burst()
        self.idle = False
        self.lifecycle.finish(end, edited)

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────

    def before_step(self, tokens: int, has_prompt: bool = False) -> None:
        """Send on what waits for the host, behind the step of ``tokens`` that comes (none: the engine will rest).

        ``has_prompt``: that step waits for the host that launches it; see ``CopySchedule.send_waiting``.
        """
        if self.deferred_step is not None:
            if self.async_scheduling and self.steps_since_prompt < 2:
                time.sleep(_YIELD_S)
            self.take_deferred()
        after_prompt = self.steps_since_prompt == 0
        self.steps_since_prompt = 0 if has_prompt else self.steps_since_prompt + 1
        schedule, to_host = self.schedule, self.to_host
        if tokens == 0 and self.bursts.batches > 1 and self.captures.slot_of:
            self.bursts.hand_over_old()  # it waits for the other stages
        elif tokens == 0:
            self.bursts.end()
            schedule.flush()
        elif time.monotonic() > schedule.report_at and not self.bursts.holding:
            schedule.report()
        if to_host.waiting or to_host.overflow:
            schedule.send_waiting(tokens, has_prompt, after_prompt)
        if not self.captures.slot_of:
            self.idle = not (to_host.waiting or to_host.overflow) and self.counters == schedule.reported

    def after_step(self, step: Step) -> None:
        """Take the wanted rows of the step that was just enqueued, or defer that to the next call."""
        self.take_deferred()
        if not self.captures and step.begin is None:
            return
        self.idle = False
        if step.begin is None and step.drafts is None and self.bursts.take_next(
                step.requests, step.first, int(step.starts[-1]), step.token_ids, step.positions, step.number):
            return
        step.starts, step.first = step.starts.astype(np.int64), step.first.astype(np.int64)
        if self.defer_to_next_call and (self.async_scheduling or self.steps_since_prompt == 0):
            self.deferred_step = step
        else:
            self.bursts.end_of(step.requests)
            self._take(step)

    def take_deferred(self) -> None:
        """Take the rows of a step that was deferred."""
        step, self.deferred_step = self.deferred_step, None
        if step is None:
            return
        try:
            self.bursts.end_of(step.requests)
            self._take(step)
        except Exception:
            self.counters.failures += 1
            if self.counters.failures == 1:
                logger.exception("vllm-tap: copying a step's rows failed, so they are missing (logged once)")
            self.miss_step()

    def miss_step(self) -> None:
        """Report the drafts of a step that could not be looked at, so that those of the step before do not stay.

        Its other rows are missing by themselves.
        """
        self.end_burst()
        if not self.drafts_max:
            return
        computed, self.computed_before_step = (
            self.captures.computed if self.computed_before_step is None else self.computed_before_step), None
        for slot in self.captures.slot_of.values():
            positions = computed[slot] + np.arange(self.drafts_max)
            for entry in self.captures.plan(slot):
                self.to_host.send_event(Lost(entry, np.full(len(positions), slot), positions))

    def flush(self) -> None:
        """Leave nothing behind."""
        self.end_burst()
        self.schedule.flush()

    def end_burst(self) -> None:
        """Take what was deferred, and end the burst."""
        self.take_deferred()
        self.bursts.end()

    def _take(self, step: Step) -> None:
        """Select a step's rows; encode, copy and hand them over, as the first of a burst where they are of decode."""
        self.computed_before_step = None
        selected = self._select(step)
        if selected is not None:
            parts = self._by_entry(selected)
            if not self.bursts.begin(step, selected, parts):
                nbytes = sum(self.bursts.take_once(step, entry, rows) for entry, rows in parts)
                self.schedule.bytes_a_token = nbytes / max(1, int(step.starts[-1]))
        self.computed_before_step = None

    def _select(self, step: Step) -> Selected | None:
        """Rows that captures want, those of requests that begin with the step among them; None where none is in it."""
        if step.begin is not None:
            step.begin()
        if step.drafts is not None:
            self.drafts_max = max(self.drafts_max, int(step.drafts.max()) + step.slack)
            self.computed_before_step = self.captures.computed.copy()
        selected = self.captures.select(step.requests, step.starts, step.first, step.drafts, step.slack)
        if selected is not None:
            self.layouts.outdated = False
            self.chosen += 1
            self.counters.steps += 1
        return selected

    def _by_entry(self, selected: Selected) -> list[tuple[Entry, Selected]]:
        """Rows of each entry, those of all plans that have it together: each entry is encoded once."""
        if len(selected.row) == 0:
            return []
        plans = np.unique(selected.plan).tolist() if len(self.captures.plans) > 1 else selected.plan[:1].tolist()
        if len(plans) == 1:
            return [(entry, selected) for entry in self.captures.plans[plans[0]]]
        taking: dict[Entry, list[int]] = {}
        for plan in plans:
            for entry in self.captures.plans[plan]:
                taking.setdefault(entry, []).append(plan)
        parts = {tuple(some): selected.of_plans(some) for some in taking.values()}
        return [(entry, parts[tuple(some)]) for entry, some in taking.items()]
