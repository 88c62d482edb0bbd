"""The commands that look after a store as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_tap.cli.options import Ref, Store

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Put them into ``app``."""
    app.command("fsck")(check)
    app.command("rebuild")(rebuild)
    app.command("compact")(compact)
    app.command("rm")(remove)
    app.command("hold")(hold)
    app.command("release")(release)
    app.command("curve-keys")(curve_keys)


def check(
    store: Store = Path("captures"),
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check every byte of a store and name every bad row. Exit code 1 where something is bad."""
    from vllm_tap.cli.upkeep import check_store

    raise typer.Exit(check_store(store, json))


def rebuild(store: Store = Path("captures")) -> None:
    """Make the catalog again from journals and blocks; no writer may run."""
    from vllm_tap.cli.upkeep import rebuild_catalog

    raise typer.Exit(rebuild_catalog(store))


def compact(
    store: Store = Path("captures"),
    older_than: Annotated[float | None, typer.Option(
        "--older-than", metavar="DAYS", min=0.0, help="Only blocks of captures made longer ago; default: all.")] = None,
    zstd: Annotated[bool, typer.Option(
        "--zstd", help="Compress rows that are stored as they are (raw16, raw); of cold blocks too.")] = False,
) -> None:
    """Sort sealed blocks by capture and layer, joining small ones; no writer may run."""
    from vllm_tap.cli.upkeep import compact_store

    raise typer.Exit(compact_store(store, older_than, zstd))


def remove(
    refs: Annotated[list[str], typer.Argument(help="Capture ids, response ids or X-Request-Ids.")],
    store: Store = Path("captures"),
) -> None:
    """Delete captures for good: hidden at once, erased from the disk within seconds."""
    from vllm_tap.store_control import delete

    for target in delete(store, refs):
        typer.echo(target)


def hold(ref: Ref, store: Store = Path("captures")) -> None:
    """Keep a capture from being deleted or expired until it is released."""
    from vllm_tap.store_control import hold as run

    typer.echo(run(store, ref, True))


def release(ref: Ref, store: Store = Path("captures")) -> None:
    """End a hold."""
    from vllm_tap.store_control import hold as run

    typer.echo(run(store, ref, False))


def curve_keys(
    name: Annotated[str, typer.Argument(help="The engine's name: letters, digits, '-' and '_'.")],
    folder: Annotated[Path, typer.Option("--folder", help="The writer's folder of keys, its --curve.")] = Path("curve"),
) -> None:
    """Let an engine on another host send to this host's writer: make its keys, and print the folder to carry there."""
    from schemas.wire.curve import make_sender

    typer.echo(make_sender(folder, name))
    typer.echo("carry this folder to the engine's host, name it there in VLLM_TAP_CURVE, and remove it here; the "
               f"writer takes --listen tcp://HOST:PORT --curve {folder} and knows new keys from its next start on",
               err=True)
