"""Copies of encoded rows from the device to the ring; where the model runs on the host, rows are encoded in the ring.

Rows are encoded on the model's own stream, into scratch. The next step's graph rewrites staging, and the order of that
stream alone puts it after the encoding. Copies to the host have a stream of their own. They are enqueued a step late,
behind what the step before them had to fetch, because a device copies in one direction one thing after the other. The
sampled tokens that the scheduler waits for would otherwise stand behind a whole prompt's rows.

Two hazards are ordered. Scratch is a ring: the model's stream waits for the copy of what lay there before, by an event.
Ring memory is read by the sender, and an event tells nothing in its process. So copies are numbered, and behind each
the device writes its number beside the ring. A run carries the number of its copy.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import torch

from engine_side.transport.cuda_calls import device_to_host
from engine_side.transport.events import EditsCounted, Event, Freed, Run
from engine_side.transport.ring import ALIGN, Ring, view
from engine_side.transport.shared_memory import COPIES, Outbox

_AHEAD_BYTES: Final = 48 << 20  # of copies a step, beside what the step itself will make
_COPIES_MAX: Final = 256  # events kept; older copies are waited for, which by then costs nothing


class Scratch:
    """Device memory between the encoders and the copies to the host: a byte ring in the order of the streams."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.capacity = nbytes - nbytes % ALIGN
        self.head = 0
        self._tail = 0
        self._copies: deque[tuple[int, Any]] = deque()

    def allocate(self, nbytes: int, stream: Any) -> int | None:
        """Offset of contiguous bytes, at most half of all; ``stream`` waits for the copy of what they held.

        None where what they held is not even on its way. The offset is a multiple of ``ALIGN``, as kernels take it to
        be: one that is not would have them write before it.
        """
        skip, last = self._skip(nbytes), None
        while self._copies and (
            self.head + skip + nbytes - self._tail > self.capacity or len(self._copies) > _COPIES_MAX
        ):
            self._tail, last = self._copies.popleft()
        if last is not None:  # copies end in order
            stream.wait_event(last)
        if self.head + skip + nbytes - self._tail > self.capacity:
            return None
        self.head += skip + nbytes
        return (self.head - nbytes) % self.capacity

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for bytes, or will be once copies are over that are under way."""
        tail = self._copies[-1][0] if self._copies else self._tail
        return self.head + self._skip(nbytes) + nbytes - tail <= self.capacity

    def _skip(self, nbytes: int) -> int:
        """Bytes to leave out before ``nbytes``, so that they begin at a multiple of ``ALIGN`` and are contiguous."""
        start = self.head % self.capacity
        skip = -start % ALIGN
        return skip if start + skip + nbytes <= self.capacity else self.capacity - start

    def add_copy(self, until: int, event: Any) -> None:
        """Note that ``event`` comes after the copy of everything that was allocated before ``head`` was ``until``."""
        self._copies.append((until, event))

    def give_back(self, nbytes: int) -> None:
        """Give back the end of what was allocated last."""
        self.head -= nbytes

    def discard(self) -> None:
        """Give back all that was allocated: nothing of it waits for a copy."""
        self._tail = self.head


class DeviceToHost:
    """Events that leave the step in their order, and bytes on their way to the ring."""

    def __init__(self, device: torch.device, ring: Ring, scratch: Scratch | None = None,
                 outbox: Outbox | deque[Event] | None = None) -> None:
        self.outbox = deque[Event]() if outbox is None else outbox
        self.ring = ring
        self.scratch = scratch
        self._device = device
        if scratch is not None:
            self._copying: Any = torch.cuda.Stream(device)
            self._encoded = torch.cuda.Event()
            self._over = [torch.cuda.Event() for _ in range(2 * _COPIES_MAX)]  # in turns: scratch keeps fewer
            self.numbers = torch.arange(COPIES, dtype=torch.int64, device=device)
            self._copy = device_to_host()
        self.waiting: deque[tuple[Event, int, int, int, int]] = deque()  # event, from, to, bytes, scratch's head
        self.overflow = self.outbox.overflow if isinstance(self.outbox, Outbox) else ()

    def reserve(self, base: int, nbytes: int) -> tuple[torch.Tensor, int]:
        """Reserve memory (uint8), and an offset in it, to encode bytes in that shall lie at ``base`` of the ring."""
        scratch = self.scratch
        if scratch is None:
            return self.ring.memory, base
        while (at := scratch.allocate(nbytes, torch.cuda.current_stream(self._device))) is None:
            if self.waiting:
                self.start_copies(nbytes)
            else:  # what was reserved and never enqueued holds nothing
                scratch.discard()
        return scratch.memory, at

    def give_back(self, nbytes: int) -> None:
        """Give back the end of the region reserved last, of the ring and of scratch."""
        self.ring.give_back(nbytes)
        if self.scratch is not None:
            self.scratch.give_back(nbytes)

    def fits(self, nbytes: int) -> bool:
        """Whether bytes can be reserved beside what is held and not enqueued yet."""
        return self.scratch is None or self.scratch.fits(nbytes)

    def ends(self) -> tuple[int, int]:
        """The end of the region reserved last: the head of the ring, and of scratch."""
        return self.ring.head, 0 if self.scratch is None else self.scratch.head

    def free(self, mark: int) -> None:
        """Free the ring up to the end of a region, once what reads it has finished."""
        freed = Freed((mark, 0))
        if self.scratch is None:
            self.outbox.append(freed)
        else:
            self.waiting.append((freed, 0, 0, 0, 0))

    def send_event(self, event: Event) -> None:
        """Send an event without bytes, after everything before it."""
        if self.waiting:
            self.waiting.append((event, 0, 0, 0, 0))
        else:
            self.outbox.append(event)

    def enqueue_numbers(self, event: EditsCounted, numbers: torch.Tensor) -> None:
        """Send an event with numbers of the device, which lie in the ring then; without them where it is full."""
        nbytes = numbers.numel() * numbers.element_size()
        if (region := self.ring.allocate(nbytes)) is not None:
            event.offset, event.mark = region[0], (region[1], 0)
            memory, at = self.reserve(region[0], nbytes)
            view(memory, at, tuple(numbers.shape), numbers.dtype).copy_(numbers)
            if self.scratch is not None:
                self.waiting.append((event, at, region[0], nbytes, self.scratch.head))
                return
        self.send_event(event)

    def enqueue(self, runs: list[Run], at: int, base: int, nbytes: int, until: int) -> None:
        """Enqueue runs whose ``nbytes`` lie at ``at`` of reserved memory, for ``base`` of the ring.

        ``until``: scratch's head behind them.
        """
        if self.scratch is None:
            self.outbox.extend(runs)
            return
        *others, last = runs  # the last one brings the bytes of all
        for run in others:
            self.waiting.append((run, 0, 0, 0, 0))
        self.waiting.append((last, at, base, nbytes, until))

    @property
    def light(self) -> bool:
        """Whether what waits takes the bus less than a millisecond."""
        return sum(nbytes for _, _, _, nbytes, _ in self.waiting) <= _AHEAD_BYTES

    def before_step(self, tokens: int, bytes_a_token: float) -> None:
        """Send on what waits, as fast as the step of ``tokens`` will make more and a little faster; all where it is 0.

        At the speed of the bus the part beyond takes a millisecond, a step of decode several.
        """
        if self.waiting:
            self.start_copies(_AHEAD_BYTES + 1.5 * tokens * bytes_a_token if tokens else float("inf"))
        self.push()

    def push(self) -> bool:
        """Send what the sender had no room for; returns whether it has all."""
        return not isinstance(self.outbox, Outbox) or self.outbox.push()

    def start_copies(self, budget: float) -> None:
        """Enqueue copies of at most ``budget`` bytes, but one, behind everything on the model's stream so far."""
        if self.scratch is None or not self.waiting:
            return
        self._encoded.record(torch.cuda.current_stream(self._device))
        self._copying.wait_event(self._encoded)
        number = self.ring.shared.made = self.ring.shared.made + 1  # before the device can say that it is over
        moved: list[Event] = []
        source = target = size = until = 0  # of a copy that grows by what is contiguous in both memories
        # Runs that share their bytes go together: those before the one that brings them are without any.
        while self.waiting and (budget > 0 or not isinstance(self.waiting[0][0], Run)):
            event, at, base, nbytes, head = self.waiting.popleft()
            if nbytes:
                if (source + size, target + size) != (at, base):
                    self._to_ring(source, target, size)
                    source, target, size = at, base, 0
                size += nbytes
                budget -= nbytes
                until = head
            if isinstance(event, Run | Freed | EditsCounted):
                event.copied = number
            moved.append(event)
        self._to_ring(source, target, size)
        self._copy(self.ring.copied.data_ptr(), self.numbers.data_ptr() + 8 * (number % COPIES), 8,
                   self._copying.cuda_stream)
        if until:
            over = self._over[number % len(self._over)]
            over.record(self._copying)
            self.scratch.add_copy(until, over)
        self.outbox.extend(moved)

    def _to_ring(self, source: int, target: int, nbytes: int) -> None:
        """Copy bytes of scratch to the ring."""
        if nbytes:
            assert self.scratch is not None
            self._copy(self.ring.memory.data_ptr() + target, self.scratch.memory.data_ptr() + source, nbytes,
                       self._copying.cuda_stream)
