"""``vllm-tap keys``: make, list and revoke the keys of the HTTP service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schemas.errors import TapError
from vllm_tap.cli.options import Keys, Store
from vllm_tap.sizes import parse_size, size_text

__all__ = ["app"]

app = typer.Typer(help="Make, list and revoke the keys of the HTTP service.", no_args_is_help=True,
                  rich_markup_mode=None)
KeyName = Annotated[str, typer.Argument(help="The key's name, which owns the captures made with it.")]
Quota = Annotated[str | None, typer.Option(
    help="Bytes that its captures may take, such as 50GB; none: no quota (default: that of the name's old key).")]


@app.command("make")
def make(
    name: KeyName,
    store: Store = Path("captures"),
    keys: Keys = None,
    replace: Annotated[bool, typer.Option("--replace", help="End the name's old key; the new one reads the same "
                                                            "captures.")] = False,
    quota: Quota = None,
) -> None:
    """Make a key and print it, this once: the file keeps only its hash."""
    from api.auth.keys import make_key

    path = _file(store, keys)
    # The key alone goes to standard output, so that it can be piped.
    typer.echo(make_key(path, name, replace, None if quota is None else _quota_bytes(quota)))
    typer.echo(f"the key of {name}, shown this once; {path} holds its hash alone", err=True)


@app.command("set")
def change_quota(name: KeyName, quota: Annotated[str, typer.Option(help="Bytes, such as 50GB; none: no quota.")],
                 store: Store = Path("captures"), keys: Keys = None) -> None:
    """Change the quota of a key; a running service applies it from the next request on."""
    from api.auth.keys import set_quota

    set_quota(_file(store, keys), name, _quota_bytes(quota))
    typer.echo(f"{name}: quota {quota}")


@app.command("ls")
def list_keys(store: Store = Path("captures"), keys: Keys = None) -> None:
    """List the names that have keys."""
    from rich.table import Table

    from api.auth.keys import read_keys
    from vllm_tap.cli.show import console, when

    path = _file(store, keys)
    try:
        found = read_keys(path)
    except FileNotFoundError:
        typer.echo(f"no keys in {path}: the service is open, on loopback only", err=True)
        return
    used = _used(store, [key.name for key in found])
    table = Table("key", "made", "revoked", "quota", "used", box=None, pad_edge=False, header_style="bold")
    for key in found:
        table.add_row(key.name, when(key.created_ms), when(key.revoked_ms) if key.revoked_ms else "",
                      size_text(key.quota_bytes) if key.quota_bytes else "", used.get(key.name, ""))
    console().print(table)


@app.command("revoke")
def revoke(name: KeyName, store: Store = Path("captures"), keys: Keys = None) -> None:
    """End a key; a running service refuses it from the next request on. Its captures stay."""
    from api.auth.keys import revoke_key

    revoke_key(_file(store, keys), name)
    typer.echo(f"revoked {name}")


def _file(store: Path, keys: Path | None) -> Path:
    from api.config import keys_file

    return keys_file(store, keys)


def _quota_bytes(text: str) -> int:
    """Bytes, 0 for ``none``."""
    return 0 if text == "none" else parse_size(text, "--quota")


def _used(store: Path, names: list[str]) -> dict[str, str]:
    """Bytes that the captures of the names take; empty where there is no store to ask, as beside keys of their own."""
    from schemas.read.reader import StoreReader

    try:
        with StoreReader(store) as reader:
            return {name: size_text(reader.owner_bytes(name)) for name in names}
    except TapError:
        return {}
