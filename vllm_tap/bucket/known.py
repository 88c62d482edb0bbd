"""Heads that a store's folder pushed: a head that it does not know is of a later state of the store, or of a copy."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from schemas import limits
from schemas.errors import FencedError, StoreError
from schemas.objects.layout import Head
from schemas.store.paths import pushed_name
from schemas.store.small_files import write_durable

__all__ = ["TAKE_OVER", "KnownHead", "KnownHeads"]

TAKE_OVER: Final = ("push from the folder that pushed last; or, where this one is to go on, vllm-tap push STORE URL "
                    "--take-over: the head there stays whole below retired/, and the other folder is refused from "
                    "then on")


class KnownHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A head that this folder wrote, or was about to write: the answer to the write may have been lost. ``catalog``:
    the database that got its catalog, without user, password and options; "" where none did.
    """

    url: str
    push: str
    parent: str | None
    generation: int
    begun_ms: int
    catalog: str = ""


_Change = Callable[[list[KnownHead]], list[KnownHead]]


class KnownHeads:
    """The file in a store's folder that remembers the heads; several pushes of the folder may run at once.

    If the folder is put back to an earlier state, so is the file: the head of a later push is not in it. If the folder
    is copied, so is the file: only the copy that pushes first then knows its new head.
    """

    def __init__(self, store: Path, url: str) -> None:
        self._store, self._path, self._url = store, store / pushed_name(), url

    def read(self) -> list[KnownHead]:
        """The heads, the oldest first; StoreError where the file is none."""
        try:
            if self._path.stat().st_size > limits.bucket_known_bytes_max:
                raise ValueError(f"more than {limits.bucket_known_bytes_max:,} bytes")
            return msgspec.json.decode(self._path.read_bytes(), type=list[KnownHead])
        except FileNotFoundError:
            return []
        except (msgspec.MsgspecError, ValueError) as error:
            raise StoreError("push", self._path, f"malformed: {error}",
                             "remove it, and push with --take-over") from None
        except OSError as error:
            raise StoreError("push", self._path, error.strerror) from None

    def has(self, head: Head) -> bool:
        """Whether this folder wrote a head, wherever, or one that only deletions have followed."""
        return any(one.push in (head.push, head.origin) for one in self.read())

    def check(self, head: Head, url: str) -> None:
        """Raise FencedError for a head that this folder did not write."""
        known = self.read()
        if any(one.push in (head.push, head.origin) for one in known):
            return
        last = max((one.generation for one in known if one.url == self._url), default=None)
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(head.pushed_ms, 0), 1 << 42) / 1000))
        raise FencedError(
            "push to", url, f"its head is generation {head.generation} of {when}, which {self._store} did not push ("
            + ("it has pushed nothing there" if last is None else f"the last it knows is generation {last}")
            + "): the folder was put back to an earlier state, or a copy of it pushes there too", TAKE_OVER)

    def catalog(self) -> str:
        """The database that has the catalog of this URL's last head; "" where none has."""
        return next((one.catalog for one in reversed(self.read()) if one.url == self._url), "")

    def cataloged(self, place: str) -> None:
        """Remember where the catalog of this URL's heads is."""
        self._change(lambda known: [msgspec.structs.replace(one, catalog=place) if one.url == self._url else one
                                    for one in known])

    def begin(self, head: Head) -> None:
        """Remember, durably, a head that is about to be written."""
        catalog = self.catalog()
        self._change(lambda known: [*known, KnownHead(self._url, head.push, head.parent, head.generation,
                                                      time.time_ns() // 1_000_000, catalog)])

    def settle(self, head: Head) -> None:
        """Forget the heads of this URL that cannot become its head any more, now that ``head`` is. ``head`` stays, and
        so do heads that follow it: pushes that run at the same time may still write these.
        """
        self._change(lambda known: [one for one in known
                                    if one.url != self._url or head.push in (one.push, one.parent)])

    def touch(self) -> None:
        """Raise StoreError where the file cannot be written, before anything is sent."""
        self._change(lambda known: known)

    def _change(self, change: _Change) -> None:
        try:
            with self._locked():
                before = self.read()
                after = change(before)[-limits.bucket_known_heads_max:]
                if after != before or not self._path.exists():
                    write_durable(self._path, msgspec.json.encode(after))
        except OSError as error:
            raise StoreError("push", self._path, error.strerror,
                             "the store's folder remembers which heads it pushed: whoever pushes has to write there"
                             ) from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        held = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
        finally:
            os.close(held)
