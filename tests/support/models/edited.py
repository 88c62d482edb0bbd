"""Edits as functions of a reference's rows: written from the documentation, not from the code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.support.models.reference import Edit


def vector(width: int, seed: int, size: float = 1.0) -> Any:
    """A vector of chance."""
    return (np.random.default_rng(seed).standard_normal(width) * size).astype(np.float32)


def moved(edits: Sequence[dict[str, Any]], prompt_len: int, named: Any = None) -> dict[tuple[str, int], list[Edit]]:
    """The edits of a request as functions of a reference's rows: written from the documentation, not from the code."""
    found: dict[tuple[str, int], list[Edit]] = {}

    def edit_of(spec: dict[str, Any]) -> Edit:
        given = spec.get("vector")
        v = torch.tensor(named if isinstance(given, str) else given) if given is not None else torch.zeros(1)

        def change(rows: torch.Tensor) -> torch.Tensor:
            unit = v / v.norm()
            along = rows @ unit if spec["op"] in ("ablate", "cap") else torch.zeros(len(rows))
            new = {
                "add": lambda: rows + spec.get("scale", 1) * v,
                "scale": lambda: rows * spec["by"],
                "set": lambda: v.expand_as(rows),
                "ablate": lambda: rows - along[:, None] * unit,
                "cap": lambda: rows + (along.clamp(spec.get("low"), spec.get("high")) - along)[:, None] * unit,
            }[spec["op"]]()
            at, where = torch.arange(len(rows)), spec.get("positions", "all")
            if isinstance(where, str):
                here = {"all": at >= 0, "prompt": at < prompt_len, "generated": at >= prompt_len}[where]
            else:
                here = sum(((at >= a) & (at < b) for a, b in where), torch.zeros(len(rows), dtype=torch.bool))
            return torch.where(here[:, None], new, rows)

        return change

    for spec in edits:
        site, _, layer = spec["site"].partition(".")
        for number in [int(layer)] if layer else spec["layers"]:
            found.setdefault((site, number), []).append(edit_of(spec))
    return found
