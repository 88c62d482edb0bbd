"""docs/reference/commands.md, and the tables of docs/reference/limits.md and sizes.md, written from the code.

``python -m tests.support.pages.reference_pages`` writes them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import typer.main
from typer.testing import CliRunner

from schemas import limits
from schemas.spec import parse_spec
from tests.support.pages import readme
from vllm_tap.cli.main import app
from vllm_tap.serve.model_config import ModelConfig
from vllm_tap.sites.sizes import size
from vllm_tap.sizes import size_text

DOCS: Final = Path(__file__).parents[3] / "docs"
# Models of the table of sizes: layers and width.
MODELS: Final = {"Qwen3 0.6B": (28, 1024), "a 3B": (36, 2048), "Llama 3 8B": (32, 4096), "Llama 3 70B": (80, 8192)}


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
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if "bytes" in name and value % bytes_ == 0 and value >= bytes_:
            return f"{value // bytes_} {unit}"
    return f"{value:,}"


def sizes_table() -> str:
    """Bytes of `resid_post` in every layer of MODELS, by the command's own arithmetic."""
    lines = ["| layers × width | `int8b64`, a token | `raw16`, a token | a million tokens, `int8b64` | staging "
             "| scratch | starts |", "|---|---|---|---|---|---|---|"]
    for name, (layers, width) in MODELS.items():
        config = ModelConfig(("LlamaForCausalLM",), layers, width, 128, width // 128, 8)
        small, exact = (size(config, parse_spec({"codec": codec})) for codec in ("int8b64", "raw16"))
        starts = "refused by the budget of 8 GiB: arm fewer layers" if small.refused else "yes"
        lines.append(f"| {layers} × {width:,} ({name}) | {size_text(small.token_bytes)} "
                     f"| {size_text(exact.token_bytes)} | {size_text(small.token_bytes * 10**6)} "
                     f"| {small.staging_bytes / 2**30:.2f} GiB | {small.scratch_bytes / 2**30:.2f} GiB | {starts} |")
    return "\n".join(lines)


def sizes_example() -> str:
    """The output of the page's own command."""
    typed, = readme.commands("docs/reference/sizes.md")
    done = CliRunner().invoke(app, typed.split()[1:])
    assert done.exit_code == 0, done.output
    return f"```text\n{done.stdout.rstrip()}\n```"


PARTS: Final[dict[str, tuple[tuple[str, Callable[[], str]], ...]]] = {
    "reference/limits.md": (("limits", limits_table),),
    "reference/sizes.md": (("example", sizes_example), ("sizes", sizes_table)),
}


def with_parts(name: str) -> str:
    """A page of PARTS with what the code gives between its marks."""
    page = (DOCS / name).read_text()
    for part, made in PARTS[name]:
        begin, end = f"<!-- begin {part} (python -m tests.support.pages.reference_pages) -->", f"<!-- end {part} -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        assert found and ended, f"{name}: no {begin} … {end}"
        page = f"{before}{begin}\n{made()}\n{end}{after}"
    return page


def main() -> None:
    (DOCS / "reference" / "commands.md").write_text(commands_page())
    for name in PARTS:
        (DOCS / name).write_text(with_parts(name))


if __name__ == "__main__":
    main()
