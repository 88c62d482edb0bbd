"""The command that holds an engine's edits against itself, as a table for people or as JSON for programs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_tap.cli.options import Tiny, engine_of, model_of

if TYPE_CHECKING:
    from vllm_tap.verify.checks import Outcome

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Put the command into ``app``."""
    app.command("verify")(verify)


def verify(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="The model: a folder, or a name on the Hugging Face hub.")] = None,
    tiny: Tiny = False,
    edit: Annotated[str, typer.Option(
        help="Places to verify, comma-separated: resid_post, attn_out, mlp_out, mlp_post, z, each in every layer or, "
             "as resid_post.12, in one (default: every one that the model has).")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify that captured rows of MODEL are exact, here.

    MODEL (or --tiny) runs with the vLLM of this machine. At one editable place after another, each row is captured raw
    and set to itself. The answer, its log-probabilities, the rows and the K/V cache must be the same, bit for bit. Then
    wrong rows of seven kinds are set: each must be noticed. The prefix cache must not mix edited with unedited
    requests. The exit code is 1 if a check fails. Run it after an upgrade of vLLM. Arguments after -- go to vLLM.
    """
    from vllm_tap.cli.show import print_json
    from vllm_tap.verify.run import VerifyJob, run

    environment, arguments = engine_of(tiny, None, context.obj)
    path = model_of(model, tiny)
    job = VerifyJob(path, edit, arguments, environment)
    if sys.stderr.isatty():
        typer.echo(f"loading {path} with vLLM (a minute) …", err=True)
    outcome = run(job, progress=sys.stderr.isatty())
    if json:
        print_json({"model": path, "ok": outcome.ok, **asdict(outcome)}, indent=2)
    else:
        _print(path, outcome)
    if not outcome.ok:
        raise typer.Exit(1)


def _print(path: str, outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    out.print(Text(f"{path}, {outcome.dtype}, vLLM {outcome.vllm_version}: {outcome.prompt_tokens} prompt and "
                   f"{outcome.generated_tokens} generated tokens; K/V: {outcome.cache}"), "")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("site", "left"), ("layer", "right"), ("rows", "right"), ("put back", "left"),
                       ("control against unedited", "left")):
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold")
    for place in outcome.places:
        table.add_row(place.site, str(place.layer), str(place.rows), "pass" if place.ok else "FAIL: " + "; ".join(
            place.differs or ["the run without an edit differs"]), "; ".join(place.unedited) or "equal")
    out.print(table, "")
    for site in outcome.faults:
        told = [f"{name} ({len(by)} signs)" if by else f"{name} NOT FOUND" for name, by in site.told.items()]
        out.print(Text(f"faults injected at {site.site}.{site.layer}: {', '.join(told)}"))
        for name, why in site.left_out.items():
            out.print(Text(f"  not injected: {name}: {why}"))
    out.print(Text(f"prefix cache: {outcome.salt}"))
    if outcome.left_out:
        out.print(Text(f"left out, since this model cannot have them edited: {', '.join(outcome.left_out)}"))
    for wrong in outcome.failed:
        out.print(Text(f"FAIL: {wrong}"))
    passed = sum(place.ok for place in outcome.places)
    out.print("", Text(f"{'ok' if outcome.ok else 'FAILED'}: {passed} of {len(outcome.places)} places pass; "
                       f"{sum(len(site.told) - len(site.missed) for site in outcome.faults)} of "
                       f"{sum(len(site.told) for site in outcome.faults)} injected faults were found"))
