"""The file that the step's process and the sender's share: the ring of rows, then a few numbers, then a queue.

Every number has one writer, so there is no shared lock and no wake-up: the step puts its events into memory, and the
sender looks there. The writer of the store maps the ring alone.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from engine_side.transport.events import Event, Mark, decode, encode

__all__ = ["COPIES", "EXTRA", "Events", "Outbox", "Regions", "Shared"]

logger = logging.getLogger("vllm.tap")

U8 = npt.NDArray[np.uint8]

COPIES: Final = 4096  # the device counts copies to the host modulo this
_LINE: Final = 64  # bytes between numbers, so that their writers do not share a line of cache
_NUMBERS: Final = mmap.PAGESIZE
_QUEUE: Final = 4 << 20
_SIZE: Final = 8  # bytes before each event: its length
_OVERFLOW_MAX: Final = 64 << 20  # of events that the queue has no room for, where none are taken
_STILL_S: Final = 10.0  # without a taken event, then none are: many long prompts take the sender a while only
_FULL: Final = 32 << 20  # of events that wait: nothing more is begun

EXTRA: Final = _NUMBERS + _QUEUE  # bytes of the file beside the ring


class _Number:
    """A number in shared memory, as an attribute; 0 at first."""

    def __init__(self, line: int) -> None:
        self.offset = line * _LINE

    def __get__(self, shared: Shared, owner: type[Shared]) -> int:
        return shared.numbers[self.offset // 8]

    def __set__(self, shared: Shared, value: int) -> None:
        shared.numbers[self.offset // 8] = value


_COPIED: Final = _Number(0)


class Shared:
    """A mapped file of ``capacity`` bytes of ring and what comes after them."""

    copied = _COPIED  # the last copy to the host that is over, modulo COPIES; written by the device
    put = _Number(1)  # bytes ever put into the queue; written by the step
    taken = _Number(2)  # bytes ever taken from it; written by the sender, as are the next two
    tail = _Number(3)  # bytes of the ring ever released
    writer_away = _Number(4)  # not 0: too much waits for the writer, no capture is begun
    closing = _Number(5)  # not 0: no event follows those in the queue; written by the step's process
    abandoned = _Number(6)  # not 0: nothing is taken or released any more; written by both
    made = _Number(7)  # copies to the host ever begun; written by the step
    begun = _Number(8)  # not 0: the sender runs; written by it

    def __init__(self, file: int, path: Path, capacity: int) -> None:
        self.path, self.capacity = path, capacity
        self.map = mmap.mmap(file, capacity + EXTRA)
        self._bytes = np.frombuffer(self.map, np.uint8)
        self.numbers = memoryview(self.map)[capacity : capacity + _NUMBERS].cast("q")
        self.queue = memoryview(self.map)[capacity + _NUMBERS :]
        self.copied_at = capacity + _COPIED.offset  # in the file, 8 bytes

    @classmethod
    def opened(cls, path: Path, capacity: int) -> Shared:
        """The file of another process; OSError where it is gone."""
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return cls(file, path, capacity)
        finally:
            os.close(file)

    def over(self) -> int:
        """Number of copies that are over; fewer than ``COPIES`` are under way at any time."""
        made = self.made  # read first: where it is old by then, the answer is too low, and asked for again
        return made - (made - self.copied) % COPIES

    def behind(self) -> Literal["copies", "sender", "writer"]:
        """The party that must go on before the ring has room: the copies, the sender that takes events, or the writer.
        """
        if self.over() < self.made:
            return "copies"
        return "writer" if self.taken == self.put else "sender"

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the ring themselves, for checksums and for sending across hosts."""
        return memoryview(self.map)[offset : offset + nbytes]

    def blocks_at(self, offset: int, nbytes: int, count: int, stride: int) -> U8:
        """``count`` blocks of ``nbytes`` of the ring, ``stride`` apart, in place: uint8 [count, nbytes]."""
        return np.lib.stride_tricks.as_strided(self._bytes[offset:], (count, nbytes), (stride, 1), writeable=False)


class Regions:
    """Regions of the ring that hold rows, in the order of their allocation; used by the sender alone."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._marks: deque[Mark] = deque()
        self._released: set[Mark] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the ring that they take."""
        return self._marks[-1][0] - self._shared.tail if self._marks else 0

    def hold(self, mark: Mark) -> None:
        """Keep a region until it is released."""
        self._marks.append(mark)

    def release(self, marks: Sequence[Mark]) -> None:
        """Free regions, each once all that were allocated before it are free."""
        self._released.update(marks)
        while self._marks and self._marks[0] in self._released:
            mark = self._marks.popleft()
            self._released.discard(mark)
            self._shared.tail = mark[0]


class _Fence:
    """Orders what one processor writes, and what another reads, where the architecture alone does not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of nobody else: what orders is that taking one and leaving it does

    def __call__(self) -> None:
        for _ in range(2):
            self._lock.acquire()
            self._lock.release()


class Outbox:
    """Events on their way to the sender, in their order; used by the step thread alone."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.overflow: deque[memoryview] = deque()  # what the queue had no room for
        self._overflow_bytes = 0
        self._seen = -1, 0.0  # how much was taken, and when that was first seen
        self._fence = _Fence()

    def __len__(self) -> int:
        """Bytes that the sender has not taken yet."""
        return self._shared.put - self._shared.taken + self._overflow_bytes

    @property
    def full(self) -> bool:
        """Whether so much waits that nothing new should be begun."""
        return len(self) > _FULL

    def append(self, event: Event) -> None:
        """Append an event; it is forgotten where nobody takes events any more."""
        if self._shared.abandoned:
            return
        message = encode(event)
        self.overflow.append(memoryview(len(message).to_bytes(_SIZE, "little") + message))
        self._overflow_bytes += _SIZE + len(message)
        self.push()

    def extend(self, events: Iterable[Event]) -> None:
        """Append several events."""
        for event in events:
            self.append(event)

    def push(self) -> bool:
        """Put what overflowed into the queue as far as there is room; whether nothing waits."""
        shared = self._shared
        if shared.abandoned:
            self._forget()
        while self.overflow:
            at = shared.put % _QUEUE
            room = min(_QUEUE - at, shared.taken + _QUEUE - shared.put)
            part = self.overflow[0][:room]
            if not part:
                if shared.taken != self._seen[0]:
                    self._seen = shared.taken, time.monotonic()
                elif self._overflow_bytes > _OVERFLOW_MAX and time.monotonic() - self._seen[1] > _STILL_S:
                    logger.error("vllm-tap: the sender's process hangs, so nothing more is captured; restart the "
                                 "engine")
                    shared.abandoned = True
                    self._forget()
                return False
            shared.queue[at : at + len(part)] = part
            self._fence()
            shared.put += len(part)
            self._overflow_bytes -= len(part)
            if len(part) == len(self.overflow[0]):
                self.overflow.popleft()
            else:
                self.overflow[0] = self.overflow[0][len(part) :]
        return True

    def _forget(self) -> None:
        """Drop what nobody takes any more."""
        self.overflow.clear()
        self._overflow_bytes = 0


class Events:
    """The reader of an ``Outbox``; used by the sender alone."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._bytes = bytearray()  # of an event that has not come whole
        self._first: Event | None = None
        self._fence = _Fence()

    def __bool__(self) -> bool:
        """Whether an event waits."""
        return self.first() is not None

    def first(self) -> Event | None:
        """The oldest event that was not taken; None where there is none."""
        if self._first is None:
            size = self._whole(_SIZE)
            if size is not None and self._whole(_SIZE + size) is not None:
                message = bytes(self._bytes[_SIZE:])
                self._bytes.clear()
                self._first = decode(message)
        return self._first

    def take(self) -> None:
        """Take the oldest event off the queue."""
        self._first = None

    def _whole(self, nbytes: int) -> int | None:
        """The length that an event begins with once ``nbytes`` of it are here."""
        shared = self._shared
        while (missing := nbytes - len(self._bytes)) > 0:
            at = shared.taken % _QUEUE
            part = min(missing, shared.put - shared.taken, _QUEUE - at)
            if not part:
                return None
            self._fence()
            self._bytes += shared.queue[at : at + part]
            self._fence()
            shared.taken += part
        return int.from_bytes(self._bytes[:_SIZE], "little")
