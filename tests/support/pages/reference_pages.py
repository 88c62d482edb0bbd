"""Pages of docs/reference that the code writes whole, and the tables of others that it writes between marks.

``python -m tests.support.pages.reference_pages`` writes them.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import typer.main
from prometheus_client import Histogram
from prometheus_client.metrics import MetricWrapperBase
from typer.testing import CliRunner

from api import __main__ as api_process
from api.errors import CODES
from api.metrics import Metrics
from engine_side import config as engine
from schemas import legacy, limits
from schemas.spec import parse_spec
from schemas.wire.messages import TapCounters, TapState
from tests.support.pages import readme
from tests.support.pages.settings import TESTS
from vllm_tap.cli.main import app
from vllm_tap.client import http
from vllm_tap.serve import endpoint_plugin
from vllm_tap.serve.model_config import ModelConfig
from vllm_tap.sites.sizes import size
from vllm_tap.sizes import size_text
from writer_service import __main__ as writer_process
from writer_service.metrics import GAUGES, TAP_PREFIX, Counters, Reader, sync_seconds

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
    """Every command, its arguments and its flags, and those of the two processes that ``serve`` starts."""
    lines = ["# Commands", "", "This page has the help of every command, written from the code "
             "(`python -m tests.support.pages.reference_pages`).",
             "[Operations](operations.md) describes the processes of `serve`, and what happens if one ends. "
             "[Settings](settings.md) lists environment variables."]
    for name, command in commands():
        lines += ["", f"## vllm-tap {name}", "", " ".join(command.help.split())]
        if params := [param for param in command.params if "--help" not in param.opts]:
            lines += ["", "| | default | |", "|---|---|---|"]
            lines += [_row(param) for param in params]
    for parser in (writer_process.flags(), api_process.flags()):
        lines += ["", f"## {parser.prog}", "", f"{parser.description} `vllm-tap serve` starts it; run it yourself on a "
                  "host or in a container of its own.", "", "| | default | |", "|---|---|---|"]
        lines += [_process_row(action) for action in parser._actions if action.dest != "help"]
    return "\n".join(lines) + "\n"


def _process_row(action: argparse.Action) -> str:
    assert action.help, f"{action.option_strings}: no help"
    shown = f"`{action.option_strings[-1]}`" + (f" {action.metavar}" if action.metavar else "")
    default = "must be given" if action.required else f"`{action.default}`" if action.default not in (None, "") else ""
    return f"| {shown} | {default} | {action.help[0].upper()}{action.help[1:]}. |"


def _row(param: Any) -> str:
    argument = not param.opts[0].startswith("-")
    shown = f"`{param.name.upper()}`" if argument else ", ".join(f"`{flag}`" for flag in param.opts)
    if param.metavar and not argument:
        shown += f" {param.metavar}"
    if param.envvar:
        shown += f" (`{param.envvar}`)"
    given = param.show_default if callable(param.default) else param.default
    default = "" if given in (None, False, "") else f"`{_text(given)}`"
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


def settings_page() -> str:
    """Every environment variable, by who reads it."""
    lines = ["# Settings", "", "Environment variables, and what they mean; written from the code "
             "(`python -m tests.support.pages.reference_pages`). Flags are in [commands](commands.md), variables of "
             "the compose file in [containers](../howto/containers.md#settings)."]
    for heading, about, found in SETTINGS:
        flags = any(setting.flag for setting in found.values())
        lines += ["", f"## {heading}", "", about, "", "| variable | default | unit or form | meaning |"
                  + (" flag of `serve` |" if flags else ""), "|---|---|---|---|" + ("---|" if flags else "")]
        lines += [f"| `{name}` | {_quoted(of.default) or 'unset'} | {_cell(of.unit)} | {_cell(of.meaning)} |"
                  + (f" {_quoted(of.flag) or '–'} |" if flags else "") for name, of in found.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A value as code; words as they are."""
    return f"`{text}`" if text and " " not in text else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


SETTINGS: Final = (
    ("The engine", "The plugin reads these in every process of vLLM. `vllm-tap serve`, `vllm-tap capture` and "
     "`vllm_tap.recording` set them for their engine. With a vLLM of your own, set them before it starts.",
     engine.SETTINGS),
    ("The service on vLLM's own port", "Read by the endpoint plugin, beside those of the engine "
     "([how](http/operate.md#on-vllms-own-port)).", endpoint_plugin.SETTINGS),
    ("Clients", "Read by the Python clients.", http.SETTINGS),
    ("Names of earlier designs", "They capture every request ([how](operations.md#capture-every-request)). The plugin, "
     "`vllm-tap serve` and `vllm-tap capture` read them; a value that is not valid ends the start.", legacy.SETTINGS),
    ("Tests and measurements", "For contributors; nothing that is installed reads these.", TESTS),
)


def errors_page() -> str:
    """Every code of the HTTP service."""
    lines = ["# Errors of the HTTP service", "", "Written from `api/errors.py` "
             "(`python -m tests.support.pages.reference_pages`).", "",
             'Every error is `{"error": {"message", "type", "param", "code"}}`. The message names the field, its value '
             "and what would be valid. `param` names the field or parameter, or is null. `type` is "
             "`invalid_request_error` below 500, else `server_error`. `Retry-After` is there if waiting helps. "
             "Errors of the model server pass through as they are, and close the capture as `failed`.", "",
             "While the writer is away, reads and generations without a capture go on. A generation with a capture is "
             "refused with 503 before the model server is asked.", "",
             "| status | `code` | when | what to do |", "|---|---|---|---|"]
    lines += [f"| {of.status or '4xx'} | `{code}` | {of.when} | {of.cure} |"
              for code, of in sorted(CODES.items(), key=lambda each: each[1].status or 499)]
    lines += ["", "Messages of the engine's start and of commands: [troubleshooting](../howto/troubleshooting.md)."]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Writer:
    """State of a writer that has one engine and has done nothing."""

    counters: Counters = field(default_factory=Counters)
    sync_seconds: Histogram = field(default_factory=sync_seconds)
    taps: dict[str, TapState] = field(default_factory=lambda: {"engine": TapState(TapCounters(), 0, 0, 0)})

    def gauges(self) -> dict[str, float]:
        return dict.fromkeys(GAUGES, 0.0)


def metrics_page() -> str:
    """Every metric of the writer, of engines and of the service, with its type, labels and meaning."""
    written = list(Reader(_Writer()).collect())
    lines = ["# Metrics", "", "For Prometheus; written from the code "
             "(`python -m tests.support.pages.reference_pages`). Counters count since the start of their process. "
             "Which of them deserve an alarm: [containers](../howto/containers.md#metrics)."]
    of_engines = [found for found in written if found.name.startswith(TAP_PREFIX)]
    for heading, about, found in (
        ("The HTTP service", "`GET /metrics` of the service, with a key if it has keys. On vLLM's own port they are in "
         "vLLM's `/metrics`. `vllm_tap_api_engine_…` are there only with "
         "[several engines](../howto/several-engines.md).", Metrics(["engine"]).registry.collect()),
        ("The writer", "`http://127.0.0.1:PORT/metrics` of the writer (`--metrics-port`). No key is asked.",
         [found for found in written if found not in of_engines]),
        ("The engines", "The writer tells them too: each connected engine reports them every second. The label "
         "`engine` is the name of its stream.", of_engines),
    ):
        lines += ["", f"## {heading}", "", about, "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        lines += [f"| `{each.name}{'_total' if each.type == 'counter' else ''}` | {each.type} | "
                  f"{', '.join(f'`{label}`' for label in LABELS.get(each.name, getattr(each, '_labelnames', ())))} | "
                  f"{each.documentation} |" for each in found]
    return "\n".join(lines) + "\n"


# Of the service's own metrics, by name: what is collected of one without samples has no labels.
LABELS: Final = {collector._name: collector._labelnames for collector in vars(Metrics(["engine"])).values()
                 if isinstance(collector, MetricWrapperBase)}

PAGES: Final[dict[str, Callable[[], str]]] = {
    "reference/commands.md": commands_page, "reference/settings.md": settings_page,
    "reference/errors.md": errors_page, "reference/metrics.md": metrics_page,
}
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
    for name, made in PAGES.items():
        (DOCS / name).write_text(made())
    for name in PARTS:
        (DOCS / name).write_text(with_parts(name))


if __name__ == "__main__":
    main()
