"""The commands of the laboratory: what codecs cost, two reports against each other, which codec to take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schemas.errors import ArgumentError, TapError

if TYPE_CHECKING:
    from vllm_tap.fidelity.reports.report import Report

__all__ = ["add"]

_LAB = ("jinja2", "matplotlib", "scipy", "sklearn")


_commands = typer.Typer()


def add(app: typer.Typer) -> None:
    """Put the commands into ``app``."""
    app.registered_commands += _commands.registered_commands


@_commands.command()
def fidelity(
    context: typer.Context,
    what: Annotated[list[str] | None, typer.Argument(
        metavar="MODEL | compare OLD NEW", help="A folder or a name on the Hugging Face hub; or compare and two "
                                                "reports.")] = None,
    pilot: Annotated[bool, typer.Option("--pilot", help="Two small models that are trained here first: plain, and with "
                                                        "massive columns planted.")] = False,
    out: Annotated[Path, typer.Option(help="The folder of the report; a run that was ended goes on from there.")]
        = Path("fidelity"),
    codecs: Annotated[str, typer.Option(help="Codecs, comma-separated.")] = "",
    sites: Annotated[str, typer.Option(help="Sites, comma-separated (default: resid_post and mlp_post).")] = "",
    layers: Annotated[str, typer.Option(help="Layers, comma-separated (default: all).")] = "",
    text: Annotated[Path | None, typer.Option(help="A file of text, or JSON lines with a field text (default: the "
                                                   "standard library of the running Python).")] = None,
    size: Annotated[str, typer.Option(help="quick: 16 prompts of 128 tokens; standard: 200 of 512; full: 400 of "
                                           "2,048.")] = "quick",
    prompts: Annotated[int | None, typer.Option(help="So many prompts.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt.")] = None,
    bar: Annotated[float | None, typer.Option(help="KL in nats that a codec may cost (default: what bfloat16 costs).")]
        = None,
    sae: Annotated[list[str] | None, typer.Option(
        help="An autoencoder in SAELens's format: FOLDER@resid_post.12; repeatable.")] = None,
) -> None:
    """Measure what codecs cost MODEL: decoded rows are put back into it, and looked at as scientists do.

    Writes report.json and report.html, once every control has behaved: rows put back as they were change nothing,
    shuffled ones cost more than none where they are measured, one wrong row is found at its position. With compare the
    exit code is 1 where a codec has become worse, breaks the model or is missing. Arguments after -- go to vLLM.
    """
    _need_lab()
    words = list(what or ())
    if words[:1] == ["compare"]:
        return _compare(words[1:])
    if pilot == bool(words) or len(words) > 1:
        raise TapError("name one model (MODEL), or --pilot, or compare and two reports")
    if pilot:
        if sae:
            raise ArgumentError("--sae", sae[0], "is for one model; the pilots take none")
        return _pilots(out, sites, {"layers": layers, "codecs": codecs, "text": text, "size": size, "prompts": prompts,
                                    "tokens": tokens, "bar": bar}, context.obj)
    from vllm_tap.fidelity.job import FidelityJob

    _run(FidelityJob(words[0], out, _words(sites), _numbers(layers), _words(codecs), text, size, prompts, tokens, bar,
                     _coders(sae or []), context.obj))
    return None


def _pilots(out: Path, sites: str, more: dict[str, object], for_vllm: tuple[str, ...]) -> None:
    """Both pilots, each in a process of its own: vLLM does not start well where another engine has been."""
    from vllm_tap.fidelity.pilot import pilot_model

    flags = [word for name, value in more.items() if value not in (None, "") for word in (f"--{name}", str(value))]
    for name, planted, chosen in (("plain", False, sites), ("planted", True, sites or "mlp_post")):
        model = pilot_model(planted, progress=sys.stderr.isatty())
        done = subprocess.run([sys.executable, "-m", "vllm_tap", "fidelity", str(model), "--out", str(out / name),
                               "--sites", chosen, *flags, "--", "--dtype", "float32", *for_vllm],
                              env={"OMP_NUM_THREADS": "1", **os.environ})  # so small a model only waits for a second
        if done.returncode:
            raise typer.Exit(done.returncode)


def _run(job: object) -> None:
    from vllm_tap.fidelity.job import FidelityJob, run

    assert isinstance(job, FidelityJob)
    report = run(job, progress=sys.stderr.isatty())
    _print(report)
    typer.echo(job.out / "report.json")
    typer.echo(job.out / "report.html")


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vllm_tap.fidelity.reports.report import lines_of

    out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    out.print(Text(f"{report.model['name']}, {report.model['dtype']}: {report.settings['prompts']} prompts of "
                   f"{report.settings['tokens']} tokens; bar {report.bar:.3g} nats, "
                   f"engine's floor {report.free:.3g}"), "")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("place", "codec", "bytes", "KL, nats", "95 %", "top-1", "Δ perplexity", "verdict"):
        table.add_column(name, justify="left" if name in ("place", "codec", "verdict") else "right")
    for one in lines_of(report):
        if one.kind == "noise":
            continue
        word = f"{one.verdict.word} ({one.verdict.more} prompts more)" if one.verdict.more else one.verdict.word
        table.add_row(f"{one.site}.{one.layer}", one.name, str(one.row_bytes or ""), f"{one.kl.value:.3g}",
                      f"{one.kl.low:.2g} to {one.kl.high:.2g}", f"{100 * one.top1.value:.2f} %",
                      f"{100 * one.perplexity.value:+.3f} %", word if one.kind == "codec" else "control")
    out.print(table, "")
    for place in report.places:
        for name, found in place.broken.items():
            out.print(Text(f"{place.site}.{place.layer} {name}: broken here, {found['why']}"))
    if report.settings.get("intervals"):
        out.print(Text(f"intervals: {report.settings['intervals']}"))


def _compare(words: list[str]) -> None:
    from vllm_tap.fidelity.reports.compare import DIFFER, compared, line_of
    from vllm_tap.fidelity.reports.report import load_report

    if len(words) != 2:
        raise TapError("compare takes two reports: vllm-tap fidelity compare OLD NEW")
    changes = compared(load_report(Path(words[0]), "OLD"), load_report(Path(words[1]), "NEW"))
    for one in changes:
        typer.echo(line_of(one))
    if any(one.word in DIFFER for one in changes):
        raise typer.Exit(1)


@_commands.command()
def recommend(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT", help="report.json of one run or several: what is "
                                                                        "taken holds in all of them.")],
    use: Annotated[str, typer.Option(help="audit, lens, probe, sae, neurons or geometry.")] = "lens",
    bytes_per_token: Annotated[int | None, typer.Option(help="Bytes that a token may take, all places together.")]
        = None,
    sites: Annotated[str, typer.Option(help="Sites that are stored, comma-separated (default: all).")] = "",
    layers: Annotated[str, typer.Option(help="Layers that are stored (default: all).")] = "",
) -> None:
    """Recommend the cheapest codec that meets a use's criterion, from reports of fidelity: no model runs.

    The exit code is 1 where nothing that fits holds.
    """
    _need_lab()
    from vllm_tap.fidelity.reports.recommend import recommend as of
    from vllm_tap.fidelity.reports.recommend import shown
    from vllm_tap.fidelity.reports.report import load_report

    found = of([load_report(path) for path in reports], use, bytes_per_token, _words(sites), _numbers(layers))
    typer.echo(shown(found))
    if found.chosen is None:
        raise typer.Exit(1)


def _need_lab() -> None:
    from importlib.util import find_spec

    if lacking := [name for name in _LAB if find_spec(name) is None]:
        raise TapError(f"{', '.join(lacking)}: not installed; pip install 'vllm-tap[lab]'")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    words = _words(text)
    if wrong := [word for word in words if not word.isascii() or not word.isdigit()]:
        raise ArgumentError("--layers", wrong[0], "valid: numbers from 0, with commas between")
    return tuple(map(int, words))


def _coders(given: list[str]) -> dict[str, Path]:
    found = {}
    for text in given:
        folder, at, place = text.rpartition("@")
        if not at or not folder or not place:
            raise ArgumentError("--sae", text, "valid: FOLDER@SITE.LAYER, such as sae@resid_post.12")
        found[place] = Path(folder)
    return found
