"""Work beside the model's stream: encoding and copying off it on CUDA; on other devices the same calls do nothing.

Three hazards are ordered here, all by events between streams, none by waiting on the host. Staging is rewritten by the
next step: ``block_main`` makes the model's stream wait for the encoding. Scratch is a ring on the device: encoding
waits for the copy of what lay there before. Ring memory is read by the sender: ``deliver`` gives an event after the
copy, asked before a run is sent.

Encoding and copies have a stream each, so that the bytes of a long prompt cross to the host while the next steps run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from engine_side.ring import Ring

_COPIES_MAX: Final = 256  # events kept; older copies are waited for, which by then costs nothing


class Scratch:
    """Device memory between the encoders and the copies to the host: a byte ring in the order of the streams."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.capacity = nbytes
        self._head = self._tail = 0
        self._copies: deque[tuple[int, Any]] = deque()

    def take(self, nbytes: int, stream: Any) -> int:
        """Offset of contiguous bytes, at most half of all; ``stream`` waits for the copy of what they held."""
        start = self._head % self.capacity
        skip = self.capacity - start if start + nbytes > self.capacity else 0
        last = None
        while self._head + skip + nbytes - self._tail > self.capacity or len(self._copies) > _COPIES_MAX:
            if not self._copies:  # what was taken and never copied holds nothing
                self._tail = self._head
                break
            self._tail, last = self._copies.popleft()
        if last is not None:  # copies end in order
            stream.wait_event(last)
        self._head += skip + nbytes
        return (start + skip) % self.capacity

    def copied(self, event: Any) -> None:
        """``event`` comes after the copy of everything taken so far."""
        self._copies.append((self._head, event))


class SideStream:
    """Work beside the model's stream of ``device``; on CUDA through ``scratch``."""

    def __init__(self, device: torch.device, scratch: Scratch | None = None) -> None:
        self.device = device
        self.scratch = scratch
        self._encoding: Any = torch.cuda.Stream(device) if scratch is not None else None
        self._copying: Any = torch.cuda.Stream(device) if scratch is not None else None
        self._encoded: Any = None

    @contextmanager
    def after_main(self) -> Iterator[None]:
        """Run what follows beside the model's stream, after what that has enqueued."""
        if self.scratch is None:
            yield
            return
        self._encoding.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._encoding):
                yield
        finally:  # also after an error: what was enqueued before it still reads staging
            self._encoded = self._encoding.record_event()

    def block_main(self) -> None:
        """Hold the model's stream until the last rows are encoded."""
        if self._encoded is not None:
            torch.cuda.current_stream(self.device).wait_event(self._encoded)
            self._encoded = None

    def room(self, ring: Ring, base: int, nbytes: int) -> tuple[torch.Tensor, int]:
        """Where a block is encoded that shall lie at ``base`` of the ring: memory (uint8) and an offset in it."""
        if self.scratch is None:
            return ring.memory, base
        return self.scratch.memory, self.scratch.take(nbytes, self._encoding)

    def deliver(self, ring: Ring, base: int, at: int, nbytes: int) -> Any:
        """Bring a block from its room to the ring; an event after that, or None where it is there already."""
        if self.scratch is None:
            return None
        self._copying.wait_stream(self._encoding)
        with torch.cuda.stream(self._copying):
            ring.memory[base : base + nbytes].copy_(self.scratch.memory[at : at + nbytes], non_blocking=True)
        ready = self._copying.record_event()
        self.scratch.copied(ready)
        return ready
