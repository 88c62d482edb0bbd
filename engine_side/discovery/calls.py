"""One step of a model, recorded: what every module was given and returned, as rows.

Every module's ``forward`` is replaced on the instance for the length of the step, and put back. What lies inside a
decoder block is handed over when the block ends, so that never more than a block's tensors are kept.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from engine_side.tap import taps

NUMBERS_MAX: Final = 1 << 17  # in a row: no site has more
_OPERATIONS: Final = torch._ops.__file__  # where calls of operations are


@dataclass(frozen=True, slots=True)
class Value:
    """Rows [tokens, any width] in float64 that a call was given or has made, and the rule by which a tap takes them."""

    rule: str
    rows: torch.Tensor


@dataclass(slots=True)
class Call:
    """One call of a module: ``given`` as it was before the call, ``made`` as it was right after.

    ``takes`` and ``hands``: the shapes of all tensors that it was given and has returned, rows or not. ``claimed``: by
    site and layer, the rows that a tap would take of this call by a table, None where it cannot. ``hidden``: whether it
    ran inside an operation, of which a graph shows nothing. ``returned``: rows of a kernel before they became noise.
    """

    path: str
    module: nn.Module
    began: int
    ids: torch.Tensor | None  # whole numbers that it was given first
    given: list[Value]
    takes: list[torch.Size] = field(default_factory=list)
    ended: int = 0
    hands: list[torch.Size] = field(default_factory=list)
    made: list[Value] = field(default_factory=list)
    claimed: dict[tuple[str, int], torch.Tensor | None] = field(default_factory=dict)
    hidden: bool = False
    returned: torch.Tensor | None = None


Claim = tuple[tuple[str, int], taps.Rule]  # what a tap takes of a module, by a table: site and layer, and how


class Recording:
    """The calls of a step of ``tokens`` of ``model``, for the length of a ``with`` block; ``outside`` has those outside
    its blocks.

    ``kernels``: ids of the modules whose results become ``noise``, since a step without a cache leaves them zero or
    unwritten. ``claims``: by a module's id, the sites and layers that a table has there, and their rules.
    ``block_ended(block, inside)``: called as each of ``blocks`` ends.
    """

    def __init__(self, model: nn.Module, tokens: int, blocks: Sequence[str], kernels: Container[int],
                 claims: Mapping[int, Sequence[Claim]], noise: Callable[[torch.Tensor], None],
                 block_ended: Callable[[Call, list[Call]], None]) -> None:
        self.model, self.tokens, self.blocks, self.kernels = model, tokens, frozenset(blocks), kernels
        self.claims, self.noise, self.block_ended = claims, noise, block_ended
        self.outside: list[Call] = []
        self._inside: list[Call] = []
        self._in_block = False
        self._clock = count()
        self._undo: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> list[Call]:
        for path, module in self.model.named_modules():
            if type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList):
                self._undo.append((module, module.__dict__.get("forward")))
                module.forward = self._recording(path, module)
        return self.outside

    def __exit__(self, *_: object) -> None:
        put_back(self._undo)

    def _recording(self, path: str, module: nn.Module) -> Callable[..., Any]:
        forward, claims = module.forward, self.claims.get(id(module), ())
        places = {name: place for place, name in enumerate(inspect.signature(forward).parameters)}
        named = [name for name, parameter in inspect.signature(forward).parameters.items()
                 if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]

        def recording(*args: Any, **kwargs: Any) -> Any:
            arguments = {**{named[i] if i < len(named) else f"*{i}": a for i, a in enumerate(args)}, **kwargs}
            tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
            first = next(iter(tensors.values()), None)
            ids = first.detach().clone() if first is not None and not first.is_floating_point() else None
            call = Call(path, module, next(self._clock), ids, self._values("argument", tensors),
                        [value.shape for value in tensors.values()], hidden=_in_operation())
            self._in_block |= path in self.blocks
            given = taps.Call(places, args, kwargs)
            self._claim(call, claims, True, lambda rule: rule.rows(given))
            result = forward(*args, **kwargs)
            if id(module) in self.kernels:
                written = result if isinstance(result, torch.Tensor) else tensors.get("output", first)
                call.returned = rows_of(written, self.tokens)
                self.noise(written)
            call.ended = next(self._clock)
            call.made = self._made(call, result, tensors)
            self._claim(call, claims, False,
                        lambda rule: rule.rows(given) if rule.written else rule.rows(module, result))
            self._keep(call)
            return result

        return recording

    def _claim(self, call: Call, claims: Sequence[Claim], before: bool,
               take: Callable[[taps.Rule], Any]) -> None:
        for place, rule in claims:
            if rule.before is before:
                try:
                    call.claimed[place] = rows_of(take(rule), self.tokens)
                except (AttributeError, IndexError, TypeError, ValueError):  # not made for what it is used on
                    call.claimed[place] = None

    def _made(self, call: Call, result: Any, tensors: Mapping[str, torch.Tensor]) -> list[Value]:
        """The tensors that a call has returned, and those of its arguments that it has written."""
        results = list(enumerate(result if isinstance(result, tuple | list) else [result]))
        call.hands = [value.shape for _, value in results if isinstance(value, torch.Tensor)]
        before = {value.rule.partition(" ")[2]: value.rows for value in call.given}
        return self._values("result", {str(number): one for number, one in results}) + [
            value for value in self._values("written", tensors)
            if not torch.equal(value.rows, before[value.rule.partition(" ")[2]])]

    def _keep(self, call: Call) -> None:
        if call.path in self.blocks:
            self._in_block = False
            self.block_ended(call, self._inside)
            self._inside = []
        else:
            (self._inside if self._in_block else self.outside).append(call)

    def _values(self, side: str, tensors: Mapping[str, Any]) -> list[Value]:
        return [Value(f"{side} {name}", rows) for name, tensor in tensors.items()
                if (rows := rows_of(tensor, self.tokens)) is not None]


def _in_operation() -> bool:
    """Whether an operation of torch's called what called this."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _OPERATIONS:
        frame = frame.f_back
    return frame is not None


def put_back(before: Iterable[tuple[nn.Module, Any]]) -> None:
    """Give modules the ``forward`` back that they had of their own; None where they had their class's."""
    for module, own in before:
        if own is None:
            del module.forward
        else:
            module.forward = own


def rows_of(value: Any, tokens: int) -> torch.Tensor | None:
    """A tensor as rows [tokens, width] in float64; None where it is none: a rank's share of them, or one for all."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
        return None
    shape = value.shape[1:] if value.dim() > 2 and value.shape[0] == 1 else value.shape
    if shape[0] != tokens or not 0 < value.numel() <= tokens * NUMBERS_MAX:
        return None
    return value.detach().reshape(tokens, -1).to("cpu", torch.float64, copy=True)
