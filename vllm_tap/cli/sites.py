"""The command that lists the sites of a model, as a table for people or as JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from schemas.errors import TapError
from schemas.sites import SITES
from vllm_tap.cli.options import Tiny, engine_of, model_of

if TYPE_CHECKING:
    from rich.table import Table

    from engine_side.discovery.outcome import Outcome, ProvedPlace
    from vllm_tap.sites.description import SiteList

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Put the command into ``app``."""
    app.command("sites")(sites)


def sites(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="The model: a folder, or a name on the Hugging Face hub.")] = None,
    tiny: Tiny = False,
    prove: Annotated[bool, typer.Option(
        "--prove", help="Load the model with vLLM and search it, as an engine does when it starts: where each site is, "
                        "by which identity, and how far its rows are off.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the sites of MODEL (or --tiny), and what each is.

    Without --prove it reads only config.json.
    With --prove arguments after -- go to vLLM, and the exit code is 1 if an identity fails.
    """
    from vllm_tap.cli.show import print_json
    from vllm_tap.sites.description import as_found, describe, load_config

    environment, arguments = engine_of(tiny, None, context.obj)
    if context.obj and not prove:
        raise TapError(f"arguments after -- ({context.obj[0]} …) go to vLLM, which only --prove starts; add --prove, "
                       f"or leave them out")
    path = model_of(model, tiny)
    listed, outcome = describe(path, load_config(path)), None
    if prove:
        from vllm_tap.sites.prove import prove as run

        if sys.stderr.isatty():
            typer.echo(f"loading {path} with vLLM …", err=True)
        outcome = run(path, arguments, environment)
        listed = listed if outcome.failed else as_found(listed, outcome)
    if json:
        print_json({**asdict(listed), "proof": outcome}, indent=2)
    elif outcome is None or not outcome.failed:
        _print(listed, outcome)
    if outcome is not None and outcome.failed:
        typer.echo(f"vllm-tap: {path}: {', '.join(listed.architectures)} is not proved: {outcome.failed}", err=True)
        raise typer.Exit(1)


def _print(listed: SiteList, outcome: Outcome | None) -> None:
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    out.print(Text(_head(listed, outcome)), "", _sites(listed), "", sep="\n")
    if outcome is not None:
        blocks = next(iter({_block(place) for found in outcome.sites.values() for place in found.places} - {""}), "")
        out.print(Text(f"Proved in {outcome.dtype}, where rounding is up to {outcome.rounding:.0e}, on vLLM "
                       f"{outcome.vllm_version}; block is {blocks}.{{l}}:"), "", _proofs(outcome, blocks), "", sep="\n")
    elif any(None in (entry.width, entry.layers) for entry in listed.sites):
        out.print(Text("?  config.json does not say; --prove does, and GET /v1/capabilities once an engine has started."
                       "\n"))
    reasons: dict[str, list[str]] = {}
    for site, why in listed.refused.items():
        reasons.setdefault(why, []).append(site)
    for why, names in reasons.items():
        out.print(Text(f"refused  {', '.join(names)}: {why}"))


def _head(listed: SiteList, outcome: Outcome | None) -> str:
    layers = "" if listed.n_layers is None else f", {listed.n_layers} layers"
    start = f"{', '.join(listed.architectures)}{layers}: "
    if listed.known:
        return f"{start}in the table of architectures."
    if outcome is None:
        return (f"{start}in no table of architectures. The sites below are looked for by structure when an engine "
                "starts, which is refused where one that is armed is not found; --prove looks for them now.")
    return f"{start}in no table of architectures; these sites were found by structure."


def _sites(listed: SiteList) -> Table:
    table = _table(("site", "TransformerLens, {l} the layer", "width", "layers", "meaning"), right=("width",))
    for entry in listed.sites:
        table.add_row(entry.site, "\n".join(entry.transformer_lens) or "–",
                      "?" if entry.width is None else str(entry.width),
                      _layers(entry.site, entry.layers, listed.n_layers), entry.meaning)
    return table


def _proofs(outcome: Outcome, blocks: str) -> Table:
    """A line for the layers of a site that are proved alike, with the worst of them."""
    table = _table(("site", "layers", "place", "identity", "off"), right=("off",))
    for site, found in sorted(outcome.sites.items(), key=lambda item: list(SITES).index(item[0])):
        alike: dict[tuple[str, str, str], list[ProvedPlace]] = {}
        for place in found.places:
            path = place.path.replace(f"{blocks}.{place.layer}", "block", 1) if _block(place) else place.path
            alike.setdefault((path, place.rule, place.identity), []).append(place)
        for (path, rule, identity), places in alike.items():
            offs = [place.off for place in places if place.off is not None]
            table.add_row(site, _layers(site, [place.layer for place in places], outcome.n_layers), f"{path}: {rule}",
                          identity or "none was tried: the place is the table's",
                          "–" if not offs else f"{max(offs):.1e}" if max(offs) else "0")
    return table


def _table(columns: Iterable[str], right: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        whole = name in ("site", "width", "off") or name.startswith("TransformerLens")
        table.add_column(name, justify="right" if name in right else "left", no_wrap=whole, overflow="fold")
    return table


def _layers(site: str, layers: list[int] | None, n_layers: int | None) -> str:
    from vllm_tap.cli.show import ranges

    if layers is None:
        return "?"
    if not SITES[site].per_layer:
        return "once"
    return "all" if len(layers) == n_layers else ranges(layers)


def _block(place: ProvedPlace) -> str:
    """The path of the list of blocks in which a place is; "" of one that is in none."""
    before, found, _ = f".{place.path}.".partition(f".{place.layer}.")
    return before.removeprefix(".") if found else ""
