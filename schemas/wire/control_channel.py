"""The control channel: one thread that carries records to the writer and keeps each until the writer holds it.

Used by the API, by the front end of the engine and by the command line. A caller hands over a function that makes the
record from its sequence number; the number is given when the record is first sent, so a record that was never sent can
be withdrawn without leaving a gap. No ZeroMQ socket is ever touched from a caller's thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import zmq

from schemas import limits
from schemas.errors import ConflictError, NotFoundError, ProtocolError, StoreError, TapError
from schemas.ids import new_ulid
from schemas.wire.curve import secure_sender
from schemas.wire.identity import Nonces
from schemas.wire.messages import Ack, Bye, Connect, Ping, Record, Refuse, Welcome, decode_from_writer, encode

__all__ = ["ControlChannel"]

_HEARTBEAT_S: Final = limits.heartbeat_interval_ms / 1000
_SILENT_S: Final = 3 * _HEARTBEAT_S  # without a word for this long the connection is made anew
_GATHER_S: Final = 0.02
_RESEND_S: Final = _HEARTBEAT_S  # an Ack that leaves out what was sent this long ago means it was lost


def _refusal(code: str, reason: str) -> TapError:
    """The error that stands for one refused record."""
    if code in ("conflict", "held"):
        return ConflictError(reason)
    if code == "not_found":
        return NotFoundError(reason)
    return ProtocolError(f"the writer refused a record ({code}): {reason}")


@dataclass(slots=True, eq=False)
class _Item:
    """One record on its way; ``seq`` is 0 until it is first sent."""

    make: Callable[[int], Record]
    done: threading.Event | None  # of a caller who waits: to make one takes longer than all else that a post does
    seq: int = 0
    data: bytes = b""
    sent_s: float = 0.0
    error: TapError | None = None

    def end(self) -> None:
        """The writer holds it, or never will."""
        if self.done is not None:
            self.done.set()


class ControlChannel:
    """Carries control records to the writer at ``endpoint``, in order, once each.

    ``role`` is "api", "front_end" or "cli"; ``curve`` the folder of keys where the writer is on another host. The
    writer may be away when the channel is made, and may go and come back: records wait, at most
    ``limits.control_records_pending_max`` of them.

    >>> channel = ControlChannel("ipc:///tmp/tap/writer.sock", "api")            # doctest: +SKIP
    >>> channel.submit(lambda seq: Delete(seq=seq, capture=capture))              # doctest: +SKIP
    """

    def __init__(self, endpoint: str, role: str, curve: Path | None = None) -> None:
        self.endpoint, self.role, self._curve = endpoint, role, curve
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._queued: deque[_Item] = deque()
        self._sent: deque[_Item] = deque()
        self._fatal: TapError | None = None
        self._closing = False
        self._stream, self._epoch, self._last_seq, self._covered = "", 0, 0, 0
        self._new_stream()
        self._welcomed = False
        self._greeted = False  # a Hello went out on this connection
        self._heard_s = float("-inf")
        self._waiting = 0  # callers that wait for their records
        self._urgent = threading.Event()  # one more of them
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"control-channel-{role}", daemon=True)
        self._thread.start()

    # ── for callers, any thread ─────────────────────────────────────────────────────────────────────────────────

    def submit(self, make: Callable[[int], Record], timeout_s: float = limits.control_submit_timeout_ms / 1000) -> None:
        """Returns once the record is durable.

        Raises ConflictError (id taken, or held), NotFoundError, ProtocolError where the writer refuses it, and
        StoreError where it does not answer within ``timeout_s`` seconds; the record was then withdrawn if it had not
        been sent, else it may still arrive.
        """
        with self._hurrying():
            done = threading.Event()
            item = self._put(make, done)
            self._urgent.set()
            in_time = done.wait(timeout_s)
        if not in_time:
            with self._lock:
                if item in self._queued:
                    self._queued.remove(item)
                    self._empty.notify_all()
                    raise StoreError("reach the writer at", self.endpoint, f"no connection for {timeout_s:g} s; "
                                     "the record was not sent", "is the writer process running?")
            if not done.is_set():
                raise StoreError("wait for the writer at", self.endpoint, f"no answer for {timeout_s:g} s",
                                 "is its disk full, or the process stopped?")
        if item.error is not None:
            raise item.error

    def post(self, make: Callable[[int], Record]) -> None:
        """Queues the record and returns; StoreError where too many wait already.

        It goes a moment later, with what else is posted by then: a caller in the middle of a batch of answers is not
        made to take turns with the thread at each of them.
        """
        self._put(make)

    def flush(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s`` seconds; whether nothing is left that the writer does not hold durably."""
        with self._hurrying(), self._lock:
            self._urgent.set()
            self._empty.wait_for(lambda: not (self._queued or self._sent) or self._fatal is not None, timeout_s)
            return not (self._queued or self._sent)

    @contextlib.contextmanager
    def _hurrying(self) -> Iterator[None]:
        """While somebody waits, nothing is held back for what else may be posted."""
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    @property
    def alive(self) -> bool:
        """Whether the writer answered within the last three heartbeats."""
        return self._welcomed and time.monotonic() - self._heard_s < _SILENT_S

    @property
    def pending(self) -> int:
        """How many records the writer does not hold durably yet."""
        with self._lock:
            return len(self._queued) + len(self._sent)

    def close(self, timeout_s: float = 2.0) -> None:
        """Waits at most ``timeout_s`` seconds for what is queued, says Bye, and ends the thread."""
        self.flush(timeout_s)
        with self._lock:
            self._closing = True
        self._urgent.set()
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _HEARTBEAT_S)

    def _put(self, make: Callable[[int], Record], done: threading.Event | None = None) -> _Item:
        item = _Item(make, done)
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            if self._closing:
                raise StoreError("send to the writer at", self.endpoint, "the channel is closed")
            waiting = len(self._queued) + len(self._sent)
            if waiting >= limits.control_records_pending_max:
                raise StoreError("send to the writer at", self.endpoint, f"{waiting} records wait already",
                                 "is the writer process running?")
            self._queued.append(item)
            first = len(self._queued) == 1
        if first:  # otherwise the thread was woken for what waits already
            self._wake()
        return item

    def _wake(self) -> None:
        # A full pipe wakes the thread just as well; a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    # ── the thread ──────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        context = zmq.Context()
        dealer = None
        try:
            while not self._closing and self._fatal is None:
                if dealer is None:
                    dealer, opened_s = self._connect(context), time.monotonic()
                self._turn(dealer)
                if time.monotonic() - max(self._heard_s, opened_s) > _SILENT_S:
                    dealer.close(linger=0)
                    dealer = None
            if dealer is not None and self._welcomed and self._fatal is None:
                self._send(dealer, encode(Bye(seq=self._last_seq)))
        except zmq.ZMQError as error:
            self._fail_all(StoreError("talk to the writer at", self.endpoint, error))
        finally:
            if dealer is not None:
                dealer.close(linger=200)
            self._fail_all(self._fatal or StoreError("send to the writer at", self.endpoint, "the channel was closed"))
            self._wake_in.close()
            self._wake_out.close()
            context.term()

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # a Hello waits in no queue: of those that go out the writer may have each
        dealer.setsockopt(zmq.MAXMSGSIZE, limits.message_header_bytes_max)
        secure_sender(dealer, self._curve)
        dealer.connect(self.endpoint)
        self._hello(dealer)
        return dealer

    def _hello(self, dealer: zmq.Socket[bytes]) -> None:
        self._welcomed = False
        self._next_ping_s = time.monotonic() + _HEARTBEAT_S
        self._greeted = self._send(dealer, encode(Connect(
            stream=self._stream, role=self.role, epoch=self._epoch, pid=os.getpid(), nonces=self._nonces.draw(),
            sent=self._last_seq)))
        if not self._greeted:
            self._nonces.withdraw()

    def _turn(self, dealer: zmq.Socket[bytes]) -> None:
        """One round: wait, take the writer's answers, send what is queued, say that we live."""
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN if self._greeted else zmq.POLLIN | zmq.POLLOUT)
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        events = dict(poller.poll(max(1, int((self._next_ping_s - time.monotonic()) * 1000))))
        if self._wake_out.fileno() in events:
            if not self._waiting:
                self._urgent.wait(_GATHER_S)
            self._urgent.clear()
            self._wake_out.recv(4096)
        if not self._greeted and events.get(dealer, 0) & zmq.POLLOUT:
            self._hello(dealer)
        for _ in range(64):  # then our own turn, however much arrives
            if not dealer.poll(0):
                break
            self._take(dealer, dealer.recv_multipart())
        if self._welcomed:
            self._send_queued(dealer)
        if time.monotonic() >= self._next_ping_s:
            self._next_ping_s = time.monotonic() + _HEARTBEAT_S
            if self._welcomed:
                self._send(dealer, encode(Ping()))

    def _take(self, dealer: zmq.Socket[bytes], parts: list[bytes]) -> None:
        try:
            message = decode_from_writer(parts[0])
        except msgspec.MsgspecError:
            return  # not the writer's language: silence will make the connection anew
        self._heard_s = time.monotonic()
        match message:
            case Welcome(durable=durable):
                if durable < self._covered:
                    # Another store, or one that lost what it had promised: what still waits starts a stream of its own.
                    self._new_stream()
                    self._hello(dealer)
                    return
                self._welcomed = True
                self._nonces.welcomed()
                self._resend(dealer, above=durable)
                self._send(dealer, encode(Ping()))  # its Ack covers the others, and says which of them were refused
            case Ack(durable=durable, refused=refused):
                reasons = {seq: (code, reason) for seq, code, reason in refused}
                self._refuse(reasons)
                self._cover(durable)
                if self._sent and time.monotonic() - self._sent[0].sent_s > _RESEND_S:
                    self._resend(dealer)
            case Refuse(code="hello" | "resend"):
                self._hello(dealer)
            case Refuse(code="fenced", stream=stream):
                if stream == self._stream:  # a copy of this process goes on with it
                    self._new_stream()
                    self._hello(dealer)
            case Refuse(code="disk" | "limit"):
                self._welcomed = False  # nothing can be taken now: after a silence the connection is made anew
            case Refuse(code=code, reason=reason):
                self._fatal = ProtocolError(f"the writer refused this {self.role} ({code}): {reason}")

    def _new_stream(self) -> None:
        """A stream of its own name, numbered from 1; what was sent before is made and sent again."""
        with self._lock:
            self._queued.extendleft(reversed(self._sent))
            self._sent.clear()
        self._stream, self._epoch, self._nonces = new_ulid(), time.time_ns() // 1_000_000, Nonces()
        self._last_seq = self._covered = 0

    def _send_queued(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            with self._lock:
                if not self._queued:
                    return
                item = self._queued.popleft()
                try:
                    item.data = encode(item.make(self._last_seq + 1))
                except Exception as error:  # a caller's function must not end the channel for all others
                    item.error = ProtocolError(f"the record could not be made: {error!r}")
                    item.end()
                    continue
                self._last_seq += 1
                item.seq = self._last_seq
                self._sent.append(item)
            self._send(dealer, item.data)
            item.sent_s = time.monotonic()

    def _resend(self, dealer: zmq.Socket[bytes], above: int = 0) -> None:
        for item in [item for item in self._sent if item.seq > above]:
            self._send(dealer, item.data)
            item.sent_s = time.monotonic()

    def _send(self, dealer: zmq.Socket[bytes], data: bytes) -> bool:
        """Whether it went out; if not, the writer is away, and what it lacks is sent once more when it is back."""
        try:
            dealer.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _refuse(self, reasons: dict[int, tuple[str, str]]) -> None:
        for item in self._sent:
            if item.seq in reasons:
                item.error = _refusal(*reasons[item.seq])

    def _cover(self, durable: int) -> None:
        with self._lock:
            while self._sent and self._sent[0].seq <= durable:
                self._sent.popleft().end()
            self._covered = max(self._covered, min(durable, self._last_seq))
            self._empty.notify_all()

    def _fail_all(self, error: TapError) -> None:
        with self._lock:
            self._fatal = self._fatal or error
            for item in [*self._sent, *self._queued]:
                item.error = item.error or error
                item.end()
            self._sent.clear()
            self._queued.clear()
            self._empty.notify_all()
