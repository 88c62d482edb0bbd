"""The commands that look after a store as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["add"]

StorePath = Annotated[Path, typer.Argument(help="The folder of captures.", envvar="VLLM_ACT_OUTDIR")]


def add(app: typer.Typer) -> None:
    """Put them into ``app``."""
    app.command("fsck")(check)
    app.command("rebuild")(rebuild)


def check(
    store: StorePath = Path("captures"),
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check every byte of a store and name every bad row. Exit code 1 where something is bad."""
    from vllm_tap.upkeep import check_store

    raise typer.Exit(check_store(store, json))


def rebuild(store: StorePath = Path("captures")) -> None:
    """Make the catalog again from journals and blocks; no writer may run."""
    from vllm_tap.upkeep import rebuild_catalog

    raise typer.Exit(rebuild_catalog(store))
