"""The commands under ``vllm-tap keys``: the keys of the HTTP service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_tap.cli.options import Keys, Store

__all__ = ["app"]

app = typer.Typer(help="Make, list and revoke the keys of the HTTP service.", no_args_is_help=True,
                  rich_markup_mode=None)
KeyName = Annotated[str, typer.Argument(help="Whose key it is: the owner of what is captured with it.")]
Quota = Annotated[str | None, typer.Option(
    help="Bytes that its captures may take, such as 50GB; none: any (default: as the name's old key).")]


@app.command("make")
def make_key(
    name: KeyName,
    store: Store = Path("captures"),
    keys: Keys = None,
    replace: Annotated[bool, typer.Option("--replace", help="End the name's old key; the new one reads the same "
                                                            "captures.")] = False,
    quota: Quota = None,
) -> None:
    """Make a key and print it, this once: the file keeps its hash alone."""
    from vllm_tap.cli.keys_command import print_new_key

    print_new_key(store, keys, name, replace, quota)


@app.command("set")
def set_key(name: KeyName, quota: Annotated[str, typer.Option(help="Bytes, such as 50GB; none: any.")],
            store: Store = Path("captures"), keys: Keys = None) -> None:
    """Change what a key may have; a running service goes by it from the next request on."""
    from vllm_tap.cli.keys_command import change_quota

    change_quota(store, keys, name, quota)


@app.command("ls")
def list_keys(store: Store = Path("captures"), keys: Keys = None) -> None:
    """List the names that have keys."""
    from vllm_tap.cli.keys_command import print_keys

    print_keys(store, keys)


@app.command("revoke")
def revoke_key(name: KeyName, store: Store = Path("captures"), keys: Keys = None) -> None:
    """End a key; a running service refuses it from the next request on. Its captures stay."""
    from vllm_tap.cli.keys_command import revoke

    revoke(store, keys, name)
