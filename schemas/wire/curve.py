"""Keys of a line between hosts (CURVE): who has none can neither write into a store nor read what travels.

A folder of the writer holds its pair and, in ``senders/``, the public key of every sender that may come. A sender's
folder holds its own pair and the writer's public key: ``make_sender`` makes it, to be carried to the sender's host.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from schemas.errors import StartError

__all__ = ["SENDERS", "check_sender", "check_writer", "make_sender", "secure_sender", "secure_writer"]

SENDERS: Final = "senders"
_WRITER: Final = "writer"
_SENDER: Final = "sender"


def make_sender(folder: Path, name: str) -> Path:
    """A new sender's folder, below the writer's; makes the writer's pair where there is none yet.

    StartError where the name is taken, or is none: letters, digits, "-" and "_", at most 64.
    """
    if not (0 < len(name) <= 64 and name.isascii() and name.replace("-", "").replace("_", "").isalnum()) \
            or name == SENDERS:
        raise StartError(f"sender {name!r}: letters, digits, '-' and '_', at most 64 of them, and not {SENDERS!r}")
    out = folder / name
    if out.exists() or (folder / SENDERS / f"{name}.key").exists():
        raise StartError(f"{folder}: has a sender {name!r} already; remove {SENDERS}/{name}.key to end it")
    before = os.umask(0o077)
    try:
        (folder / SENDERS).mkdir(parents=True, exist_ok=True)
        out.mkdir()
        if not (folder / f"{_WRITER}.key_secret").exists():
            create_certificates(folder, _WRITER)
        public, _ = create_certificates(out, _SENDER)
        (out / f"{_WRITER}.key").write_text((folder / f"{_WRITER}.key").read_text())
        Path(public).rename(folder / SENDERS / f"{name}.key")
    except OSError as error:
        raise StartError(f"{folder}: keys cannot be made there: {error}") from None
    finally:
        os.umask(before)
    return out


def check_sender(folder: Path) -> None:
    """StartError where a sender's keys are not there or not readable by their owner alone."""
    _secret(folder, _SENDER)
    _load(folder / f"{_WRITER}.key")


def check_writer(folder: Path) -> None:
    """StartError where the writer's keys are not there or not readable by their owner alone, or no sender's is."""
    _secret(folder, _WRITER)
    senders = list((folder / SENDERS).glob("*.key"))
    for path in senders:
        _load(path)  # one that is none would shut all of them out
    if not senders:
        raise StartError(f"{folder / SENDERS}: no sender's key; make one with `vllm-tap curve-keys NAME`")


def secure_sender(socket: zmq.Socket[Any], folder: Path | None) -> None:
    """Give a socket its keys, before it connects; nothing where there are none."""
    if folder is not None:
        socket.curve_publickey, socket.curve_secretkey = _secret(folder, _SENDER)
        socket.curve_serverkey = _load(folder / f"{_WRITER}.key")[0]


def secure_writer(socket: zmq.Socket[Any], folder: Path) -> Path:
    """Give the writer's socket its keys, before it is bound; the folder of those who may come.

    CURVE alone lets in whoever knows the writer's public key: an authenticator must be held against that folder.
    """
    check_writer(folder)
    _, socket.curve_secretkey = _secret(folder, _WRITER)
    socket.curve_server = True
    return folder / SENDERS


def _secret(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.key_secret"
    public, secret = _load(path)
    mode = path.stat().st_mode
    if secret is None or mode & 0o077:
        raise StartError(f"{path}: " + ("holds no secret key" if secret is None else
                                        f"others may read it (mode {mode & 0o777:04o}); chmod 600 it"))
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError, IndexError) as error:
        raise StartError(f"{path}: no key of a line between hosts ({error}); `vllm-tap curve-keys NAME` makes them"
                         ) from None
    for key in filter(None, (public, secret)):
        try:
            whole = len(key) == 40 and len(z85.decode(key)) == 32
        except (ValueError, KeyError, struct.error):
            whole = False
        if not whole:
            raise StartError(f"{path}: a key has 40 characters of Z85")
    return public, secret
