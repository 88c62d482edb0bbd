"""A device whose copies to the host come late: streams and events as torch has them, over memory of the host.

What the model's stream is told happens at once. Copies wait on their own stream, in order, until somebody lets them be
made or the model's stream has to wait for them: what is read or written too soon is seen in the rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine_side.transport.device_copies import DeviceToHost, Scratch
from engine_side.transport.ring import Ring

HOST = torch.device("cpu")


class Copies:
    """The stream of copies; ``made`` of ``begun`` have been."""

    def __init__(self, device: torch.device) -> None:
        self._waiting: list[Callable[[], object]] = []
        self.made = 0

    @property
    def cuda_stream(self) -> Copies:
        """Where torch has a number."""
        return self

    @property
    def begun(self) -> int:
        """Of copies."""
        return self.made + len(self._waiting)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Of memory, by addresses, in its turn."""
        self._waiting.append(lambda: ctypes.memmove(target, source, nbytes))

    def make(self, until: int) -> None:
        """All up to that number."""
        while self.made < min(until, self.begun):
            self._waiting.pop(0)()
            self.made += 1

    def wait_event(self, event: Event) -> None:
        """Of the model's stream, where all has happened."""


class Event:
    """Recorded behind everything that its stream was told so far."""

    def __init__(self) -> None:
        self._copies: Copies | None = None
        self._at = 0

    def record(self, stream: Any) -> None:
        if isinstance(stream, Copies):
            self._copies, self._at = stream, stream.begun

    def wait(self) -> None:
        """As the model's stream does."""
        if self._copies is not None:
            self._copies.make(self._at)


class Model:
    """The model's stream."""

    def wait_event(self, event: Event) -> None:
        event.wait()


@contextmanager
def late_to_host(ring: Ring, scratch: int) -> Iterator[tuple[DeviceToHost, Copies]]:
    """The way through ``scratch`` bytes of such a device to the host, and the stream of its copies."""
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", Copies)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device: model)
        patch.setattr("engine_side.transport.device_copies.device_to_host",
                      lambda: lambda target, source, nbytes, stream: stream.copy(target, source, nbytes))
        to_host = DeviceToHost(HOST, ring, Scratch(scratch, HOST))
        yield to_host, to_host._copying
