"""What docs/walk.md costs to read: ``python -m tests.support.pages.walk`` prints its files and their lines."""

from __future__ import annotations

import re

from tests.support.pages.readme import ROOT


def files() -> dict[str, int]:
    """Lines of every file of the project that the walk names, by path."""
    page = (ROOT / "docs" / "walk.md").read_text()
    named = re.findall(r"`((?:engine_side|writer_service|schemas|api)/[\w/]+\.py)", page)
    return {path: len((ROOT / path).read_text().splitlines()) for path in dict.fromkeys(named)}


if __name__ == "__main__":
    found = files()
    for path, lines in found.items():
        print(f"{lines:6} {path}")
    print(f"{sum(found.values()):6} lines in {len(found)} files")
