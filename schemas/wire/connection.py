"""The connection of a sender to its writer: greets it, hears its answers, tells it that the sender lives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from schemas import limits
from schemas.wire.curve import secure_sender
from schemas.wire.messages import Ack, Bye, Connect, Ping, Refuse, Welcome, decode_from_writer, encode
from schemas.wire.send_window import SendWindow

__all__ = ["Connection"]

logger = logging.getLogger("vllm.tap")

_GREET_S: Final = 0.2  # between Hellos that no Welcome answers
_ANSWERS_MAX: Final = 64  # taken at once, then the sender has its turn


class Connection:
    """The socket of the stream in ``window``, for one thread, between ``open`` and ``close``.

    ``hello`` has the fields of a Hello beside the stream's name and numbers. ``ping`` makes a sign of life. ``curve``
    is the folder of keys where the writer is on another host.
    """

    welcome: Welcome | None = None  # None while the writer has not taken this connection's Hello
    refused: Refuse | None = None  # final: nothing is said any more
    heard_s = float("-inf")  # when the writer last took something of ours

    def __init__(self, endpoint: str, window: SendWindow[Any], hello: Connect, ping: Callable[[], Ping],
                 curve: Path | None) -> None:
        self._endpoint, self._window, self._hello, self._ping, self._curve = endpoint, window, hello, ping, curve
        self._context = zmq.Context()
        self._socket: Any = None

    def open(self) -> None:
        """Connect; a connection that was open is given up first."""
        if self._socket is not None:
            self._socket.close()
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)  # until ``close``
        socket.set(zmq.IMMEDIATE, 1)  # a Hello waits in no queue: of those that go out the writer may have each
        socket.set(zmq.SNDHWM, limits.sender_window_frames_max)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.MAXMSGSIZE, limits.message_header_bytes_max)
        socket.set(zmq.RECONNECT_IVL, 50)
        socket.set(zmq.RECONNECT_IVL_MAX, 500)
        secure_sender(socket, self._curve)
        socket.set(zmq.IPV6, int("[" in self._endpoint))  # of an address alone: names stay what they are
        socket.connect(self._endpoint)
        self._poller = zmq.Poller()
        self.opened_s = time.monotonic()
        self.greet()

    def close(self, linger_ms: int) -> None:
        """Disconnect, after what was said last has gone out or ``linger_ms`` have passed."""
        self._context.destroy(linger_ms)

    def send(self, parts: list[Any]) -> bool:
        """Whether a message went out; if not, the writer is away, or has not taken what went out before."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def say(self, message: Ping | Bye) -> None:
        """Send what has no number; where that cannot be, a Hello comes first when the writer is there again."""
        if self.refused is None and not self.send([encode(message)]):
            self.welcome, self._greeted = None, False

    def greet(self) -> None:
        """Say Hello; until a Welcome answers nothing else is to be sent."""
        window, self.welcome = self._window, None
        self._word_due_s = time.monotonic() + _GREET_S
        self._greeted = self.send([encode(msgspec.structs.replace(
            self._hello, stream=window.stream, epoch=window.epoch, nonces=window.nonces.draw(), sent=window.last))])
        if not self._greeted:
            window.nonces.withdraw()

    def tend(self) -> None:
        """Say Hello where the writer has taken none, else that the sender lives, when it is time for that."""
        if self.refused is not None:
            return
        due = time.monotonic() >= self._word_due_s
        if self.welcome is None and (due or (not self._greeted and self._socket.get(zmq.EVENTS) & zmq.POLLOUT)):
            self.greet()
        elif due:
            self._word_due_s = time.monotonic() + limits.heartbeat_interval_ms / 1000
            self.say(self._ping())

    def wait(self, timeout_ms: int | None = None, wake: int | None = None) -> dict[Any, int]:
        """Wait for an answer, for a writer to greet, or for the file ``wake``; what is ready, by socket or file.

        Without ``timeout_ms`` until the next word is due.
        """
        if timeout_ms is None:
            timeout_ms = max(1, int(1000 * (self._word_due_s - time.monotonic())))
        self._poller.register(self._socket, zmq.POLLIN if self._greeted else zmq.POLLIN | zmq.POLLOUT)
        if wake is not None:
            self._poller.register(wake, zmq.POLLIN)
        return dict(self._poller.poll(timeout_ms))

    def receive(self) -> Iterator[Ack | Refuse | Welcome]:
        """Acks, and what ends the stream: a Refuse, or a Welcome that does not hold what an earlier Ack promised.

        After that Welcome, or the Refuse "fenced", the caller has its window begin again, and is greeted for here.
        Whatever other Refuse comes out is final.
        """
        for _ in range(_ANSWERS_MAX):
            try:
                answer = decode_from_writer(self._socket.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            except msgspec.MsgspecError as error:
                logger.error("vllm-tap: the writer sent what is no answer: %s", error)
                continue
            match answer:
                case Welcome(durable=durable) if durable >= self._window.covered:
                    self.welcome, self.heard_s = answer, time.monotonic()
                    self._window.nonces.welcomed()
                    self._window.resume(durable)
                    self._word_due_s = self.heard_s
                case Ack() if self.welcome is not None:  # else it may speak of a stream that is no more
                    self.heard_s = time.monotonic()
                    yield answer
                case Refuse(code="hello" | "resend"):
                    self.greet()
                case Refuse(code="disk" | "limit"):
                    self.welcome = None  # nothing can be taken now: greet again, in a while
                case Welcome() | Refuse(code="fenced", stream=self._window.stream):
                    self.welcome = None
                    yield answer
                    self.greet()
                case Refuse(code=code) if code != "fenced":
                    self.refused = answer
                    yield answer
