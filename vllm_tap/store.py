"""A store on disk or in a bucket, read without any server: the same interface as over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from schemas.attended import Attention, AttentionAsked, LackingRows, attend, reading
from schemas.bucket.places import Stores, is_url, shown_places
from schemas.bucket.reader import AnyReader, Cataloged, OneReader, open_reader, stores_of
from schemas.bucket.several import SeveralReader
from schemas.errors import ArgumentError, NotFoundError, StoreError
from schemas.manifest import FINAL, Manifest
from schemas.read.reader import CaptureRow, StoreReader
from schemas.sites import site_meant
from schemas.store.paths import NOT_A_FOLDER, url_of
from schemas.wire.engine_info import EngineInfo
from schemas.zarr_view.view import CaptureView
from vllm_tap.client.captures import F32, Capture, Layers, Rows, check_range, drop_layer_axis, site_and_layers
from vllm_tap.client.listing import Filters
from vllm_tap.errors import MissingRows, not_complete
from vllm_tap.progress import ProgressReport, reporting
from writer_service.recover.store_lock import is_free

__all__ = ["Store", "folder_of", "open_store"]

_LOOK_EVERY_S: Final = 0.5
_AWAY_S: Final = 3.0  # a writer that died is back sooner, where something starts it again


class Store:
    """Captures of one store; made by ``open_store``. May be read while a writer writes to it; one in a bucket is as its
    head was when it was opened, until ``refresh``.

    Examples:
        >>> with open_store("captures") as store:                                     # doctest: +SKIP
        ...     for row in store.captures():
        ...         print(row.id, store[row.id]["resid_post", 12].shape)
    """

    def __init__(self, path: Stores, wait_s: float = 10.0, cache: str | Path | None = None,
                 cache_bytes: int | None = None, catalog: str | None = None) -> None:
        self.wait_s, self._opened = wait_s, (path, wait_s, cache, cache_bytes, catalog)
        self.reader: AnyReader = open_reader(path if catalog is None else Cataloged(path, catalog), cache, cache_bytes)
        self.path: str | Path = Path(path) if isinstance(path, str | Path) and not is_url(path) else shown_places(path)

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

    def refresh(self) -> bool:
        """See what was pushed to the bucket since, to new stores of ``URL/*`` too; whether there was any.

        A store in a folder is always as it is.
        """
        return self.reader.refresh()

    @property
    def stores(self) -> list[str]:
        """The places of the stores that are read: one, or several as one."""
        return stores_of(self.reader, self._opened[0])

    def store_of(self, ref: str) -> str:
        """The place of the store that has a capture; of those that a divided one is in, the first writer's."""
        if not isinstance(self.reader, SeveralReader):
            self.reader.capture(ref)
            return str(self.path)
        return self.reader.places_of(ref)[0]

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
        if not (folders := [each.path for each in _readers(self.reader) if isinstance(each, StoreReader)]):
            return self.reader.manifest(ref)  # what is in a bucket is final
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
                had_s = had_s if all(map(is_free, folders)) else now_s
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

    def attention(self, ref: str, asked: AttentionAsked, wait_s: float) -> Attention:
        """``Capture.attention``, computed here; the capture may take ``wait_s`` seconds to become final, unless
        ``asked.allow_missing``.
        """
        manifest = self.manifest(ref) if asked.allow_missing else self.final(ref, wait_s)
        try:
            return attend(manifest, asked, reading(self.reader, manifest.id, asked.layer))
        except LackingRows as error:
            raise MissingRows(manifest.id, error.what, error.missing) from None

    def zarr_value(self, ref: str, key: str, span: slice) -> bytes | None:
        """Some bytes of what lies under a key of a capture's Zarr view; None where nothing does."""
        found = CaptureView(self.reader, ref).value(key)
        return None if found is None else found.read()[span]

    @property
    def opened(self) -> tuple[Stores, str | Path | None, int | None]:
        """The folders or URLs, the cache and its bytes as they were given."""
        path, _, cache, cache_bytes, _ = self._opened
        return path, cache, cache_bytes

    @property
    def catalog(self) -> str | None:
        """The URL of the Postgres database that has the catalog, where one was given."""
        return self._opened[-1]

    def __reduce__(self) -> tuple[type[Store], tuple[object, ...]]:
        return Store, self._opened  # a worker of dask opens it anew


def _readers(reader: AnyReader) -> list[OneReader]:
    return list(reader.stores.values()) if isinstance(reader, SeveralReader) else [reader]


def folder_of(store: str | Path) -> Path:
    """The folder of a store; StoreError of one in a bucket."""
    path = Path(store)
    if (url := url_of(path)) is not None:
        raise StoreError("open store", url, NOT_A_FOLDER)
    return path


def open_store(path: Stores, cache: str | Path | None = None, cache_bytes: int | None = None,
               catalog: str | None = None) -> Store:
    """The store at ``path``, read-only; StoreError where there is none.

    ``path`` is a folder, or the URL that ``vllm-tap push`` brought a store to: s3://bucket/prefix, and what else
    obstore knows. Then rows are read by ranges through a ``cache`` on a local disk (default: ~/.cache/vllm-tap) of at
    most ``cache_bytes`` (default: 4 GiB). BucketError where the bucket does not answer. Rows of a folder that were
    evicted to a bucket are read in the same way.

    ``catalog`` is for a store in a bucket: the URL of a Postgres database that ``vllm-tap push --catalog`` brings the
    catalog to. Then no catalog is fetched or kept here, and every read is of the last push. CatalogError where the
    database does not answer, or lags behind.

    Several paths are read as one store. So are all the stores one level below a prefix: ``s3://bucket/captures/*``, or
    without the ``*`` where the prefix has no store itself. They share ``cache_bytes`` evenly. Each must be there.
    ConflictError where two are one store, or have one capture.

    Examples:
        >>> open_store("captures")["chatcmpl-01J…"]["resid_post", 12].shape          # doctest: +SKIP
        (37, 4096)
    """
    return Store(path, cache=cache, cache_bytes=cache_bytes, catalog=catalog)
