"""The send window of a stream: its numbers, and every message until the writer holds it durably."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from schemas.ids import new_ulid
from schemas.wire.identity import Nonces

__all__ = ["SendWindow"]

T = TypeVar("T")


class SendWindow(Generic[T]):
    """Messages of one stream, numbered from 1, each kept until an Ack covers it.

    The rule of resending is here: what the Welcome of a new connection leaves out goes out again, and so does what has
    been out for long without progress.
    """

    stream: str
    epoch: int
    nonces: Nonces

    def __init__(self) -> None:
        self.unacked: OrderedDict[int, T] = OrderedDict()
        self.begin_again()

    def begin_again(self) -> list[T]:
        """Start a stream of a new name; the messages that waited in the one before, which have no number any more."""
        waiting = list(self.unacked.values())
        self.unacked.clear()
        self.stream, self.epoch, self.nonces = new_ulid(), time.time_ns() // 1_000_000, Nonces()
        self.last = 0  # the number given last
        self.covered = 0  # the highest number that a writer said to hold
        self.next = 1  # the first number that has not gone out on this connection
        self._progress_s = time.monotonic()
        return waiting

    def add(self, message: T) -> None:
        """Keep a message under the number after ``last``."""
        self.last += 1
        self.unacked[self.last] = message

    def send(self, put: Callable[[T], bool]) -> None:
        """Hand what has not gone out to ``put``, in order, until it answers that it takes no more."""
        while self.next <= self.last:
            message = self.unacked.get(self.next)
            if message is not None and not put(message):
                return
            if self.next == self.covered + 1:
                self._progress_s = time.monotonic()
            self.next += 1

    def resume(self, durable: int) -> None:
        """Send all past ``durable`` on a new connection; an Ack that follows the Welcome covers the others."""
        self.covered = max(self.covered, durable)
        self.next = durable + 1

    def cover(self, durable: int) -> list[T]:
        """The messages that the writer holds from now on, no longer kept."""
        held = []
        while self.unacked and next(iter(self.unacked)) <= durable:
            held.append(self.unacked.popitem(last=False)[1])
        if durable > self.covered:
            self.covered, self._progress_s = durable, time.monotonic()
        return held

    def resend_after(self, stall_s: float) -> None:
        """Send all again that no Ack covers where nothing was covered for ``stall_s`` seconds: some of it was lost."""
        if self.next > self.covered + 1 and time.monotonic() - self._progress_s > stall_s:
            self.next = self.covered + 1
