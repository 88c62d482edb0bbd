"""The recorder: what a worker does once a step — choose rows, encode them into the ring, tell the sender.

Nothing here touches a socket or a file, and no failure here reaches the step: it is counted, logged once, and the
rows are reported as dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import torch

from engine_side.block import Layout, fill, layout_of
from engine_side.device import SideStream
from engine_side.events import I64, Event, Finished, Lost, Opened, Run
from engine_side.ring import Ring
from engine_side.selection import CaptureTable, Entry, Plan, Selected, plan_of
from engine_side.staging import Staging
from engine_side.ticket import Ticket
from schemas import codecs
from schemas.errors import SpecError
from schemas.spec import Resolved, parse_spec

logger = logging.getLogger("vllm.tap")

_WAIT_S: Final = 0.0005
_LAYOUTS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the model as its runner laid it out; a seam makes it.

    ``starts`` [n + 1] rows of each request, ``first`` [n] position of each request's first row (host's view, too high
    by at most ``slack``); ``positions`` and ``token_ids`` [rows] the tensors that the model really used; ``drafts``
    [n] how many of each request's last rows are guesses of speculative decoding, None for nobody.
    """

    requests: list[str]
    starts: I64
    first: I64
    positions: torch.Tensor
    token_ids: torch.Tensor
    drafts: I64 | None = None
    slack: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """A finish as the scheduler saw it (a seam carries it to the worker)."""

    request: str
    ticket: Ticket
    reason: str
    stop_reason: str | int | None
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    computed: int


@dataclass(slots=True)
class Counters:
    """What happened so far, for logs and metrics."""

    steps: int = 0
    rows: int = 0
    bytes: int = 0
    dropped: int = 0
    failures: int = 0
    position_mismatches: int = 0
    waits: int = 0


@dataclass(slots=True)
class Recorder:
    """Owned by the step thread; ``outbox`` is read by the sender thread."""

    staging: Staging
    ring: Ring
    dtype: str
    on_full: str
    side: SideStream
    outbox: deque[Event] = field(default_factory=deque)
    captures: CaptureTable = field(default_factory=CaptureTable)
    counters: Counters = field(default_factory=Counters)
    _guesses: int = 0  # the most rows of a request in a step whose positions may be taken again by the next
    _before: I64 | None = None  # what was computed before the step that is being looked at, where guesses are about
    _tickets: dict[str, str] = field(default_factory=dict)  # running request → capture id
    _layouts: dict[Entry, Layout | None] = field(default_factory=dict)  # None: its codec does not fit the site

    # ── requests come and go ────────────────────────────────────────────────────────────────────────────────────

    def open(self, request: str, ticket: Ticket, prompt_token_ids: list[int], cached: int) -> None:
        """A request is scheduled for the first time (on some runners again after a preemption)."""
        if request in self._tickets:
            self.resume(request, cached)
            return
        capture = ticket.capture_of(request)
        taken, absent = self._held_against_model(ticket.resolved)
        # "all" means what is there; a layer asked for by its number stays expected, and is named as not armed.
        by_number = absent and parse_spec(ticket.asked).layers != "all"
        resolved, absent = (ticket.resolved, absent) if by_number else (taken, {})
        slot = self.captures.open(request, taken, len(prompt_token_ids))
        self._tickets[request] = capture
        now = time.time_ns() // 1_000_000
        self.outbox.append(Opened(slot, capture, request, ticket.asked, resolved, absent, prompt_token_ids, cached,
                                  now, ticket.adapter))
        self._warm(plan_of(taken))

    def resume(self, request: str, cached: int) -> None:
        """A preempted request goes on after ``cached`` positions.

        Other requests may have filled the prefix cache further than this one had come itself: that part of its prompt
        is never computed.
        """
        slot = self.captures.slot_of.get(request)
        if slot is None or cached <= self.captures.computed[slot]:
            return
        positions = np.arange(self.captures.computed[slot], cached)
        for entry in self.captures.plan(slot):
            self.outbox.append(Lost(entry, np.full(len(positions), slot), positions, "prefix_cached"))
        self.captures.computed[slot] = cached

    def _held_against_model(self, asked: Resolved) -> tuple[Resolved, dict[str, list[int]]]:
        """What the model has of a spec, and by site the layers that it lacks.

        The front end knows the armed sites but not which layers have them: some blocks of a sparse model are dense.
        """
        has = {site: set(self.staging.layers.get(site, ())) for site in asked.layers}
        absent = {site: [layer for layer in layers if layer not in has[site]] for site, layers in asked.layers.items()}
        if not any(absent.values()):
            return asked, {}
        kept = {site: [layer for layer in layers if layer in has[site]] for site, layers in asked.layers.items()}
        return msgspec.structs.replace(asked, layers=kept), {site: layers for site, layers in absent.items() if layers}

    def finish(self, end: End) -> None:
        """A request ended; one that never ran is opened first, so that its manifest exists."""
        if end.request not in self._tickets:
            self.open(end.request, end.ticket, end.prompt_token_ids, 0)
        slot = self.captures.close(end.request)
        total = len(end.prompt_token_ids) + len(end.output_token_ids)
        seen = int(self.captures.computed[slot])
        # The last sampled token is never forwarded; under async scheduling a step more may have run. A request that is
        # aborted while it is preempted counts 0 computed tokens although its rows were taken.
        last = total - 1 if end.reason in ("stop", "length") else min(total, max(end.computed, seen))
        self.outbox.append(Finished(
            slot, self._tickets.pop(end.request), end.reason, end.stop_reason, end.output_token_ids,
            max(last, 0), int(self.captures.recomputed[slot]),
        ))

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────

    def before_step(self) -> None:
        """The next step's graph overwrites staging: it waits until this step's rows are encoded."""
        self.side.block_main()

    def after_step(self, step: Step) -> None:
        """Take the wanted rows of the step that was just enqueued."""
        if not self.captures:
            return
        if step.drafts is not None:
            self._guesses = max(self._guesses, int(step.drafts.max()) + step.slack)
            self._before = self.captures.computed.copy()
        selected = self.captures.select(step.requests, step.starts, step.first, step.drafts, step.slack)
        if selected is None:
            return
        self.counters.steps += 1
        plans = np.unique(selected.plan) if len(self.captures.plans) > 1 else selected.plan[:1]
        with self.side.after_main():
            for plan in plans:
                part = selected if len(plans) == 1 else _only(selected, int(plan))
                for entry in self.captures.plans[int(plan)]:
                    self._take(step, entry, part)
        self._before = None

    def miss_step(self) -> None:
        """A step could not be looked at, so its rows are missing; drafts of the step before must not stand for them."""
        if not self._guesses:
            return
        computed, self._before = self.captures.computed if self._before is None else self._before, None
        for slot in self.captures.slot_of.values():
            positions = computed[slot] + np.arange(self._guesses)
            for entry in self.captures.plan(slot):
                self.outbox.append(Lost(entry, np.full(len(positions), slot), positions))

    def _take(self, step: Step, entry: Entry, selected: Selected) -> None:
        """One entry's rows, in blocks of at most a frame."""
        layout = self._layout(entry)
        if layout is None:
            self._lose(entry, selected, slice(None))
            return
        for begin in range(0, len(selected.row), layout.rows_max):
            rows = slice(begin, begin + layout.rows_max)
            run = None
            try:
                run = self._encode(step, entry, layout, selected, rows)
            except Exception:
                self._failed(entry)
            if run is None:
                self._lose(entry, selected, rows)
            else:
                self.outbox.append(run)

    def _lose(self, entry: Entry, selected: Selected, rows: slice) -> None:
        """Rows that are not taken are told of."""
        self.counters.dropped += len(selected.row[rows]) * len(entry.layers)
        self.outbox.append(_lost(entry, selected, rows))

    def _failed(self, entry: Entry) -> None:
        self.counters.failures += 1
        if self.counters.failures == 1:
            logger.exception("vllm-tap: taking rows of %s as %s failed; they are dropped (logged once)", entry.site,
                             entry.codec)

    def _encode(self, step: Step, entry: Entry, layout: Layout, selected: Selected, rows: slice) -> Run | None:
        """Encode a block into the ring; None when the ring is full and rows may be dropped."""
        index = selected.row[rows]
        place = layout.place(len(index))
        region = self._allocate(place.nbytes + 8 * place.n)
        if region is None:
            return None
        base, mark = region
        try:
            ready = fill(layout, place, index, step.token_ids, step.positions, self.ring, base, self.side)
        except BaseException:
            # The region was taken: hand it to the sender as an empty run, so that the ring's order holds.
            self.outbox.append(Run(entry, selected.slot[:0], selected.position[:0], selected.flags[:0], {}, 0, 0, mark,
                                   None))
            raise
        at = [base + offset for offset in place.offsets]
        self.counters.rows += place.n * len(entry.layers)
        self.counters.bytes += sum(place.sizes)
        extents = dict(zip(layout.names, zip(at, place.sizes, strict=False), strict=False))
        return Run(entry, selected.slot[rows], selected.position[rows], selected.flags[rows], extents, at[-2], at[-1],
                   mark, ready)

    def _allocate(self, nbytes: int) -> tuple[int, int] | None:
        region = self.ring.allocate(nbytes)
        if region is None and self.on_full == "wait" and nbytes <= self.ring.capacity // 2:
            self.counters.waits += 1
            while region is None and not self.ring.abandoned:
                time.sleep(_WAIT_S)
                region = self.ring.allocate(nbytes)
        return region

    def _warm(self, plan: Plan) -> None:
        """A projection is made before the first step that needs it: one row of each entry that has one is encoded."""
        for entry in plan:
            try:
                if codecs.identified(entry.codec).family.projected and (layout := self._layout(entry)) is not None:
                    with torch.inference_mode(), self.side.after_main():
                        layout.encode(self.staging.buffers[entry.site][:1, :1])
            except Exception:
                self._failed(entry)

    def _layout(self, entry: Entry) -> Layout | None:
        """None where the codec cannot take this site's rows: its parameters do not fit their width."""
        if entry not in self._layouts:
            if len(self._layouts) >= _LAYOUTS_MAX:
                self._layouts.clear()
            try:
                self._layouts[entry] = layout_of(entry, self.staging, self.dtype, self.ring, self.side)
            except SpecError:
                self._layouts[entry] = None
                self._failed(entry)
        return self._layouts[entry]


def _only(selected: Selected, plan: int) -> Selected:
    keep = selected.plan == plan
    return Selected(selected.row[keep], selected.slot[keep], selected.position[keep], selected.flags[keep],
                    selected.plan[keep], None if selected.slack is None else selected.slack[keep])


def _lost(entry: Entry, selected: Selected, rows: slice) -> Lost:
    """These rows at every position that they may have had: no older row may stand for them."""
    slot, position = selected.slot[rows], selected.position[rows]
    if selected.slack is None:
        return Lost(entry, slot, position)
    slack = selected.slack[rows]
    less = [np.flatnonzero(slack >= by) for by in range(int(slack.max(initial=0)) + 1)]
    return Lost(entry, np.concatenate([slot[at] for at in less]),
                np.maximum(np.concatenate([position[at] - by for by, at in enumerate(less)]), 0))
