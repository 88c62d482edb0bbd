"""The sender: closes frames, numbers what leaves, keeps it until the writer has it durable, sends again if not.

It runs in a process of its own (sender_process) and owns the socket and the ring's tail. Frames and control records
leave in one sequence, so a Finish never overtakes the rows it speaks of.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
import zmq

from engine_side.transport.events import Counted, Entry, Finished, Freed, Lost, Mark, Opened, Run
from engine_side.transport.shared_memory import Events, Shared
from schemas import codecs, limits
from schemas.ids import new_ulid
from schemas.wire import messages
from schemas.wire.curve import secure_sender
from schemas.wire.identity import Nonces
from schemas.wire.messages import EngineInfo
from schemas.wire.row_table import RowTable

logger = logging.getLogger("vllm.tap")

_IDLE_POLL_MS = 10
_BUSY_POLL_MS = 2
_STALL_S = 3.0
_ALONE_S = 10.0
_FLUSH_S = 5.0


@dataclass(slots=True)
class Pending:
    """A frame that is still growing: runs of one entry."""

    started: float
    runs: list[Run] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)  # by run, the capture of each distinct slot
    inverse: list[Any] = field(default_factory=list)  # by run, row → index into its names
    nbytes: int = 0
    steps: int = 0
    rows: int = 0


@dataclass(slots=True)
class Outgoing:
    """A numbered message, kept until it is durable."""

    parts: list[bytes]
    frame: messages.Frame | None = None
    marks: Sequence[Mark] = ()
    opens: str = ""  # the capture that it is the Open of
    ends: str = ""  # or the Finish

    @property
    def nbytes(self) -> int:
        """Of payload."""
        return 0 if self.frame is None else sum(part.nbytes for part in self.frame.streams)


class Sender:
    """One stream of one worker to one writer. ``engine``: the process that the rows are of."""

    def __init__(self, endpoint: str, info: EngineInfo, shared: Shared, engine: int, curve: Path | None = None,
                 rank: int = 0) -> None:
        self.stream = new_ulid()
        self.epoch = time.time_ns() // 1_000_000
        self._endpoint, self._info, self._shared, self._engine = endpoint, info, shared, engine
        self._rank, self._curve = rank, curve
        self._events = Events(shared)
        self._told = messages.TapCounters()  # by the recorder
        self._counters = messages.TapCounters()  # of what happened here
        self._slots: dict[int, str] = {}
        self._pending: dict[Entry, Pending] = {}
        self._lost: dict[tuple[str, Entry, str], list[int]] = {}
        self._seq = 0
        self._unacked: OrderedDict[int, Outgoing] = OrderedDict()
        self._record_bytes = 0  # of the records among them
        self._next = 1  # the first number not sent on this connection
        self._marks: deque[Mark] = deque()  # ring marks in the order of allocation
        self._released: set[Mark] = set()
        self._covered = 0  # the highest number that a writer said to hold
        self._dropped = 0  # the number of the last Dropped
        self._nonces = Nonces()
        self._layers: dict[str, dict[str, list[int]]] = {}  # of each capture of which the writer lacks the end, by site
        self._doubtful: set[str] = set()  # captures that a copy of this process may have opened
        self._welcome: messages.Welcome | None = None
        self._refused: str | None = None
        self._progress = (0, time.monotonic())  # (durable, since when)
        self._socket: Any = None
        self._copied = np.empty(0, np.uint8)  # where pieces are put together; kept: new memory has to be touched

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, closing: Callable[[], bool]) -> None:
        """Until ``closing``, and then what is there: take events, close frames, talk to the writer."""
        context = zmq.Context()
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.set(zmq.SNDHWM, limits.sender_window_frames_max)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 500)
        secure_sender(self._socket, self._curve)
        self._socket.set(zmq.IPV6, int("[" in self._endpoint))  # of an address alone: names stay what they are
        self._socket.connect(self._endpoint)
        next_ping, alone_since = 0.0, time.monotonic()
        deadline: float | None = None
        try:
            while True:
                busy, now, ending = True, time.monotonic(), closing()
                try:
                    busy = self._take_events()
                    self._close_old_frames(force=ending)
                    if now >= next_ping:
                        next_ping = now + (0.2 if self._welcome is None else limits.heartbeat_interval_ms / 1000)
                        self._say(self._hello() if self._welcome is None else messages.Ping(self._state()))
                        if self._welcome is not None:
                            alone_since = float("inf")
                        elif now - alone_since > _ALONE_S:
                            alone_since = float("inf")
                            logger.warning("vllm-tap: no writer answers at %s for %.0f s: does it run, and does it "
                                           "know this engine's key?", self._endpoint, _ALONE_S)
                    self._send_unsent()
                    if self._socket.poll(_BUSY_POLL_MS if busy or self._pending else _IDLE_POLL_MS):
                        self._receive()
                except Exception:
                    # Never end for one event: what could not be taken is counted and the manifest will miss it.
                    self._counters.failures += 1
                    logger.exception("vllm-tap: the sender failed on an event")
                    time.sleep(_BUSY_POLL_MS / 1000)
                if ending:
                    deadline = deadline or now + _FLUSH_S
                    if now > deadline or not (self._unacked or self._pending or self._events):
                        break
            self._say(messages.Bye(self._seq))
            if self._unacked:
                logger.warning("vllm-tap: %d messages were not acknowledged before the end", len(self._unacked))
        finally:
            self._shared.abandoned = True
            self._socket.close(linger=500)
            context.term()

    # ── events to messages ──────────────────────────────────────────────────────────────────────────────────────

    def _take_events(self) -> bool:
        taken = False
        while (event := self._events.first()) is not None:
            if isinstance(event, Run | Freed) and event.copied > self._shared.over():
                break
            self._events.take()
            taken = True
            if isinstance(event, Run):
                self._add_run(event)
            elif isinstance(event, Freed):
                self._marks.append(event.mark)
                self._release([event.mark])
            elif isinstance(event, Lost):
                self._add_lost(event)
            elif isinstance(event, Opened):
                self._open(event)
            elif isinstance(event, Counted):
                self._told = event.counters
            else:
                self._finish(event)
        return taken

    def _open(self, event: Opened) -> None:
        self._slots[event.slot] = event.capture
        self._layers[event.capture] = event.resolved.layers
        self._number(messages.Open(
            seq=self._seq + 1, capture=event.capture, request=event.request[:limits.alias_chars_max],
            asked=event.asked, resolved=event.resolved, prompt_len=len(event.prompt_token_ids),
            cached=min(event.cached, len(event.prompt_token_ids)),
            prompt_token_ids=np.asarray(event.prompt_token_ids, "<u4").tobytes(), created_ms=event.created_ms,
            adapter=event.adapter,
        ))
        for site, layers in event.absent.items():
            self._number(messages.Dropped(seq=self._seq + 1, capture=event.capture, site=site, layers=layers, start=0,
                                         stop=limits.position_max, reason="not_armed"))

    def _finish(self, event: Finished) -> None:
        self._slots.pop(event.slot, None)
        for entry, pending in list(self._pending.items()):
            if any(event.capture in names for names in pending.names):
                self._close_frame(entry)
        self._report_lost()
        self._number(messages.Finish(
            seq=self._seq + 1, capture=event.capture, reason=event.reason, stop_reason=event.stop_reason,
            output_token_ids=np.asarray(event.output_token_ids, "<u4").tobytes(), end=event.end,
            recomputed=event.recomputed,
        ))

    def _add_run(self, run: Run) -> None:
        self._marks.append(run.mark)
        try:
            self._report_lost()
            slots, inverse = np.unique(run.slot, return_inverse=True)
            names = [self._slots[int(slot)] for slot in slots]
        except BaseException:
            self._release([run.mark])
            raise
        rows = run.steps * len(run.slot)
        if (begun := self._pending.get(run.entry)) is not None and begun.rows + rows > limits.frame_rows_max:
            self._close_frame(run.entry)
        pending = self._pending.setdefault(run.entry, Pending(time.monotonic()))
        pending.rows += rows
        pending.runs.append(run)
        pending.names.append(names)
        pending.inverse.append(inverse)
        pending.nbytes += run.steps * sum(size for _, size in run.extents.values())
        pending.steps += run.steps
        if pending.nbytes >= limits.frame_bytes_target or pending.steps >= 1024:
            self._close_frame(run.entry)

    def _add_lost(self, event: Lost) -> None:
        if event.entry in self._pending:
            self._close_frame(event.entry)  # what was taken before is older than the loss
        for slot in np.unique(event.slot):
            key = self._slots[int(slot)], event.entry, event.reason
            self._lost.setdefault(key, []).extend(int(p) for p in event.position[event.slot == slot])

    def _report_lost(self) -> None:
        lost, self._lost = self._lost, {}
        for (capture, entry, reason), positions in lost.items():
            ordered = np.unique(np.asarray(positions))
            for part in np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1):
                self._number(messages.Dropped(
                    seq=self._seq + 1, capture=capture, site=entry.site, layers=list(entry.layers),
                    start=int(part[0]), stop=int(part[-1]) + 1, reason=reason,
                ))
                self._dropped = self._seq

    def _close_old_frames(self, force: bool) -> None:
        now = time.monotonic()
        for entry, pending in list(self._pending.items()):
            if force or now - pending.started >= limits.frame_delay_ms / 1000:
                self._close_frame(entry)
        if force or self._dropped not in self._unacked:
            self._report_lost()  # while a report is on its way, further losses merge: a writer may be away for long

    def _close_frame(self, entry: Entry) -> None:
        pending = self._pending.pop(entry)
        marks = [run.mark for run in pending.runs]
        try:
            self._number(*self._frame(entry, pending), marks)
        except BaseException:
            self._release(marks)
            raise

    def _frame(self, entry: Entry, pending: Pending) -> tuple[messages.Frame, bytes]:
        """The message of a frame that is full or old enough, and its row table."""
        captures = list(dict.fromkeys(name for names in pending.names for name in names))
        number = {name: i for i, name in enumerate(captures)}
        capture = np.concatenate([
            np.tile(np.asarray([number[name] for name in names])[inverse], run.steps)
            for run, names, inverse in zip(pending.runs, pending.names, pending.inverse, strict=True)
        ])
        table = RowTable(
            capture.astype(np.uint32),
            np.concatenate([self._positions(run) for run in pending.runs]).astype(np.uint32),
            np.concatenate([self._column(run, run.tokens, "<u4") for run in pending.runs]),
            np.concatenate([np.tile(run.flags, run.steps) for run in pending.runs]).astype(np.uint32),
        ).to_bytes()
        return messages.Frame(
            seq=self._seq + 1, site=entry.site, codec=entry.codec, dtype=self._info.dtype_of(entry.site),
            width=self._info.widths[entry.site], layers=list(entry.layers), captures=captures,
            runs=[len(run.slot) for run in pending.runs for _ in range(run.steps)],
            table_xxh3=xxhash.xxh3_64_intdigest(table),
            streams=[self._stream_part(stream.name, pending.runs) for stream in
                     codecs.streams(entry.codec, self._info.widths[entry.site], self._info.dtype_of(entry.site))],
            fingerprint=self._info.fingerprint, rank=self._rank, time_ns=time.time_ns(),
        ), table

    def _column(self, run: Run, offset: int, dtype: str) -> Any:
        """A column of all steps of a run that lies in the ring from ``offset`` on."""
        size = np.dtype(dtype).itemsize * len(run.slot)
        return self._shared.blocks_at(offset, size, run.steps, run.stride).copy().view(dtype).reshape(-1)

    def _positions(self, run: Run) -> Any:
        """The positions that the model used; they differ from the host's only where the host had to guess."""
        used = self._column(run, run.positions, "<i8")
        expected = (run.position + np.arange(run.steps)[:, None]).reshape(-1)
        if not np.array_equal(used, expected):
            self._counters.position_mismatches += 1
        return used

    def _stream_part(self, name: str, runs: list[Run]) -> messages.StreamPart:
        digest = xxhash.xxh3_64()
        extents: list[tuple[int, int]] = []
        for run in runs:
            offset, size = run.extents[name]
            extents += [(offset + step * run.stride, size) for step in range(run.steps)]
            digest.update(self._together(offset, size, run))
        return messages.StreamPart(name, sum(size for _, size in extents), digest.intdigest(), extents)

    def _together(self, offset: int, size: int, run: Run) -> Any:
        """The bytes of a stream in all steps of a run, side by side.

        One copy and one checksum are cheaper than a checksum of many small pieces.
        """
        if run.steps == 1:
            return self._shared.bytes_at(offset, size)
        if len(self._copied) < run.steps * size:
            self._copied = np.empty(run.steps * size, np.uint8)
        together = self._copied[: run.steps * size]
        np.copyto(together.reshape(run.steps, size), self._shared.blocks_at(offset, size, run.steps, run.stride))
        return together

    # ── the wire ────────────────────────────────────────────────────────────────────────────────────────────────

    def _state(self) -> messages.TapState:
        counters = messages.TapCounters(**{name: getattr(self._told, name) + getattr(self._counters, name)
                                          for name in messages.TapCounters.__struct_fields__})
        used = self._marks[-1][0] - self._shared.tail if self._marks else 0
        return messages.TapState(counters, self._shared.capacity, used, len(self._unacked))

    def _number(self, message: messages.Record | messages.Frame, table: bytes = b"",
                marks: Sequence[Mark] = ()) -> None:
        self._seq += 1
        if self._refused is not None:  # nobody will take it: free the ring, keep nothing
            self._release(marks)
            self._layers.clear()
            return
        if isinstance(message, messages.Frame):
            self._unacked[self._seq] = Outgoing([messages.encode(message), table], message, marks)
        else:
            self._unacked[self._seq] = Outgoing(
                [messages.encode(message)], opens=message.capture if isinstance(message, messages.Open) else "",
                ends=message.capture if isinstance(message, messages.Finish) else "")
            self._record_bytes += len(self._unacked[self._seq].parts[0])
            if self._record_bytes > limits.records_pending_bytes_max and not self._shared.writer_away:
                self._shared.writer_away = True
                logger.warning("vllm-tap: %d MiB of records wait for a writer that is away: no capture is begun until "
                               "it is back", self._record_bytes >> 20)

    def _send_unsent(self) -> None:
        if self._welcome is None or self._next > self._seq:
            return
        # Payload that leaves in messages is memory beside the ring until the writer has it.
        out = 0 if self._welcome.ring else sum(
            outgoing.nbytes for seq, outgoing in self._unacked.items() if seq < self._next)
        while self._next <= self._seq:
            outgoing = self._unacked.get(self._next)
            if outgoing is not None:
                parts: list[Any] = outgoing.parts
                if outgoing.frame is not None and not self._welcome.ring:
                    out += outgoing.nbytes
                    if out > limits.payload_window_bytes_max and out > outgoing.nbytes:
                        return
                    parts = self._inline(outgoing)
                try:
                    self._socket.send_multipart(parts, zmq.NOBLOCK)
                except zmq.Again:
                    return
            self._next += 1

    def _inline(self, outgoing: Outgoing) -> list[Any]:
        """The payload itself, for a writer that cannot map the ring."""
        frame = outgoing.frame
        assert frame is not None
        bare = [msgspec.structs.replace(part, extents=[]) for part in frame.streams]
        parts: list[Any] = [messages.encode(msgspec.structs.replace(frame, streams=bare)), outgoing.parts[1]]
        for stream in frame.streams:
            payload = b"".join(self._shared.bytes_at(offset, size) for offset, size in stream.extents)
            step = limits.payload_part_bytes
            parts += [payload[at : at + step] for at in range(0, len(payload), step)]
        return parts

    def _say(self, message: messages.Connect | messages.Ping | messages.Bye) -> None:
        if self._refused is None:
            try:
                self._socket.send(messages.encode(message), zmq.NOBLOCK)
            except zmq.Again:
                self._welcome = None  # nobody there: say Hello first when somebody is
                if isinstance(message, messages.Connect):
                    self._nonces.withdraw()

    def _hello(self) -> messages.Connect:
        return messages.Connect(stream=self.stream, role="engine", epoch=self.epoch, rank=self._rank, pid=self._engine,
                               engine=self._info, ring_path=str(self._shared.path), ring_bytes=self._shared.capacity,
                               nonces=self._nonces.draw(), sent=self._seq)

    def _receive(self) -> None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                answer = messages.decode_from_writer(data)
            except msgspec.MsgspecError as error:
                logger.error("vllm-tap: the writer sent what is no answer: %s", error)
                continue
            if isinstance(answer, messages.Welcome) and answer.durable < self._covered:
                logger.warning("vllm-tap: the writer's store does not hold what was durable before; a new stream "
                               "begins")
                self._begin_again()
            elif isinstance(answer, messages.Welcome):
                self._welcome = answer
                self._nonces.welcomed()
                self._cover(answer.durable)
                self._next = answer.durable + 1
            elif isinstance(answer, messages.Ack):
                for seq, code, reason in answer.refused:
                    logger.warning("vllm-tap: the writer refused message %d (%s): %s", seq, code, reason)
                    self._take_refusal(seq, code)
                if self._welcome is not None:  # else it may speak of a stream that is no more
                    self._cover(answer.durable)
            elif answer.code in ("hello", "resend"):
                self._welcome = None
                self._say(self._hello())
            elif answer.code == "fenced":
                if answer.stream == self.stream:
                    self._leave_to_the_other()
            elif answer.code in ("disk", "limit"):
                self._welcome = None  # nothing can be taken now: greet again, in a while
            else:
                self._refused = answer.reason
                self._cover(self._seq)
                logger.error("vllm-tap: the writer refuses this engine (%s): %s", answer.code, answer.reason)

    def _begin_again(self) -> None:
        """What still waits begins a stream of its own."""
        waiting = list(self._unacked.values())
        self._unacked.clear()
        self._record_bytes = 0
        self.stream, self.epoch = new_ulid(), time.time_ns() // 1_000_000
        self._seq = self._covered = self._dropped = 0
        self._next, self._welcome, self._progress = 1, None, (0, time.monotonic())
        self._nonces = Nonces()
        for outgoing in waiting:
            if outgoing.frame is not None:
                frame = msgspec.structs.replace(outgoing.frame, seq=self._seq + 1)
                self._number(frame, outgoing.parts[1], outgoing.marks)
            else:
                record = messages.decode_record(outgoing.parts[0])
                self._number(msgspec.structs.replace(record, seq=self._seq + 1))
        self._say(self._hello())

    def _leave_to_the_other(self) -> None:
        """A copy of this process goes on with the stream, and with the captures that were begun in it."""
        opening = {outgoing.opens for outgoing in self._unacked.values() if outgoing.opens}
        begun = [capture for capture in self._layers if capture not in opening]
        logger.error("vllm-tap: another process goes on with this sender's stream (was it cloned, or a snapshot of it "
                     "resumed twice?): a new stream begins; rows of %d captures that had begun are not taken from "
                     "here, and named as fenced where nobody has them", len(begun))
        self._begin_again()
        self._doubtful = opening
        for capture in begun:
            self._give_up(capture)

    def _take_refusal(self, seq: int, code: str) -> None:
        outgoing = self._unacked.get(seq)
        if outgoing is not None and code == "conflict" and outgoing.opens in self._doubtful:
            self._doubtful.discard(outgoing.opens)
            self._give_up(outgoing.opens)

    def _give_up(self, capture: str) -> None:
        """The other opened it: what of its rows comes from nobody else is missing for that reason."""
        for site, layers in self._layers.pop(capture, {}).items():
            if layers:
                self._number(messages.Dropped(seq=self._seq + 1, capture=capture, site=site, layers=layers, start=0,
                                             stop=limits.position_max, reason="fenced"))

    def _cover(self, durable: int) -> None:
        """Forget what is durable; send again what has been out for long without progress."""
        self._covered = max(self._covered, durable)
        while self._unacked and next(iter(self._unacked)) <= durable:
            _, outgoing = self._unacked.popitem(last=False)
            self._release(outgoing.marks)
            if outgoing.frame is None:
                self._record_bytes -= len(outgoing.parts[0])
            if outgoing.ends:
                self._layers.pop(outgoing.ends, None)
                self._doubtful.discard(outgoing.ends)
        if self._shared.writer_away and self._record_bytes < limits.records_pending_bytes_max // 2:
            self._shared.writer_away = False
        now = time.monotonic()
        if durable > self._progress[0] or not self._unacked:
            self._progress = durable, now
        elif now - self._progress[1] > _STALL_S and self._next > durable + 1 and self._welcome and self._welcome.ring:
            # What travels in messages may be under way for long, and a connection that lasts loses none of them: of a
            # new one the Welcome says where to go on.
            self._next = durable + 1
            self._progress = durable, now

    def _release(self, marks: Sequence[Mark]) -> None:
        """Free ring memory in the order in which it was allocated."""
        self._released.update(marks)
        while self._marks and self._marks[0] in self._released:
            mark = self._marks.popleft()
            self._released.discard(mark)
            self._shared.tail = mark[0]
