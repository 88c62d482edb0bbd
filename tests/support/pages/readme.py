"""The README's code blocks, so that tests can run what its readers type."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def blocks(language: str, document: str = "README.md") -> list[str]:
    """The fenced blocks of a language, in order."""
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(document: str = "README.md") -> list[str]:
    """Every command of the console blocks; a command goes on until its quotes are closed."""
    found: list[str] = []
    for block in blocks("console", document):
        pending = ""
        for line in block.splitlines():
            pending = f"{pending}\n{line}" if pending else line
            if pending.count("'") % 2 == 0:
                found.append(pending)
                pending = ""
    return found
