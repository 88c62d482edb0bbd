"""A played engine: its steps without a model or a device. Everything behind the encoder is the real thing.

The recorder selects, makes bursts, allocates in a real ring and hands events to a sender's process, as in an engine. In
place of the encoder stands what writes token ids and positions alone: the coded rows lie in the ring from the start, as
a device would have put them there beside the processor, which a copy by this process would not be.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from bench.shapes import LOADS, SHAPES
from engine_side import kernels
from engine_side.front.ticket import Ticket
from engine_side.step.block import layout_of
from engine_side.step.capture_lifecycle import End
from engine_side.step.recorder import Recorder
from engine_side.step.selection import Step, plan_of
from engine_side.tap.budget import ring_bytes
from engine_side.tap.staging import Staging
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.ring import Ring, view
from engine_side.transport.ring_files import free_bytes
from engine_side.transport.sender_process import SenderProcess
from engine_side.transport.shared_memory import Outbox
from schemas.ids import new_ulid
from schemas.spec import Armed, parse_spec, resolve
from schemas.wire.engine_info import EngineInfo

SITE: Final = "resid_post"
DTYPE: Final = "bfloat16"
_STEP_TOKENS: Final = 8192  # of a step with prompts, vLLM's default on a large device: rings are made for that
_LOOK_S: Final = 0.002  # between looks at what is durable


@dataclass(slots=True)
class Stamp:
    """The encoder's place: rows are there, their token ids and positions are written, as the kernels do."""

    source: kernels.StagedRows
    memory: torch.Tensor
    offsets: list[int]
    begins: Any

    def aim(self, where: torch.Tensor | int, n: int, offsets: list[int], begins: Any) -> bool:
        """Aim it at other rows."""
        self.source = dataclasses.replace(self.source, rows=where, n=n)
        self.offsets, self.begins = offsets, begins
        return True

    def move(self, begins: Any) -> None:
        """Move it to another region."""
        self.begins = begins

    def __call__(self, step: int) -> None:
        source, at = self.source, int(self.begins[step])
        rows = slice(source.rows, source.rows + source.n) if isinstance(source.rows, int) else source.rows
        view(self.memory, at + self.offsets[-2], (source.n,), torch.int32).copy_(source.token_ids[rows])
        view(self.memory, at + self.offsets[-1], (source.n,), torch.int64).copy_(source.positions[rows])


@dataclass(slots=True)
class Played:
    """What was played in a stretch of time; rows are of one layer, as everywhere."""

    seconds: float  # from the first step to the last
    durable_s: float  # from the first step until the last row was durable
    nbytes: int
    rows: int  # offered: those that found no room included
    dropped: int
    latencies_s: list[float] = field(default_factory=list)  # of each step with rows, until they were durable
    rounds_s: list[float] = field(default_factory=list)  # of a real engine: what it took for the load, each time

    def quantile_ms(self, q: float) -> float:
        """Of the time until rows were durable."""
        return 1000 * float(np.quantile(self.latencies_s, q)) if self.latencies_s else math.nan


def default_ring(shape: str) -> int:
    """Bytes that an engine of this shape takes on a GPU."""
    return ring_bytes(SHAPES[shape].layers * _STEP_TOKENS * SHAPES[shape].hidden * 2, free_bytes())


class PlayedEngine:
    """An engine of a shape that captures every layer of the residual in one codec."""

    def __init__(self, shape: str, codec: str, load: str, step_tokens: int, ring: int,
                 sender: Callable[[Ring], SenderProcess]) -> None:
        size, self.load, self._step_tokens = SHAPES[shape], LOADS[load], step_tokens
        armed = Armed({SITE: list(range(size.layers))}, size.layers)
        self._spec = parse_spec({"codec": codec})
        self._resolved = resolve(self._spec, armed)
        self.codec, self.layers = self._resolved.codec[SITE], size.layers
        staging = Staging({SITE: torch.empty(size.layers, 1, size.hidden, dtype=torch.bfloat16)}, armed.sites)
        self.ring = Ring(ring, pinned=False)
        _fill(self.ring)
        self.recorder = Recorder(staging, DTYPE, "drop", DeviceToHost(torch.device("cpu"), self.ring,
                                                                      outbox=Outbox(self.ring.shared)))
        self._leave_out_the_encoder(staging)
        self.pid = os.getpid()
        self.sender = sender(self.ring)
        self.sender.begin(EngineInfo(f"played {shape}", DTYPE, "f", "", "", size.layers, armed, {SITE: size.hidden},
                                     1 << 20, "", "", ""))
        rows = max(step_tokens, self.load.prompt, self.load.batch)
        self._token_ids, self._positions = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
        self._waiting: deque[tuple[int, float]] = deque()  # ring's head after a step, and when that was

    def _leave_out_the_encoder(self, staging: Staging) -> None:
        layouts = self.recorder.layouts
        entry, = plan_of(self._resolved)
        layout = layout_of(entry, staging, DTYPE, layouts.bytes_max, compiled=True)
        layouts._made[entry] = dataclasses.replace(layout, kernel=Stamp)
        self.row_bytes = sum(layout.stream_bytes) * self.layers

    def play(self, seconds: float, rate: float | None, ended: Callable[[list[str]], None],
             tell: Callable[[float], None] = lambda done: None) -> Played:
        """Play the load again and again for so long, at ``rate`` bytes a second; rows that find no room are dropped.

        ``rate`` None: as fast as the ring gives room; nothing is dropped. ``ended`` is given captures that began
        together and have ended, ``tell`` the seconds that have passed.
        """
        recorder = self.recorder
        recorder.bursts.on_full = "wait" if rate is None else "drop"
        before, latencies = recorder.counters.rows + recorder.counters.dropped, list[float]()
        dropped, begun, played = recorder.counters.dropped, time.monotonic(), 0

        def step(requests: Sequence[str], rows: int, first: int, begin: Callable[[], None] | None = None) -> None:
            """A step of ``rows`` rows of each request from position ``first`` on, when it is due."""
            nonlocal played
            self._wait_until(begun + (played / rate if rate else 0.0), latencies)
            count = len(requests) * rows
            positions = np.tile(np.arange(first, first + rows), len(requests))
            self._positions[:count] = torch.from_numpy(positions)
            self._token_ids[:count] = self._positions[:count]
            recorder.before_step(count, rows > 1)
            recorder.after_step(Step(list(requests), np.arange(len(requests) + 1) * rows,
                                     np.full(len(requests), first), self._positions[:count], self._token_ids[:count],
                                     begin=begin))
            played += count * self.row_bytes
            self._waiting.append((self.ring.head, time.monotonic()))
            self._look(latencies)
            tell(min(time.monotonic() - begun, seconds))

        while time.monotonic() - begun < seconds:
            ended(self._generate(step, begun + seconds))
        recorder.flush()
        last = time.monotonic()
        while self.ring.shared.tail < self.ring.head:
            if self.ring.shared.abandoned:
                raise RuntimeError("the sender's process has ended; what it wrote to standard error says why")
            recorder.to_host.push()
            self._look(latencies)
            time.sleep(_LOOK_S)
        self._look(latencies)
        durable = time.monotonic()
        rows = recorder.counters.rows + recorder.counters.dropped - before
        return Played(last - begun, durable - begun, played, rows, recorder.counters.dropped - dropped, latencies)

    def _generate(self, step: Callable[..., None], until: float) -> list[str]:
        """One round of the load, cut short at ``until``: prompts, then a token a step; the captures."""
        load, recorder = self.load, self.recorder
        requests = [new_ulid() for _ in range(load.batch)]
        tickets = {name: Ticket(name, self._spec.to_json(), self._resolved, 0, 1, 1) for name in requests}
        prompt, together = list(range(load.prompt)), max(1, self._step_tokens // load.prompt)

        def begin(names: Sequence[str]) -> None:
            for name in names:
                recorder.open(name, tickets[name], prompt, 0)

        for at in range(0, load.batch, together):
            names = requests[at : at + together]
            rows = min(load.prompt, self._step_tokens)
            for first in range(0, load.prompt, rows):
                step(names, min(rows, load.prompt - first), first, None if first else partial(begin, names))
        generated = 1
        while generated < load.generated and time.monotonic() < until:
            step(requests, 1, load.prompt + generated - 1)
            generated += 1
        recorder.flush()
        for name in requests:
            recorder.finish(End(name, tickets[name], "length", None, prompt, [7] * generated,
                                load.prompt + generated - 1))
        return requests

    def _wait_until(self, due: float, latencies: list[float]) -> None:
        while (left := due - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
            self.recorder.to_host.push()
            self._look(latencies)

    def _look(self, latencies: list[float]) -> None:
        """Note how long what has become durable since the last look took."""
        shared, now = self.ring.shared, time.monotonic()
        while self._waiting and (shared.tail >= self._waiting[0][0] or shared.tail == self.ring.head):
            latencies.append(now - self._waiting.popleft()[1])

    def close(self) -> None:
        """Send what is there and end."""
        self.recorder.flush()
        self.sender.close()
        self.ring.close()


def _fill(ring: Ring) -> None:
    """Bytes that decode in every codec: small enough that each pair of them is a column of the row."""
    pattern = torch.from_numpy(np.random.default_rng(0).integers(0, 4, 64 << 20, np.uint8))
    for at in range(0, ring.capacity, len(pattern)):
        part = ring.memory[at : at + len(pattern)]
        part.copy_(pattern[: len(part)])
