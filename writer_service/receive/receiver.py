"""Receiver of messages: greetings, records, frames and byes are taken in order, checked and journaled.

Frames stand in one line until they lie in their segments; lanes write them side by side. A record waits there for the
frames of its own sender, and no frame waits for it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import xxhash
import zmq

from schemas import limits
from schemas.errors import ProtocolError, StoreError
from schemas.wire.layout import check_codecs
from schemas.wire.messages import Bye, Connect, Frame, Ping, Refuse, Welcome, decode_from_sender, unpack
from schemas.wire.records import ClientFinish, Delete, Dropped, Finish, Join, Open, PartFinish, Record
from schemas.wire.row_table import RowTable, check_frame, check_part, check_table
from writer_service.config import Config
from writer_service.control_log import Message, Refused, RowsOverQuota
from writer_service.journal.journal import Journal
from writer_service.journal.open_segments import lane_bytes
from writer_service.journal.parallel_append import ReceivedFrame
from writer_service.journal.payload import find_payload
from writer_service.receive.capture_rules import CaptureRules, Member
from writer_service.receive.record_checks import RefusedError
from writer_service.receive.senders import Acks, Senders
from writer_service.receive.sockets import Sockets, receive_at_once
from writer_service.sender_state import SenderState
from writer_service.upkeep.usage import Quota

burst_bytes: Final = 2 * limits.frame_bytes_target  # so much waiting at once is a burst, which is not over for …
burst_s: Final = 0.2
in_line_max: Final = 2 * limits.commit_bytes_target  # bytes of payload that each lane may have to write
_FROM_AFAR: Final = (Open, Finish, Join, PartFinish, Dropped, ClientFinish)  # may come from another host


@dataclass(frozen=True, slots=True)
class _ReceivedRecord:
    """A record that stands in the line."""

    state: SenderState
    record: Record

    @property
    def seq(self) -> int:
        """Its number in its stream."""
        return self.record.seq


class _Seq(msgspec.Struct):
    """Number of a message that is otherwise malformed."""

    seq: int


class _Greeting(msgspec.Struct, tag="hello"):
    """Version of a Hello in another version's words."""

    version: int = limits.PROTOCOL_VERSION


_seq = msgspec.msgpack.Decoder(_Seq)
_greeting = msgspec.msgpack.Decoder(_Greeting)


def _check_codecs(state: SenderState, opened: Open) -> None:
    try:
        check_codecs(state.layout, opened.resolved)
    except (ProtocolError, StoreError) as error:
        raise RefusedError("malformed", str(error)) from None


class Receiver:
    """Takes messages off the sockets, ``heard`` of them so far; a burst goes on until ``burst_until`` (monotonic)."""

    def __init__(self, sockets: Sockets, acks: Acks, journal: Journal, rules: CaptureRules, senders: Senders,
                 quota: Quota, uuid: bytes, config: Config) -> None:
        self.heard = 0
        self.burst_until = 0.0
        self._sockets, self._acks, self._journal, self._rules = sockets, acks, journal, rules
        self._senders, self._quota, self._uuid, self._commit_bytes = senders, quota, uuid, config.commit_bytes
        self._counters = journal.counters
        self._line_max = config.lanes * in_line_max
        self._line: deque[ReceivedFrame | _ReceivedRecord] = deque()
        self._waiting: deque[ReceivedFrame] = deque()  # the line's last frames: no lane was given them yet
        self._waiting_bytes = 0
        self._written_bytes = 0  # since ``receive`` was called

    @property
    def full(self) -> bool:
        """Whether lanes have enough to write: nothing need be received until one of them is done."""
        return self._journal.appending_bytes >= self._line_max

    def receive(self) -> bool:
        """Take what is waiting, up to a bound; whether nothing was left, with lanes neither.

        After as much as a commit takes it ends: syncing goes on beside the next reception, as lanes do.
        """
        self._written_bytes = 0
        self.collect()
        for _ in range(receive_at_once):
            if self._written_bytes >= self._commit_bytes or self.full:
                return False
            arrived = self._sockets.receive()
            if arrived is None:
                self.collect()
                return not self._line
            self.heard += 1
            address, parts = arrived
            if parts:
                self._take(address, parts)
        self.collect()
        return False

    def settle(self, state: SenderState | None = None) -> None:
        """Wait until everything that was received is journaled, or all of one stream."""
        while self._line and (state is None or state.waiting):
            self._take_first()

    def collect(self) -> None:
        """Take note of what lanes have written, without receiving more."""
        while self._line and self._can_take_first():
            self._take_first()

    def forget(self) -> None:
        """A commit failed: what was received and not appended comes again."""
        self._line.clear()
        self._waiting.clear()
        self._waiting_bytes = 0

    def _take(self, address: bytes, parts: list[zmq.Frame]) -> None:
        try:
            message = decode_from_sender(parts[0].buffer)
        except msgspec.MsgspecError as error:
            self._take_malformed(address, parts[0], str(error))
            return
        if isinstance(message, Connect):
            if (known := self._senders.get(message.stream)) is not None:
                self.settle(known)
            self._greet(address, message)
            return
        if (state := self._sender(address)) is None:
            return
        state.last_seen = time.monotonic()
        if isinstance(message, Ping) and state.must_greet:
            self._acks.start_over(address)  # the first may have been lost
        elif isinstance(message, Ping):
            state.tap, state.asks = message.tap, message.asks
            self._counters.requests_uncaptured += max(0, message.uncaptured - state.uncaptured)
            state.uncaptured = message.uncaptured
            self._acks.ack(state)
        elif state.must_greet:
            return  # it was told so; what it sends until its Hello comes again after it
        elif isinstance(message, Bye):
            self.settle(state)
            self._take_bye(state, message)
        elif self._in_order(state, message.seq):
            if isinstance(message, Frame):
                self._take_frame(state, message, parts)
            elif state.waiting:
                self._stand_in_line(_ReceivedRecord(state, message))
            else:
                self._take_record(state, message)

    def _sender(self, address: bytes) -> SenderState | None:
        """Sender on a connection; one that did not greet is told to."""
        state = self._senders.by_connection(address)
        if state is None:
            self._acks.send(address, Refuse("hello", "say Hello first"))
        return state

    def _take_malformed(self, address: bytes, part: zmq.Frame, why: str) -> None:
        self._counters.malformed += 1
        try:  # to greet again would not help it
            greeting = unpack(_greeting, part.buffer)
        except msgspec.MsgspecError:
            pass
        else:
            code = "malformed" if greeting.version == limits.PROTOCOL_VERSION else "version"
            self._acks.send(address, Refuse(code, f"Hello of protocol version {greeting.version}: {why[:1000]}"))
            return
        if (state := self._sender(address)) is None:
            return
        try:
            seq = unpack(_seq, part.buffer).seq
        except msgspec.MsgspecError:
            return
        # It has a number: take it, or the sender would send it for ever.
        if not state.must_greet and self._in_order(state, seq):
            self.settle(state)
            if seq == state.received + 1:
                self._refuse(state, seq, "malformed", why)

    def _in_order(self, state: SenderState, seq: int) -> bool:
        """Whether this is the next message; anything else is answered with what is covered."""
        if seq == state.received + state.waiting + 1 and seq not in state.ahead:
            return True
        self.settle(state)
        self._acks.ack(state)
        if seq > state.received + 1:
            self._counters.gaps += 1
            return False
        self._counters.duplicates += 1
        if seq == state.received + 1 and seq in state.ahead:  # it lies in the store already, from before a power loss
            state.ahead.discard(seq)
            state.received = seq
            self._journal.note(state)
        return False

    def _greet(self, address: bytes, hello: Connect) -> None:
        state = self._senders.greet(address, hello)
        if isinstance(state, Refuse):
            self._counters.refused += 1
            self._acks.send(address, state)
            return
        # What was taken but is not on the disk yet comes again, and is dropped as a duplicate if it gets there.
        covered = state.covered(self._acks.os_is_enough)
        self._acks.send(address, Welcome(self._uuid.hex(), covered, state.ring is not None))
        self._acks.ack(state)

    def _take_frame(self, state: SenderState, frame: Frame, parts: list[zmq.Frame]) -> None:
        try:
            rows = check_frame(frame)
            if len(parts) < 2:
                raise ProtocolError(f"frame {frame.seq}: no row table")
            table_bytes = parts[1].bytes
            table = RowTable.from_bytes(table_bytes, rows)
            check_table(frame, table)
            if state.share is not None:
                check_part(frame, state.share)
            if xxhash.xxh3_64_intdigest(table_bytes) != frame.table_xxh3:
                raise ProtocolError(f"frame {frame.seq}: the row table does not match its checksum")
            payload = find_payload(frame, state.ring, [part.buffer for part in parts[2:]])
        except ProtocolError as error:
            self.settle(state)
            if frame.seq == state.received + 1:
                self._refuse_frame(state, frame.seq, error)
            return  # else those before it could not be written: all come again
        if self._quota.limit is not None and any(isinstance(one, _ReceivedRecord) for one in self._line):
            self.settle()  # an Open that says whether its rows are taken may be in the line
        if self._quota.limit is not None and self._rules.over_quota(frame.captures):
            self.settle(state)
            if frame.seq == state.received + 1 and self._append(state, Refused(frame.seq, "quota")):
                self._advance(state, frame.seq)
                self._counters.rows_over_quota += rows
            return
        self._stand_in_line(received := ReceivedFrame(state, frame, table_bytes, table, payload))
        self._waiting.append(received)
        self._waiting_bytes += received.nbytes
        if self._waiting_bytes >= lane_bytes:
            self._give()

    def _stand_in_line(self, received: ReceivedFrame | _ReceivedRecord) -> None:
        received.state.waiting += 1
        self._line.append(received)

    def _give(self) -> None:
        """Let lanes write the frames that wait."""
        if self._journal.appending_bytes + self._waiting_bytes >= burst_bytes:
            self.burst_until = time.monotonic() + burst_s
        try:
            for received in self._waiting:
                self._journal.start_append(received)
        except OSError as error:
            self._not_written(error)
        else:
            self._waiting.clear()
            self._waiting_bytes = 0

    def _can_take_first(self) -> bool:
        """Whether ``_take_first`` need not wait for a lane."""
        first = self._line[0]
        return isinstance(first, _ReceivedRecord) or first is self._next_waiting or self._journal.appended

    @property
    def _next_waiting(self) -> ReceivedFrame | None:
        """The frame that is too little for a lane. If it is the line's first, all lanes have nothing to do."""
        return self._waiting[0] if self._waiting else None

    def _take_first(self) -> None:
        """Journal the first of the line, or take note of it; wait for its lane."""
        first, fault = self._line[0], None
        try:
            if first is self._next_waiting:
                fault = self._journal.append(first)
                self._waiting_bytes -= self._waiting.popleft().nbytes
            elif isinstance(first, ReceivedFrame):
                fault = self._journal.finish_append()
        except OSError as error:
            self._not_written(error)
            return
        self._line.popleft()
        first.state.waiting -= 1
        if isinstance(first, _ReceivedRecord):
            self._take_record(first.state, first.record)
        elif fault is not None:
            self._refuse_frame(first.state, first.seq, fault)
        else:
            self._written_bytes += first.nbytes
            self._note_frame(first.state, first.frame, first.table)
        if first.state.received != first.seq:  # its record, or its refusal, could not be written
            self._give_up()

    def _not_written(self, error: OSError) -> None:
        self._journal.disk_error("append", self._journal.folder, error)
        self._give_up()

    def _give_up(self) -> None:
        """None of what was received and not journaled progresses: the senders try again."""
        self._journal.give_up_append()
        states = {id(received.state): received.state for received in self._line}
        self.forget()
        for state in states.values():
            state.waiting = 0
            self._acks.ack(state)

    def _note_frame(self, state: SenderState, frame: Frame, table: RowTable) -> None:
        self._advance(state, frame.seq)
        self._quota.appended(sum(part.nbytes for part in frame.streams))
        if self._acks.os_is_enough:
            self._acks.ack(state)
        counts = np.bincount(table.capture, minlength=len(frame.captures)).tolist()
        for count, capture in zip(counts, frame.captures, strict=True):
            if not self._rules.rows_count(state.stream, state.epoch, frame.seq, capture):
                self._counters.rows_not_indexed += count

    def _refuse_frame(self, state: SenderState, seq: int, error: ProtocolError) -> None:
        self._counters.malformed += 1
        self._refuse(state, seq, "malformed", str(error))

    def _take_record(self, state: SenderState, record: Record) -> None:
        try:
            if state.remote and not isinstance(record, _FROM_AFAR):
                raise RefusedError("forbidden", f"{type(record).__name__} is accepted from this host only")
            if isinstance(record, Open) and state.group:
                _check_codecs(state, record)
            effect = self._rules.accept(state.stream, state.epoch, record, Member(state.group, state.rank))
        except RefusedError as error:
            self._counters.refused += 1
            self._refuse(state, record.seq, error.code, error.reason)
            return
        if not self._append(state, record):
            return
        effect()
        self._advance(state, record.seq)
        self._counters.records += 1
        if isinstance(record, Open | Join):
            state.open_captures.add(record.capture)
            if isinstance(record, Open) and self._quota.over and self._append(state, RowsOverQuota(record.capture)):
                self._rules.refuse_rows(record.capture)
        elif isinstance(record, Dropped) and record.reason != "fenced":  # whose range has no end
            lost = (record.stop - record.start) * len(record.layers)
            self._counters.dropped[record.reason] = self._counters.dropped.get(record.reason, 0) + lost
        elif isinstance(record, Finish | PartFinish):
            state.open_captures.discard(record.capture)
        elif isinstance(record, Delete):
            deleted = set(self._rules.resolve(record.capture))
            for other in self._senders:
                other.open_captures -= deleted

    def expire(self, capture: str) -> None:
        """Delete a capture as if somebody had asked for it; one that was deleted or held meanwhile stays."""
        record = Delete(0, capture)
        with contextlib.suppress(RefusedError):
            effect = self._rules.accept("", 0, record)
            if self._journal.try_append(SenderState("", 0, "writer"), record):
                effect()
                self._counters.expired += 1

    def _refuse(self, state: SenderState, seq: int, code: str, reason: str) -> None:
        if self._append(state, Refused(seq, code)):
            state.refused.append((seq, code, reason[:1000]))
            self._advance(state, seq)

    def _take_bye(self, state: SenderState, bye: Bye) -> None:
        self._acks.ack(state)
        if bye.seq > state.received or state.ended:
            return  # something before it is missing, and will come again with it
        self._senders.close_captures(state, "the engine ended")
        state.ended = self._append(state, bye)
        if state.ended:
            state.close_ring()

    def _append(self, state: SenderState, message: Message) -> bool:
        done = self._journal.try_append(state, message)
        if not done:
            self._acks.ack(state)
        return done

    def _advance(self, state: SenderState, seq: int) -> None:
        state.received = seq
        self._journal.note(state)
