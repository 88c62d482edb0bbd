"""The commands of the laboratory: what codecs cost, two reports against each other, which codec to take."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Annotated

import typer

from schemas.errors import ArgumentError, TapError

if TYPE_CHECKING:
    from vllm_tap.fidelity.job import FidelityJob
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
        metavar="MODEL | kv MODEL | compare OLD NEW", help="A folder or a name on the Hugging Face hub; with kv before "
                                                           "it, codecs of the K/V cache; or compare and two reports.")
        ] = None,
    pilot: Annotated[bool, typer.Option("--pilot", help="Two small models that are trained here first: plain, and with "
                                                        "massive columns planted.")] = False,
    out: Annotated[Path, typer.Option(help="The folder of the report; repeat the command to resume a run there.")]
        = Path("fidelity"),
    codecs: Annotated[str, typer.Option(help="Codecs, comma-separated.")] = "",
    sites: Annotated[str, typer.Option(help="Sites, comma-separated (default: resid_post and mlp_post).")] = "",
    layers: Annotated[str, typer.Option(help="Layers, comma-separated (default: all).")] = "",
    text: Annotated[Path | None, typer.Option(help="A file of text, or JSON lines with a field text (default: the "
                                                   "standard library of the running Python).")] = None,
    size: Annotated[str, typer.Option(help="quick: 16 prompts of 128 tokens; standard: 200 of 512; full: 400 of "
                                           "2,048.")] = "quick",
    prompts: Annotated[int | None, typer.Option(help="Number of prompts (default: as --size says).")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt (default: as --size says).")] = None,
    bar: Annotated[float | None, typer.Option(help="KL in nats that a codec may cost (default: what bfloat16 costs).")]
        = None,
    sae: Annotated[list[str] | None, typer.Option(
        help="An autoencoder in SAELens's format: FOLDER@resid_post.12; repeatable.")] = None,
    modes: Annotated[str, typer.Option(
        help="Modes of kv: snapshot, direct, in-forward (default: these three), rolling.")] = "",
    window: Annotated[int | None, typer.Option(help="Positions that stay exact before a step, in kv's mode rolling "
                                               "(default: half of the context, at most 128).")] = None,
    engine_dtypes: Annotated[str, typer.Option(
        help="Dtypes of vLLM's own cache (--kv-cache-dtype) for kv, such as fp8, each in another engine.")] = "",
    parts: Annotated[str, typer.Option(
        help="Parts of the cache for kv: kv, k, v: both, keys or values alone (default: all three).")] = "",
    codec: Annotated[list[str] | None, typer.Option(
        help="Measure a codec of your own with kv, NAME=PACKAGE.MODULE:CLASS; repeatable.")] = None,
) -> None:
    """Measure what codecs cost MODEL.

    Decoded rows are put back into the model, and compared as scientists use them. The report (report.json, report.html)
    is written once every control has held. Rows put back as they were change nothing, shuffled rows cost more than the
    engine's own noise, and one wrong row is found at its position.

    With kv, keys and values go through codecs on their way into the cache. Snapshot: the first half of a prompt at
    once. In-forward: all as they are computed. Direct: all as an exact run had them. Rolling: once they have left a
    window that stays exact. With compare, the exit code is 1 if a codec has become worse, breaks the model or is
    missing. Arguments after -- go to vLLM.
    """
    _need_lab()
    words = list(what or ())
    if words[:1] == ["compare"]:
        return _compare(words[1:])
    of_kv = words[:1] == ["kv"]
    words = words[of_kv:]
    if pilot == bool(words) or len(words) > 1:
        raise TapError("name one model (MODEL, or kv MODEL), or --pilot, or compare and two reports")
    for flag, given, fits in (("--modes", modes, of_kv), ("--parts", parts, of_kv), ("--codec", codec, of_kv),
                              ("--window", window, of_kv), ("--engine-dtypes", engine_dtypes, of_kv),
                              ("--sites", sites, not of_kv),
                              ("--sae", sae, not of_kv and not pilot)):
        if given and not fits:
            why = "is for one model; the pilots take none" if flag == "--sae" and pilot else (
                f"{'goes with' if not of_kv else 'does not go with'} kv: vllm-tap fidelity kv MODEL")
            raise ArgumentError(flag, given[0] if isinstance(given, list) else given, why)
    common: dict[str, object] = {"layers": layers, "text": text, "size": size, "prompts": prompts, "tokens": tokens,
                                 "bar": bar}
    if pilot:
        common |= {"codecs": codecs, "modes": modes, "parts": parts, "codec": codec,
                   "window": window, "engine-dtypes": engine_dtypes}
        return _pilots(out, None if of_kv else sites, common, context.obj)
    from vllm_tap.fidelity.job import FidelityJob

    job = FidelityJob(words[0], out, _words(sites), _numbers(layers), () if of_kv else _words(codecs), text, size,
                      prompts, tokens, bar, _coders(sae or []), context.obj)
    return _run_kv(job, (modes, parts, codecs, engine_dtypes), codec or [], window) if of_kv else _run(job)


def _pilots(out: Path, sites: str | None, more: dict[str, object], for_vllm: tuple[str, ...]) -> None:
    """Both pilots, each in a process of its own: vLLM does not start well where another engine has been. They run side
    by side, and what the second says is told behind the first; one after the other where they would share a GPU's
    memory. ``sites`` None: codecs of keys and values.
    """
    import torch

    from vllm_tap.fidelity.pilot import pilot_model

    flags = [word for name, value in more.items() if value not in (None, "")
             for each in (value if isinstance(value, list) else [value]) for word in (f"--{name}", str(each))]
    running: list[tuple[subprocess.Popen[bytes], IO[bytes] | None]] = []
    with ExitStack() as ended:
        for name, planted in (("plain", False), ("planted", True)):
            model = pilot_model(planted, progress=sys.stderr.isatty())
            words = ["kv", str(model)] if sites is None else [
                str(model), "--sites", sites or ("mlp_post" if planted else "")]
            told = ended.enter_context(TemporaryFile()) if running else None
            one = subprocess.Popen([sys.executable, "-m", "vllm_tap", "fidelity", *words, "--out", str(out / name),
                                    *flags, "--", "--dtype", "float32", *for_vllm], stdout=told,
                                   stderr=None if told is None else subprocess.STDOUT,
                                   env={"OMP_NUM_THREADS": "1", **os.environ})  # so small a model waits for a second
            ended.callback(one.kill)  # of one that has ended nothing is left to do
            running.append((one, told))
            if torch.cuda.is_available():
                one.wait()
        for one, said in running:
            one.wait()
            if said is not None:
                said.seek(0)
                sys.stdout.buffer.write(said.read())
                sys.stdout.flush()
        if failed := [one.returncode for one, _ in running if one.returncode]:
            raise typer.Exit(failed[0])


def _run(job: FidelityJob) -> None:
    from vllm_tap.fidelity.job import run

    _show(run(job, progress=sys.stderr.isatty()), job.out)


def _run_kv(job: FidelityJob, words: tuple[str, ...], own: list[str], window: int | None) -> None:
    from vllm_tap.fidelity.kv.codecs import own_codecs
    from vllm_tap.fidelity.kv.job import KVJob, run
    from vllm_tap.fidelity.kv.modes import MODES, PARTS

    if own and (here := str(Path.cwd())) not in sys.path:  # where a codec of one's own lies, as for python -m
        sys.path.insert(0, here)
    modes, parts, codecs, dtypes = map(_words, words)
    asked = KVJob(job, modes or MODES, parts or PARTS, codecs, own_codecs(own), window, dtypes)
    _show(run(asked, progress=sys.stderr.isatty()), job.out)


def _show(report: Report, out: Path) -> None:
    _print(report)
    typer.echo(out / "report.json")
    typer.echo(out / "report.html")


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
        table.add_row(one.place, one.name, str(one.row_bytes or ""), f"{one.kl.value:.3g}",
                      f"{one.kl.low:.2g} to {one.kl.high:.2g}", f"{100 * one.top1.value:.2f} %",
                      f"{100 * one.perplexity.value:+.3f} %", word if one.kind == "codec" else "control")
    out.print(table, "")
    for place in report.places:
        for name, found in place.broken.items():
            out.print(Text(f"{place.name} {name}: broken here, {found['why']}"))
    for name in ("attention", "drafter", "retrieval"):
        if (part := getattr(report, name)) and "why" in part:
            out.print(Text(f"{name}: not shown, {part['why']}"))
    if report.settings.get("left_out"):
        out.print(Text(f"left out: {report.settings['left_out']}"))
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
    use: Annotated[str, typer.Option(help="audit, lens, probe, sae, neurons, geometry, attention or "
                                           "drafter.")] = "lens",
    bytes_per_token: Annotated[int | None, typer.Option(help="Bytes that a token may take, over all sites and layers.")]
        = None,
    sites: Annotated[str, typer.Option(help="Sites that are stored, comma-separated (default: all).")] = "",
    layers: Annotated[str, typer.Option(help="Layers that are stored (default: all).")] = "",
) -> None:
    """Recommend the cheapest codec for a use.

    It must meet the criterion of the use in reports of fidelity. No model runs. The exit code is 1 if no codec does.
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
