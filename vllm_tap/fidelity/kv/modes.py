"""Modes: the place of a codec between keys and values and their cache, and faults that are put in there on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from engine_side.seams.kept.keys_values import Rows
from schemas.errors import ArgumentError, StartError
from vllm_tap.fidelity.kv.codecs import Coded, Stand

__all__ = ["MODES", "PARTS", "ROLLING", "Coding", "Exact", "Kept", "Make", "Window", "Written", "noise_like",
            "one_wrong", "shuffled", "window_of"]

MODES: Final = ("snapshot", "direct", "in-forward")  # that are measured where none is named
ROLLING: Final = "rolling"
_FIRST, _WINDOW_MAX = 4, 128
_STEP_MIN = 4  # rows that leave a window together: two alone, shuffled, are the same pairs in another order
PARTS: Final = ("kv", "k", "v")

# By layer and number of a prompt the keys and values [positions, heads, head] of a run without any change.
Exact = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
Written = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # keys, values, slots
# Of rows [rows, heads, head] and where they stand: what takes their place.
Make = Callable[[torch.Tensor, Stand], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Window:
    """The positions that stay exact in ``rolling``: the ``first`` positions, the ``exact`` ones before those of a step,
    and those of the step itself. A step has at most ``step`` positions of a prompt.
    """

    exact: int
    first: int
    step: int

    def coded_at(self, position: int) -> int:
        """The first position of the step in which the row at ``position`` of a prompt is changed."""
        return ((position + self.exact) // self.step + 1) * self.step

    def stop(self, tokens: int) -> int:
        """The first position of a prompt of so many tokens whose row is not changed any more."""
        return (tokens - 1) // self.step * self.step - self.exact


def window_of(tokens: int, context: int, exact: int | None = None) -> Window:
    """The window of prompts of so many tokens, whose context is a number of whole steps; ArgumentError where hardly
    anything would leave it.
    """
    exact = min(context // 2, _WINDOW_MAX) if exact is None else exact
    steps = [step for step in range(_STEP_MIN, context + 1) if context % step == 0]
    step = max((step for step in steps if step <= max(exact // 4, _STEP_MIN)), default=steps[0])
    window = Window(exact, _FIRST, step)
    if window.stop(tokens) < _FIRST + 3 or window.coded_at(_FIRST + 1) >= tokens:
        most = (tokens - 1) // step * step - _FIRST - 3
        raise ArgumentError("--window", exact, f"in prompts of {tokens} tokens hardly a row leaves it: valid: at most "
                            f"{max(most, 0)}, or take more --tokens")
    return window


@dataclass(slots=True)
class Coding:
    """The rows that are written in place of a run's keys and values.

    ``make`` is asked for the rows of a step at one layer. ``number_of`` tells the number of a prompt from its request's
    id. ``part`` is "kv", "k" or "v". ``layers`` are those whose rows are changed.

    The ``mode`` tells when rows are changed. In-forward: every token's as they are computed, so that later layers
    compute with the result. Direct: the same, but every layer's rows are those of a run without any change (``exact``),
    so that nothing is changed twice. Snapshot: rows of positions before ``context`` are written as they are, and stay
    so until the request goes on behind them. Then they are changed, all layers' as the exact run had them. Rolling:
    each row is written as it is computed. It is changed once a step begins that is further behind it than the
    ``window``.

    ``asked``: rows of keys, and rows of values, that ``make`` was given, by position. ``changed``: how many of them are
    others now. ``wrong``: the first error in ``make``; the rows then stay as they are.
    """

    mode: str
    part: str
    layers: frozenset[int]
    context: int
    make: Make
    number_of: Callable[[str], int]
    exact: Exact = field(default_factory=dict)
    window: Window | None = None
    wrong: Exception | None = None
    asked: Counter[int] = field(default_factory=Counter)
    changed: int = 0
    _kept: dict[tuple[int, str], list[tuple[torch.Tensor, Written]]] = field(default_factory=dict)

    def __call__(self, layer: int, rows: Rows) -> Iterator[Written]:
        """The rows that are written for a layer's rows of a step."""
        if layer not in self.layers and self.mode != "direct":
            yield rows.keys, rows.values, rows.slots
        elif self.mode == "snapshot":
            yield from self._changed_later(layer, rows)
            yield rows.keys, rows.values, rows.slots
        elif self.window is not None:
            yield from self._left(layer, rows, self.window)
            yield rows.keys, rows.values, rows.slots
        else:
            yield self._of_requests(layer, rows)

    def _of_requests(self, layer: int, rows: Rows) -> Written:
        keys, values = self._exactly(layer, rows) if self.mode == "direct" else (rows.keys, rows.values)
        if layer in self.layers:
            prompts = torch.tensor([self.number_of(request) for request in rows.requests])[rows.owners]
            keys, values = self._made(layer, prompts, keys, values, rows.positions)
        return keys, values, rows.slots

    def _exactly(self, layer: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as the exact run had them, at positions that it has: this run's own answers may go on
        otherwise.
        """
        keys, values = rows.keys.clone(), rows.values.clone()
        for number, request in enumerate(rows.requests):
            if (exact := self.exact.get((layer, self.number_of(request)))) is not None:
                mine = ((rows.owners == number) & (rows.positions < len(exact[0]))).nonzero()[:, 0]
                there, at = mine.to(keys.device), rows.positions[mine]
                keys[there], values[there] = (one[at].to(keys.device) for one in exact)
        return keys, values

    def _changed_later(self, layer: int, rows: Rows) -> Iterator[Written]:
        """Keep the rows before the context. Write a request's kept rows, changed, once it goes on behind the context.
        """
        for number, request in enumerate(rows.requests):
            mine = (rows.owners == number).nonzero()[:, 0]
            before = rows.positions[mine] < self.context
            if before.all() and len(mine):
                there = mine.to(rows.keys.device)
                # Slots lie in a buffer that the next step writes again.
                self._kept.setdefault((layer, request), []).append((rows.positions[mine], (
                    rows.keys[there].clone(), rows.values[there].clone(), rows.slots[there].clone())))
            elif before.any():
                raise StartError(f"a step has positions on both sides of {self.context}: leave out vLLM's arguments "
                                 "that cut prompts otherwise")
            elif kept := self._kept.pop((layer, request), None):
                positions = torch.cat([at for at, _ in kept])
                keys, values, slots = (torch.cat(parts) for parts in zip(*(one for _, one in kept), strict=True))
                yield *self._made(layer, self._prompts(request, positions), keys, values, positions), slots

    def _left(self, layer: int, rows: Rows, window: Window) -> Iterator[Written]:
        """Write the rows that have left the window, changed. Keep those within it, and those that come now."""
        for number, request in enumerate(rows.requests):
            mine = (rows.owners == number).nonzero()[:, 0]
            if not len(mine):
                continue
            if len(mine) > window.step:
                raise StartError(f"a step has {len(mine)} positions of one prompt, and {window.step} are exact beside "
                                 "the window: leave out vLLM's arguments that cut prompts otherwise")
            there = mine.to(rows.keys.device)
            # Slots lie in a buffer that the next step writes again.
            come = (rows.positions[mine], (rows.keys[there].clone(), rows.values[there].clone(),
                                           rows.slots[there].clone()))
            kept = self._kept.get((layer, request), [])
            start, stay = int(come[0].min()) - window.exact, [come]
            if kept:
                positions = torch.cat([at for at, _ in kept])
                parts = [torch.cat(each) for each in zip(*(one for _, one in kept), strict=True)]
                gone, on = positions < start, (positions >= start).to(there.device)
                changed = gone & (positions >= window.first)
                if changed.any():
                    keys, values, slots = (each[changed.to(there.device)] for each in parts)
                    at = positions[changed]
                    yield *self._made(layer, self._prompts(request, at), keys, values, at), slots
                keys, values, slots = (each[on] for each in parts)
                stay = [(positions[~gone], (keys, values, slots)), come]
            self._kept[layer, request] = stay

    def _prompts(self, request: str, positions: torch.Tensor) -> torch.Tensor:
        return torch.full_like(positions, self.number_of(request))

    def _made(self, layer: int, prompts: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
              ) -> tuple[torch.Tensor, torch.Tensor]:
        stands = {what: Stand(prompts, layer, positions, what) for what in self.part}
        return (self._one(keys, stands["k"]) if "k" in stands else keys,
                self._one(values, stands["v"]) if "v" in stands else values)

    def _one(self, rows: torch.Tensor, stand: Stand) -> torch.Tensor:
        """The changed rows. The rows as they are where the change fails or makes what is no number: an engine's step
        must not fail.
        """
        try:
            made = self.make(rows, stand)
            if made.shape != rows.shape:
                raise ValueError(f"it decodes to {list(made.shape)}, not to {list(rows.shape)}")
            if not made.isfinite().all():
                raise ArithmeticError("it decodes to what is no number")
        except Exception as error:  # whatever somebody else's codec raises; told behind the run
            self.wrong = self.wrong or error
            return rows
        self.asked.update(stand.positions.tolist())
        self.changed += int((made != rows).flatten(1).any(-1).sum())
        return made


@dataclass(slots=True)
class Kept:
    """The rows of the first ``positions`` positions that a run has written, of prompts alone. It changes nothing."""

    positions: int
    number_of: Callable[[str], int]
    _rows: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def __call__(self, layer: int, rows: Rows) -> Iterator[Written]:
        for number, request in enumerate(rows.requests):
            mine = ((rows.owners == number) & (rows.positions < self.positions)).nonzero()[:, 0]
            if len(mine):
                there = mine.to(rows.keys.device)
                self._rows.setdefault((layer, self.number_of(request)), []).append(
                    (rows.keys[there].cpu(), rows.values[there].cpu()))
        yield rows.keys, rows.values, rows.slots

    @property
    def exact(self) -> Exact:
        """The exact rows by layer and prompt."""
        return {key: (torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts]))
                for key, parts in self._rows.items()}


def noise_like(coder: Coded) -> Make:
    """Rows with Gaussian noise of the codec's own error, head by head: as large, without its structure."""
    def make(rows: torch.Tensor, stand: Stand) -> torch.Tensor:
        off = (coder.coded(rows, stand).float() - rows.float()).norm(dim=-1, keepdim=True)
        parts = []
        for prompt, part in stand.by_prompt():
            seed = int(np.random.default_rng(_seeds(stand, prompt, part, stand.layer)).integers(1 << 62))
            parts.append(torch.randn(rows[part].shape, generator=torch.Generator().manual_seed(seed)))
        drawn = torch.cat(parts).to(rows.device)
        return (rows.float() + drawn * off / drawn.norm(dim=-1, keepdim=True)).to(rows.dtype)

    return make


def _seeds(stand: Stand, prompt: int, part: slice, more: int) -> tuple[int, ...]:
    """The numbers that rows of a prompt are drawn by."""
    return more, prompt, int(stand.positions[part][0]), ord(stand.what)


def shuffled(seed: int = 0) -> Make:
    """A control: each position's row is another's of its prompt. Values are moved otherwise than keys, because
    attention does not see the order in which pairs of them lie in the cache.
    """
    def make(rows: torch.Tensor, stand: Stand) -> torch.Tensor:
        moved = torch.empty_like(rows)
        for prompt, part in stand.by_prompt():
            order = np.random.default_rng(_seeds(stand, prompt, part, seed)).permutation(part.stop - part.start)
            moved[part][torch.from_numpy(order)] = rows[part][torch.from_numpy(np.roll(order, 1))]
        return moved

    return make


def one_wrong(prompt: int, at: int) -> Make:
    """A control: one position's row of one prompt is that of the position before."""
    def make(rows: torch.Tensor, stand: Stand) -> torch.Tensor:
        where = ((stand.positions == at) & (stand.prompts == prompt)).nonzero()[:, 0]
        if not len(where):
            return rows
        wrong = rows.clone()
        wrong[where] = rows[where - 1]
        return wrong

    return make
