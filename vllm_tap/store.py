"""A store on disk, read without any server: the same interface as over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from schemas.control import EngineInfo
from schemas.manifest import Manifest
from schemas.reader import CaptureRow, StoreReader
from vllm_tap.captures import Capture, Rows
from vllm_tap.errors import NotComplete

__all__ = ["Store", "open_store"]

_FINAL: Final = frozenset(("complete", "incomplete", "failed"))


class Store:
    """Captures of one store; made by ``open_store``. May be read while a writer writes to it.

    >>> with open_store("captures") as store:                                     # doctest: +SKIP
    ...     for row in store.captures():
    ...         print(row.id, store[row.id]["resid_post", 12].shape)
    """

    def __init__(self, path: str | Path, wait_s: float = 10.0) -> None:
        self.wait_s, self._reader = wait_s, StoreReader(path)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, ref: str) -> Capture:
        """The capture of that id, response id or X-Request-Id; NotFoundError where there is none."""
        return Capture(self, self._reader.capture(ref).id, self.wait_s)

    def __iter__(self) -> Iterator[Capture]:
        """All captures, newest first."""
        before = None
        while page := self._reader.captures(before=before):
            for row in page:
                yield Capture(self, row.id, self.wait_s)
            before = page[-1].id

    def captures(self, status: str | None = None, limit: int = 100, before: str | None = None) -> list[CaptureRow]:
        """A page of the list, newest first; ``before`` is the last id of the page before."""
        return self._reader.captures(status=status, limit=limit, before=before)

    def samples(self, ref: str) -> list[str]:
        """The capture ids of a request that made several."""
        return self._reader.samples(ref)

    def engine(self) -> EngineInfo | None:
        """The newest engine that wrote to the store."""
        return self._reader.engine()

    def close(self) -> None:
        """Releases the files; arrays taken before stay valid."""
        self._reader.close()

    # ── what a Capture reads from ───────────────────────────────────────────────────────────────────────────────

    def manifest(self, ref: str, wait_s: float | None = None) -> Manifest:
        """The manifest; with ``wait_s``, once the capture is final or that many seconds have passed."""
        end_s = time.monotonic() + (wait_s or 0.0)
        while (found := self._reader.manifest(ref)).status not in _FINAL and time.monotonic() < end_s:
            time.sleep(0.05)
        return found

    def rows(self, ref: str, site: str, layers: Sequence[int], start: int, stop: int | None,
             wait_s: float | None, rejected: bool = False) -> Rows:
        """Decoded rows; NotComplete where the capture is not final after ``wait_s`` seconds (None: as it is)."""
        if wait_s is not None and (found := self.manifest(ref, wait_s)).status not in _FINAL:
            raise NotComplete(f"capture {found.id} is {found.status} after {wait_s:g} s")
        piece = self._reader.slice(ref, site, layers, start, stop, rejected=rejected)
        return Rows(piece.capture, piece.site, piece.layers, piece.start, piece.stop, piece.positions, piece.token_ids,
                    piece.values(), piece.missing, piece.clipped)


def open_store(path: str | Path) -> Store:
    """The store at ``path``, read-only; StoreError where there is none.

    >>> open_store("captures")["chatcmpl-01J…"]["resid_post", 12].shape          # doctest: +SKIP
    (37, 4096)
    """
    return Store(path)
