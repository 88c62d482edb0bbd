"""``vllm-tap keys``: make, list and revoke the keys of the HTTP service."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from api.keys import make_key, read_keys, revoke_key
from schemas.zarr_layout import KEYS_FILE
from vllm_tap.show import console, when

__all__ = ["print_keys", "print_new_key", "revoke"]


def keys_file(store: Path, keys: Path | None) -> Path:
    """Where the keys of a store lie, if nobody says otherwise."""
    return keys or store / KEYS_FILE


def print_new_key(store: Path, keys: Path | None, name: str, replace: bool) -> None:
    """Makes a key; the key alone goes to standard output, so that it can be piped."""
    path = keys_file(store, keys)
    typer.echo(make_key(path, name, replace))
    typer.echo(f"the key of {name}, shown this once; {path} holds its hash alone", err=True)


def print_keys(store: Path, keys: Path | None) -> None:
    """Names, when they were made and when they were revoked."""
    path = keys_file(store, keys)
    try:
        found = read_keys(path)
    except FileNotFoundError:
        typer.echo(f"no keys in {path}: the service is open, on loopback only", err=True)
        return
    table = Table("key", "made", "revoked", box=None, pad_edge=False, header_style="bold")
    for key in found:
        table.add_row(key.name, when(key.created_ms), when(key.revoked_ms) if key.revoked_ms else "")
    console().print(table)


def revoke(store: Path, keys: Path | None, name: str) -> None:
    """Ends the keys of a name; a running service refuses them from its next request on."""
    revoke_key(keys_file(store, keys), name)
    typer.echo(f"revoked {name}")
