"""The nudge: noise added where a tensor leaves its module must move the stream by just that noise.

The search shows that rows have the right numbers. The nudge shows that the model goes on with this very tensor and not
with a copy of it. In one more step every ``attn_out``, ``mlp_out`` and ``resid_post`` gets noise of its own. The sums
are checked again with that noise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, Final

import torch

from engine_side.discovery.calls import put_back, rows_of
from engine_side.discovery.identities import apart
from engine_side.tap import taps
from engine_side.tap.architectures import TapPoint

NUDGED: Final = ("attn_out", "mlp_out", "resid_post")
HELD: Final = ("resid_pre", "resid_mid", *NUDGED)
SUM_ROUNDINGS: Final = 4  # a sum of rounded rows is off by that of one, of its length

Rows = dict[tuple[str, int], torch.Tensor]


class Nudge:
    """A step of ``tokens`` with noise of ``draws`` in it, for the length of a ``with`` block.

    ``points``: of the sites ``HELD``, as far as the model has them.
    """

    def __init__(self, points: Iterable[TapPoint], tokens: int, draws: torch.Generator) -> None:
        self.points = sorted((point for point in points if point.site in HELD), key=lambda point: id(point.module))
        self.tokens, self.draws = tokens, draws
        self.rows: Rows = {}  # as they were before the noise
        self.noise: Rows = {}  # by how much they were moved
        self._undo: list[tuple[Any, Any]] = []

    def __enter__(self) -> Nudge:
        for _, group in groupby(self.points, key=lambda point: id(point.module)):
            points = list(group)
            module = points[0].module
            self._undo.append((module, module.__dict__.get("forward")))
            module.forward = self._nudging(module, points)
        return self

    def __exit__(self, *_: object) -> None:
        put_back(self._undo)

    def _nudging(self, module: Any, points: list[TapPoint]) -> Callable[..., Any]:
        forward = module.forward
        places = {name: place for place, name in enumerate(inspect.signature(forward).parameters)}

        def nudging(*args: Any, **kwargs: Any) -> Any:
            call = taps.Call(places, args, kwargs)
            for point in points:
                if (rule := taps.rule_of(point.rule)).before:
                    self._keep(point, rule.rows(call))
            result = forward(*args, **kwargs)
            for point in points:
                if not (rule := taps.rule_of(point.rule)).before:
                    before = self._keep(point, rule.rows(call) if rule.written else rule.rows(module, result))
                    if point.site in NUDGED and before is not None:
                        result = self._moved(point, rule, call, module, result, before)
            return result

        return nudging

    def _keep(self, point: TapPoint, rows: torch.Tensor) -> torch.Tensor | None:
        if (kept := rows_of(rows, self.tokens)) is not None:
            self.rows[point.site, point.layer] = kept
        return kept

    def _moved(self, point: TapPoint, rule: taps.Rule, call: taps.Call, module: Any, result: Any,
               before: torch.Tensor) -> Any:
        """The result with noise in it, as large as the rows are: where its rule takes them, or the first of two."""
        _, _, which = point.rule.partition(" × ")[0].partition(" ")
        if rule.written:
            call.get(which).add_(self._noise(call.get(which)))
        else:
            place = int(which.partition(" + ")[0]) if which else 0
            whole = list(result) if isinstance(result, tuple | list) else [result]
            whole[place] = whole[place] + self._noise(whole[place])
            result = type(result)(whole) if isinstance(result, tuple | list) else whole[0]
        after = rows_of(rule.rows(call) if rule.written else rule.rows(module, result), self.tokens)
        assert after is not None
        self.noise[point.site, point.layer] = after - before
        return result

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(like.shape, generator=self.draws).to(like.device, torch.float32)
        return (noise * like.float().square().mean(dim=-1, keepdim=True).sqrt()).to(like.dtype)

    def wrong(self, sums: bool, tolerance: float) -> Iterator[str]:
        """The sites that did not move as they must. ``sums``: whether the stream is what attention and MLP add up to.
        """
        def moved(site: str, layer: int) -> torch.Tensor | None:
            rows = self.rows.get((site, layer))
            return None if rows is None else rows + self.noise.get((site, layer), 0)

        for site, layer in self.rows:
            terms = {
                "resid_pre": [moved("resid_post", layer - 1)],
                "resid_mid": [moved("resid_pre", layer), moved("attn_out", layer)],
                "resid_post": [moved("resid_pre", layer), *(
                    term for term in (moved("attn_out", layer), moved("mlp_out", layer)) if term is not None)],
            }.get(site, []) if sums or site == "resid_pre" else []
            there = [term for term in terms if term is not None]
            if not terms or len(there) < len(terms) or (site == "resid_post" and len(there) == 1):
                continue
            if (off := apart(self.rows[site, layer], torch.stack(there).sum(0))) > SUM_ROUNDINGS * tolerance:
                yield f"{site}.{layer} differs by {off:.1e} from the expected value after its inputs were changed"
