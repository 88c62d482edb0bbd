"""Seeded captures for a writer that keeps dying, and what must be true of its store at any moment.

I1 what was acknowledged is readable and bit-equal; I2 nothing is called complete that is not; I3 no row is made up;
I4 every status is a known one and expected = captured + missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from schemas.errors import NotFoundError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.support.store_helpers import SITE, Sender, assert_adds_up, assert_rows, until

LAYERS = [0, 1, 2, 3]
STATUSES = {"pending", "running", "complete", "empty", "incomplete", "failed"}
CODECS = ("int8b64", "raw")


@dataclass
class Capture:
    """What was sent of a capture; numbers are those of the engine's stream, ``delete`` of the other's."""

    id: str
    number: int
    codec: str
    opened: int
    frames: list[tuple[int, int, int]] = field(default_factory=list)  # number, first position, end
    total: int = 0
    finish: int = 0
    delete: int = 0

    def acknowledged(self, durable: int) -> set[int]:
        """Positions that the engine was told are safe."""
        return {position for seq, start, stop in self.frames if seq <= durable for position in range(start, stop)}


class Traffic:
    """An engine and an API that send what ``rng`` says, over as many lives of the writer as it takes."""

    def __init__(self, endpoint: str, rng: random.Random) -> None:
        self.rng = rng
        self.engine, self.api = Sender(endpoint), Sender(endpoint, role="api")
        self.captures: list[Capture] = []

    def connect(self) -> None:
        """Greet a new life of the writer; what it lacks goes out again."""
        for sender in (self.engine, self.api):
            before = sender.durable
            sender.close()
            sender.connect()
            assert sender.hello().durable >= before, "what was acknowledged is forgotten"

    def send(self, count: int) -> None:
        """Some messages."""
        for _ in range(count):
            running = [capture for capture in self.captures if not capture.finish]
            dice = self.rng.random()
            if not running or (dice < 0.1 and len(running) < 4):
                self._open()
            elif dice < 0.8:
                self._frame(self.rng.choice(running))
            elif dice < 0.9:
                self._finish(self.rng.choice(running))
            elif dice < 0.93 and (done := [c for c in self.captures if c.finish and not c.delete]):
                doomed = self.rng.choice(done)
                if doomed.finish <= self.engine.durable:
                    doomed.delete = self.api.delete(doomed.id)
            else:
                self.receive()

    def _open(self) -> None:
        codec = self.rng.choice(CODECS)
        capture = Capture(new_ulid(), len(self.captures) + 1, codec, self.engine.next())
        self.engine.open(capture.id, prompt_len=1, codec=codec)
        self.captures.append(capture)

    def _frame(self, capture: Capture) -> None:
        rows = self.rng.choice([1, 1, 1, 5, 30])
        span = range(capture.total, capture.total + rows)
        capture.frames.append((self.engine.next(), span.start, span.stop))
        self.engine.frame([(capture.id, capture.number, span)], codec=capture.codec)
        capture.total += rows

    def _finish(self, capture: Capture) -> None:
        capture.finish = self.engine.finish(capture.id, end=capture.total, output=capture.total)

    def receive(self) -> None:
        """Hear what has come."""
        for sender in (self.engine, self.api):
            while sender.receive(0) is not None:
                pass

    def settle(self, store: Path, alive: Callable[[], bool] = lambda: True) -> None:
        """Finish every capture, wait until all is durable and the catalog has heard of it, or the writer is dead."""
        for capture in self.captures:
            if not capture.finish:
                self._finish(capture)
        self.engine.wait(alive=alive)
        self.api.wait(alive=alive)
        with StoreReader(store) as reader:
            kept = [capture.id for capture in self.captures if not capture.delete]
            until(lambda: not alive() or all(reader.capture(name).status != "running" for name in kept))

    def check(self, store: Path, some: int | None = None, durable: int | None = None) -> int:
        """Assert I1–I4 of the newest captures and some others, or of all; how many rows were compared.

        ``durable``: the number up to which the engine's messages must be readable, if not all acknowledged ones.
        """
        durable = self.engine.durable if durable is None else durable
        chosen = self.captures
        if some is not None and len(chosen) > 2 * some:
            chosen = [*self.rng.sample(chosen[:-some], some), *chosen[-some:]]
        rows = 0
        with StoreReader(store) as reader:
            for capture in chosen:
                rows += self._check(reader, capture, durable)
        return rows

    def _check(self, reader: StoreReader, capture: Capture, durable: int) -> int:
        if capture.opened > durable:
            return 0
        if capture.delete:
            if capture.delete <= self.api.durable:
                with pytest.raises(NotFoundError):
                    reader.capture(capture.id)
            return 0
        status = reader.capture(capture.id).status
        assert status in STATUSES, status
        got = reader.slice(capture.id, SITE, LAYERS, 0, max(capture.total, 1)) if capture.total else None
        positions = [] if got is None else got.positions.tolist()
        if got is not None:
            assert_rows(got, capture.number, positions)
        assert capture.acknowledged(durable) <= set(positions), "acknowledged rows are gone"
        assert_adds_up(reader.manifest(capture.id))
        if status in ("complete", "empty"):
            assert capture.finish and positions == list(range(capture.total)), f"called {status}, and is not"
            assert bool(positions) == (status == "complete")
        elif capture.finish and capture.finish <= durable:
            raise AssertionError(f"finished and acknowledged, but {status}")
        return len(positions)

    def close(self) -> None:
        self.engine.close()
        self.api.close()
