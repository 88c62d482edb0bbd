"""Rotary embeddings of an engine in this process: keys as they were before theirs, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine_side.seams.kept.keys_values import layers_of, runner_of

__all__ = ["Rotary", "rotaries_of"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embedding of a layer. ``table`` float32 [positions, 2 · pairs]: cosines and then sines, as the model
    has them. The first 2 · pairs numbers of a head are turned: in ``halves``, the first half with the second, or else
    each number with its neighbour.
    """

    table: torch.Tensor
    halves: bool

    def turned(self, rows: torch.Tensor, positions: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Rows [rows, heads, head] turned as at their positions, or ``back``: float32."""
        made = rows.float().clone()
        cosine, sine = self.table[positions].to(rows.device).unsqueeze(1).chunk(2, -1)
        if back:
            length = cosine.square() + sine.square()  # 1, but for embeddings that scale as well
            cosine, sine = cosine / length, -sine / length
        pairs, (one, other) = cosine.shape[-1], self._pairs(cosine.shape[-1])
        first, second = rows.float()[..., one], rows.float()[..., other]
        assert first.shape[-1] == pairs
        made[..., one], made[..., other] = first * cosine - second * sine, second * cosine + first * sine
        return made

    def _pairs(self, count: int) -> tuple[slice, slice]:
        if self.halves:
            return slice(0, count), slice(count, 2 * count)
        return slice(0, 2 * count, 2), slice(1, 2 * count, 2)


def rotaries_of(engine: Any) -> dict[int, Rotary | str]:
    """The rotary embedding of each layer, or why it is not known."""
    runner = runner_of(engine)
    paths = {id(module): path for path, module in runner.model.named_modules()}
    return {layer: _of(runner.model, paths.get(id(part))) for layer, part in layers_of(runner).items()}


def _of(model: Any, path: str | None) -> Rotary | str:
    if path is None:
        return "the model does not have the layer as a module"
    parent = model.get_submodule(path.rpartition(".")[0])
    found = [part for _, part in parent.named_modules() if hasattr(part, "cos_sin_cache")]
    if len({id(part) for part in found}) != 1:
        return f"beside its attention there are {len(found)} rotary embeddings"
    part = found[0]
    table = part.cos_sin_cache
    if (getattr(part, "mrope_section", None) or table.ndim != 2 or table.shape[1] != getattr(part, "rotary_dim", None)
            or not hasattr(part, "is_neox_style")):
        return f"its rotary embedding, {type(part).__name__}, turns keys by more than their position"
    return Rotary(table.detach().float().cpu(), bool(part.is_neox_style))
