"""The life of captures on a worker: opened with their requests, resumed after a preemption, finished."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from engine_side.edits.edited import Edited
from engine_side.front.ticket import Ticket
from engine_side.step.selection import CaptureTable, Plan
from engine_side.tap.shares import layers_sent
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import EditsCounted, Finished, Joined, Lost, Opened, PartFinished
from engine_side.transport.shared_memory import Outbox
from schemas.sites import BY_MODEL, ask_site, edited_place
from schemas.spec import Resolved, parse_spec
from schemas.wire.engine_info import Divided
from schemas.wire.layout import LEADER, Part
from schemas.wire.messages import TapCounters


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
class CaptureLifecycle:
    """Running captures and their requests; the sender is told of every begin, loss and end.

    ``part``: what this rank sends of them; None on an engine of one rank. ``layers``: the layers of each site that the
    engine has; staging may have only some. ``counted``: the places (layers by site) whose counts of edits this rank
    reports when it does not lead. ``divided``: what other writers get; ``layers`` are without it.
    """

    to_host: DeviceToHost
    captures: CaptureTable
    counters: TapCounters
    layers: Mapping[str, list[int]]
    part: Part | None = None
    counted: Mapping[str, list[int]] = field(default_factory=dict)
    divided: Divided | None = None
    _ids: dict[str, str] = field(default_factory=dict)  # running request → capture id
    _cached: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # of requests with edits: positions read
    _refused: set[str] = field(default_factory=set)  # running requests whose captures were not begun here

    def open(self, request: str, ticket: Ticket, prompt_token_ids: list[int], cached: int) -> Plan:
        """Begin the capture of a request that is scheduled for the first time; returns what is to be taken.

        On some runners a request that comes back from a preemption is scheduled so again.
        """
        if request in self._ids:
            self.resume(request, cached)
            return ()
        if request in self._refused:  # it comes back from a preemption
            return ()
        if self._nobody_takes():
            self.counters.captures_refused += 1
            self._refused.add(request)
            return ()
        capture = ticket.capture_of(request)
        resolved, taken, absent = self._held_against_model(ticket)
        if self.divided is not None and self.divided.writer and not any(taken.layers.values()):
            self._refused.add(request)  # all of it is other writers'
            return ()
        edits = ticket.edits if self._leads or self._counts(ticket.edits) else ""
        if self.part is not None:
            taken = msgspec.structs.replace(taken, layers={
                site: layers_sent(self.part, site, layers) for site, layers in taken.layers.items()})
            if not self._leads and not any(taken.layers.values()) and not edits:
                self._refused.add(request)
                return ()
        slot = self.captures.open(request, taken, len(prompt_token_ids))
        now = time.time_ns() // 1_000_000
        try:
            self.to_host.send_event(
                Opened(slot, capture, request, ticket.asked, resolved, absent, prompt_token_ids, cached, now,
                       ticket.adapter, edits)
                if self._leads else Joined(slot, capture, taken.layers, len(prompt_token_ids), edits))
        except BaseException:  # a capture that the sender was not told of takes no rows
            self.captures.close(request)
            raise
        self._ids[request] = capture
        if edits:
            self._cached[request] = [(0, cached)]
        return self.captures.plan(slot)

    def resume(self, request: str, cached: int) -> None:
        """Go on with a preempted request after ``cached`` positions.

        Other requests may have filled the prefix cache further than this one had come itself: that part of its prompt
        is never computed.
        """
        slot = self.captures.slot_of.get(request)
        if slot is None or cached <= self.captures.computed[slot]:
            return
        if request in self._cached:
            self._cached[request].append((int(self.captures.computed[slot]), cached))
        positions = np.arange(self.captures.computed[slot], cached)
        for entry in self.captures.plan(slot):
            self.to_host.send_event(Lost(entry, np.full(len(positions), slot), positions, "prefix_cached"))
        self.captures.computed[slot] = cached

    def finish(self, end: End, edited: Edited | None = None) -> None:
        """End a capture; that of a request that never ran is opened first, so that its manifest exists.

        ``edited``: what was made of its edits.
        """
        counted = end.request in self._refused
        self._refused.discard(end.request)
        if end.request not in self._ids:
            if self._nobody_takes():
                self.counters.captures_refused += not counted
                return
            self.open(end.request, end.ticket, end.prompt_token_ids, 0)
            if end.request in self._refused:  # this rank has no share of it
                self._refused.discard(end.request)
                return
        slot = self.captures.close(end.request)
        total = len(end.prompt_token_ids) + len(end.output_token_ids)
        seen = int(self.captures.computed[slot])
        # The last sampled token is never forwarded; under async scheduling a step more may have run. A request that is
        # aborted while it is preempted counts 0 computed tokens although its rows were taken.
        last = max(0, total - 1 if end.reason in ("stop", "length") else min(total, max(end.computed, seen)))
        cached = self._cached.pop(end.request, None)
        if edited is not None and cached is not None:
            self._tell_counts(self._ids[end.request], edited, cached)
        capture = self._ids.pop(end.request)
        self.to_host.send_event(Finished(
            slot, capture, end.reason, end.stop_reason, end.output_token_ids, last, int(self.captures.recomputed[slot]),
        ) if self._leads else PartFinished(slot, capture, last))

    def _tell_counts(self, capture: str, edited: Edited, cached: list[tuple[int, int]]) -> None:
        """Tell how often edits of a capture were made, as the device has counted it."""
        numbers = edited.numbers
        event = EditsCounted(capture, edited.places, edited.combinations, cached,
                             0 if numbers is None else numbers.numel())
        if numbers is None:
            self.to_host.send_event(event)
        else:
            self.to_host.enqueue_numbers(event, numbers)

    def _counts(self, told: str) -> bool:
        """Whether edits (as ``Edits.told``) are made at any place that this rank counts."""
        if not (told and self.counted):
            return False
        places = (edited_place(edit["site"], layer) for edit in json.loads(told) for layer in edit.get("layers", ()))
        return any(layer in self.counted.get(site, ()) for site, layer in places)

    @property
    def _leads(self) -> bool:
        return self.part is None or self.part.rank == LEADER

    def _nobody_takes(self) -> bool:
        """Whether too much waits for the sender or for a writer that is away, or nothing is sent any more."""
        shared, outbox = self.to_host.ring.shared, self.to_host.outbox
        return bool(shared.writer_away or shared.abandoned or (isinstance(outbox, Outbox) and outbox.full))

    def _held_against_model(self, ticket: Ticket) -> tuple[Resolved, Resolved, dict[str, list[int]]]:
        """Rows that are expected, those of them that the model has, and by site the layers that it lacks.

        The front end knows the armed sites but not which layers have them: some blocks of a sparse model are dense.
        "all" means what is there; a layer that was asked for by its number stays expected, and is named as not armed.
        What other writers get is expected of them, and named so.
        """
        asked, away = ticket.resolved, dict[str, list[int]]()
        if self.divided is not None:
            asked, away = _here_and_away(asked, self.divided)
        resolved, taken, absent = self._of_model(ticket, asked)
        if asked.writer:  # what no rank has is missing in the first writer's store
            resolved, absent = taken, {}
        if away:
            resolved = msgspec.structs.replace(resolved, elsewhere=away, layers={
                site: sorted([*layers, *away.get(site, ())]) for site, layers in resolved.layers.items()})
        return resolved, taken, absent

    def _of_model(self, ticket: Ticket, asked: Resolved) -> tuple[Resolved, Resolved, dict[str, list[int]]]:
        if all(layers == self.layers.get(site, []) for site, layers in asked.layers.items()):
            return asked, asked, {}  # all that there are, as most ask for
        has = {site: set(self.layers.get(site, [])) for site in asked.layers}
        if all(has[site].issuperset(layers) for site, layers in asked.layers.items()):
            return asked, asked, {}
        present = {site: [layer for layer in layers if layer in has[site]] for site, layers in asked.layers.items()}
        spec = parse_spec(ticket.asked)
        named = {(meant, layer) for site, layer in map(ask_site, spec.sites or ())  # some names have the layer in them
                 for meant in (BY_MODEL[site].sites if site in BY_MODEL else (site,))}
        absent = {site: lacking for site, layers in asked.layers.items()
                  if (lacking := [layer for layer in layers if layer not in has[site] and
                                  (spec.layers != "all" or (site, layer) in named)])}
        expected = {site: sorted([*layers, *absent.get(site, ())]) for site, layers in present.items()}
        return (msgspec.structs.replace(asked, layers=expected), msgspec.structs.replace(asked, layers=present), absent)


def _here_and_away(asked: Resolved, divided: Divided) -> tuple[Resolved, dict[str, list[int]]]:
    """A spec without the layers that other writers get, and these by site."""
    away = {site: gone for site, layers in asked.layers.items()
            if (gone := [layer for layer in layers if layer in divided.elsewhere.get(site, ())])}
    here = {site: [layer for layer in layers if layer not in away.get(site, ())]
            for site, layers in asked.layers.items()}
    return msgspec.structs.replace(asked, layers=here, writer=divided.writer), away
