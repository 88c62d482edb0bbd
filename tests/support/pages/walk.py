"""What docs/explain/walk.md costs to read: ``python -m tests.support.pages.walk`` prints the lines of what it names."""

from __future__ import annotations

import ast
import re
from typing import Any

from tests.support.pages.readme import ROOT


def named() -> dict[str, int]:
    """Lines of every function and class that the walk names, by ``path:name``."""
    page = (ROOT / "docs" / "explain" / "walk.md").read_text()
    found = re.findall(r"`((?:engine_side|writer_service|schemas|api)/[\w/]+\.py):([\w.]+)`", page)
    return {f"{path}:{name}": _lines(path, name) for path, name in found}


def _lines(path: str, name: str) -> int:
    node: Any = ast.parse((ROOT / path).read_text())
    for part in name.split("."):
        node = next(each for each in node.body if getattr(each, "name", None) == part)
    return int(node.end_lineno) - int(node.lineno) + 1


if __name__ == "__main__":
    cost = named()
    for place, lines in cost.items():
        print(f"{lines:6} {place}")
    print(f"{sum(cost.values()):6} lines in {len({place.partition(':')[0] for place in cost})} files")
