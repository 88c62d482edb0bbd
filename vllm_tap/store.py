"""A store on disk, read without any server: the same interface as over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from schemas.errors import ArgumentError, NotFoundError
from schemas.manifest import FINAL, Manifest
from schemas.read.reader import CaptureRow, StoreReader
from schemas.sites import site_meant
from schemas.wire.messages import EngineInfo
from vllm_tap.client.captures import F32, Capture, Layers, Rows, check_range, drop_layer_axis, site_and_layers
from vllm_tap.client.listing import Filters
from vllm_tap.errors import not_complete
from vllm_tap.progress import ProgressReport, reporting
from writer_service.recover.store_lock import is_free

__all__ = ["Store", "open_store"]

_LOOK_EVERY_S: Final = 0.5
_AWAY_S: Final = 3.0  # a writer that died is back sooner, where something starts it again


class Store:
    """Captures of one store; made by ``open_store``. May be read while a writer writes to it.

    Examples:
        >>> with open_store("captures") as store:                                     # doctest: +SKIP
        ...     for row in store.captures():
        ...         print(row.id, store[row.id]["resid_post", 12].shape)
    """

    def __init__(self, path: str | Path, wait_s: float = 10.0) -> None:
        self.path, self.wait_s, self.reader = Path(path), wait_s, StoreReader(path)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, ref: str) -> Capture:
        """The capture of that id, response id or X-Request-Id; NotFoundError where there is none."""
        return Capture(self, self.reader.capture(ref).id, self.wait_s)

    def __iter__(self) -> Iterator[Capture]:
        """All captures, newest first."""
        return (Capture(self, row.id, self.wait_s) for row in self.captures())

    def captures(self, status: str | None = None, *, tags: Mapping[str, str | None] | None = None,
                 model: str | None = None, site: str | None = None, since: datetime | str | None = None,
                 until: datetime | str | None = None, text: str | None = None, limit: int | None = None,
                 before: str | None = None) -> Iterator[CaptureRow]:
        """The captures that the filters let through, newest first, as ``Client.captures``."""
        return Filters(status, tags or {}, model, site, since, until, text).of(self.reader, limit, before)

    def wait(self, refs: Iterable[str], timeout_s: float = 60.0, *, progress: ProgressReport = False) -> list[Manifest]:
        """The manifests of captures once all are final; NotComplete where that takes longer than ``timeout_s``."""
        names, end_s = list(refs), time.monotonic() + timeout_s
        found: list[Manifest] = []
        with reporting(progress, "waiting") as tell:
            for ref in names:
                found.append(self.final(ref, end_s - time.monotonic()))
                tell(len(found), len(names))
        return found

    def samples(self, ref: str) -> list[str]:
        """The capture ids of a request that made several."""
        return self.reader.samples(ref)

    def engine(self) -> EngineInfo | None:
        """The newest engine that wrote to the store."""
        return self.reader.engine()

    def rows_at(self, rows: Sequence[tuple[str, int]], site: str, layer: Layers = None) -> F32:
        """Any rows, each named by its capture and position, in that order: float32 ``[rows, width]`` (with a list of
        layers ``[layers, rows, width]``).

        NotFoundError names the first that is not there. Faster by far than a slice a row.

        Examples:
            >>> store.rows_at([("01J…", 17), ("01K…", 3)], "resid_post", 12).shape   # doctest: +SKIP
            (2, 4096)
        """
        named, layers = site_and_layers(site, layer)
        named = site_meant(named, {}, site, "site", ArgumentError)  # its rows may be of several models
        if layers is None:
            raise ArgumentError("layer", layer, f"name a layer of {site}")
        return drop_layer_axis(self.reader.rows_at(rows, named, layers).values(), layer)

    def close(self) -> None:
        """Releases the files; arrays taken before stay valid."""
        self.reader.close()

    # ── what a Capture reads from ───────────────────────────────────────────────────────────────────────────────

    def manifest(self, ref: str, wait_s: float | None = None) -> Manifest:
        """The manifest; with ``wait_s``, once the capture is final or that many seconds have passed.

        A capture that is not there yet may be on its way: it is waited for too. Nothing is any longer once no writer
        has had the store for 3 seconds.
        """
        look_s = had_s = time.monotonic()  # when to look again for a writer, and when one had the store last
        end_s = had_s + (wait_s or 0.0)
        while True:
            late = (now_s := time.monotonic()) >= end_s
            try:
                if (found := self.reader.manifest(ref)).status in FINAL or late:
                    return found
            except NotFoundError:
                if late:
                    raise
            if now_s >= look_s:
                look_s = now_s + _LOOK_EVERY_S
                had_s = had_s if is_free(self.path) else now_s
            if now_s - had_s >= _AWAY_S:
                end_s = 0.0  # read once more: the writer may have ended just after it had made the capture final
            else:
                time.sleep(0.02)

    def final(self, ref: str, wait_s: float) -> Manifest:
        """The manifest once the capture is final; NotComplete where that takes longer than ``wait_s`` seconds, and
        sooner where no writer has the store.
        """
        end_s = time.monotonic() + wait_s
        if (found := self.manifest(ref, wait_s)).status in FINAL:
            return found
        raise not_complete(found, wait_s, no_writer=time.monotonic() < end_s)

    def rows(self, ref: str, site: str, layers: Sequence[int], start: int, stop: int | None,
             wait_s: float | None, rejected: bool = False) -> Rows:
        """Decoded rows; NotComplete where the capture is not final after ``wait_s`` seconds (None: as it is)."""
        check_range(start, stop)
        if wait_s is not None:
            self.final(ref, wait_s)
        piece = self.reader.slice(ref, site, layers, start, stop, rejected=rejected)
        return Rows(piece.capture, piece.site, piece.layers, piece.start, piece.stop, piece.positions, piece.token_ids,
                    piece.values(), piece.missing, piece.clipped)


def open_store(path: str | Path) -> Store:
    """The store at ``path``, read-only; StoreError where there is none.

    Examples:
        >>> open_store("captures")["chatcmpl-01J…"]["resid_post", 12].shape          # doctest: +SKIP
        (37, 4096)
    """
    return Store(path)
