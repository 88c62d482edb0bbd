"""Sites inside attention and the MLP, by what defines them: where a tensor comes from, and where it goes.

``q_rot`` and ``k_rot`` are the queries and keys that the attention kernel is given. ``v`` is the columns of a
projection that the kernel is given as values. ``q`` and ``k`` are the columns that norms and a rotation turn into
``q_rot`` and ``k_rot``: a rotation leaves a row at position 0 as it is. ``z`` and ``mlp_post`` are the input of the
projection that makes the result of attention or of the MLP. ``mix_in`` and ``mix_post`` are the two ends of a mixer
(Mamba, linear attention): the projection of what it gets, and the input of the projection that makes its result. Rows
are compared number for number, because nothing is computed between a projection and the module that gets its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from engine_side.discovery.calls import Call, Value
from engine_side.discovery.identities import Place, below, close
from engine_side.tap.architectures import CHOSEN_INSIDE

STEPS_MAX: Final = 3  # between a projection and the kernel: a norm, a rotation, a scale
ROPE_MAX: Final = 2.0  # what a rotation may multiply by (yarn)

_HEADS: Final = {"q_rot": "query", "k_rot": "key", "v": "value"}  # what vLLM's attention calls them
_LATENT: Final = {"q_rot": "q", "kv_latent": "kv_c_normed", "k_pe": "k_pe"}  # what its latent attention does
_ATTENTION: Final = ("q", "k", "v", "q_rot", "k_rot", "z")
_MIXER: Final = ("mix_in", "mix_steps", "mix_post")
_MEANING: Final = {
    "q": "columns of a projection that become the queries, before a query norm and the rotary embedding",
    "k": "columns of a projection that become the keys, before a key norm and the rotary embedding",
    "v": "columns of a projection that attention gets as values",
    "q_rot": "queries as the attention kernel gets them",
    "k_rot": "keys as the attention kernel gets them",
    "q_latent": "compressed queries of all heads after their norm, as the projection that makes the queries gets them",
    "kv_latent": "compressed keys and values of all heads after their norm, as the attention kernel gets them",
    "k_pe": "the part of the keys that is rotated, shared by all heads, as the attention kernel gets it",
    "z": "attention result of all heads, before the output projection",
    "z gated": "what the output projection gets: attention's result, changed on its way (a gate, a norm)",
    "mlp_post": "activation that the MLP's last projection gets",
    "mix_in": "input projection of a mixer, its columns in the layer's own order, before the convolution",
    "mix_steps": "a second, narrower input projection of a mixer, as of decay and update in Qwen3-Next",
    "mix_post": "what the output projection of a mixer gets, after its norm",
    "router_logits": "router logits, before the choice of experts",
    "experts": "ids of the experts that vLLM's router chose, heaviest first",
}


@dataclass(frozen=True, slots=True)
class Roles:
    """Facts that the seam knows of vLLM's own modules: attention layers, matrix products, mixtures of experts.

    ``chosen``: for a mixture, the number of its experts and the number of those a token is sent to; None for any other
    module. ``chooses_inside``: whether the mixture's kernel chooses the experts, and its router is not called.
    """

    is_kernel: Callable[[nn.Module], bool]
    is_projection: Callable[[nn.Module], bool]
    chosen: Callable[[nn.Module], tuple[int, int] | None] = lambda _module: None
    chooses_inside: Callable[[nn.Module], bool] = lambda _module: False


@dataclass(slots=True)
class Parts:
    """Sites inside a block, each with its rows [tokens, width] in the recorded step; why there is none of others."""

    places: dict[str, tuple[Place, torch.Tensor | None]] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)


class Inside:
    """The search inside one block: its calls, in the order in which they began."""

    def __init__(self, calls: Sequence[Call], block: str, roles: Roles, tolerance: float) -> None:
        self.calls = sorted(calls, key=lambda call: call.began)
        self.block, self.roles, self.tolerance = block, roles, tolerance
        self.found = Parts()

    def parts(self, attention: Call | None, mlp: Call | None) -> Parts:
        """Sites of a block whose attention and MLP terms were made by these calls."""
        kernels = [call for call in self.calls if self.roles.is_kernel(call.module)]
        mixers = [call for call in kernels if self._projections_in(call) and not
                  {"argument query", "argument kv_c_normed"} & {value.rule for value in call.given}]
        kernels = [call for call in kernels if call not in mixers]
        if len(mixers) == 1:
            self._mixer(mixers[0])
        elif mixers:
            self._lack(_MIXER, f"{len(mixers)} mixers in one block")
        if mixers and not kernels:
            self._lack(_ATTENTION, "a mixer has none")
        if len(kernels) == 1:
            self._attention(kernels[0])
            self._before(kernels[0], attention)
        elif kernels:
            self._lack(_ATTENTION, f"{len(kernels)} attention layers in one block")
        if mlp is not None:
            self._operand("mlp_post", mlp, "mlp_post")
        self._mixture()
        return self.found

    def _put(self, site: str, path: str, rule: str, rows: torch.Tensor | None, meaning: str = "", width: int = 0
             ) -> None:
        self.found.places[site] = Place(below(path, self.block), rule, rows.shape[1] if rows is not None else width,
                                        _MEANING[meaning or site]), rows

    def _lack(self, sites: Sequence[str], why: str) -> None:
        self.found.lacks |= {site: why for site in sites if site not in self.found.places}

    def _attention(self, kernel: Call) -> None:
        given = {value.rule.removeprefix("argument "): value.rows for value in kernel.given}
        names = _HEADS if "query" in given else _LATENT if "kv_c_normed" in given else {}
        for site, name in names.items():
            if site != "v" and name in given:
                self._put(site, kernel.path, f"argument {name}", given[name])
        if names is not _HEADS:
            if names:
                self._latent_queries(given["q"], kernel)
            self._lack(("q", "k", "v"), "keys and values are compressed: kv_latent and k_pe are there" if names else
                       f"{type(kernel.module).__name__} has none")
            return
        for site, rows in (("q", given["query"]), ("k", given.get("key")), ("v", given.get("value"))):
            source = None if rows is None else self._source(rows, kernel, steps=0 if site == "v" else STEPS_MAX)
            if source is None:
                self._lack((site,), "no columns of a projection become it")
            else:
                self._put(site, source[0].path, source[1], source[2])

    def _projections_in(self, mixer: Call) -> list[Call]:
        return [call for call in self.calls if call.path.startswith(f"{mixer.path}.") and call.made
                and self.roles.is_projection(call.module)]

    def _mixer(self, mixer: Call) -> None:
        """The two ends of a mixer: projections of what it gets, and the one that makes what it returns."""
        inner = self._projections_in(mixer)
        if any(call.hidden for call in inner):
            self._lack(_MIXER, "vLLM computes this mixer in one operation, with its projections")
            return
        into = [call for call in inner for value in mixer.given if _given(call, value.rows)]
        if len(into) in (1, 2):
            for site, call in zip(_MIXER, sorted(into, key=lambda call: -call.made[0].rows.shape[1]), strict=False):
                self._put(site, call.path, call.made[0].rule, call.made[0].rows)
            self._lack(("mix_steps",), "one projection makes all that the mixer makes of a token: mix_in")
        else:
            self._lack(_MIXER[:2], f"the mixer has {len(into)} projections of what it gets")
        result = mixer.returned
        makes = [call for call in inner if result is not None and call not in into and len(call.given) == 1
                 and torch.equal(call.made[0].rows.nan_to_num(), result.nan_to_num())]
        if len(makes) == 1:
            self._put("mix_post", makes[0].path, "operand", makes[0].given[0].rows)
        self._lack(("mix_post",), f"{len(makes)} projections make what the mixer returns")

    def _latent_queries(self, rotated: torch.Tensor, kernel: Call) -> None:
        """``q``, and ``q_latent`` where what makes it is not given what the keys are made of too."""
        if (source := self._source(rotated, kernel, STEPS_MAX)) is None or len(source[0].given) != 1:
            return
        call, rule, rows = source
        self._put("q", call.path, rule, rows)
        given = call.given[0].rows
        if any(torch.equal(other.given[0].rows, given) for other, _ in self._projected(call)
               if other.given and other.given[0].rows.shape == given.shape):
            self._lack(("q_latent",), "queries are made of what keys are made of: nothing is compressed")
        else:
            self._put("q_latent", call.path, "operand", given)

    def _source(self, rows: torch.Tensor, kernel: Call, steps: int) -> tuple[Call, str, torch.Tensor] | None:
        """The projection of whose columns ``rows`` were made in up to ``steps`` calls, its rule and the columns."""
        if (found := self._columns(rows, kernel)) is not None:
            return found
        if steps and (before := self._predecessor(rows, kernel)) is not None:
            return self._source(before, kernel, steps - 1)
        return self._rotated(rows, kernel) if steps else None

    def _columns(self, rows: torch.Tensor, kernel: Call) -> tuple[Call, str, torch.Tensor] | None:
        width = rows.shape[1]
        for call, value in self._projected(kernel):
            for start in _starts(value.rows[0], rows[0, 0], width):
                part = value.rows[:, start : start + width]
                if torch.equal(part, rows):
                    return call, _columns_rule(value, start, width), part
        return None

    def _rotated(self, rows: torch.Tensor, kernel: Call) -> tuple[Call, str, torch.Tensor] | None:
        """Rotated rows that no module made: the columns that are ``rows`` at position 0, and as long everywhere else.
        """
        width = rows.shape[1]
        found = [(call, _columns_rule(value, start, width), value.rows[:, start : start + width])
                 for call, value in self._projected(kernel) for start in _starts(value.rows[0], rows[0, 0], width)
                 if self._may_turn_into(value.rows[:, start : start + width], rows)]
        return found[0] if len(found) == 1 else None

    def _may_turn_into(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        return before.shape == after.shape and torch.equal(before[0], after[0]) and not torch.equal(before, after) \
            and close(before.norm(dim=1), after.norm(dim=1), self.tolerance)

    def _projected(self, kernel: Call) -> Iterator[tuple[Call, Value]]:
        for call in self.calls:
            if call.began < kernel.began and call.made and self.roles.is_projection(call.module):
                yield call, call.made[0]

    def _predecessor(self, rows: torch.Tensor, kernel: Call) -> torch.Tensor | None:
        """The tensor that became ``rows`` in the last call that made them. It is the one tensor of that width that the
        call was given. Of several, it is the one that a rotation has turned into ``rows``; a rotation leaves position 0
        as it is but for a factor. Where no call made ``rows``, it is a tensor that a call made and a rotation may have
        turned into them. None where there is no such tensor.
        """
        before = [call for call in reversed(self.calls) if call.ended < kernel.began]
        for call in before:
            if any(value.rows.shape == rows.shape and torch.equal(value.rows, rows) for value in call.made):
                given = [value.rows for value in call.given
                         if value.rows.shape == rows.shape and not torch.equal(value.rows, rows)]
                if len(given) > 1:
                    given = [one for one in given if _turned(one[0], rows[0], self.tolerance)]
                return given[0] if len(given) == 1 else None
        return next((value.rows for call in before for value in call.made if self._may_turn_into(value.rows, rows)),
                    None)

    def _before(self, kernel: Call, attention: Call | None) -> None:
        """``z``: what the projection is given that makes what attention returns."""
        if attention is not None:
            result = kernel.made[0].rows if kernel.made else None
            plain = result is not None and bool(attention.given) and torch.equal(attention.given[0].rows, result)
            self._operand("z", attention, "z" if plain else "z gated")

    def _operand(self, site: str, source: Call, meaning: str) -> None:
        if self.roles.is_projection(source.module) and len(source.given) == 1:
            self._put(site, source.path, "operand", source.given[0].rows, meaning)
        else:
            self._lack((site,), f"{below(source.path, self.block) or 'the block'}, which makes the sum's term, is no "
                                "one projection")

    def _mixture(self) -> None:
        mixtures = {call.path: call for call in self.calls if self.roles.chosen(call.module) is not None}
        if len(mixtures) != 1:
            if mixtures:
                self._lack(("router_logits", "experts"), f"{len(mixtures)} mixtures of experts in one block")
            return
        (call,) = mixtures.values()
        experts, chosen = self.roles.chosen(call.module) or (0, 0)
        gates = [gate for gate in self.calls if self.roles.is_projection(gate.module) and gate.made
                 and gate.made[0].rows.shape[1] == experts and gate.began < call.ended]
        if len(gates) == 1:
            self._put("router_logits", gates[0].path, gates[0].made[0].rule, gates[0].made[0].rows)
        else:
            self._lack(("router_logits",), f"{len(gates)} projections make {experts} numbers before the experts")
        if self.roles.chooses_inside(call.module):
            self._lack(("experts",), CHOSEN_INSIDE)
        else:
            self._put("experts", f"{call.path}.router", "choice", None, width=chosen)


def _given(call: Call, rows: torch.Tensor) -> bool:
    """Whether a call was given nothing but these rows."""
    return len(call.given) == 1 and torch.equal(call.given[0].rows, rows)


def _starts(row: torch.Tensor, first: torch.Tensor, width: int) -> list[int]:
    """Candidates for the first column of a part that begins with this number."""
    return [start for start in (row == first).nonzero().flatten().tolist() if start + width <= row.numel()]


def _columns_rule(value: Value, start: int, width: int) -> str:
    return value.rule if width == value.rows.shape[1] else f"{value.rule} columns {start}:{start + width}"


def _turned(before: torch.Tensor, after: torch.Tensor, tolerance: float) -> bool:
    """Whether a row is another times a number near one."""
    along = float(before @ after / (before @ before).clamp_min(1e-30))
    return 1 / ROPE_MAX < along < ROPE_MAX and close(along * before, after, tolerance)
