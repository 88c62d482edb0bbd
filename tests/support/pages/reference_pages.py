"""docs/reference/commands.md and the table of docs/reference/limits.md, written from the code.

``python -m tests.support.pages.reference_pages`` writes them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer.main

from schemas import limits
from vllm_tap.cli.main import app

DOCS: Final = Path(__file__).parents[3] / "docs"
_BEGIN, _END = "<!-- begin limits (python -m tests.support.pages.reference_pages) -->", "<!-- end limits -->"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its whole name, as click has it."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for part, inner in getattr(command, "commands", {}).items():
            yield f"{name} {part}", inner
        if not hasattr(command, "commands"):
            yield name, command


def commands_page() -> str:
    """Every command, its arguments and its flags."""
    lines = ["# Commands", "", "What `--help` says of every command; written from the code "
             "(`python -m tests.support.pages.reference_pages`).",
             "More on what `serve` is given: [operations](operations.md)."]
    for name, command in commands():
        lines += ["", f"## vllm-tap {name}", "", " ".join(command.help.split())]
        if params := [param for param in command.params if "--help" not in param.opts]:
            lines += ["", "| | default | |", "|---|---|---|"]
            lines += [_row(param) for param in params]
    return "\n".join(lines) + "\n"


def _row(param: Any) -> str:
    argument = not param.opts[0].startswith("-")
    shown = f"`{param.name.upper()}`" if argument else ", ".join(f"`{flag}`" for flag in param.opts)
    if param.metavar and not argument:
        shown += f" {param.metavar}"
    if param.envvar:
        shown += f" (`{param.envvar}`)"
    default = "" if param.default is None or param.default is False else f"`{_text(param.default)}`"
    return f"| {shown} | {'must be given' if param.required else default} | {' '.join((param.help or '').split())} |"


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def limits_table() -> str:
    """Every name of schemas/limits.py with its value and what is said beside it, by the headings there."""
    path = Path(limits.__file__)
    lines = path.read_text().splitlines()
    table: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.AnnAssign):
            continue
        before = lines[node.lineno - 2]
        if before.startswith("#"):
            table += ["", f"**{before.removeprefix('# ').rstrip('.')}**", "", "| limit | value | |", "|---|---|---|"]
        elif not table:
            table += ["| version | value | |", "|---|---|---|"]
        assert isinstance(node.target, ast.Name)
        note = re.sub(r"^[^#]*#?\s*", "", lines[node.lineno - 1]) if "#" in lines[node.lineno - 1] else ""
        table.append(f"| `{node.target.id}` | {_value(node.target.id, getattr(limits, node.target.id))} | {note} |")
    return "\n".join(table)


def _value(name: str, value: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if "bytes" in name and value % size == 0 and value >= size:
            return f"{value // size} {unit}"
    return f"{value:,}"


def with_limits(page: str) -> str:
    """The page with the table in its place."""
    before, _, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert end, f"no {_BEGIN} … {_END}"
    return f"{before}{_BEGIN}\n{limits_table()}\n{_END}{after}"


def main() -> None:
    (DOCS / "reference/commands.md").write_text(commands_page())
    page = DOCS / "reference/limits.md"
    page.write_text(with_limits(page.read_text()))


if __name__ == "__main__":
    main()
