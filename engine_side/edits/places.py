"""Places to edit in a loaded model: how changed rows go back to where a tap's rule takes them from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from engine_side.edits.tables import Tables, edited
from engine_side.tap import taps
from engine_side.tap.architectures import TapPoint
from schemas.errors import StartError

_OPERANDS: Final = ("operand", "copied operand")
_BUFFERS: Final = ("marks", "programs", "ordinals", "slots", "vectors", "forms")


@dataclass(frozen=True, slots=True)
class EditedCall:
    """An edit of a call: of its argument (``before``), or of its result; ``parts``: the result's members whose sum the
    rows are.
    """

    name: str  # of its buffers, on the module
    rule: taps.Rule
    before: bool
    parts: tuple[int, ...]


def call_of(point: TapPoint) -> EditedCall:
    """The edit of a place; StartError where its rows are made in a way that nothing can be put back into."""
    rule, name = taps.rule_of(point.rule), f"vllm_tap_edit_{point.site}"
    if point.rule in _OPERANDS:
        return EditedCall(name, rule, True, ())
    if point.rule == "stream_out":
        return EditedCall(name, rule, False, (0, 1))
    if point.rule == "result":
        return EditedCall(name, rule, False, (0,))
    side, _, which = point.rule.partition(" ")
    if not any(word in point.rule for word in (" × ", " columns ")):
        if side == "argument":
            return EditedCall(name, rule, True, ())
        if side in ("result", "results"):
            return EditedCall(name, rule, False, tuple(int(part) for part in which.split(" + ")))
    raise StartError(f"vllm-tap: {point.site}.{point.layer} cannot be edited in this model: its rows are "
                     f"{point.rule!r} of a {type(point.module).__name__}, into which changed ones do not go back; "
                     "leave it out of --edit (VLLM_TAP_EDIT)")


def keep(model: nn.Module, tables: Tables) -> None:
    """Make all tables buffers of the model: a deep sleep gives away what was allocated while it was loaded, but these.
    """
    kept = {"marks": tables.marks, "counts": tables.counts, "ordinals": tables.ordinals, "slots": tables.every_slot}
    for width, pool in tables.pools.items():
        kept |= {f"vectors_{width}": pool.vectors, f"forms_{width}": pool.forms}
    for name, tensor in kept.items():
        model.register_buffer(f"vllm_tap_edit_{name}", tensor, persistent=False)


def edit_arguments(points: Iterable[TapPoint], tables: Tables) -> None:
    """Edit what modules are given. Behind ``taps.install``, whose taps then see what goes on."""
    for point, call in _registered(points, tables, before=True):
        # Else an fp8 model's activation quantizes the rows before.
        point.module.requires_unquantized_input = True
        _wrap(point.module, call)


def edit_results(points: Iterable[TapPoint], tables: Tables) -> None:
    """Edit what modules return. Before ``taps.install``, whose taps then see what goes on."""
    for point, call in _registered(points, tables, before=False):
        _wrap(point.module, call)


def _registered(points: Iterable[TapPoint], tables: Tables, before: bool) -> Iterator[tuple[TapPoint, EditedCall]]:
    for point in points:
        call, place = call_of(point), (point.site, point.layer)
        if call.before == before:
            pool = tables.pools[tables.widths[place]]
            for part, buffer in zip(_BUFFERS, (tables.marks_of(place), tables.programs, tables.ordinals,
                                            tables.slots[place], pool.vectors, pool.forms), strict=True):
                point.module.register_buffer(f"{call.name}_{part}", buffer, persistent=False)
            yield point, call


def _wrap(module: nn.Module, call: EditedCall) -> None:
    forward = taps.found(module, "forward")
    places = {name: number - 1 for number, name in enumerate(inspect.signature(forward).parameters)}

    @functools.wraps(forward)
    def editing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not call.before:
            return _put_back(self, call, forward(self, *args, **kwargs))
        rows = call.rule.rows(taps.Call(places, args, kwargs))
        now, _ = _moved(self, call, rows)
        return forward(self, *(now if value is rows else value for value in args),
                       **{name: now if value is rows else value for name, value in kwargs.items()})

    taps.put(module, "forward", editing)


def _put_back(module: Any, call: EditedCall, result: Any) -> Any:
    """A call's result with its rows edited: of several tensors whose sum they are the first takes all."""
    now, chosen = _moved(module, call, call.rule.rows(module, result))
    if not isinstance(result, tuple | list):
        return now
    whole = list(result)
    first, *others = call.parts
    whole[first] = torch.where(chosen, now, whole[first]) if others else now
    for other in others:
        whole[other] = torch.where(chosen, torch.zeros_like(whole[other]), whole[other])
    return type(result)(whole)


def _moved(module: Any, call: EditedCall, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as they go on, and which of them are edited."""
    now, chosen = edited(rows.reshape(-1, rows.shape[-1]),
                         *(getattr(module, f"{call.name}_{part}") for part in _BUFFERS))
    return now.view(rows.shape), chosen.view(*rows.shape[:-1], 1)
