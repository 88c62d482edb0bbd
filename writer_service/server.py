"""The writer's main loop: receive; commit → ack; seal what is full or idle."""

from __future__ import annotations

import time
from typing import Any, Final

import zmq

from schemas.catalog.records import connect_read
from schemas.errors import StartError, StoreError
from schemas.store.paths import endpoint_name
from schemas.wire.line_times import LineTimes
from schemas.wire.messages import StoreState, TapState
from writer_service import fs, log
from writer_service.config import Config
from writer_service.journal.group_commit import Batch, Waker
from writer_service.journal.journal import Journal
from writer_service.journal.open_segments import open_max
from writer_service.metrics import serve_metrics
from writer_service.receive.absent_parts import AbsentParts
from writer_service.receive.capture_rules import CaptureRules
from writer_service.receive.lost_ranks import LostRanks
from writer_service.receive.receiver import Receiver
from writer_service.receive.senders import Acks, Senders
from writer_service.receive.sockets import Sockets, check_sockets
from writer_service.receive.unopened import Unopened
from writer_service.recover.recovery import recover
from writer_service.seal.sealer import Sealer, backlog_max
from writer_service.sender_state import SenderState
from writer_service.upkeep.cold_blocks import need_library
from writer_service.upkeep.upkeep import Upkeep
from writer_service.upkeep.usage import Quota, disk_bytes

idle_poll_ms: Final = 200
drain_s: Final = 2.0
settle_s: Final = 8.0
measure_after_s: Final = 2.0  # of its start: what comes at once is not to share the disk with that


class Writer:
    """Writer of one store. ``run`` returns after ``stop`` was set and everything is on the disk."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.stop = False
        check_sockets(config)
        began = time.monotonic()
        state = recover(config.store)
        self._recovery_s, self._recovery_cut_bytes = time.monotonic() - began, state.cut_bytes
        log.info("recovered", "journal and catalog are whole", seconds=round(self._recovery_s, 3),
                 cut_bytes=state.cut_bytes, rebuilt=state.rebuilt, streams=len(state.streams))
        self._uuid, self._lock_fd = state.uuid, state.lock
        self._waker = Waker()
        self._journal = Journal(config, state.uuid, state.next_log, state.next_segment, self._waker)
        self.counters, self.sync_seconds = self._journal.counters, self._journal.sync_seconds
        self.counters.erasures_failed = len(state.not_erased)
        self._db = connect_read(config.store / "catalog.sqlite")
        self._rules = CaptureRules(self._db)
        self._sealer = Sealer(config.store, state.uuid, state.epoch, self._db, self._waker, self._journal)
        self._senders = Senders(self._db, self._journal, config.engine_lost_s)
        self._absent_parts = AbsentParts(self._db, self._journal, config.engine_lost_s)
        self._lost_ranks = LostRanks(self._db, self._journal, self._senders, config.engine_lost_s)
        self._unopened = Unopened(self._db, self._journal, self._rules, self._senders, config.engine_lost_s)
        self._senders.restore(state.streams, self._rules.open_captures())
        self._upkeep = Upkeep(config.store, state.uuid, self._waker, config.keep_s, config.retain_days,
                              config.retain_bytes, self._journal.segments.take_number)
        self._quota = Quota(config.quota_bytes, disk_bytes(config.store / "blocks"))
        self._sealer.submit(state.to_seal)
        try:
            need_library(config.store)
        except StoreError as error:
            log.warn("no_library", f"rows of deleted captures cannot be erased from compressed blocks: {error}")
        if config.metrics_port:
            serve_metrics(config.metrics_host, config.metrics_port, self)

    @property
    def taps(self) -> dict[str, TapState]:
        """Last words of the connected engines, by stream."""
        return {state.stream: state.tap for state in self._senders
                if state.tap is not None and state.address is not None and not state.ended}

    def times(self) -> LineTimes:
        """The times that engines waited for room in their rings, and what was at work here."""
        told = [state.tap.counters for state in self._senders if state.tap is not None]
        waited = max(((one.waited_copies_seconds, one.waited_sender_seconds, one.waited_writer_seconds)
                      for one in told), key=sum, default=(0.0, 0.0, 0.0))
        counters = self.counters
        return LineTimes(*waited, counters.appending_seconds, counters.syncing_seconds, counters.held_seconds,
                         counters.payload_bytes)

    def store_state(self) -> StoreState:
        """The rate at which the store takes rows, and the rings of the engines that are connected."""
        rings, now = dict[str, tuple[int, int]](), time.monotonic()
        for state in self._senders:
            if state.tap is not None and state.address is not None and not state.ended and (
                    now - state.last_seen <= self.config.engine_lost_s):
                room, taken = rings.get(state.name, (0, 0))
                rings[state.name] = room + _ring_bytes(state.tap.ring_bytes), taken + _ring_bytes(
                    state.tap.ring_used_bytes)
        return StoreState(self._journal.rate.bytes_s, self._journal.rate.measured, rings)

    def gauges(self) -> dict[str, float]:
        """Numbers of now, by the names of metrics.GAUGES."""
        return {"lag_seconds": self._journal.lag_s(time.monotonic()),
                "catalog_lag_commits": self._journal.catalog.backlog, "store_bytes": self._quota.used,
                "store_bytes_per_second": self._journal.rate.bytes_s, "ranks_lost": self._lost_ranks.count,
                "recovery_seconds": self._recovery_s, "recovery_cut_bytes": self._recovery_cut_bytes}

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Receive until ``stop``; then commit, seal and close. StoreError where the catalog cannot be written."""
        context: zmq.Context[Any] = zmq.Context()
        self._sockets = Sockets(context, self.config)
        self._senders.rings_max = self._sockets.shares.rings
        self._acks = Acks(self._sockets, self.counters, self.config.durability == "os", self.store_state)
        self._receiver = Receiver(self._sockets, self._acks, self._journal, self._rules, self._senders, self._quota,
                                    self._uuid, self.config)
        poller = zmq.Poller()
        poller.register(self._waker.read_fd, zmq.POLLIN)
        self._announce()
        self._measure_s = time.monotonic() + measure_after_s
        last = time.monotonic()
        try:
            while not self.stop:
                behind = self._behind()
                self._sockets.poll_on(poller, listening=not (behind or self._receiver.full))
                began = time.monotonic()
                wait = self._journal.wait_s(began)
                poller.poll(idle_poll_ms if wait is None else min(int(wait * 1000) + (wait > 0), idle_poll_ms))
                self._waker.drain()
                now = time.monotonic()
                if now - last > 1.0:  # this process stood still: the senders are not to blame for their silence
                    self._forgive(now - last)
                last = now
                if behind:
                    self.counters.held_seconds += now - began
                    self._receiver.collect()
                if quiet := not behind and self._receiver.receive():
                    self._journal.rate.quiet()
                self._step(now, quiet)
            self._finish()
        finally:
            self._journal.give_up_append()
            self._sockets.close()
            context.term()
            self._sockets.leave()
            fs.close(self._lock_fd)

    def _announce(self) -> None:
        """Tell where it listens: in the store, for engines that start later, and to whoever started it."""
        try:
            fs.write_durable(self.config.store / endpoint_name(), self.config.endpoint.encode())
        except OSError as error:
            raise StartError(f"cannot write {self.config.store / endpoint_name()}: {error}") from None
        print(f"writer ready {self.config.endpoint}", flush=True)
        if self.config.listen:
            print(f"writer listens {self.config.listen}", flush=True)
        if self.config.metrics_port:
            print(f"writer metrics http://{self.config.metrics_host}:{self.config.metrics_port}/metrics", flush=True)

    def _behind(self) -> bool:
        """Whether syncing or sealing must catch up before more is received: senders then wait."""
        return len(self._journal.segments.retired) >= open_max or self._sealer.backlog >= backlog_max

    def _step(self, now: float, quiet: bool) -> None:
        """Do everything that is due between two receptions."""
        if (silent := self._sockets.look(now)) > 0:  # the socket was away: nobody could be heard
            self._forgive(silent)
        self.counters.connections_refused = self._sockets.refused
        self._end_commit()
        self._take_catalog()
        self._sealer.step(now, busy=now < self._receiver.burst_until)
        self._take_upkeep(now)
        if self._upkeep.step(now, self._rules.applied):
            self._quota.measuring()
        # They take turns: whoever has something waiting was heard.
        if quiet or self._receiver.heard > 2 * len(self._senders):
            self._receiver.heard = 0
            self._senders.find_lost(now)
            self._absent_parts.find(now)
            self._lost_ranks.find(now)
            self._unopened.find(now)
        self._sealer.submit(self._journal.take_sealable(now, self.config.seal_idle_s))
        self._journal.commit_if_due(now)
        self._rules.batch = self._journal.batch_number
        self._acks.flush()
        if quiet and now > self._measure_s and self._journal.idle:
            self._measure_s = float("inf")
            self._journal.rate.begin(self._journal.folder)
        if self._journal.catalog.failed is not None:
            raise StoreError("write catalog", self.config.store / "catalog.sqlite", self._journal.catalog.failed,
                             "restart the writer; it rebuilds a damaged catalog")

    def _forgive(self, seconds: float) -> None:
        """Add a time in which nobody could be heard to all deadlines."""
        for waiting in (self._senders, self._absent_parts, self._lost_ranks, self._unopened):
            waiting.forgive(seconds)

    def _take_upkeep(self, now: float) -> None:
        """Let quota and captures follow what upkeep found."""
        done = self._upkeep.take(now, self._journal)
        if done is not None:
            self._receiver.settle()
            if done.used_bytes is not None:
                self._quota.measured(done.used_bytes)
            for capture in done.expired:
                self._receiver.expire(capture)

    # ── answer ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _end_commit(self) -> None:
        ended = self._journal.end_commit()
        if ended is None:
            return
        batch, on_disk = ended
        if not on_disk:
            self._start_over()
            return
        for state, seq in self._covered_by(batch):
            state.durable = max(state.durable, seq)
            if state.role == "engine":
                self._acks.ack(state)

    def _take_catalog(self) -> None:
        while self._journal.catalog.done:
            batch = self._journal.catalog.done.popleft()
            self._rules.applied = batch.number
            for state, seq in self._covered_by(batch):
                state.settled = max(state.settled, seq)
                if state.role != "engine":  # to those who ask questions next, an Ack means that readers see it
                    self._acks.ack(state)

    def _covered_by(self, batch: Batch) -> list[tuple[SenderState, int]]:
        found = [(self._senders.get(name, epoch), seq) for name, (epoch, _, seq) in batch.covered.items()]
        return [(state, seq) for state, seq in found if state is not None]

    def _start_over(self) -> None:
        """A commit failed: every sender goes back to what is on the disk, and so do the rules."""
        self._receiver.forget()
        self._take_catalog()
        self._rules.forget()
        self._lost_ranks.forget()
        self._senders.own_captures(self._rules.open_captures())
        for state in self._senders:
            state.rewind()
            if state.address is not None:
                self._acks.start_over(state.address)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self) -> None:
        """Drain what has arrived, commit, seal, and leave a clean catalog."""
        deadline = time.monotonic() + drain_s
        while not self._receiver.receive() and time.monotonic() < deadline:
            self._step(time.monotonic(), quiet=False)
            time.sleep(0.001)
        self._receiver.settle()
        self._upkeep.close()
        self._take_upkeep(time.monotonic())
        self._settle()
        self._sealer.submit(self._journal.take_sealable(float("inf"), 0.0))
        while self._sealer.backlog:
            self._sealer.step(0.0)
            time.sleep(0.005)
        self._settle()
        self._sealer.close()
        self._db.close()
        self._journal.close()

    def _settle(self) -> None:
        """Commit until nothing is left to commit."""
        deadline = time.monotonic() + settle_s
        while time.monotonic() < deadline:
            self._journal.start_commit()
            self._end_commit()
            self._take_catalog()
            self._acks.flush()
            if self._journal.idle:
                return
            time.sleep(0.002)


def _ring_bytes(told: int) -> int:
    """Bytes that an engine says of its ring, as far as a sum of them can be sent."""
    return min(max(told, 0), 1 << 50)
