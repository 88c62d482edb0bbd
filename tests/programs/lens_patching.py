"""Activation patching by TransformerLens's hooks; prints ``VALUES`` and JSON [sites, layers, positions].

Run in TransformerLens's own environment as ``python tests/programs/lens_patching.py MODEL ASKED.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lens import bridge_of


def values(model: str, asked: dict[str, Any]) -> list[list[list[float]]]:
    """What each row of the clean prompt gives back of the difference of two logits, 0 to 1."""
    bridge = bridge_of(model)
    clean, corrupted = torch.tensor([asked["clean"]]), torch.tensor([asked["corrupted"]])

    def difference(logits: torch.Tensor) -> float:
        return float(logits[0, -1, asked["right"]] - logits[0, -1, asked["wrong"]])

    with torch.inference_mode():
        logits, cache = bridge.run_with_cache(clean)
        whole, nothing = difference(logits), difference(bridge(corrupted))

        def cell(name: str, position: int) -> float:
            def patch(rows: torch.Tensor, hook: Any) -> torch.Tensor:
                rows = rows.clone()
                rows[:, position] = cache[name][:, position]
                return rows

            patched = difference(bridge.run_with_hooks(corrupted, fwd_hooks=[(name, patch)]))
            return (patched - nothing) / (whole - nothing)

        return [[[cell(name.format(l=layer), position) for position in range(clean.shape[1])]
                 for layer in asked["layers"]] for name in asked["sites"].values()]


if __name__ == "__main__":
    print("VALUES", json.dumps(values(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))))
