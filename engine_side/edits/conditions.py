"""Conditions: a probe's score of a request's newest row says whether edits are made from the next step on, or ends it.

Scores are made on the device from the rows that a step has left in staging, before the next step overwrites them. Where
they cross a threshold, the next position is noted, also on the device. From there on a request's edits are made or not,
whatever is computed again. The host is told later which requests are ended, and gets the notes of a request at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine_side.tap.staging import Staging
from schemas.edits.resolved import Condition

switches_max: Final = 16  # of a request; after them its edits stay as they are
_NEVER: Final = 2**62


@dataclass(slots=True)
class Watched:
    """A request with a condition, and its line in the tables."""

    request: str
    condition: Condition
    prompt_len: int
    line: int


class Conditions:
    """Requests with conditions of one worker. ``switches`` int64 [lines, switches_max]: positions from which edits are
    made, are not made, …, in turns; line 0 belongs to no request.
    """

    def __init__(self, staging: Staging, requests: int) -> None:
        self.staging, self.device = staging, next(iter(staging.buffers.values())).device
        self.switches = torch.full((requests + 1, switches_max), _NEVER, dtype=torch.int64, device=self.device)
        self.unseen = torch.zeros(requests + 1, dtype=torch.int64, device=self.device)  # positions without a verdict
        self._free = list(range(requests, 0, -1))
        self._newest: list[tuple[Watched, int]] = []  # of the last step, with their newest rows
        self._positions = self.unseen[:0]  # of those rows
        self._under_way: deque[tuple[Any, torch.Tensor, list[Watched]]] = deque()  # event, flags on the host

    def open(self, request: str, condition: Condition, prompt_len: int) -> Watched:
        """Watch a request from its next step on."""
        if not self._free:  # preempted requests keep their lines
            count = len(self.switches)
            self.switches = torch.cat([self.switches, torch.full_like(self.switches, _NEVER)])
            self.unseen = torch.cat([self.unseen, torch.zeros_like(self.unseen)])
            self._free = list(range(2 * count - 1, count - 1, -1))
        watched = Watched(request, condition, prompt_len, self._free.pop())
        self.switches[watched.line] = _NEVER
        self.unseen[watched.line] = 0
        return watched

    def close(self, watched: Watched) -> torch.Tensor:
        """Watch it no more; returns its switches, int32 [switches_max], −1 for none."""
        self.settle()
        self._free.append(watched.line)
        found = self.switches[watched.line]
        return torch.where(found == _NEVER, -1, found).to(torch.int32)

    def made(self, lines: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Whether rows get their conditional edits, bool [rows]; ``lines`` and ``positions`` int64 [rows]."""
        return (self.switches[lines] <= positions[:, None]).sum(dim=-1) % 2 == 1

    def look_at(self, here: Sequence[tuple[Watched, int]], positions: torch.Tensor) -> None:
        """Take note of the newest rows of the step that comes; ``positions`` [rows] of all its rows."""
        self._newest = list(here)
        if here:
            self._positions = positions[self._numbers([row for _, row in here])].long()

    def settle(self) -> None:
        """Score the newest rows of the last step, which are still in staging."""
        newest, self._newest = self._newest, []
        if not newest:
            return
        watched = [each for each, _ in newest]
        lines, after = self._numbers([each.line for each in watched]), self._positions + 1
        high, low, first = torch.from_numpy(np.array([
            [each.condition.above for each in watched],
            [-np.inf if each.condition.below is None else each.condition.below for each in watched],
            [each.prompt_len for each in watched]])).to(self.device)
        scores, switches = self._scores(newest), self.switches[lines]
        count = (switches != _NEVER).sum(dim=-1)
        crossed = torch.where(count % 2 == 1, scores < low, scores >= high)
        crossed &= (after > self.unseen[lines]) & (after >= first) & (count < switches_max)
        self.switches[lines, count.clamp(max=switches_max - 1)] = torch.where(
            crossed, after, switches.gather(1, count.clamp(max=switches_max - 1)[:, None])[:, 0])
        self.unseen[lines] = torch.maximum(self.unseen[lines], after)
        if any(each.condition.stops for each in watched):
            self._tell(crossed, watched)

    @property
    def telling(self) -> bool:
        """Whether the host is yet to be told something."""
        return bool(self._under_way)

    def stopped(self) -> dict[str, str]:
        """Requests that their conditions end, with the probe, as far as the host has not been told; waits for nothing.

        May be called by another thread than the rest.
        """
        found: dict[str, str] = {}
        while self._under_way and (self._under_way[0][0] is None or self._under_way[0][0].query()):
            _, flags, watched = self._under_way.popleft()
            found |= {each.request: each.condition.probe for each, crossed in zip(watched, flags.tolist(), strict=True)
                      if crossed and each.condition.stops}
        return found

    def _scores(self, newest: Sequence[tuple[Watched, int]]) -> torch.Tensor:
        """The score of each row that its condition is about, float32 [requests]."""
        found = torch.empty(len(newest), device=self.device)
        for name in dict.fromkeys(each.condition.probe for each, _ in newest):
            scorer = self.staging.probes[f"probe.{name}"]
            mine = [number for number, (each, _) in enumerate(newest) if each.condition.probe == name]
            buffer = self.staging.buffers[scorer.about.site][self.staging.index(scorer.about.site, scorer.about.layer)]
            scores = scorer.encode(buffer[self._numbers([newest[number][1] for number in mine])][None])["x"][0]
            columns = self._numbers([newest[number][0].condition.column for number in mine])
            found[self._numbers(mine)] = scores.gather(1, columns[:, None])[:, 0]
        return found

    def _tell(self, crossed: torch.Tensor, watched: list[Watched]) -> None:
        if self.device.type == "cpu":
            self._under_way.append((None, crossed, watched))
            return
        flags = torch.empty(crossed.shape, dtype=torch.bool, pin_memory=True)
        flags.copy_(crossed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._under_way.append((event, flags, watched))

    def _numbers(self, numbers: Sequence[int]) -> torch.Tensor:
        return on_device(np.array(numbers, np.int64), self.device)


def on_device(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Numbers of the host on a device; waits for nothing."""
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
