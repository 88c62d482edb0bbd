"""Runs notebooks of docs/notebooks as a reader does, cell by cell, with an engine in this process.

The engine is eager: what a notebook shows does not depend on the graph, which takes longer to make than all of it.

Run as ``python -m tests.programs.notebooks NAME …`` in an empty folder; prints what is left of each as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


def run(name: str) -> dict[str, Any]:
    """The names that a notebook's cells have made."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("max_num_seqs=16)", "max_num_seqs=16, enforce_eager=True)")
            exec(compile(source, f"{name}, cell {number}", "exec"), space)  # noqa: S102
    return space


def main(names: list[str]) -> None:
    from tests.support.engines.engines import shut_down

    left: dict[str, Any] = {}
    for name in names:
        space = run(name)
        shut_down(space["llm"])
        left[name] = (
            {"agree": (space["lens"][space["layers"][-1]][0] == space["said"]).tolist(), "layers": space["layers"]}
            if name == "logit_lens" else
            {"fitted": space["fitted"].tolist(), "scores": space["by_token"].tolist(), "answer": len(space["tokens"])})
    print("LEFT", json.dumps(left), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
