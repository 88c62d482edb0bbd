"""Bursts: selected rows are encoded into regions of the ring, copied to the host and handed over to the sender.

No failure here reaches the step: it is counted, logged once, and the rows are reported as dropped.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from engine_side.step.block import EntryRows
from engine_side.step.burst import Burst
from engine_side.step.copy_schedule import WAIT_S, CopySchedule
from engine_side.step.layouts import Layouts
from engine_side.step.selection import CaptureTable, Selected, Step
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import I64, Entry, Lost
from schemas.wire.messages import TapCounters

logger = logging.getLogger("vllm.tap")

_STEPS_MAX: Final = 16
_BYTES_MAX: Final = 16 << 20
_BURST_S: Final = 0.04  # rows are seen no later than that, and a step


@dataclass(slots=True)
class Bursts:
    """Bursts that steps of decode continue, and bursts of one step for any other.

    ``batches`` of an engine are under way at once, each of other requests. Each has a burst of its own, because its
    steps come in turns with those of the others. Regions of the ring are sent in their order: where one is sent, those
    before it are sent too, and their bursts go on in new ones.
    """

    to_host: DeviceToHost
    on_full: str  # "drop" or "wait"
    counters: TapCounters
    captures: CaptureTable
    layouts: Layouts
    schedule: CopySchedule
    batches: int = 1
    running: list[Burst] = field(default_factory=list)  # in the order of their regions

    def take_next(self, requests: list[str], first: I64, rows: int, token_ids: torch.Tensor, positions: torch.Tensor,
                  number: int = 0) -> bool:
        """Take the wanted rows of a step that continues a burst; else end those of its requests, and take none.

        Arguments as in a Step without drafts, in which no request begins; ``first`` are the runner's integers, with
        what it has behind them. Asked once a step.
        """
        for burst in self.running:
            if burst.continues_with(requests, first, rows):
                break
        else:
            self.end_of(requests)
            return False
        if self.batches > 1 and not burst.copied and not burst.counts(number):
            self.hand_over()
        if burst.copied and (self.layouts.outdated or not self._begin(burst.renewed(time.monotonic(), number), burst)):
            self.end_of(requests)
            return False
        self.counters.steps += 1
        self._encode_next(self.running[-1] if burst.copied else burst, token_ids, positions)
        return True

    def begin(self, step: Step, selected: Selected, parts: list[tuple[Entry, Selected]]) -> bool:
        """Take a step's rows as the first of a burst; False where it is no step of decode, or there is no room."""
        if selected.steps_unchanged < 2:
            return False
        entries = []
        for entry, part in parts:
            layout = self.layouts.of(entry)
            if layout is None or len(part.row) > layout.rows_max:
                return False
            entries.append(EntryRows(layout, part.row, part.slot, part.position, part.flags))
        burst = Burst(entries, 0, selected.steps_unchanged, step.requests, step.first, int(step.starts[-1]),
                      time.monotonic(), selected.running, step.number)
        if not self._begin(burst):
            return False
        self.schedule.bytes_a_token = burst.step_bytes / burst.step_rows
        self._encode_next(burst, step.token_ids, step.positions)
        return True

    def take_once(self, step: Step, entry: Entry, selected: Selected) -> int:
        """Take one entry's rows of a step, in blocks of at most a frame; returns their bytes."""
        self.hand_over()  # regions go their way in their order
        layout = self.layouts.of(entry)
        if layout is None:
            self._lose(entry, selected, slice(None))
            return 0
        nbytes = 0
        for begin in range(0, len(selected.row), layout.rows_max):
            part = slice(begin, begin + layout.rows_max)
            rows = EntryRows(layout, selected.row[part], selected.slot[part], selected.position[part],
                             selected.flags[part])
            burst = Burst([rows], 1, 1, [], step.first, 0, 0.0, selected.running, step.number)
            if self._reserve(burst, wait=True):
                if not self._encode(burst, step.token_ids, step.positions):
                    self._lose(entry, selected, part)
                self._copy(burst, last=True)
            else:
                self._lose(entry, selected, part)
            nbytes += burst.step_bytes
        return nbytes

    def end(self) -> None:
        """End all bursts: what they hold goes its way."""
        self._end(self.running)

    def end_of(self, requests: list[str]) -> None:
        """End the bursts of requests whose next step does not continue them; all bursts where only one may go on."""
        if self.running:
            several = self.batches > 1 and not self.layouts.outdated
            there = set(requests) if several else set[str]()
            self._end([burst for burst in self.running if not several or not there.isdisjoint(burst.requests)])

    def hand_over(self) -> None:
        """Hand over what bursts hold; they go on in regions of their own."""
        held = [burst for burst in self.running if not burst.copied and burst.entries]
        for burst in held:
            self._copy(burst, burst is held[-1])

    def hand_over_old(self) -> None:
        """Hand over what has been held for long, where no step comes that would."""
        if any(burst.entries and not burst.copied and time.monotonic() - burst.began > _BURST_S
               for burst in self.running):
            self.hand_over()

    @property
    def holding(self) -> bool:
        """Whether a burst holds rows."""
        return any(burst.entries for burst in self.running)

    def _end(self, some: list[Burst]) -> None:
        if not some:
            return
        for burst in some:
            self.captures.advance(*burst.running, burst.steps_done)
        self.hand_over()
        self.running = [burst for burst in self.running if all(burst is not other for other in some)]

    def _begin(self, burst: Burst, before: Burst | None = None) -> bool:
        """Let a burst run, in the place of the one ``before``; False where a region has no room for two steps."""
        if time.monotonic() > self.schedule.report_at:
            self.schedule.report()
        burst.steps_max = burst.steps_unchanged
        if burst.entries:
            room = min(_BYTES_MAX, self.layouts.bytes_max // 2) // self.batches - burst.index_bytes
            burst.steps_max = min(_STEPS_MAX, burst.steps_unchanged, room // burst.step_bytes)
        if before is None and len(self.running) >= self.batches:
            self._end(self.running[:1])
        if burst.steps_max < 2 or (burst.entries and not self._reserve(burst, wait=False)):
            return False
        self.running = [*(each for each in self.running if each is not before), burst]
        return True

    def _encode_next(self, burst: Burst, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Encode the next step of a burst."""
        try:
            burst.encode(token_ids, positions)
        except Exception:
            self._failed(burst)
            self._end([burst])
            for rows in burst.entries:
                self.counters.dropped += len(rows.row) * len(rows.layout.layers)
                self.to_host.send_event(Lost(rows.layout.entry, rows.slot, rows.position + burst.steps_done))
            self.captures.advance(*burst.running, burst.steps_done + 1)
            return
        if burst.steps_done == burst.steps_max or (burst.entries and time.monotonic() - burst.began > _BURST_S):
            self.hand_over()
            burst.copied = True

    def _encode(self, burst: Burst, token_ids: torch.Tensor, positions: torch.Tensor) -> bool:
        try:
            burst.encode(token_ids, positions)
            return True
        except Exception:
            self._failed(burst)
            return False

    def _copy(self, burst: Burst, last: bool) -> None:
        """Hand over what was encoded, behind its copy to the host; give back what was not used of the ``last`` region.
        """
        burst.copied = True
        used = burst.index_bytes + burst.steps_done * burst.step_bytes
        if last:
            self.to_host.give_back(burst.nbytes - used)
            burst.mark, burst.memory_end = self.to_host.ends()
        if not burst.steps_done:
            if burst.index_bytes or not last:  # the row numbers may be on their way to the device
                self.to_host.free(burst.mark)
            return
        self.to_host.enqueue(burst.runs(burst.mark), burst.memory_offset + burst.index_bytes,
                             burst.ring_offset + burst.index_bytes, used - burst.index_bytes, burst.memory_end)
        self.counters.rows += burst.steps_done * sum(rows.block.n * len(rows.layout.layers) for rows in burst.entries)
        self.counters.bytes += burst.steps_done * sum(sum(rows.block.sizes) for rows in burst.entries)

    def _reserve(self, burst: Burst, wait: bool) -> bool:
        """Reserve the burst's region; False where there is no room for it."""
        if self.running and not self.to_host.fits(burst.nbytes):
            self.hand_over()  # nothing that is held may be overwritten
        region = self._allocate(burst.nbytes, burst.alignment, wait)
        if region is None:
            return False
        try:
            memory, offset = self.to_host.reserve(region[0], burst.nbytes)
            burst.assign_region(self.to_host.ring.memory, region[0], memory, offset)
            burst.mark, burst.memory_end = self.to_host.ends()
            burst.begin_mark = burst.mark - burst.nbytes
            return True
        except Exception:
            self._failed(burst)
            self.to_host.free(self.to_host.ring.head)
            return False

    def _allocate(self, nbytes: int, alignment: int, wait: bool) -> tuple[int, int] | None:
        ring = self.to_host.ring
        region = ring.allocate(nbytes, alignment)
        if region is None and wait and self.on_full == "wait" and nbytes <= ring.capacity // 2:
            region = self._await(nbytes, alignment)
        return region

    def _await(self, nbytes: int, alignment: int) -> tuple[int, int] | None:
        """A region once there is room; None where no room will be made any more. Counts the time waited, by what was
        waited for.
        """
        ring, counters = self.to_host.ring, self.counters
        counters.waits += 1
        began, region = time.monotonic(), None
        self.to_host.before_step(0, 0.0)  # what has not gone yet cannot be released
        while region is None and not ring.shared.abandoned:
            behind = ring.shared.behind()
            time.sleep(WAIT_S)
            self.to_host.push()
            region = ring.allocate(nbytes, alignment)
            now = time.monotonic()
            match behind:
                case "copies":
                    counters.waited_copies_seconds += now - began
                case "sender":
                    counters.waited_sender_seconds += now - began
                case "writer":
                    counters.waited_writer_seconds += now - began
            began = now
            if now > self.schedule.report_at:
                self.schedule.report()
        return region

    def _lose(self, entry: Entry, selected: Selected, rows: slice) -> None:
        """Report rows that are not taken."""
        self.counters.dropped += len(selected.row[rows]) * len(entry.layers)
        self.to_host.send_event(_lost(entry, selected, rows))

    def _failed(self, burst: Burst) -> None:
        self.counters.failures += 1
        if self.counters.failures == 1:
            logger.exception("vllm-tap: copying rows of %s failed, so they are dropped (logged once)",
                             ", ".join(f"{rows.layout.entry.site} as {rows.layout.entry.codec}"
                                       for rows in burst.entries))


def _lost(entry: Entry, selected: Selected, rows: slice) -> Lost:
    """The loss of rows at every position that they may have had, so that no older row stands for them."""
    slot, position = selected.slot[rows], selected.position[rows]
    if selected.slack is None:
        return Lost(entry, slot, position)
    slack = selected.slack[rows]
    less = [np.flatnonzero(slack >= by) for by in range(int(slack.max(initial=0)) + 1)]
    return Lost(entry, np.concatenate([slot[at] for at in less]),
                np.maximum(np.concatenate([position[at] - by for by, at in enumerate(less)]), 0))
