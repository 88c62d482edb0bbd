"""Taps: the call of chosen module *instances* also copies rows into staging, inside the compiled graph.

Only instances of the target model are touched, so drafters and other models in the process stay as they are. So do
their classes: vLLM chooses by them how a layer gets adapters, is quantized or loaded anew. The wrapped forward is
ordinary traced code: Dynamo and CUDA graphs see a tensor written, no hook, no opaque operation. What comes from the
arguments is copied before the call: fused norms update the residual in place.

A copy costs nothing where what follows reads staging instead of the tensor that was copied: then the compiler writes
once, into staging. So the operand of a matrix product is read from there, and so is the residual (``read_back``).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import torch
from torch import nn

from engine_side.tap.architectures import TapPoint, of_model
from engine_side.tap.staging import JOINT, Staging
from schemas.errors import StartError

Forward = Callable[..., Any]

STREAM: Final = "vllm_tap_stream"  # the buffer that a norm reads


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that makes rows of a call: of its arguments (``before``) or of its result.

    ``instead``: the call gets the staged rows for its first argument, which it only reads. ``unquantized``: vLLM is
    told to call with rows, not with codes of them. ``written``: rows are what the call has written into an argument.
    """

    before: bool
    rows: Callable[..., torch.Tensor]
    method: str = "forward"
    instead: bool = False
    unquantized: bool = False
    written: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call, by name or, where the signature does not know the name, by place."""

    places: dict[str, int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def get(self, name: str, place: int = 0) -> Any:
        """The argument called ``name``; None where it was not given."""
        if name in self.kwargs:
            return self.kwargs[name]
        place = self.places.get(name, place)
        return self.args[place] if place < len(self.args) else None

    def first(self) -> Any:
        """The first tensor that the call was given."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))


def _stream_in(call: Call) -> torch.Tensor:
    hidden, residual = call.get("hidden_states", 1), call.get("residual", 2)
    return hidden if residual is None else hidden + residual


def _stream_out(_module: Any, result: Any) -> torch.Tensor:
    hidden, residual = result
    return hidden + residual


def _result(_module: Any, result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _second(_module: Any, result: Any) -> torch.Tensor:
    return result[1]


def projected(module: Any, number: int) -> tuple[int, int]:
    """The columns of q, k or v, numbered so, in what a joint projection makes."""
    module = of_model(module)
    queries, keys = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
    start = (0, queries, queries + keys)[number]
    return start, start + (queries if number == 0 else keys)


def _projected(number: int) -> Callable[[Any, Any], torch.Tensor]:
    """One of q, k, v of a joint projection."""

    def rows(module: Any, result: Any) -> torch.Tensor:
        start, stop = projected(module, number)
        return _result(module, result)[..., start:stop]

    return rows


def _joint(module: Any, result: Any) -> torch.Tensor:
    """q, k and v side by side."""
    joint, module = _result(module, result), of_model(module)
    return joint[..., : (module.num_heads + 2 * module.num_kv_heads) * module.head_size]


def _choice(_router: Any, result: Any) -> torch.Tensor:
    """Chosen ids by falling weight: kernels return them in any order."""
    weights, ids = result
    return ids.gather(-1, weights.argsort(dim=-1, descending=True, stable=True))


RULES: Final[dict[str, Rule]] = {
    "stream_in": Rule(True, _stream_in),
    "argument": Rule(True, Call.first),
    "operand": Rule(True, Call.first, instead=True, unquantized=True),
    "copied operand": Rule(True, Call.first, unquantized=True),
    "query": Rule(True, lambda call: call.get("query", 0)),
    "key": Rule(True, lambda call: call.get("key", 1)),
    "stream_out": Rule(False, _stream_out),
    "result": Rule(False, _result),
    "second": Rule(False, _second),
    "q": Rule(False, _projected(0)),
    "k": Rule(False, _projected(1)),
    "v": Rule(False, _projected(2)),
    "qkv": Rule(False, _joint),
    "choice": Rule(False, _choice, "_compute_routing"),
}


def rule_of(name: str) -> Rule:
    """The rule of a name: one of ``RULES``, or one made for a place that was found by structure.

    The latter are ``argument a``, ``arguments a + b`` (of both, what is given), ``result 0``, ``results 0 + 1`` and
    ``written a``. Each may end with ``× factor``. ``result 0 columns 8:16`` is a part of the columns. An argument
    without a name is ``*`` and its number.
    """
    if name in RULES:
        return RULES[name]
    whole, _, columns = name.partition(" columns ")
    if columns:
        first, last = map(int, columns.split(":"))
        return replace(rule_of(whole), rows=_columns(rule_of(whole).rows, first, last))
    rest, _, by = name.partition(" × ")
    side, _, which = rest.partition(" ")
    parts, factor = which.split(" + "), float(by or 1)

    def given(call: Call) -> torch.Tensor:
        values = (call.get(part, int(part[1:]) if part[0] == "*" else 0) for part in parts)
        found = [value for value in values if value is not None]
        return _total(found, factor)

    def made(_module: Any, result: Any) -> torch.Tensor:
        return _total([result[int(part)] if isinstance(result, tuple | list) else result for part in parts], factor)

    return Rule(True, given) if side.startswith("argument") else Rule(False, given, written=True) \
        if side == "written" else Rule(False, made)


def _columns(rows: Callable[..., torch.Tensor], first: int, last: int) -> Callable[..., torch.Tensor]:
    return lambda *call: rows(*call)[..., first:last]


def _total(tensors: list[Any], factor: float) -> torch.Tensor:
    total = tensors[0] if len(tensors) == 1 else tensors[0] + tensors[1]
    return total if factor == 1 else total * factor


def install(points: Iterable[TapPoint], staging: Staging,
            projection_writers: Mapping[int, Callable[[Any, torch.Tensor], None]] | None = None) -> None:
    """Wrap every point's module once.

    ``projection_writers``: by ``id``, what makes a joint projection write q, k and v into their buffer without a copy.
    """
    ordered = sorted(points, key=lambda point: id(point.module))
    for _, points_of in groupby(ordered, key=lambda point: id(point.module)):
        taps = list(points_of)
        module = taps[0].module
        if any(rule_of(tap.rule).unquantized for tap in taps):
            # Else an fp8 model's activation quantizes them before.
            module.requires_unquantized_input = True
        copies = [(tap.site, tap.rule, staging.of_layer(tap.site, tap.layer)) for tap in taps]
        if staging.joint is not None and {tap.rule for tap in taps} >= set(JOINT):
            copies = [copy for copy in copies if copy[1] not in JOINT]
            buffer = staging.of_layer("qkv", taps[0].layer)
            if projection_writers and id(module) in projection_writers:
                projection_writers[id(module)](module, buffer)
            else:
                copies.append(("qkv", "qkv", buffer))
        for site, _, buffer in copies:
            if isinstance(module, nn.Module):
                module.register_buffer(_name(site), buffer, persistent=False)
            else:
                setattr(module, _name(site), buffer)
        for method, group in groupby(copies, key=lambda copy: rule_of(copy[1]).method):
            rules = [(_name(site), rule_of(rule)) for site, rule, _ in group]
            put(module, method, _tapped(found(module, method), rules))


def _name(site: str) -> str:
    return f"vllm_tap_{site}"


def found(owner: Any, method: str) -> Forward:
    """The function that a call of ``owner.method`` runs, with the owner as its first argument.

    Some of vLLM's back ends put a fused forward on the instance. StartError where it is one that takes itself off and
    puts itself back in every call: what is around it is lost in the first.
    """
    own = owner.__dict__.get(method)
    if own is None:
        function: Forward = getattr(type(owner), method)
    elif isinstance(own, types.MethodType):
        function = own.__func__
    else:
        raise StartError(f"vllm-tap: cannot tap a {type(owner).__name__}, because vLLM replaces its {method} in every "
                         "call; leave cpu_offload_gb and offload_group_size out")
    return function


def put(owner: Any, method: str, function: Forward) -> None:
    """Make ``function`` the method of this one instance: its class stays what vLLM looks at."""
    setattr(owner, method, types.MethodType(function, owner))


def _tapped(forward: Forward, taps: list[tuple[str, Rule]]) -> Forward:
    places = {name: number - 1 for number, name in enumerate(inspect.signature(forward).parameters)}
    before = [(name, rule) for name, rule in taps if rule.before]
    after = [(name, rule) for name, rule in taps if not rule.before]

    @functools.wraps(forward)  # another wrapper has to know the names of its arguments
    def tapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, rule in before:
            rows = rule.rows(Call(places, args, kwargs))
            staged = _stage(getattr(self, name), rows)
            if rule.instead and staged.dtype == rows.dtype:
                args, kwargs = _with_first(args, kwargs, staged.view(rows.shape))
        result = forward(self, *args, **kwargs)
        for name, rule in after:
            rows = rule.rows(Call(places, args, kwargs)) if rule.written else rule.rows(self, result)
            _stage(getattr(self, name), rows)
        return result

    return tapped


def _stage(buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.reshape(-1, buffer.shape[-1])
    staged = buffer[: rows.shape[0]]  # tells the compiler that the rows have room: else the device checks each place
    if torch.compiler.is_compiling():
        # What is copied and made for that alone Inductor writes to a tensor of its own, too; put by index it does not.
        places = torch.arange(rows.shape[0], device=buffer.device)
        buffer.index_put_((places,), rows.to(buffer.dtype))
    else:
        staged.copy_(rows)
    return staged


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], first: torch.Tensor
                ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((first, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): first})


def read_back(norm: nn.Module, buffer: torch.Tensor) -> None:
    """``norm(hidden, residual)`` takes its residual from ``buffer`` [tokens, width], where a tap put the same rows."""
    forward, dtype = found(norm, "forward"), buffer.dtype

    def reading(self: Any, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is not None and residual.dtype == dtype:
            residual = getattr(self, STREAM)[: hidden.shape[0]]
        return forward(self, hidden, residual)

    norm.register_buffer(STREAM, buffer, persistent=False)
    put(norm, "forward", reading)
