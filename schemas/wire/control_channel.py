"""The control channel: one thread that carries records to the writer and keeps each until the writer holds it.

Used by the API, by the front end of the engine and by the command line. A caller hands over a function that makes the
record from its sequence number. The number is given when the record is first sent, so a record that was never sent can
be withdrawn without leaving a gap. No caller's thread ever touches a ZeroMQ socket.
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

import zmq

from schemas import limits
from schemas.errors import ConflictError, NotFoundError, ProtocolError, StartError, StoreError, TapError
from schemas.wire.connection import Connection
from schemas.wire.messages import Ack, Bye, Connect, Ping, StoreState, encode
from schemas.wire.records import Record
from schemas.wire.send_window import SendWindow

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
class _PendingRecord:
    """One record on its way; made when it is first sent."""

    make: Callable[[int], Record]
    done: threading.Event | None  # of a caller who waits: to make one takes longer than all else that a post does
    data: bytes = b""
    error: TapError | None = None

    def end(self, error: TapError | None = None) -> None:
        """The writer holds it, or for ``error`` never will."""
        self.error = self.error or error
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
        self.endpoint, self.role = endpoint, role
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._queued: deque[_PendingRecord] = deque()
        self.window: SendWindow[_PendingRecord] = SendWindow()
        self.store = StoreState()  # as the writer told it last; only the API asks
        self.uncaptured = 0  # as the next Ping says
        self.connection = Connection(endpoint, self.window, Connect("", role, 0, pid=os.getpid()), self._ping, curve)
        self._fatal: TapError | None = None
        self._closing = False
        self._waiting = 0  # callers that wait for their records
        self._urgent = threading.Event()  # one more of them
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"control-channel-{role}", daemon=True)
        self._thread.start()

    def _ping(self) -> Ping:
        return Ping(asks=self.role == "api", uncaptured=self.uncaptured)

    # ── for callers, any thread ─────────────────────────────────────────────────────────────────────────────────

    def submit(self, make: Callable[[int], Record], timeout_s: float = limits.control_submit_timeout_ms / 1000) -> None:
        """Returns once the record is durable.

        Raises ConflictError (id taken, or held), NotFoundError or ProtocolError where the writer refuses it. Raises
        StoreError where the writer does not answer within ``timeout_s`` seconds. The record was then withdrawn if it
        had not been sent, else it may still arrive.
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

        The record goes a moment later, together with others posted by then. So a caller in the middle of a batch of
        answers does not take turns with the thread at each of them.
        """
        self._put(make)

    def flush(self, timeout_s: float) -> bool:
        """Waits at most ``timeout_s`` seconds; whether nothing is left that the writer does not hold durably."""
        with self._hurrying(), self._lock:
            self._urgent.set()
            self._empty.wait_for(lambda: self._pending == 0 or self._fatal is not None, timeout_s)
            return self._pending == 0

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
        return time.monotonic() - self.connection.heard_s < _SILENT_S

    @property
    def pending(self) -> int:
        """The number of records that the writer does not hold durably yet."""
        with self._lock:
            return self._pending

    @property
    def _pending(self) -> int:
        return len(self._queued) + len(self.window.unacked)

    def close(self, timeout_s: float = 2.0) -> None:
        """Waits at most ``timeout_s`` seconds for what is queued, says Bye, and ends the thread."""
        self.flush(timeout_s)
        with self._lock:
            self._closing = True
        self._urgent.set()
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _HEARTBEAT_S)

    def _put(self, make: Callable[[int], Record], done: threading.Event | None = None) -> _PendingRecord:
        item = _PendingRecord(make, done)
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            if self._closing:
                raise StoreError("send to the writer at", self.endpoint, "the channel is closed")
            if (waiting := self._pending) >= limits.control_records_pending_max:
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
        try:
            self.connection.open()
            while not self._closing and self._fatal is None:
                self._turn()
                if time.monotonic() - max(self.connection.heard_s, self.connection.opened_s) > _SILENT_S:
                    self.connection.open()
            if self.connection.welcome is not None:
                self.connection.say(Bye(seq=self.window.last))
        except (zmq.ZMQError, StartError) as error:  # the latter where keys are gone when it connects anew
            self._fail_all(StoreError("talk to the writer at", self.endpoint, error))
        finally:
            self._fail_all(StoreError("send to the writer at", self.endpoint, "the channel was closed"))
            self.connection.close(linger_ms=200)
            self._wake_in.close()
            self._wake_out.close()

    def _turn(self) -> None:
        """One round: wait, take the writer's answers, send what is queued, say that we live."""
        if self._wake_out.fileno() in self.connection.wait(wake=self._wake_out.fileno()):
            if not self._waiting:
                self._urgent.wait(_GATHER_S)
            self._urgent.clear()
            self._wake_out.recv(4096)
        for answer in self.connection.receive():
            if isinstance(answer, Ack):
                self._cover(answer)
            elif answer is self.connection.refused:
                self._fatal = ProtocolError(f"the writer refused this {self.role} ({answer.code}): {answer.reason}")
            else:  # what was sent before is made and sent again
                with self._lock:
                    self._queued.extendleft(reversed(self.window.begin_again()))
        if self.connection.welcome is not None:
            self._number_queued()
            self.window.send(lambda item: self.connection.send([item.data]))
        self.connection.tend()

    def _number_queued(self) -> None:
        with self._lock:
            while self._queued:
                item = self._queued.popleft()
                try:
                    item.data = encode(item.make(self.window.last + 1))
                except Exception as error:  # a caller's function must not end the channel for all others
                    item.end(ProtocolError(f"the record could not be made: {error!r}"))
                else:
                    self.window.add(item)

    def _cover(self, ack: Ack) -> None:
        if isinstance(ack.store, StoreState):
            self.store = ack.store
        with self._lock:
            for seq, code, reason in ack.refused:
                if (item := self.window.unacked.get(seq)) is not None:
                    item.error = _refusal(code, reason)
            for item in self.window.cover(ack.durable):
                item.end()
            self._empty.notify_all()
        self.window.resend_after(_RESEND_S)

    def _fail_all(self, error: TapError) -> None:
        with self._lock:
            self._fatal = self._fatal or error
            for item in [*self.window.begin_again(), *self._queued]:
                item.end(self._fatal)
            self._queued.clear()
            self._empty.notify_all()
