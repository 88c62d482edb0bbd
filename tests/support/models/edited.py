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


def _listed(spec: dict[str, Any]) -> list[int]:
    """Positions of an edit that lists them, or ranges of them, in their order."""
    where = spec.get("positions", "all")
    return [] if isinstance(where, str) else [at for each in where for at in (
        range(*each) if isinstance(each, list | tuple) else [each])]


def moved(edits: Sequence[dict[str, Any]], prompt_len: int, named: Any = None) -> dict[tuple[str, int], list[Edit]]:
    """The edits of a request as functions of a reference's rows: written from the documentation, not from the code."""
    found: dict[tuple[str, int], list[Edit]] = {}

    def edit_of(spec: dict[str, Any]) -> Edit:
        given = spec.get("vector")
        rows_of = dict(zip(_listed(spec), spec.get("rows", ()), strict=False))
        v = torch.tensor(named if isinstance(given, str) else given) if given is not None else torch.zeros(1)

        def change(rows: torch.Tensor) -> torch.Tensor:
            unit = v / v.norm()
            along = rows @ unit if spec["op"] in ("ablate", "cap") else torch.zeros(len(rows))
            new = {
                "add": lambda: rows + spec.get("scale", 1) * v,
                "scale": lambda: rows * spec["by"],
                "set": lambda: torch.stack([torch.tensor(rows_of[at]) if at in rows_of else row for at, row in
                                            enumerate(rows)]) if rows_of else v.expand_as(rows),
                "ablate": lambda: rows - along[:, None] * unit,
                "cap": lambda: rows + (along.clamp(spec.get("low"), spec.get("high")) - along)[:, None] * unit,
            }[spec["op"]]()
            at, where = torch.arange(len(rows)), spec.get("positions", "all")
            if isinstance(where, str):
                here = {"all": at >= 0, "prompt": at < prompt_len, "generated": at >= prompt_len}[where]
            else:
                here = torch.isin(at, torch.tensor(_listed(spec)))
            return torch.where(here[:, None], new, rows)

        return change

    for spec in edits:
        site, _, layer = spec["site"].partition(".")
        for number in [int(layer)] if layer else spec["layers"]:
            found.setdefault((site, number), []).append(edit_of(spec))
    return found
