"""``vllm-tap keys``: make, list and revoke the keys of the HTTP service."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from api.auth.keys import make_key, read_keys, revoke_key, set_quota
from api.config import keys_file
from schemas.errors import TapError
from schemas.read.reader import StoreReader
from vllm_tap.cli.show import console, when
from vllm_tap.sizes import parse_size, size_text

__all__ = ["change_quota", "print_keys", "print_new_key", "revoke"]


def quota_of(text: str) -> int:
    """Bytes, 0 for ``none``."""
    return 0 if text == "none" else parse_size(text, "--quota")


def print_new_key(store: Path, keys: Path | None, name: str, replace: bool, quota: str | None) -> None:
    """Makes a key; the key alone goes to standard output, so that it can be piped."""
    path = keys_file(store, keys)
    typer.echo(make_key(path, name, replace, None if quota is None else quota_of(quota)))
    typer.echo(f"the key of {name}, shown this once; {path} holds its hash alone", err=True)


def print_keys(store: Path, keys: Path | None) -> None:
    """Names, when they were made and when they were revoked, how much they may have and what they have."""
    path = keys_file(store, keys)
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


def _used(store: Path, names: list[str]) -> dict[str, str]:
    """What the captures of the names take; empty where there is no store to ask, as beside keys of their own."""
    try:
        with StoreReader(store) as reader:
            return {name: size_text(reader.owner_bytes(name)) for name in names}
    except TapError:
        return {}


def change_quota(store: Path, keys: Path | None, name: str, quota: str) -> None:
    """What a name may have from now on; a running service goes by it from its next request on."""
    set_quota(keys_file(store, keys), name, quota_of(quota))
    typer.echo(f"{name}: quota {quota}")


def revoke(store: Path, keys: Path | None, name: str) -> None:
    """Ends the keys of a name; a running service refuses them from its next request on."""
    revoke_key(keys_file(store, keys), name)
    typer.echo(f"revoked {name}")
