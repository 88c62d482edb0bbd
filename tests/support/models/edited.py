"""Edits as functions of a reference's rows: written from the documentation, not from the code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.support.engines.engines import ON_GPU
from tests.support.models.reference import Edit


def vector(width: int, seed: int, size: float = 1.0) -> Any:
    """A vector of chance, of numbers that the model's dtype has."""
    found = (np.random.default_rng(seed).standard_normal(width) * size).astype(np.float32)
    return torch.from_numpy(found).bfloat16().float().numpy() if ON_GPU else found


def _listed(spec: dict[str, Any]) -> list[int]:
    """Positions of an edit that lists them, or ranges of them, in their order."""
    where = spec.get("positions", "all")
    return [] if isinstance(where, str) else [at for each in where for at in (
        range(*each) if isinstance(each, list | tuple) else [each])]


HEAD = 32  # numbers of a head in every small model


def of_head(spec: dict[str, Any], head: int) -> dict[str, Any]:
    """An edit of some heads as one of rows that are one of them."""
    def mine(numbers: Any) -> Any:
        return numbers if len(numbers) == HEAD else numbers[head * HEAD : (head + 1) * HEAD]

    cut = {name: value for name, value in spec.items() if name != "heads"}
    if "vector" in cut:
        cut["vector"] = mine(cut["vector"])
    if "rows" in cut:
        cut["rows"] = [mine(row) for row in cut["rows"]]
    return cut


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

        def of_heads(rows: torch.Tensor) -> torch.Tensor:
            parts = list(rows.split(HEAD, dim=1))
            for head in spec["heads"]:
                parts[head] = edit_of(of_head(spec, head))(parts[head])
            return torch.cat(parts, dim=1)

        return of_heads if "heads" in spec else change

    for spec in edits:
        site, _, layer = spec["site"].partition(".")
        for number in [int(layer)] if layer else spec["layers"]:
            # What enters a block is what the one before hands on.
            place = ("resid_post", number - 1) if site == "resid_pre" and number else (site, number)
            found.setdefault(place, []).append(edit_of(spec))
    return found


OPS = ("add", "scale", "ablate", "cap", "set")


def _edit(op: str, v: Any) -> dict[str, Any]:
    """An edit by operation, with this vector."""
    more: dict[str, Any] = {"add": {"scale": 1.5}, "cap": {"low": -0.1, "high": 0.05}}.get(op, {})
    return {"op": op, "by": -0.5} if op == "scale" else {"op": op, "vector": v.tolist(), **more}


def at_every_place(widths: dict[tuple[str, int], int], heads: bool = False) -> list[list[dict[str, Any]]]:
    """Requests with an edit at every place (site and layer, with the width of its rows), each place with every
    operation; ``heads``: of single heads, whose vectors are of a head or of the row.
    """
    where: list[Any] = ["all", "generated", [[2, 50]], "prompt", [[40, 60], [70, 73]]]
    found = []
    for turn in range(len(OPS)):
        edits = []
        for number, ((site, layer), width) in enumerate(widths.items()):
            op, size = OPS[(turn + number) % len(OPS)], HEAD if heads and (turn + number) % 2 else width
            some = {"heads": [[1], [0, 1], [0]][(turn + number) % 3]} if heads else {}
            edits.append({"site": f"{site}.{layer}", "positions": where[(turn + 2 * number) % len(where)], **some,
                          **_edit(op, vector(size, 40 + number))})
        found.append(edits)
    return found
