"""API keys: who may ask, and whose captures are whose. The file holds names and hashes, never a key.

A key is 256 random bits, so one SHA-256 of it is enough: there is nothing to guess, and nothing to slow a guesser for.
The name is the owner that a capture's record carries: a new key for the same name reads what the old one captured.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from schemas import limits
from schemas.errors import NotFoundError, StartError, TapError
from schemas.store.small_files import write_durable

__all__ = ["Key", "KeyFile", "check_name", "make_key", "read_keys", "revoke_key", "set_quota"]

log = logging.getLogger("vllm_tap.api")

_PREFIX: Final = "tap_"  # so that scanners for leaked secrets can know one
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@\-]{0,63}", re.ASCII)
_VERSION: Final = 1


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key; times in milliseconds since 1970, 0 for never. ``quota_bytes``: for its captures, 0 for any."""

    name: str
    sha256: str
    created_ms: int
    revoked_ms: int = 0
    quota_bytes: int = 0


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    keys: list[Key]


def check_name(name: str) -> str:
    """``name`` if it can own captures, else TapError."""
    if _NAME.fullmatch(name) is None:
        raise TapError(f"NAME = {name[:100]!r}: a key's name is 1 to 64 of A-Z a-z 0-9 _ . @ -, beginning with a "
                       "letter or digit")
    return name


def read_keys(path: Path) -> list[Key]:
    """Keys of the file; FileNotFoundError where there is none, StartError where it cannot be trusted."""
    try:
        with path.open("rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StartError(f"keys = {str(path)!r}: {error.strerror}") from None
    if mode & 0o022:  # who can write to it can make a key; who can read it still has none
        raise StartError(f"keys = {str(path)!r}: others can write to it (mode {mode & 0o777:04o}); chmod 600 it")
    try:
        document = msgspec.json.decode(data, type=_Document)
        digests = [bytes.fromhex(key.sha256) for key in document.keys]
    except (ValueError, msgspec.MsgspecError) as error:
        raise StartError(f"keys = {str(path)!r}: no file of keys ({error}); restore it, "
                         "or move it away and make keys anew") from None
    if document.version != _VERSION or any(len(digest) != 32 for digest in digests):
        raise StartError(f"keys = {str(path)!r}: version {document.version}, this program knows {_VERSION}")
    return document.keys


def make_key(path: Path, name: str, replace: bool = False, quota_bytes: int | None = None) -> str:
    """A new key for ``name``, the only time that it can be seen. TapError where the name has a key.

    With ``replace`` the name's older keys end; their quota stays where none is given.
    """
    check_name(name)
    text = _PREFIX + secrets.token_urlsafe(32)
    with _changing(path) as keys:
        if any(key.name == name for key in keys) and not replace:
            raise TapError(f"NAME = {name!r}: this name has had a key; --replace ends that key and makes a new one, "
                           f"which reads the same captures")
        if quota_bytes is None:
            quota_bytes = next((key.quota_bytes for key in reversed(keys) if key.name == name), 0)
        keys[:] = [_ended(key) if key.name == name else key for key in keys]
        keys.append(Key(name, hashlib.sha256(text.encode()).hexdigest(), _now_ms(), quota_bytes=quota_bytes))
    return text


def revoke_key(path: Path, name: str) -> None:
    """Ends every key of ``name``; NotFoundError where it has none. Its captures stay."""
    with _changing(path) as keys:
        _check_in_use(keys, name)
        keys[:] = [_ended(key) if key.name == name else key for key in keys]


def set_quota(path: Path, name: str, quota_bytes: int) -> None:
    """Bounds the bytes of a name's captures from now on, 0 for any; NotFoundError where ``name`` has no key in use."""
    with _changing(path) as keys:
        _check_in_use(keys, name)
        keys[:] = [msgspec.structs.replace(key, quota_bytes=quota_bytes) if key.name == name and not key.revoked_ms
                   else key for key in keys]


def _check_in_use(keys: list[Key], name: str) -> None:
    if not any(key.name == name and not key.revoked_ms for key in keys):
        raise NotFoundError(f"NAME = {name[:100]!r}: no key in use has this name; `vllm-tap keys ls` lists them")


class KeyFile:
    """The keys as they are in the file now: what is revoked there is refused at the next request.

    Without a file the service is open. Once there was one it never opens again: gone or damaged, nobody gets in.
    """

    def __init__(self, path: Path, needed: bool) -> None:
        self.path = path
        self._needed = needed
        self._seen: tuple[int, int, int] | None = None
        self._live: list[tuple[bytes, str]] = []
        self._quotas: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):
            read_keys(path)  # what is wrong with it ends the start
        if needed and not self.live:
            raise StartError(f"keys = {str(path)!r}: no key in use there, and without one the service listens on "
                             f"loopback only; make one: vllm-tap keys make NAME --keys {path}")

    @property
    def open(self) -> bool:
        """Whether requests need no key."""
        return not self._refreshed() and not self._needed

    @property
    def live(self) -> list[tuple[bytes, str]]:
        """SHA-256 and name of the keys in use."""
        self._refreshed()
        return self._live

    def owner(self, text: str) -> str | None:
        """The name that a key stands for, None for no key in use. Takes as long for every wrong one."""
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        found = [name for known, name in self.live if secrets.compare_digest(known, digest)]
        return found[0] if found else None

    def quota_bytes(self, owner: str) -> int:
        """Bytes that the owner's captures may take, 0 for any."""
        self._refreshed()
        return self._quotas.get(owner, 0)

    def _refreshed(self) -> bool:
        """Whether there is a file; reads it where it is another than the last time."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            self._live, self._seen = [], None  # the same file may come back
            return False
        self._needed = True
        seen = (stat.st_ino, stat.st_ctime_ns, stat.st_size)  # of its mode too, which can be what is wrong with it
        if seen != self._seen:
            self._seen, self._live = seen, []
            try:
                keys = read_keys(self.path)
            except (StartError, FileNotFoundError) as error:
                log.error("nobody gets in: %s", error)
            else:
                in_use = [key for key in keys if not key.revoked_ms]
                self._live = [(bytes.fromhex(key.sha256), key.name) for key in in_use]
                self._quotas = {key.name: key.quota_bytes for key in in_use}
        return True


@contextmanager
def _changing(path: Path) -> Iterator[list[Key]]:
    """The keys, to be changed in place; written durably, mode 0600, where the block ends well."""
    try:
        # Like the writer's, which may make the store later: nobody else looks into any folder on the way.
        for missing in [each for each in path.absolute().parents if not each.exists()][::-1]:
            missing.mkdir(mode=0o700, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StartError(f"keys = {str(path)!r}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        try:
            keys = read_keys(path)
        except FileNotFoundError:
            keys = []
        yield keys
        if len(keys) > limits.keys_max:
            raise TapError(f"{len(keys)} keys, limit {limits.keys_max}")
        document = {"version": _VERSION, "keys": msgspec.to_builtins(keys)}
        write_durable(path, json.dumps(document, indent=1).encode() + b"\n")
    except OSError as error:
        raise StartError(f"keys = {str(path)!r}: {error.strerror}") from None
    finally:
        os.close(folder)


def _ended(key: Key) -> Key:
    return key if key.revoked_ms else msgspec.structs.replace(key, revoked_ms=_now_ms())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
