"""The writer's main loop: receive → check → append; commit → ack; seal what is full or idle."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
import zmq

from schemas import limits
from schemas.catalog import connect_read
from schemas.control import (
    Bye,
    ClientFinish,
    Delete,
    Dropped,
    Finish,
    Frame,
    FromWriter,
    Hello,
    Open,
    Ping,
    Record,
    Refuse,
    TapState,
    Welcome,
    decode_from_sender,
    encode,
    unpack,
)
from schemas.errors import ProtocolError, StartError, StoreError
from schemas.frame import RowTable, check_frame, check_table
from schemas.zarr_layout import endpoint_name
from writer_service import fs, says
from writer_service.cold_blocks import need_library
from writer_service.commits import Batch, Waker
from writer_service.config import Config
from writer_service.control_log import Message, OverQuota, Refused
from writer_service.doors import Doors, receive_at_once
from writer_service.journal import Journal
from writer_service.keeper import Keeper
from writer_service.lanes import Arrival
from writer_service.ledger import Ledger, RefusedError
from writer_service.metrics import serve_metrics
from writer_service.payload import find_payload
from writer_service.quota import Quota
from writer_service.recovery import recover
from writer_service.sealer import Sealer, backlog_max
from writer_service.segments import open_max
from writer_service.senders import Senders
from writer_service.streams import SenderState
from writer_service.usage import disk_bytes

idle_poll_ms: Final = 200
burst_bytes: Final = 2 * limits.frame_bytes_target  # so much waiting at once is a burst, which is not over for …
burst_s: Final = 0.2
drain_s: Final = 2.0
settle_s: Final = 8.0
start_over: Final = "a sync failed; say Hello and send again"


class _Seq(msgspec.Struct):
    """What can be read of a message that is otherwise malformed."""

    seq: int


class _Greeting(msgspec.Struct, tag="hello"):
    """What can be read of a Hello in another version's words."""

    version: int = limits.PROTOCOL_VERSION


_seq = msgspec.msgpack.Decoder(_Seq)
_greeting = msgspec.msgpack.Decoder(_Greeting)


class Writer:
    """One store's writer. ``run`` returns after ``stop`` was set and everything is on the disk."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.stop = False
        began = time.monotonic()
        state = recover(config.store)
        self.recovery_s, self.recovery_cut_bytes = time.monotonic() - began, state.cut_bytes
        says.note("recovered", "journal and catalog are whole", seconds=round(self.recovery_s, 3),
                  cut_bytes=state.cut_bytes, rebuilt=state.rebuilt, streams=len(state.streams))
        self._uuid, self._lock_fd = state.uuid, state.lock
        self._waker = Waker()
        self._journal = Journal(config, state.uuid, state.next_log, state.next_segment, self._waker)
        self.counters = self._journal.counters
        self.counters.erasures_failed = len(state.not_erased)
        self._db = connect_read(config.store / "catalog.sqlite")
        self._ledger = Ledger(self._db)
        self._sealer = Sealer(config.store, state.uuid, state.epoch, self._db, self._waker)
        self._senders = Senders(self._db, self._journal, config.engine_lost_s)
        self._senders.restore(state.streams, self._ledger.open_captures())
        self._want_ack: dict[str, SenderState] = {}
        self._waiting: list[Arrival] = []
        self._waiting_bytes = 0
        self._written_bytes = 0  # by the reception that goes on
        self._heard = 0  # messages since it was last looked for senders that are silent
        self._burst_until = 0.0
        self._os_is_enough = config.durability == "os"
        self._keeper = Keeper(config.store, state.uuid, self._waker, config.keep_s, config.retain_days,
                              config.retain_bytes, self._journal.segments.take_number)
        self._quota = Quota(config.quota_bytes, disk_bytes(config.store / "blocks"))
        for number in state.to_seal:
            self._sealer.submit(number)
        try:
            need_library(config.store)
        except StoreError as error:
            says.warn("no_library", f"rows of deleted captures cannot be erased from compressed blocks: {error}")
        if config.metrics_port:
            serve_metrics(config.metrics_host, config.metrics_port, self)

    @property
    def journal(self) -> Journal:
        """What is appended to."""
        return self._journal

    @property
    def taps(self) -> dict[str, TapState]:
        """What the engines that are connected said last, by stream."""
        return {state.stream: state.tap for state in self._senders
                if state.tap is not None and state.address is not None and not state.ended}

    @property
    def used_bytes(self) -> int:
        """What the store takes of the disk."""
        return self._quota.used

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Receive until ``stop``; then commit, seal and close. StoreError where the catalog cannot be written."""
        context: zmq.Context[Any] = zmq.Context()
        self._doors = Doors(context, self.config)
        poller = zmq.Poller()
        poller.register(self._waker.read_fd, zmq.POLLIN)
        try:
            fs.write_durable(self.config.store / endpoint_name(), self.config.endpoint.encode())
        except OSError as error:
            raise StartError(f"cannot write {self.config.store / endpoint_name()}: {error}") from None
        print(f"writer ready {self.config.endpoint}", flush=True)
        if self.config.listen:
            print(f"writer listens {self.config.listen}", flush=True)
        if self.config.metrics_port:
            print(f"writer metrics http://{self.config.metrics_host}:{self.config.metrics_port}/metrics", flush=True)
        last = time.monotonic()
        try:
            while not self.stop:
                behind = self._behind()
                self._doors.poll_on(poller, listening=not behind)
                wait = self._journal.wait_s(time.monotonic())
                poller.poll(idle_poll_ms if wait is None else min(int(wait * 1000) + (wait > 0), idle_poll_ms))
                self._waker.drain()
                now = time.monotonic()
                if now - last > 1.0:  # this process stood still: the senders are not to blame for their silence
                    self._senders.forgive(now - last)
                last = now
                self._step(now, quiet=not behind and self._receive())
            self._finish()
        finally:
            self._doors.close()
            context.term()
            fs.close(self._lock_fd)

    def _behind(self) -> bool:
        """Whether syncing or sealing must catch up before more is received: senders then wait."""
        return len(self._journal.segments.retired) >= open_max or self._sealer.backlog >= backlog_max

    def _receive(self) -> bool:
        """Take what is waiting, up to a bound; whether nothing was left.

        After as much as a commit takes it ends: syncing that goes on beside the next reception.
        """
        self._written_bytes = 0
        for _ in range(receive_at_once):
            if self._written_bytes + self._waiting_bytes >= self.config.commit_bytes:
                break
            arrived = self._doors.receive()
            if arrived is None:
                self._write_waiting()
                return True
            self._heard += 1
            address, parts = arrived
            if parts:
                self._take(address, parts)
        self._write_waiting()
        return False

    def _step(self, now: float, quiet: bool) -> None:
        """Everything that is due between two receptions."""
        self._end_commit()
        self._take_catalog()
        self._take_sealed(now)
        self._hear_keeper(now)
        if self._keeper.step(now, self._ledger.applied):
            self._quota.measuring()
        if quiet or self._heard > 2 * len(self._senders):  # they take turns: whoever has something waiting was heard
            self._heard = 0
            self._senders.find_lost(now)
        self._journal.segments.retire(now, self.config.seal_idle_s)
        for number in self._journal.segments.take_sealable():
            self._sealer.submit(number)
        for bad in self._journal.segments.drop_poisoned():
            says.warn("segment_poisoned", f"segment {bad.number} takes no more frames after a failed sync",
                      segment=bad.number)
        self._journal.commit_if_due(now)
        self._ledger.batch = self._journal.batch_number
        self._flush_acks()
        if self._journal.catalog.failed is not None:
            raise StoreError("write catalog", self.config.store / "catalog.sqlite", self._journal.catalog.failed,
                             "start again: a damaged catalog is rebuilt")

    def _hear_keeper(self, now: float) -> None:
        """What the keeper did goes into the journal; what it needs of us is done."""
        done = self._keeper.take(now, self._journal.batch_number)
        if done is not None:
            for change in done.changes:
                self._journal.change(change)
            self._journal.segments.retire_numbers(done.retire)
            if done.rotate_log:
                self._journal.rotate_log()
            self._quota.measured(done.used_bytes)
            self.counters.rows_erased += done.erased_rows
            self.counters.erasures_failed += done.failures
            self.counters.blocks_removed += done.removed_blocks
            if done.changes or done.expired:
                says.note("upkeep", "rows of deleted captures erased", rows=done.erased_rows,
                          blocks_removed=done.removed_blocks, expired=len(done.expired), failures=done.failures)
            for capture in done.expired:
                self._expire(capture)

    def _expire(self, capture: str) -> None:
        """Delete a capture as if somebody had asked for it."""
        record = Delete(0, capture)
        try:
            effect = self._ledger.accept("", 0, record)
            self._journal.append_entry(SenderState("", 0, "writer"), record)
        except RefusedError:
            return  # deleted or held meanwhile
        except OSError as error:
            self._journal.disk_error("append", self._journal.folder, error)
            return
        effect()
        self.counters.expired += 1

    def _take_sealed(self, now: float) -> None:
        change = self._sealer.take(now, busy=now < self._burst_until)
        if change is not None:
            self._journal.change(change)
            self.counters.sealed += 1
            says.note("sealed", "a segment became a block", segment=change.number)

    # ── receive ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, address: bytes, parts: list[zmq.Frame]) -> None:
        try:
            message = decode_from_sender(parts[0].buffer)
        except msgspec.MsgspecError as error:
            self._write_waiting()
            self._take_malformed(address, parts[0], str(error))
            return
        if not isinstance(message, Frame):
            self._write_waiting()
        if isinstance(message, Hello):
            self._greet(address, message)
            return
        state = self._senders.at(address)
        if state is None:
            self._send(address, Refuse("hello", "say Hello first"))
            return
        state.last_seen = time.monotonic()
        if isinstance(message, Ping) and state.must_greet:
            self._send(address, Refuse("resend", start_over))  # the first may have been lost
        elif isinstance(message, Ping):
            state.tap = message.tap
            self._want_ack[state.stream] = state
        elif state.must_greet:
            return  # it was told so; what it sends until its Hello comes again after it
        elif isinstance(message, Bye):
            self._take_bye(state, message)
        elif self._in_order(state, message.seq):
            if isinstance(message, Frame):
                self._take_frame(state, message, parts)
            else:
                self._take_record(state, message)

    def _take_malformed(self, address: bytes, part: zmq.Frame, why: str) -> None:
        self.counters.malformed += 1
        try:  # to greet again would not help it
            greeting = unpack(_greeting, part.buffer)
        except msgspec.MsgspecError:
            pass
        else:
            code = "malformed" if greeting.version == limits.PROTOCOL_VERSION else "version"
            self._send(address, Refuse(code, f"Hello of protocol version {greeting.version}: {why[:1000]}"))
            return
        state = self._senders.at(address)
        if state is None:
            self._send(address, Refuse("hello", "say Hello first"))
            return
        try:
            seq = unpack(_seq, part.buffer).seq
        except msgspec.MsgspecError:
            return
        # It has a number: take it, or the sender would send it for ever.
        if not state.must_greet and self._in_order(state, seq):
            self._refuse(state, seq, "malformed", why)

    def _in_order(self, state: SenderState, seq: int) -> bool:
        """Whether this is the next message; anything else is answered with what is covered."""
        if seq == state.received + state.waiting + 1 and seq not in state.ahead:
            return True
        self._write_waiting()
        self._want_ack[state.stream] = state
        if seq > state.received + 1:
            self.counters.gaps += 1
            return False
        self.counters.duplicates += 1
        if seq == state.received + 1 and seq in state.ahead:  # it lies in the store already, from before a power loss
            state.ahead.discard(seq)
            state.received = seq
            self._journal.note(state)
        return False

    def _greet(self, address: bytes, hello: Hello) -> None:
        state = self._senders.greet(address, hello)
        if isinstance(state, Refuse):
            self.counters.refused += 1
            self._send(address, state)
            return
        # What was taken but is not on the disk yet comes again, and is dropped as a duplicate if it gets there.
        self._send(address, Welcome(self._uuid.hex(), state.covered(self._os_is_enough), state.ring is not None))
        self._want_ack[state.stream] = state

    def _take_frame(self, state: SenderState, frame: Frame, parts: list[zmq.Frame]) -> None:
        try:
            rows = check_frame(frame)
            if len(parts) < 2:
                raise ProtocolError(f"frame {frame.seq}: no row table")
            table_bytes = parts[1].bytes
            table = RowTable.from_bytes(table_bytes, rows)
            check_table(frame, table)
            if xxhash.xxh3_64_intdigest(table_bytes) != frame.table_xxh3:
                raise ProtocolError(f"frame {frame.seq}: the row table does not match its checksum")
            payload = find_payload(frame, state.ring, [part.buffer for part in parts[2:]])
        except ProtocolError as error:
            self._write_waiting()
            self._refuse_frame(state, frame.seq, error)
            return
        if self._quota.limit is not None and self._ledger.unwanted(frame.captures):
            self._write_waiting()
            if frame.seq == state.received + 1 and self._append(state, Refused(frame.seq, "quota")):
                self._took(state, frame.seq)
                self.counters.rows_over_quota += rows
            return
        state.waiting += 1
        self._waiting.append(Arrival(state, frame, table_bytes, table, payload))
        self._waiting_bytes += self._waiting[-1].nbytes
        if self._waiting_bytes >= limits.commit_bytes_target:
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write the frames that were received one after the other, several at once."""
        if self._waiting_bytes >= burst_bytes:
            self._burst_until = time.monotonic() + burst_s
        arrivals, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not arrivals:
            return
        self._written_bytes += sum(arrival.nbytes for arrival in arrivals)
        try:
            faults: list[ProtocolError | None] = self._journal.append_frames(arrivals)
        except OSError as error:
            self._journal.disk_error("append", self.config.store, error)
            for arrival in arrivals:  # they do not progress: the senders try again
                arrival.state.waiting = 0
                self._want_ack[arrival.state.stream] = arrival.state
            return
        for arrival, fault in zip(arrivals, faults, strict=True):
            arrival.state.waiting -= 1
            if arrival.frame.seq != arrival.state.received + 1:
                continue  # the refusal of one before it could not be written: both come again
            if fault is not None:
                self._refuse_frame(arrival.state, arrival.frame.seq, fault)
            else:
                self._took_frame(arrival.state, arrival.frame, arrival.table)

    def _took_frame(self, state: SenderState, frame: Frame, table: RowTable) -> None:
        self._took(state, frame.seq)
        self._quota.appended(sum(part.nbytes for part in frame.streams))
        if self._os_is_enough:
            self._want_ack[state.stream] = state
        counts = np.bincount(table.capture, minlength=len(frame.captures)).tolist()
        for count, capture in zip(counts, frame.captures, strict=True):
            if not self._ledger.rows_count(state.stream, state.epoch, frame.seq, capture):
                self.counters.rows_not_indexed += count

    def _refuse_frame(self, state: SenderState, seq: int, error: ProtocolError) -> None:
        self.counters.malformed += 1
        self._refuse(state, seq, "malformed", str(error))

    def _take_record(self, state: SenderState, record: Record) -> None:
        try:
            if state.remote and not isinstance(record, Open | Finish | Dropped | ClientFinish):
                raise RefusedError("forbidden", f"{type(record).__name__} comes from this host alone")
            effect = self._ledger.accept(state.stream, state.epoch, record)
        except RefusedError as error:
            self.counters.refused += 1
            self._refuse(state, record.seq, error.code, error.reason)
            return
        if not self._append(state, record):
            return
        effect()
        self._took(state, record.seq)
        self.counters.records += 1
        if isinstance(record, Open):
            state.open_captures.add(record.capture)
            if self._quota.over and self._append(state, OverQuota(record.capture)):
                self._ledger.refuse_rows(record.capture)
        elif isinstance(record, Dropped):
            lost = (record.stop - record.start) * len(record.layers)
            self.counters.dropped[record.reason] = self.counters.dropped.get(record.reason, 0) + lost
        elif isinstance(record, Finish):
            state.open_captures.discard(record.capture)
        elif isinstance(record, Delete):
            deleted = set(self._ledger.under(record.capture))
            for other in self._senders:
                other.open_captures -= deleted

    def _refuse(self, state: SenderState, seq: int, code: str, reason: str) -> None:
        if self._append(state, Refused(seq, code)):
            state.refused.append((seq, code, reason[:1000]))
            self._took(state, seq)

    def _take_bye(self, state: SenderState, bye: Bye) -> None:
        self._want_ack[state.stream] = state
        if bye.seq > state.received or state.ended:
            return  # something before it is missing, and will come again with it
        self._senders.close_captures(state, "the engine ended")
        state.ended = self._append(state, bye)
        if state.ended:
            state.close_ring()

    def _append(self, state: SenderState, message: Message) -> bool:
        try:
            self._journal.append_entry(state, message)
        except OSError as error:
            self._journal.disk_error("append", self._journal.folder, error)
            self._want_ack[state.stream] = state
            return False
        return True

    def _took(self, state: SenderState, seq: int) -> None:
        state.received = seq
        self._journal.note(state)

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
                self._want_ack[state.stream] = state

    def _take_catalog(self) -> None:
        while self._journal.catalog.done:
            batch = self._journal.catalog.done.popleft()
            self._ledger.applied = batch.number
            for state, seq in self._covered_by(batch):
                state.settled = max(state.settled, seq)
                if state.role != "engine":  # to those who ask questions next, an Ack means that readers see it
                    self._want_ack[state.stream] = state

    def _covered_by(self, batch: Batch) -> list[tuple[SenderState, int]]:
        found = [(self._senders.named(name, epoch), seq) for name, (epoch, _, seq) in batch.covered.items()]
        return [(state, seq) for state, seq in found if state is not None]

    def _start_over(self) -> None:
        """A commit failed: every sender goes back to what is on the disk, and so do the rules."""
        self._take_catalog()
        self._ledger.forget()
        self._senders.own_captures(self._ledger.open_captures())
        for state in self._senders:
            if state.received > state.durable or state.must_greet:
                state.rewind()
                if state.address is not None:
                    self._send(state.address, Refuse("resend", start_over))

    def _flush_acks(self) -> None:
        for state in self._want_ack.values():
            if state.address is not None and not state.must_greet:
                self._send(state.address, state.ack(self._os_is_enough))
                self.counters.acks += 1
        self._want_ack.clear()

    def _send(self, address: bytes, message: FromWriter) -> None:
        self._doors.send(address, encode(message))

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self) -> None:
        """Drain what has arrived, commit, seal, and leave a clean catalog."""
        deadline = time.monotonic() + drain_s
        while not self._receive() and time.monotonic() < deadline:
            self._step(time.monotonic(), quiet=False)
        self._keeper.close()
        self._hear_keeper(time.monotonic())
        self._settle()
        self._journal.segments.retire(float("inf"), 0.0)
        for number in self._journal.segments.take_sealable():
            self._sealer.submit(number)
        self._burst_until = 0.0
        while self._sealer.backlog:
            self._take_sealed(0.0)
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
            self._flush_acks()
            if self._journal.idle:
                return
            time.sleep(0.002)
