"""The recorder: what a worker does once a step — choose rows, encode them into the ring, tell the sender.

Nothing here touches a socket or a file, and no failure here reaches the step: it is counted, logged once, and the
rows are reported as dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import torch

from engine_side.front.ticket import Ticket
from engine_side.step.block import Burst, Layout, Piece, layout_of
from engine_side.step.kernel_cache import Compiled
from engine_side.step.projection_matrices import Matrices
from engine_side.step.selection import CaptureTable, Plan, Selected
from engine_side.tap.staging import Staging
from engine_side.transport.device_copies import Crossing
from engine_side.transport.events import I64, Counted, Entry, Event, Finished, Lost, Opened
from engine_side.transport.shared_memory import Outbox
from schemas import codecs
from schemas.errors import SpecError
from schemas.sites import BY_MODEL, ask_site
from schemas.spec import Resolved, parse_spec
from schemas.wire.messages import TapCounters

logger = logging.getLogger("vllm.tap")

_WAIT_S: Final = 0.0005
_LAYOUTS_MAX: Final = 4096
_BURST_STEPS_MAX: Final = 16
_BURST_BYTES_MAX: Final = 16 << 20
_COUNT_S: Final = 0.5
_FLUSH_S: Final = 1.0
_SKIPPED_MAX: Final = 2
# The tokens that the engine has just got are sent by a thread of its own, which has to wait for the interpreter. Where
# first tokens may be among them, it gets the chance before something is done that takes a while.
_YIELD_S: Final = 0.00001
_BURST_S: Final = 0.04  # rows are seen no later than that, and a step


@dataclass(slots=True)
class Step:
    """One step of the model as its runner laid it out; a seam makes it.

    ``starts`` [n + 1] rows of each request, ``first`` [n] position of each request's first row (host's view, too high
    by at most ``slack``), both integers, and good until the runner prepares another step; ``positions`` and
    ``token_ids`` [rows] the tensors that the model really used; ``drafts`` [n] how many of each request's last rows are
    guesses of speculative decoding, None for nobody.
    """

    requests: list[str]
    starts: I64
    first: I64
    positions: torch.Tensor
    token_ids: torch.Tensor
    drafts: I64 | None = None
    slack: int = 0
    begin: Callable[[], None] | None = None  # opens the captures of requests that begin with it


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
class Recorder:
    """Owned by the step thread; the sender's process takes what ``outbox`` is given."""

    staging: Staging
    dtype: str
    on_full: str
    crossing: Crossing
    quiet: bool = False  # nothing is captured, and nothing waits: a step in which no request begins needs no call
    # Nothing overwrites staging, positions and token ids between a step and the next call of any kind: rows of hurried
    # steps are taken in that call, when the tokens of the step before theirs are out.
    alone: bool = False
    # A step's tokens are waited for behind the launch of the next: so are rows of any step that have to be chosen anew.
    ahead: bool = False
    compiled: Compiled = field(init=False)
    matrices: Matrices = field(init=False)
    captures: CaptureTable = field(default_factory=CaptureTable)
    counters: TapCounters = field(default_factory=TapCounters)
    _counted: TapCounters = field(default_factory=TapCounters)  # what the sender was told
    _count_at: float = 0.0
    _late: Step | None = None  # its rows are still to be taken
    _calm: int = 2  # steps since the last that was hurried, which is counted from 0; 2 and more are long ago
    _skipped: int = 0  # steps in a row behind which nothing was sent on, although something waited
    _guesses: int = 0  # the most rows of a request in a step whose positions may be taken again by the next
    _before: I64 | None = None  # what was computed before the step that is being looked at, where guesses are about
    _tickets: dict[str, str] = field(default_factory=dict)  # running request → capture id
    _refused: set[str] = field(default_factory=set)  # running requests whose captures were not begun
    _stood: int = -1  # how much the sender had taken when it was last waited for in vain
    _burst: Burst | None = None
    _bytes_a_token: float = 0.0  # of the last step that was chosen anew, all its rows counted
    _step_bytes: int = 0
    _stale: bool = False  # a burst goes on in a layout that there is a better one for
    _layouts: dict[Entry, Layout | None] = field(default_factory=dict)  # None: its rows cannot be taken

    def __post_init__(self) -> None:
        self.compiled = Compiled(self.staging, self.crossing.scratch is not None, self._forget_layouts)
        self.matrices = Matrices(self.staging, self.compiled, self.captures)

    def _forget_layouts(self, codec: str) -> None:
        """A kernel came: the next use of a codec begins with it."""
        for entry in [entry for entry in list(self._layouts) if entry.codec == codec]:
            self._layouts.pop(entry, None)
        self._stale = True

    @property
    def outbox(self) -> Outbox | deque[Event]:
        """What the sender takes."""
        return self.crossing.outbox

    # ── requests come and go ────────────────────────────────────────────────────────────────────────────────────

    def open(self, request: str, ticket: Ticket, prompt_token_ids: list[int], cached: int) -> None:
        """A request is scheduled for the first time (on some runners again after a preemption)."""
        self.catch_up()
        self.quiet = False
        if request in self._tickets:
            self.resume(request, cached)
            return
        if request in self._refused:  # it comes back from a preemption
            return
        if self._nobody_takes():
            self.counters.captures_refused += 1
            self._refused.add(request)
            return
        self._end_burst()
        capture = ticket.capture_of(request)
        resolved, taken, absent = self._held_against_model(ticket)
        slot = self.captures.open(request, taken, len(prompt_token_ids))
        now = time.time_ns() // 1_000_000
        try:
            self.crossing.say(Opened(slot, capture, request, ticket.asked, resolved, absent, prompt_token_ids, cached,
                                     now, ticket.adapter))
        except BaseException:  # what nobody heard of takes no rows
            self.captures.close(request)
            raise
        self._tickets[request] = capture
        self._warm(self.captures.plan(slot))

    def resume(self, request: str, cached: int) -> None:
        """A preempted request goes on after ``cached`` positions.

        Other requests may have filled the prefix cache further than this one had come itself: that part of its prompt
        is never computed.
        """
        self.catch_up()
        self._end_burst()
        slot = self.captures.slot_of.get(request)
        if slot is None or cached <= self.captures.computed[slot]:
            return
        positions = np.arange(self.captures.computed[slot], cached)
        for entry in self.captures.plan(slot):
            self.crossing.say(Lost(entry, np.full(len(positions), slot), positions, "prefix_cached"))
        self.captures.computed[slot] = cached

    def _held_against_model(self, ticket: Ticket) -> tuple[Resolved, Resolved, dict[str, list[int]]]:
        """What is expected, what of it the model has, and by site the layers that it lacks.

        The front end knows the armed sites but not which layers have them: some blocks of a sparse model are dense.
        "all" means what is there; a layer that was asked for by its number stays expected, and is named as not armed.
        """
        asked = ticket.resolved
        if all(layers == self.staging.layers_of(site) for site, layers in asked.layers.items()):
            return asked, asked, {}  # all that there are, as most ask for
        has = {site: set(self.staging.layers_of(site)) for site in asked.layers}
        if all(has[site].issuperset(layers) for site, layers in asked.layers.items()):
            return asked, asked, {}
        kept = {site: [layer for layer in layers if layer in has[site]] for site, layers in asked.layers.items()}
        spec = parse_spec(ticket.asked)
        named = {(meant, layer) for site, layer in map(ask_site, spec.sites or ())  # some names have the layer in them
                 for meant in (BY_MODEL[site].sites if site in BY_MODEL else (site,))}
        absent = {site: lacking for site, layers in asked.layers.items()
                  if (lacking := [layer for layer in layers if layer not in has[site] and
                                  (spec.layers != "all" or (site, layer) in named)])}
        expected = {site: sorted([*layers, *absent.get(site, ())]) for site, layers in kept.items()}
        return (msgspec.structs.replace(asked, layers=expected), msgspec.structs.replace(asked, layers=kept), absent)

    def finish(self, end: End) -> None:
        """A request ended; one that never ran is opened first, so that its manifest exists."""
        self.catch_up()
        self._end_burst()
        counted = end.request in self._refused
        self._refused.discard(end.request)
        if end.request not in self._tickets:
            if self._nobody_takes():
                self.counters.captures_refused += not counted
                return
            self.open(end.request, end.ticket, end.prompt_token_ids, 0)
        slot = self.captures.close(end.request)
        total = len(end.prompt_token_ids) + len(end.output_token_ids)
        seen = int(self.captures.computed[slot])
        # The last sampled token is never forwarded; under async scheduling a step more may have run. A request that is
        # aborted while it is preempted counts 0 computed tokens although its rows were taken.
        last = total - 1 if end.reason in ("stop", "length") else min(total, max(end.computed, seen))
        self.crossing.say(Finished(
            slot, self._tickets.pop(end.request), end.reason, end.stop_reason, end.output_token_ids,
            max(last, 0), int(self.captures.recomputed[slot]),
        ))

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────

    def before_step(self, tokens: int, hurried: bool = False) -> None:
        """A step of ``tokens`` comes (none: the engine will rest), and behind it goes what waits for the host.

        ``hurried``: that step waits for the host that launches it, and so do its tokens for the host that launches the
        next. What is to be sent on goes behind a later one, but not much later.
        """
        if self._late is not None:
            if self.ahead and self._calm < 2:
                time.sleep(_YIELD_S)
            self.catch_up()
        after_hurried = self._calm == 0
        self._calm = 0 if hurried else self._calm + 1
        if tokens == 0:
            self._end_burst()
            self._rest()
        elif (self._burst is None or not self._burst.pieces) and time.monotonic() > self._count_at:
            self._count()
        crossing = self.crossing
        if crossing.waiting or crossing.left:
            # Much is begun soon, while the device still has a prompt to compute; scratch must not fill up either.
            if crossing.light:
                later = (hurried or after_hurried) and self._skipped < _SKIPPED_MAX
            else:
                later = hurried and not after_hurried
            if later:
                self._skipped += 1
            else:
                self._skipped = 0
                crossing.before_step(tokens, self._bytes_a_token)
        if not self.captures.slot_of:
            self.quiet = not (crossing.waiting or crossing.left) and self.counters == self._counted

    def flush(self) -> None:
        """Nothing stays behind."""
        self.catch_up()
        self._end_burst()
        self._rest()

    def _rest(self) -> None:
        """Everything goes out; for a moment the sender is waited for, where it has no room for so much at once."""
        self._count()
        self.crossing.before_step(0, 0.0)
        shared, until = self.crossing.ring.shared, time.monotonic() + _FLUSH_S
        while not self.crossing.push() and shared.taken != self._stood:
            if time.monotonic() > until:
                self._stood = shared.taken  # it is waited for again when it goes on
            time.sleep(_WAIT_S)

    def _count(self) -> None:
        """What was counted goes to the writer with the sender's next sign of life."""
        self._count_at = time.monotonic() + _COUNT_S
        if self.counters != self._counted:
            self._counted = copy(self.counters)
            self.crossing.say(Counted(self._counted))

    def _nobody_takes(self) -> bool:
        """Too much waits for the sender, or for a writer that is away, or nobody sends any more: none is begun."""
        shared, outbox = self.crossing.ring.shared, self.outbox
        return bool(shared.writer_away or shared.abandoned or (isinstance(outbox, Outbox) and outbox.full))

    def after_step(self, step: Step) -> None:
        """Take the wanted rows of the step that was just enqueued; perhaps in the next call: see ``alone``."""
        self.catch_up()
        if not self.captures and step.begin is None:
            return
        self.quiet = False
        if step.begin is None and step.drafts is None and self.goes_on(
                step.requests, step.first, int(step.starts[-1]), step.token_ids, step.positions):
            return
        step.starts, step.first = step.starts.astype(np.int64), step.first.astype(np.int64)
        if self.alone and (self.ahead or self._calm == 0):
            self._late = step
        else:
            self._end_burst()
            self._take_rows(step)

    def goes_on(self, requests: list[str], first: I64, rows: int, token_ids: torch.Tensor, positions: torch.Tensor
                ) -> bool:
        """Take the wanted rows of a step that goes on with the burst; where it does not, that ends, and none are taken.

        As in a Step without drafts, in which no request begins; ``first`` are the runner's integers, with what it has
        behind them. Asked once a step.
        """
        burst = self._burst
        if burst is None:
            return False
        if not burst.goes_on(requests, first, rows) or (
                burst.brought and (self._stale or not self._begin_burst(burst.renewed(time.monotonic())))):
            self._end_burst()
            return False
        self.counters.steps += 1
        self._go_on(token_ids, positions)
        return True

    def catch_up(self) -> None:
        """Take the rows of a step that was left for later."""
        step, self._late = self._late, None
        if step is None:
            return
        try:
            self._end_burst()
            self._take_rows(step)
        except Exception:
            self.counters.failures += 1
            if self.counters.failures == 1:
                logger.exception("vllm-tap: taking a step's rows failed; they are missing (logged once)")
            self.miss_step()

    def _take_rows(self, step: Step) -> None:
        if step.begin is not None:
            step.begin()
        self._before = None
        if step.drafts is not None:
            self._guesses = max(self._guesses, int(step.drafts.max()) + step.slack)
            self._before = self.captures.computed.copy()
        selected = self.captures.select(step.requests, step.starts, step.first, step.drafts, step.slack)
        if selected is None:
            self._before = None
            return
        self._stale = False
        self.counters.steps += 1
        self._step_bytes = 0
        parts = self._parts(selected)
        if selected.steady > 1 and (burst := self._burst_of(step, selected, parts)) and self._begin_burst(burst):
            self._bytes_a_token = burst.step_bytes / burst.rows
            self._go_on(step.token_ids, step.positions)
            return  # a step with drafts begins none
        for entry, part in parts:
            self._take(step, entry, part)
        self._bytes_a_token = self._step_bytes / max(1, int(step.starts[-1]))
        self._before = None

    def _parts(self, selected: Selected) -> list[tuple[Entry, Selected]]:
        """The rows of each entry, those of all plans that have it together: each entry is encoded once."""
        if len(selected.row) == 0:
            return []
        plans = np.unique(selected.plan).tolist() if len(self.captures.plans) > 1 else selected.plan[:1].tolist()
        if len(plans) == 1:
            return [(entry, selected) for entry in self.captures.plans[plans[0]]]
        taking: dict[Entry, list[int]] = {}
        for plan in plans:
            for entry in self.captures.plans[plan]:
                taking.setdefault(entry, []).append(plan)
        parts = {tuple(some): _only(selected, some) for some in taking.values()}
        return [(entry, parts[tuple(some)]) for entry, some in taking.items()]

    def miss_step(self) -> None:
        """A step could not be looked at, so its rows are missing; drafts of the step before must not stand for them."""
        self.catch_up()
        self._end_burst()
        if not self._guesses:
            return
        computed, self._before = self.captures.computed if self._before is None else self._before, None
        for slot in self.captures.slot_of.values():
            positions = computed[slot] + np.arange(self._guesses)
            for entry in self.captures.plan(slot):
                self.crossing.say(Lost(entry, np.full(len(positions), slot), positions))

    def _take(self, step: Step, entry: Entry, selected: Selected) -> None:
        """One entry's rows, in blocks of at most a frame."""
        layout = self._layout(entry)
        if layout is None:
            self._lose(entry, selected, slice(None))
            return
        for begin in range(0, len(selected.row), layout.rows_max):
            rows = slice(begin, begin + layout.rows_max)
            piece = Piece(layout, selected.row[rows], selected.slot[rows], selected.position[rows],
                          selected.flags[rows])
            burst = Burst([piece], 1, 1, [], step.first, 0, 0.0, selected.live)
            if self._settle(burst, wait=True):
                if not self._encode(burst, step.token_ids, step.positions):
                    self._lose(entry, selected, rows)
                self._bring(burst)
            else:
                self._lose(entry, selected, rows)
            self._step_bytes += burst.step_bytes

    # ── bursts ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _burst_of(self, step: Step, selected: Selected, parts: list[tuple[Entry, Selected]]) -> Burst | None:
        """The burst that a step may begin; None where its rows are too many, or cannot be taken."""
        pieces = []
        for entry, part in parts:
            layout = self._layout(entry)
            if layout is None or len(part.row) > layout.rows_max:
                return None
            pieces.append(Piece(layout, part.row, part.slot, part.position, part.flags))
        return Burst(pieces, 0, selected.steady, step.requests, step.first, int(step.starts[-1]),
                     time.monotonic(), selected.live)

    def _begin_burst(self, burst: Burst) -> bool:
        """Take a burst's region; False where it would have no room for two steps."""
        if time.monotonic() > self._count_at:
            self._count()
        burst.steps_max = burst.steady
        if burst.pieces:
            room = min(_BURST_BYTES_MAX, self._bytes_max // 2) - burst.head
            burst.steps_max = min(_BURST_STEPS_MAX, burst.steady, room // burst.step_bytes)
        if burst.steps_max < 2 or (burst.pieces and not self._settle(burst, wait=False)):
            return False
        self._burst = burst
        return True

    def _go_on(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """The next step of the burst."""
        burst = self._burst
        assert burst is not None
        try:
            burst.encode(token_ids, positions)
        except Exception:
            self._failed(burst)
            self._end_burst()
            for piece in burst.pieces:
                self.counters.dropped += len(piece.row) * len(piece.layout.layers)
                self.crossing.say(Lost(piece.layout.entry, piece.slot, piece.position + burst.done))
            self.captures.advance(*burst.live, burst.done + 1)
            return
        if burst.done == burst.steps_max or (burst.pieces and time.monotonic() - burst.began > _BURST_S):
            self._bring(burst)

    def _end_burst(self) -> None:
        burst, self._burst = self._burst, None
        if burst is not None:
            self.captures.advance(*burst.live, burst.done)
            if not burst.brought:
                self._bring(burst)

    def _settle(self, burst: Burst, wait: bool) -> bool:
        """Take the burst's region; False where there is none."""
        region = self._allocate(burst.nbytes, wait)
        if region is None:
            return False
        try:
            memory, at = self.crossing.room(region[0], burst.nbytes)
            burst.settle(self.crossing.ring.memory, region[0], memory, at)
            return True
        except Exception:
            self._failed(burst)
            self.crossing.free()
            return False

    def _encode(self, burst: Burst, token_ids: torch.Tensor, positions: torch.Tensor) -> bool:
        try:
            burst.encode(token_ids, positions)
            return True
        except Exception:
            self._failed(burst)
            return False

    def _bring(self, burst: Burst) -> None:
        """What was encoded goes its way; what was not used of the region is given back."""
        burst.brought = True
        if not burst.pieces:
            return
        used = burst.head + burst.done * burst.step_bytes
        self.crossing.give_back(burst.nbytes - used)
        if not burst.done:
            if burst.head:  # the indexes may be on their way to the device
                self.crossing.free()
            return
        self.crossing.bring(burst.runs(self.crossing.ring.head), burst.at + burst.head, burst.base + burst.head,
                            used - burst.head)
        self.counters.rows += burst.done * sum(piece.place.n * len(piece.layout.layers) for piece in burst.pieces)
        self.counters.bytes += burst.done * sum(sum(piece.place.sizes) for piece in burst.pieces)

    def _lose(self, entry: Entry, selected: Selected, rows: slice) -> None:
        """Rows that are not taken are told of."""
        self.counters.dropped += len(selected.row[rows]) * len(entry.layers)
        self.crossing.say(_lost(entry, selected, rows))

    def _failed(self, burst: Burst) -> None:
        self.counters.failures += 1
        if self.counters.failures == 1:
            logger.exception("vllm-tap: taking rows of %s failed; they are dropped (logged once)",
                             ", ".join(f"{piece.layout.entry.site} as {piece.layout.entry.codec}"
                                       for piece in burst.pieces))

    def _allocate(self, nbytes: int, wait: bool) -> tuple[int, int] | None:
        ring = self.crossing.ring
        region = ring.allocate(nbytes)
        if region is None and wait and self.on_full == "wait" and nbytes <= ring.capacity // 2:
            self.counters.waits += 1
            self.crossing.before_step(0, 0.0)  # what has not gone yet cannot be released
            while region is None and not ring.shared.abandoned:
                time.sleep(_WAIT_S)
                self.crossing.push()
                region = ring.allocate(nbytes)
        return region

    @property
    def _bytes_max(self) -> int:
        """Of a block."""
        scratch = self.crossing.scratch
        if scratch is None:
            return self.crossing.ring.capacity // 4
        return min(self.crossing.ring.capacity // 8, scratch.capacity // 4)

    def _warm(self, plan: Plan) -> None:
        """What the first step needs is made before it: a projection, by encoding a row; a kernel, beside the steps."""
        for entry in plan:
            try:
                self.compiled.begin(entry.codec, entry.site)  # until it is there, the reference encoder serves
                if codecs.identified(entry.codec).family.projected:
                    if self._layouts.get(entry) is None or not self.matrices.kept(entry.codec, entry.site):
                        self._layouts.pop(entry, None)  # its matrix had no room, or gave it to another
                    if (layout := self._layout(entry)) is not None and layout.kernel is None:
                        with torch.inference_mode():
                            layout.encode(self.staging.buffers[entry.site][:1, :1])
            except Exception:
                logger.exception("vllm-tap: %s of %s could not be made ready", entry.codec, entry.site)

    def _layout(self, entry: Entry) -> Layout | None:
        """None where a site's rows cannot be taken: the codec does not fit their width, or its matrix has no room."""
        try:
            return self._layouts[entry]
        except KeyError:
            pass
        if len(self._layouts) >= _LAYOUTS_MAX:
            self._layouts.clear()
        compiled = self.compiled.has(entry.codec, entry.site)
        layout: Layout | None = None
        try:
            self.matrices.keep(entry.codec, entry.site)
            layout = layout_of(entry, self.staging, self.dtype, self._bytes_max, compiled)
        except (SpecError, MemoryError, torch.OutOfMemoryError) as error:
            logger.warning("vllm-tap: rows of %s cannot be %s, so they are dropped: %s", entry.site, entry.codec, error)
        self._layouts[entry] = layout
        if compiled != self.compiled.has(entry.codec, entry.site):  # its kernel came in between: look again next time
            self._layouts.pop(entry, None)
        return layout


def _only(selected: Selected, plans: list[int]) -> Selected:
    keep = np.isin(selected.plan, plans)
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
