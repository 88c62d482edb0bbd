"""The part of docs/evidence/faults.md that ``make mutants`` writes: the rest of the page is ``make faults``'s."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from tests.mutants.table import Mutant
from tests.support.store_helpers import ROOT

PAGE = ROOT / "docs" / "evidence" / "faults.md"
TITLE = "\n## Mutants\n"
HEAD = """
`make mutants` writes this table ({when}). `make mutants K="fs: journal:"` runs some of them and updates only their
lines. A mutant is a copy of the code without one sync, order, check or lock. For each mutant a fast test must fail,
at the assertion of the promise that the mutant breaks: {killed} of {count} are found.

| taken out of | what | promise broken | seen by |
|---|---|---|---|
"""


def write_page(every: Sequence[Mutant], found: Mapping[str, str]) -> None:
    """``found``: by id, the test that killed a mutant, or "". Of others the lines stay that are there."""
    before, _, table = PAGE.read_text().partition(TITLE)
    said = {beginning(line): line for line in table.splitlines() if line.startswith("| `")}
    for mutant in every:
        if mutant.id in found:
            said[head_of(mutant)] = f"{head_of(mutant)} | {mutant.promise} | {_test(found[mutant.id])} |"
    lines = [said[head_of(mutant)] for mutant in every if head_of(mutant) in said]
    killed = sum("**nothing**" not in line for line in lines)
    head = HEAD.format(when=time.strftime("%Y-%m-%d"), killed=killed, count=len(lines))
    PAGE.write_text(before + TITLE + head + "".join(f"{line}\n" for line in lines))


def head_of(mutant: Mutant) -> str:
    """How a mutant's line begins."""
    return f"| `{mutant.file}` | {mutant.name}"


def beginning(line: str) -> str:
    """The same of a line."""
    return " | ".join(line.split(" | ")[:2])


def _test(node: str) -> str:
    return f"`{node.partition('::')[2]}`" if node else "**nothing**"


def kept() -> str:
    """What stands there now, for whoever writes the rest."""
    _, title, rest = PAGE.read_text().partition(TITLE) if PAGE.exists() else ("", "", "")
    return title + rest
