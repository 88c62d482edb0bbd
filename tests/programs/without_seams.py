"""Takes one seam after the other out of this vLLM and registers the plugin; prints what was said to each as JSON.

Run as ``python -m tests.programs.without_seams MODULE:CLASS.ATTRIBUTE …``; at last nothing is missing.
"""

from __future__ import annotations

import importlib
import json
import sys

from engine_side.plugin import register
from schemas.errors import StartError


def said() -> str:
    try:
        register()
    except StartError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    places = [seam.partition(":")[::2] for seam in sys.argv[1:]]
    owners = [getattr(importlib.import_module(module), path.partition(".")[0]) for module, path in places]
    found = []
    for owner, (_, path) in zip(owners, places, strict=True):
        name = path.partition(".")[2]
        kept = vars(owner)[name]
        delattr(owner, name)
        setattr(owner, f"{name}_renamed", kept)
        found.append(said())
        setattr(owner, name, kept)
        delattr(owner, f"{name}_renamed")
    print(json.dumps([*found, said()]))
