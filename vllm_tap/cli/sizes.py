"""The command that tells how much room a capture takes, before an engine is started."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from schemas.codecs import DEFAULT_CODEC
from schemas.errors import ArgumentError, SpecError
from vllm_tap.cli.options import Tiny, model_of

if TYPE_CHECKING:
    from vllm_tap.sites.sizes import Sizes

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Put the command into ``app``."""
    app.command("sizes")(sizes)


def sizes(
    model: Annotated[str | None, typer.Argument(help="The model: a folder, or a name on the Hugging Face hub.")] = None,
    tiny: Tiny = False,
    sites: Annotated[str | None, typer.Option(
        help="Sites to capture, comma-separated (default: resid_post, or all that --arm names).")] = None,
    layers: Annotated[str, typer.Option(help='Layers to capture: "all", "0,4,8" or "0:32:4".')] = "all",
    codec: Annotated[str, typer.Option(help="Codec of the stored rows.")] = DEFAULT_CODEC,
    arm: Annotated[str | None, typer.Option(
        help="Sites armed when the engine starts, as in serve (default: the captured sites and layers).")]
        = None,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step: vLLM's --max-num-batched-tokens.")] = 8192,
    rate: Annotated[float, typer.Option(min=0, help="Captured tokens a second, of prompts and answers.")] = 1000.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what memory and disk captures of MODEL take.

    Prints bytes a token, GPU memory, CPU memory and disk a day. Reads config.json only. The exit code is 1 if an engine
    with the default budget would refuse to start.
    """
    from schemas.checks import parse_arm
    from schemas.spec import parse_spec
    from vllm_tap.cli.show import print_json
    from vllm_tap.offline.job import read_numbers
    from vllm_tap.sites.description import load_config
    from vllm_tap.sites.sizes import size

    asked = {"codec": codec, "layers": read_numbers("--layers", layers)}
    try:
        spec = parse_spec(asked if sites is None else {**asked, "sites": [name.strip() for name in sites.split(",")]})
    except SpecError as error:
        raise ArgumentError(f"--{error.field}", error.value, error.reason) from None
    found = size(load_config(model_of(model, tiny)), spec, () if arm is None else parse_arm("--arm", arm),
                 step_tokens=step_tokens, rate=rate)
    if json:
        print_json({**asdict(found), "refused": found.refused}, indent=2)
    else:
        typer.echo("\n".join(lines(found)))
    if found.refused:
        typer.echo(f"vllm-tap: refused at start: staging and scratch take {_binary(found.staging_bytes)} + "
                   f"{_binary(found.scratch_bytes)}, the budget is {_binary(found.budget_bytes)}: arm fewer sites or "
                   "layers, lower --max-num-batched-tokens, or raise --staging-bytes-max", err=True)
        raise typer.Exit(1)


def lines(found: Sizes) -> list[str]:
    """The sizes as a table of sites and a line for each kind of memory."""
    from vllm_tap.cli.show import ranges
    from vllm_tap.sizes import size_text

    width = max(len(each.codec) for each in found.sites)
    table = [f"{each.site:<14} {len(each.layers):>3} layers ({ranges(each.layers)}) × {each.width:<6} "
             f"{each.codec:<{width}} {each.token_bytes:>11,} bytes a token" for each in found.sites]
    more = f" to {_binary(most)}, by what the store takes" if (most := found.ring_bytes_max) > found.ring_bytes else ""
    armed = ", ".join(f"{site} × {layers}" for site, layers in found.armed.items())
    return [
        f"{found.model}, {found.dtype}", "", *table, "",
        f"a token        {size_text(found.token_bytes)}",
        f"a million      {size_text(found.token_bytes * 10**6)}",
        f"a day          {size_text(found.day_bytes)} at {found.rate:,g} tokens a second",
        f"GPU, staging   {_binary(found.staging_bytes)} ({armed}; {found.step_tokens:,} tokens a step)",
        f"GPU, scratch   {_binary(found.scratch_bytes)}",
        f"host, ring     {_binary(found.ring_bytes)}{more}, at most a quarter of the free memory",
    ]


def _binary(size: int) -> str:
    """A size of memory, as the engine tells it when it starts."""
    return f"{size / 2**20:,.1f} MiB"
