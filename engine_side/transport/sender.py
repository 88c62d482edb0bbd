"""The sender: turns events of the step into frames and records, and keeps each until the writer holds it durably.

It runs in a process of its own (sender_process) and owns the socket and the ring's tail. Frames and control records
leave in one sequence, so a Finish never overtakes the rows it speaks of.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from engine_side.transport.edit_counts import ToldEdits
from engine_side.transport.events import (
    Counted,
    EditsCounted,
    Entry,
    Finished,
    Freed,
    Joined,
    Lost,
    Mark,
    Opened,
    PartFinished,
    Run,
)
from engine_side.transport.frame_builder import Digest, FrameBuilder
from engine_side.transport.shared_memory import Events, Regions, Shared
from schemas import limits
from schemas.wire import messages
from schemas.wire.connection import Connection
from schemas.wire.engine_info import EngineInfo
from schemas.wire.messages import Ack, Bye, Connect, Frame, Ping, TapCounters
from schemas.wire.records import Dropped, Finish, Join, Open, PartFinish, Record
from schemas.wire.send_window import SendWindow

logger = logging.getLogger("vllm.tap")

_IDLE_POLL_MS = 10
_BUSY_POLL_MS = 2
_BUSY_S = 0.5  # after an event: the next burst comes in less, and nothing tells of the end of its copy
_STALL_S = 3.0
_ALONE_S = 10.0
_FLUSH_S = 5.0


@dataclass(slots=True)
class Outgoing:
    """A numbered message, kept until it is durable."""

    parts: list[bytes]  # the message itself, that of a frame once it is ``whole``, and the row table of a frame
    frame: Frame | None = None
    digests: Sequence[Digest] = ()  # of the frame's streams
    marks: Sequence[Mark] = ()
    opens: str = ""  # the capture that it is the Open or the Join of
    ends: str = ""  # or the Finish or the PartFinish

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return 0 if self.frame is None else sum(part.nbytes for part in self.frame.streams)

    def whole(self) -> list[bytes]:
        """Its parts; waits for the digests of a frame."""
        if self.frame is not None and not self.parts[0]:
            self.frame.streams = [msgspec.structs.replace(part, xxh3=digest())
                                  for part, digest in zip(self.frame.streams, self.digests, strict=True)]
            self.parts[0] = messages.encode(self.frame)
        return self.parts


class Sender:
    """One stream of one worker to one writer. ``engine``: the process that the rows are of."""

    def __init__(self, endpoint: str, info: EngineInfo, shared: Shared, engine: int, curve: Path | None = None,
                 rank: int = 0) -> None:
        self.window: SendWindow[Outgoing] = SendWindow()
        hello = Connect("", "engine", 0, rank, pid=engine, engine=info, ring_path=str(shared.path),
                        ring_bytes=shared.capacity)
        self.connection = Connection(endpoint, self.window, hello, lambda: Ping(self._state()), curve)
        self._endpoint, self._shared = endpoint, shared
        self._events, self._regions = Events(shared), Regions(shared)
        self._recorder_counters = TapCounters()  # as the step told them last
        self._counters = TapCounters()  # of what happened here
        self.frames = FrameBuilder(info, shared, self._regions, self._counters, rank, self._number)
        self._slots: dict[int, str] = {}  # the capture of each
        self._edits: dict[str, ToldEdits] = {}  # of each capture of which the end has not come
        self._counted = _counted_by(info, rank)
        self._lost: dict[tuple[str, Entry, str], list[int]] = {}
        self._dropped = 0  # the number of the last Dropped for losses
        self._record_bytes = 0  # of the records that wait
        self._layers: dict[str, dict[str, list[int]]] = {}  # of each capture of which the writer lacks the end, by site
        self._doubtful: set[str] = set()  # captures that a copy of this process may have opened
        self._alone_since_s = time.monotonic()
        self._busy_until = 0.0

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, closing: Callable[[], bool]) -> None:
        """Take events, close frames and talk to the writer until ``closing``, and then until nothing is left."""
        self.connection.open()
        end_s = float("inf")
        try:
            while True:
                ending = closing()
                try:
                    self._turn(ending)
                except Exception:
                    # Never end for one event: what could not be taken is counted and the manifest will miss it.
                    self._counters.failures += 1
                    logger.exception("vllm-tap: the sender failed on an event")
                    time.sleep(_BUSY_POLL_MS / 1000)
                if ending:
                    end_s = min(end_s, time.monotonic() + _FLUSH_S)
                    if time.monotonic() > end_s or not (self.window.unacked or self.frames.open or self._events):
                        break
            self.connection.say(Ping(self._state()))  # what was counted since the last one
            self.connection.say(Bye(self.window.last))
            if self.window.unacked:
                logger.warning("vllm-tap: the engine ends with %d messages that the writer has not acknowledged; their "
                               "rows may be lost", len(self.window.unacked))
        finally:
            self._shared.abandoned = True
            self.connection.close(linger_ms=500)

    def _turn(self, ending: bool) -> None:
        if self._take_events():
            self._busy_until = time.monotonic() + _BUSY_S
        self._close_old_frames(force=ending)
        self.connection.tend()
        if self.connection.welcome is not None:
            self._alone_since_s = float("inf")
        elif time.monotonic() - self._alone_since_s > _ALONE_S:
            self._alone_since_s = float("inf")
            logger.warning("vllm-tap: no writer has answered at %s for %.0f s; check that it runs, and that it has "
                           "this engine's key", self._endpoint, _ALONE_S)
        self._send_unsent()
        busy = self.frames.open or time.monotonic() < self._busy_until
        if self.connection.wait(_BUSY_POLL_MS if busy else _IDLE_POLL_MS):
            self._receive()

    # ── events to messages ──────────────────────────────────────────────────────────────────────────────────────

    def _take_events(self) -> bool:
        taken = False
        while (event := self._events.first()) is not None:
            if isinstance(event, Run | Freed | EditsCounted) and event.copied > self._shared.over():
                break
            self._events.take()
            taken = True
            match event:
                case Run():
                    self._report_lost()
                    self.frames.add(event, self._slots)
                case Freed(mark=mark):
                    self._regions.hold(mark)
                    self._regions.release([mark])
                case EditsCounted():
                    self._count_edits(event)
                case Lost():
                    self._add_lost(event)
                case Opened():
                    self._open(event)
                case Joined():
                    self._slots[event.slot] = event.capture
                    self._layers[event.capture] = event.layers
                    if event.edits:
                        self._edits[event.capture] = ToldEdits(event.edits, event.prompt_len, here=self._counted)
                    self._number(Join(0, event.capture))
                case Counted(counters=counters):
                    self._recorder_counters = counters
                case Finished():
                    self._finish(event)
                case PartFinished():
                    self._end_rows(event.slot, event.capture)
                    edits = self._edits.pop(event.capture, None)
                    self._number(PartFinish(0, event.capture,
                                            UNSET if edits is None else edits.of_this_rank(event.end)))
        return taken

    def _open(self, event: Opened) -> None:
        self._slots[event.slot] = event.capture
        self._layers[event.capture] = event.resolved.layers
        if event.edits:
            self._edits[event.capture] = ToldEdits(event.edits, len(event.prompt_token_ids), here=self._counted)
        self._number(Open(
            seq=0, capture=event.capture, request=event.request[:limits.alias_chars_max], asked=event.asked,
            resolved=event.resolved, prompt_len=len(event.prompt_token_ids),
            cached=min(event.cached, len(event.prompt_token_ids)),
            prompt_token_ids=np.asarray(event.prompt_token_ids, "<u4").tobytes(), created_ms=event.created_ms,
            adapter=event.adapter, edits=event.edits,
        ))
        for site, layers in event.absent.items():
            self._number(Dropped(0, event.capture, site, layers, 0, limits.position_max, "not_armed"))

    def _count_edits(self, event: EditsCounted) -> None:
        numbers = None
        if event.mark is not None:
            numbers = np.frombuffer(self._shared.bytes_at(event.offset, 4 * event.count), "<i4").copy()
            self._regions.hold(event.mark)
            self._regions.release([event.mark])
        self._edits[event.capture] = replace(self._edits[event.capture], counted=event, numbers=numbers)

    def _end_rows(self, slot: int, capture: str) -> None:
        """Number all that is said of a capture's rows."""
        self._slots.pop(slot, None)
        self.frames.close_of(capture)
        self._report_lost()

    def _finish(self, event: Finished) -> None:
        self._end_rows(event.slot, event.capture)
        edits = self._edits.pop(event.capture, None)
        self._number(Finish(
            seq=0, capture=event.capture, reason=event.reason, stop_reason=event.stop_reason,
            output_token_ids=np.asarray(event.output_token_ids, "<u4").tobytes(), end=event.end,
            recomputed=event.recomputed, edits="" if edits is None else edits.with_counts(event.end),
        ))

    def _add_lost(self, event: Lost) -> None:
        self.frames.close(event.entry)  # what was taken before is older than the loss
        for slot in np.unique(event.slot):
            key = self._slots[int(slot)], event.entry, event.reason
            self._lost.setdefault(key, []).extend(int(p) for p in event.position[event.slot == slot])

    def _report_lost(self) -> None:
        lost, self._lost = self._lost, {}
        for (capture, entry, reason), positions in lost.items():
            ordered = np.unique(np.asarray(positions))
            for part in np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1):
                start, stop = int(part[0]), int(part[-1]) + 1
                self._number(Dropped(0, capture, entry.site, list(entry.layers), start, stop, reason))
                self._dropped = self.window.last

    def _close_old_frames(self, force: bool) -> None:
        self.frames.close_old(force)
        if force or self._dropped not in self.window.unacked:
            self._report_lost()  # while a report is on its way, further losses merge: a writer may be away for long

    def _number(self, message: Record | Frame, table: bytes = b"", digests: Sequence[Digest] = (),
                marks: Sequence[Mark] = ()) -> None:
        """Give a message its number, and keep it."""
        if self.connection.refused is not None:  # no writer will take it: free the ring, keep nothing
            self._regions.release(marks)
            self._layers.clear()
            return
        message.seq = self.window.last + 1
        if isinstance(message, Frame):
            self.window.add(Outgoing([b"", table], message, digests, marks))
            return
        data = messages.encode(message)
        self.window.add(Outgoing([data], opens=message.capture if isinstance(message, Open | Join) else "",
                                 ends=message.capture if isinstance(message, Finish | PartFinish) else ""))
        self._record_bytes += len(data)
        if self._record_bytes > limits.records_pending_bytes_max and not self._shared.writer_away:
            self._shared.writer_away = True
            logger.warning("vllm-tap: the writer is away, and %d MiB of records wait for it; requests are not captured "
                           "until it is back", self._record_bytes >> 20)

    # ── to the writer and back ──────────────────────────────────────────────────────────────────────────────────

    def _state(self) -> messages.TapState:
        counters = TapCounters(**{name: getattr(self._recorder_counters, name) + getattr(self._counters, name)
                                  for name in TapCounters.__struct_fields__})
        return messages.TapState(counters, self._shared.capacity, self._regions.nbytes, len(self.window.unacked))

    def _send_unsent(self) -> None:
        window, welcome = self.window, self.connection.welcome
        if welcome is None or window.next > window.last:
            return
        if welcome.ring:
            window.send(lambda outgoing: self.connection.send(outgoing.whole()))
            return
        # Payload that leaves in messages is memory beside the ring until the writer has it.
        out = sum(outgoing.nbytes for seq, outgoing in window.unacked.items() if seq < window.next)

        def put(outgoing: Outgoing) -> bool:
            nonlocal out
            out += outgoing.nbytes
            if out > limits.payload_window_bytes_max and out > outgoing.nbytes > 0:
                return False
            return self.connection.send(self._inline(outgoing))

        window.send(put)

    def _inline(self, outgoing: Outgoing) -> list[Any]:
        """A message with the payload itself, for a writer that cannot map the ring."""
        whole, frame = outgoing.whole(), outgoing.frame
        if frame is None:
            return whole
        bare = [msgspec.structs.replace(part, extents=[]) for part in frame.streams]
        parts: list[Any] = [messages.encode(msgspec.structs.replace(frame, streams=bare)), whole[1]]
        for stream in frame.streams:
            payload = b"".join(self._shared.bytes_at(offset, size) for offset, size in stream.extents)
            step = limits.payload_part_bytes
            parts += [payload[at : at + step] for at in range(0, len(payload), step)]
        return parts

    def _receive(self) -> None:
        for answer in self.connection.receive():
            if isinstance(answer, Ack):
                for seq, code, reason in answer.refused:
                    # Malformed is a fault of ours, which loses rows; others may be nobody's fault.
                    logger.log(logging.ERROR if code == "malformed" else logging.WARNING,
                               "vllm-tap: the writer refused message %d (%s): %s", seq, code, reason)
                    self._take_refusal(seq, code)
                self._cover(answer.durable)
            elif isinstance(answer, messages.Welcome):
                logger.warning("vllm-tap: the writer's store lacks rows that it had acknowledged (was it put back to "
                               "an earlier state?); the engine begins a new stream")
                self._begin_again()
            elif answer.code == "fenced":
                self._leave_to_the_other()
            else:
                self._cover(self.window.last)
                logger.error("vllm-tap: the writer refuses this engine (%s): %s", answer.code, answer.reason)

    def _begin_again(self) -> None:
        """Number the messages that still wait anew, in a new stream."""
        self._record_bytes = self._dropped = 0
        for outgoing in self.window.begin_again():
            if outgoing.frame is not None:
                self._number(outgoing.frame, outgoing.parts[1], outgoing.digests, outgoing.marks)
            else:
                self._number(messages.decode_record(outgoing.parts[0]))

    def _leave_to_the_other(self) -> None:
        """A copy of this process goes on with the stream, and with the captures that were begun in it."""
        opening = {outgoing.opens for outgoing in self.window.unacked.values() if outgoing.opens}
        begun = [capture for capture in self._layers if capture not in opening]
        logger.error("vllm-tap: another process continues this sender's stream (was this process cloned, or a snapshot "
                     "of it resumed twice?), so this one begins a new stream. The writer takes no more rows of %d "
                     "running captures from here; their manifests name missing rows as fenced", len(begun))
        self._begin_again()
        self._doubtful = opening
        for capture in begun:
            self._give_up(capture)

    def _take_refusal(self, seq: int, code: str) -> None:
        outgoing = self.window.unacked.get(seq)
        if outgoing is not None and code == "conflict" and outgoing.opens in self._doubtful:
            self._doubtful.discard(outgoing.opens)
            self._give_up(outgoing.opens)

    def _give_up(self, capture: str) -> None:
        """Give up a capture that the other process goes on with: rows that only this process has are missing as
        ``fenced``.
        """
        for site, layers in self._layers.pop(capture, {}).items():
            if layers:
                self._number(Dropped(0, capture, site, layers, 0, limits.position_max, "fenced"))

    def _cover(self, durable: int) -> None:
        """Forget what is durable; send again what has been out for long without progress."""
        for outgoing in self.window.cover(durable):
            self._regions.release(outgoing.marks)
            if outgoing.frame is None:
                self._record_bytes -= len(outgoing.parts[0])
            if outgoing.ends:
                self._layers.pop(outgoing.ends, None)
                self._doubtful.discard(outgoing.ends)
        if self._shared.writer_away and self._record_bytes < limits.records_pending_bytes_max // 2:
            self._shared.writer_away = False
        if self.connection.welcome is not None and self.connection.welcome.ring:
            # What travels in messages may be under way for long, and a connection that lasts loses none of them: of a
            # new one the Welcome says where to go on.
            self.window.resend_after(_STALL_S)


def _counted_by(info: EngineInfo, rank: int) -> frozenset[tuple[str, int]] | None:
    """Places whose counts of edits a rank reports; None where the leader reports all."""
    if info.edits is None or not info.edits.counted:
        return None
    return frozenset((site, layer) for site, layers in info.edits.counted[rank].items() for layer in layers)
