"""Places to edit in a loaded model: how changed rows go back to where a tap's rule takes them from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import nn

from engine_side.edits.in_graph import acts_on, change
from engine_side.edits.tables import Pool, Tables, edited
from engine_side.tap import taps
from engine_side.tap.architectures import TapPoint
from schemas.errors import StartError
from schemas.sites import has_heads

_BUFFERS: Final = ("programs", "ordinals", "slots", "vectors", "forms", "counts")
_HEADS: Final = "heads"  # the one buffer more of a place whose rows are one head after the other
_PROJECTED: Final = ("q", "k", "v")

_NOWHERE: Final = 1 << 20  # of an argument that is known by its name alone

Argument = tuple[str, int]  # its name, and its place where the signature does not know the name


@dataclass(frozen=True, slots=True)
class EditedCall:
    """An edit of a call: of the arguments that are ``given``, or else of ``parts`` of its result. Rows are the sum of
    those, or ``columns`` of it.

    ``in_place``: the argument itself is changed, because the caller goes on with it too. ``lent``: arguments or results
    that other code may go on with, which must not see the change. The stream that a norm adds to may be staging, which
    has the row as it was before.
    """

    name: str  # of its buffers, on the module
    given: tuple[Argument, ...] = ()
    parts: tuple[int, ...] = ()
    columns: tuple[int, int] | None = None
    in_place: bool = False
    lent: bool = False


def is_editable(site: str, rule: str, source: str) -> bool:
    """Whether changed rows can be put back where a rule (as of TapPoint) takes those of a site."""
    rule = rule.partition(" columns ")[0]
    if site == "resid_mid":
        return source == "table" and rule in ("second", "argument")
    return rule in (*_PROJECTED, *_ARGUMENTS, "stream_out", "result") or (
        " × " not in rule and rule.partition(" ")[0] in ("argument", "arguments", "result", "results"))


def call_of(point: TapPoint) -> EditedCall:
    """The edit of a place; StartError where its rows are made in a way that nothing can be put back into."""
    if not is_editable(point.site, point.rule, point.source):
        raise StartError(f"vllm-tap: {point.site}.{point.layer} cannot be edited in this model: its rows are "
                         f"{point.rule!r} of a {type(point.module).__name__}, and changed rows cannot be put back "
                         "there; leave it out of --edit (VLLM_TAP_EDIT)")
    name, (rule, _, columns) = f"vllm_tap_edit_{point.site}", point.rule.partition(" columns ")
    side, _, which = rule.partition(" ")
    middle = point.site == "resid_mid"
    if rule in _PROJECTED:
        return EditedCall(name, parts=(0,), columns=taps.projected(point.module, _PROJECTED.index(rule)))
    if rule in ("stream_out", "result"):
        return EditedCall(name, parts=(0, 1) if rule == "stream_out" else (0,))
    if rule in _ARGUMENTS:
        return EditedCall(name, _ARGUMENTS[rule], in_place=middle and rule == "argument",
                          lent=rule in ("second", "stream_in") or (rule == "argument" and not middle))
    if side in ("argument", "arguments"):
        return EditedCall(name, tuple((part, int(part[1:]) if part[0] == "*" else _NOWHERE)
                                      for part in which.split(" + ")), lent=True)
    first, _, last = columns.partition(":")
    return EditedCall(name, parts=tuple(int(part) for part in which.split(" + ")),
                      columns=(int(first), int(last)) if columns else None)


def keep(model: nn.Module, tables: Tables) -> None:
    """Make all tables buffers of the model. A deep sleep gives away what was allocated while the model was loaded,
    except its buffers.
    """
    parts: list[tuple[str, Tables | Pool]] = [("", tables), *((f"_{width}", pool) for width, pool in
                                                             tables.pools.items())]
    for suffix, part in parts:
        for each in fields(part):
            if isinstance(tensor := getattr(part, each.name), torch.Tensor):
                model.register_buffer(f"vllm_tap_edit_{each.name}{suffix}", tensor, persistent=False)


# What of a call's arguments the rules of tables take. A norm that adds its two is edited before: it goes on with both
# what it norms and the sum.
_FIRST: Final[Argument] = ("", 0)
_ARGUMENTS: Final[dict[str, tuple[Argument, ...]]] = {
    "operand": (_FIRST,), "copied operand": (_FIRST,), "argument": (_FIRST,), "second": (_FIRST, ("residual", 1)),
    "query": (("query", 0),), "key": (("key", 1),), "stream_in": (("hidden_states", 1), ("residual", 2)),
}


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
        if bool(call.given) == before:
            pool = tables.pool_of(place)
            buffers = dict(zip(_BUFFERS, (tables.programs, tables.ordinals, tables.slots[place], pool.vectors,
                                          pool.forms, tables.counts_of(place)), strict=True))
            if has_heads(point.site) and pool.heads.shape[1] > 1:
                buffers[_HEADS] = pool.heads
            for part, buffer in buffers.items():
                point.module.register_buffer(f"{call.name}_{part}", buffer, persistent=False)
            yield point, call


def _wrap(module: nn.Module, call: EditedCall) -> None:
    forward = taps.found(module, "forward")
    places = {name: number - 1 for number, name in enumerate(inspect.signature(forward).parameters)}

    @functools.wraps(forward)
    def editing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not call.given:
            result = forward(self, *args, **kwargs)
            changed = _changed(self, call, result, (*args, *kwargs.values()))
            return _put_back(self, call, result) if changed is None else changed
        now, named = _replaced(self, call, taps.Call(places, args, kwargs))
        return forward(self, *now, **named)

    taps.put(module, "forward", editing)


def _replaced(module: Any, call: EditedCall, given: taps.Call) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with its rows edited. Where the rows are the sum of several, the first takes all."""
    keys = [key for name, place in call.given if (key := _key(given, name, place)) is not None]
    if not keys:
        raise StartError(f"vllm-tap: a {type(module).__name__} was called without the rows that {call.name} edits: "
                         f"{' and '.join(name or 'its first argument' for name, _ in call.given)}; leave its site out "
                         "of --edit (VLLM_TAP_EDIT)")
    tensors: list[torch.Tensor] = [given.kwargs[key] if isinstance(key, str) else given.args[key] for key in keys]
    own = [_own(tensor, call.lent) for tensor in tensors] if acts_on(tensors[0]) and not call.in_place else tensors
    if change(*own, tables=_tables(module, call), heads=_heads(module, call)):
        return _with(given, dict(zip(keys, own, strict=True)))
    rows = tensors[0] if len(tensors) == 1 else tensors[0] + tensors[1]
    now, chosen = _moved(module, call, rows)
    if call.in_place:
        rows.copy_(now)
        return list(given.args), dict(given.kwargs)
    return _with(given, {key: now if len(tensors) == 1 else torch.where(
        chosen, torch.zeros_like(tensor) if number else now, tensor) for number, (key, tensor) in enumerate(
            zip(keys, tensors, strict=True))})


def _with(given: taps.Call, other: Mapping[int | str, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, with others in the place of some."""
    return ([other.get(number, each) for number, each in enumerate(given.args)],
            {name: other.get(name, each) for name, each in given.kwargs.items()})


def _key(given: taps.Call, name: str, place: int) -> str | int | None:
    """The key of a call's argument: its keyword, or its number; None where it was not given."""
    if given.get(name, place) is None:
        return next(iter(given.kwargs)) if (name, place) == _FIRST and not given.args else None
    return name if name in given.kwargs else given.places.get(name, place)


def _changed(module: Any, call: EditedCall, result: Any, given: Iterable[Any]) -> Any:
    """A call's result, edited where it lies. Where other code may have it too, it is copied and then edited. None where
    neither can be done.
    """
    whole = list(result) if isinstance(result, tuple | list) else [result]
    if not acts_on(whole[call.parts[0]]):
        return None
    lent = call.lent or any(whole[part] is other for part in call.parts for other in given)
    for part in call.parts:
        whole[part] = _own(whole[part], lent)
    if not change(*(whole[part] for part in call.parts), tables=_tables(module, call), heads=_heads(module, call),
                  columns=call.columns):
        return None
    return type(result)(whole) if isinstance(result, tuple | list) else whole[0]


def _own(tensor: torch.Tensor, lent: bool) -> torch.Tensor:
    """A tensor that may be changed where it lies: not one that is ``lent``, nor a part of another."""
    return tensor.clone(memory_format=torch.contiguous_format) if lent or not tensor.is_contiguous() else tensor


def _put_back(module: Any, call: EditedCall, result: Any) -> Any:
    """A call's result with its rows edited. Where the rows are the sum of several tensors, the first takes all."""
    whole = list(result) if isinstance(result, tuple | list) else [result]
    first, *others = call.parts
    rows = whole[first] + whole[others[0]] if others else whole[first]
    start, stop = call.columns or (0, rows.shape[-1])
    now, chosen = _moved(module, call, rows[..., start:stop])
    if call.columns:
        now = torch.cat([rows[..., :start], now, rows[..., stop:]], dim=-1)
    whole[first] = torch.where(chosen, now, whole[first]) if others else now
    for other in others:
        whole[other] = torch.where(chosen, torch.zeros_like(whole[other]), whole[other])
    return type(result)(whole) if isinstance(result, tuple | list) else whole[0]


def _moved(module: Any, call: EditedCall, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as they go on, and which of them are edited."""
    programs, ordinals, slots, vectors, forms, counts = _tables(module, call)
    width = vectors.shape[-1]
    now, chosen = edited(rows.reshape(-1, width), programs, ordinals, slots, vectors, forms, counts,
                         _heads(module, call))
    return now.view(rows.shape), chosen.view(*rows.shape[:-1], 1) if rows.shape[-1] == width else chosen


def _tables(module: Any, call: EditedCall) -> tuple[torch.Tensor, ...]:
    return tuple(getattr(module, f"{call.name}_{part}") for part in _BUFFERS)


def _heads(module: Any, call: EditedCall) -> torch.Tensor | None:
    found: torch.Tensor | None = getattr(module, f"{call.name}_{_HEADS}", None)
    return found
