"""A capture as a Zarr v3 hierarchy that is never written: each value is made when its key is read.

    zarr.json                            the manifest as attributes; metadata of everything below it (consolidated)
    prompt_token_ids, output_token_ids   uint32 [tokens]
    SITE/rows                            float32 [token, layer, width], NaN where a row is missing
    SITE/present                         bool [token, layer]: whether the row is there
    SITE/position, SITE/token_id         int64 [token]: the positions that were asked for, and what stands there
    SITE/layer                           int64 [layer]

Keys are looked up among these and never become paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from schemas import limits
from schemas.errors import ConflictError, StoreError
from schemas.manifest import FINAL, Manifest
from schemas.read.coverage import LayerGroup
from schemas.read.coverage_cache import CoveredCapture
from schemas.read.slices import RowsAt, Slice
from schemas.sites import site_named
from schemas.store.paths import zarr_json
from schemas.zarr_view.arrays import Value, ViewArray, chunk_of, document_value
from schemas.zarr_view.listing import keys_of
from schemas.zarr_view.token_axis import TokenAxis, inside

__all__ = ["CaptureView", "NotFinalError"]

_ENCODING: Final = 1  # grows when the same rows become other bytes
_COORDINATES: Final = {"coordinates": "position token_id"}  # as xarray reads it
_OUTSIDE: Final = frozenset(("prompt_token_ids", "output_token_ids"))  # of the manifest: arrays of their own
_ELSEWHERE: Final = frozenset(("site", "extents"))  # of a site: its name, and what compaction changes


class NotFinalError(ConflictError):
    """The capture may yet get rows, so that no array of it has a shape; or it never got any."""

    def __init__(self, capture: str, status: str) -> None:
        super().__init__(f"capture {capture} is {status}: " + (
            "a Zarr view is of a capture that has ended; wait until it is final" if status in ("pending", "running")
            else "it never got rows, and its manifest says why"))


class HasCaptures(Protocol):
    """A reader of captures: of one store, or of several."""

    @property
    def path(self) -> Path:
        """The path of these files."""

    def covered(self, ref: str, owner: str | None = None) -> tuple[CoveredCapture, dict[str, int]]:
        """Same as for a RowReader, and so are these."""

    def manifest(self, ref: str, owner: str | None = None) -> Manifest: ...

    def slice(self, ref: str, site: str, layers: Sequence[int], start: int = 0, stop: int | None = None,
              owner: str | None = None, rejected: bool = False) -> Slice: ...

    def rows_at(self, rows: Sequence[tuple[str, int]], site: str, layers: Sequence[int], owner: str | None = None
                ) -> RowsAt: ...


class CaptureView:
    """The keys of one final capture of a store; ``owner`` None means any. NotFoundError where there is no such capture,
    NotFinalError where it is not final.

    ``chosen``: sites, and which of their layers; all of them where not given.
    """

    def __init__(self, reader: HasCaptures, ref: str, owner: str | None = None,
                 chosen: Mapping[str, Sequence[int]] | None = None) -> None:
        covered, self._widths = reader.covered(ref, owner)
        self._reader, self._owner, self.capture = reader, owner, covered.capture
        if self.capture.status not in FINAL or covered.resolved is None:
            raise NotFinalError(self.capture.id, self.capture.status)
        self._coverage, layers = covered.coverage, covered.resolved.layers
        self._axis = TokenAxis(covered.coverage.ranges)
        self.layers = {site: list(layers[site]) for site in layers} if chosen is None else {
            site: [layer for layer in layers[site] if layer in chosen[site]] for site in layers if site in chosen}

    @cached_property
    def arrays(self) -> dict[str, ViewArray]:
        """Every array by its path."""
        found = {f"{name}_token_ids": _tokens(name, tokens) for name, tokens in (
            ("prompt", self.capture.prompt_tokens), ("output", self.capture.output_tokens))}
        for site in self.layers:
            found |= {f"{site}/{name}": array for name, array in self._of_site(site).items()}
        return found

    def value(self, key: str) -> Value | None:
        """The value of a key; None where there is none.

        Reading it may raise what ``StoreReader.slice`` raises, and does where the capture was deleted meanwhile.
        """
        if key == "zarr.json":
            return document_value(zarr_json(self._root()))
        if (chunk := chunk_of(key)) is not None:
            array = self.arrays.get(chunk[0])
            return None if array is None else array.value(chunk[1])
        path, _, name = key.rpartition("/")
        if name != "zarr.json":
            return None
        if path in self.layers:
            return document_value(zarr_json(self._group(path, self._about(path))))
        return document_value(zarr_json(self.arrays[path].document())) if path in self.arrays else None

    def every_key(self) -> Iterator[str]:
        """Every key, metadata after what it describes and the root's last."""
        return keys_of(self._root())

    # ── metadata ────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        manifest = self._reader.manifest(self.capture.id, self._owner)
        built: dict[str, Any] = msgspec.to_builtins(manifest)
        return {**built, "expected": manifest.expected, "captured": manifest.captured}

    def _about(self, site: str) -> dict[str, Any]:
        """Attributes of a site's group, and of its rows."""
        known = next(info for info in self._manifest["sites"] if info["site"] == site)
        return {"capture": self.capture.id, "site": site,
                **{name: value for name, value in known.items() if name not in _ELSEWHERE}}

    def _root(self) -> dict[str, Any]:
        manifest = {name: value for name, value in self._manifest.items() if name not in _OUTSIDE}
        manifest["sites"] = [self._about(site["site"]) for site in manifest["sites"]]
        below: dict[str, Any] = {}
        for site in self.layers:
            group = self._group(site, self._about(site))
            below |= {site: {**group, "consolidated_metadata": _consolidated({})}}
        below |= {path: array.document() for path, array in self.arrays.items()}
        return {**_group({"capture": self.capture.id, "manifest": manifest}),
                "consolidated_metadata": _consolidated(below)}

    def _group(self, site: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
        names = [path for path in self.arrays if path.startswith(f"{site}/")]
        below = {path.removeprefix(f"{site}/"): self.arrays[path].document() for path in names}
        return {**_group(attributes), "consolidated_metadata": _consolidated(below)}

    # ── the arrays of a site ────────────────────────────────────────────────────────────────────────────────────

    def _of_site(self, site: str) -> dict[str, ViewArray]:
        layers, width, tokens = self.layers[site], self._widths[site], len(self._axis)
        rows = max(1, limits.zarr_chunk_bytes_target // (4 * max(1, width)))
        steps = max(1, min(tokens, rows)), max(1, min(tokens, limits.zarr_chunk_tokens_max))
        flags = min(steps[1], max(1, limits.zarr_chunk_bytes_target // max(1, len(layers))))
        info = site_named(site)
        return {
            "rows": ViewArray(
                "float32", (tokens, len(layers), width), (steps[0], 1, max(1, width)), ("token", "layer", "width"),
                lambda token, layer, _: self._rows(site, layers[layer.start], token), {
                    **_COORDINATES, "long_name": info.meaning, "ids": info.ids},
                lambda spans: self._state(site, layers[spans[1].start])),
            "present": ViewArray(
                "bool", (tokens, len(layers)), (flags, max(1, len(layers))), ("token", "layer"),
                lambda token, _: self._present(site, token), _COORDINATES),
            "position": ViewArray("int64", (tokens,), steps[1:], ("token",), self._positions),
            "token_id": ViewArray("int64", (tokens,), steps[1:], ("token",), self._token_ids,
                                  {"unknown": -1, "long_name": "id of the token at the position"}),
            "layer": ViewArray("int64", (len(layers),), (max(1, len(layers)),), ("layer",),
                               lambda layer: np.asarray(layers[layer], np.int64)),
        }

    def _positions(self, token: slice) -> npt.NDArray[np.int64]:
        return self._axis.positions(token.start, token.stop)

    def _group_of(self, site: str, layer: int) -> LayerGroup:
        return next(group for group in self._coverage.sites[site] if layer in group.layers)

    def _state(self, site: str, layer: int) -> object:
        group = self._group_of(site, layer)
        capture = self.capture
        return (_ENCODING, capture.id, capture.created_ms, capture.status, site, layer, len(self._axis),
                group.expected, len(group.rows.positions), group.missing)

    def _present(self, site: str, token: slice) -> npt.NDArray[np.bool_]:
        positions = self._positions(token)
        found = np.empty((len(positions), len(self.layers[site])), bool)
        for group in self._coverage.sites[site]:
            members = [number for number, layer in enumerate(self.layers[site]) if layer in group.layers]
            found[:, members] = ~inside(positions, group.missing)[:, None]
        return found

    def _rows(self, site: str, layer: int, token: slice) -> npt.NDArray[np.float32]:
        """Rows of one layer, float32 ``[tokens, 1, width]``; StoreError where what is there has changed meanwhile."""
        positions = self._positions(token)
        values = np.full((len(positions), 1, self._widths[site]), np.nan, np.float32)
        if not len(positions):
            return values
        piece = self._reader.slice(self.capture.id, site, [layer], int(positions[0]), int(positions[-1]) + 1,
                                   self._owner)
        at = positions.searchsorted(piece.positions)
        missing = inside(positions, piece.missing)
        # Each is there or is known to be missing: one that is neither would be NaN without a reason.
        if not np.array_equal(np.flatnonzero(~missing), at) or not np.array_equal(positions[at], piece.positions):
            raise StoreError("read rows", self._reader.path, f"capture {self.capture.id} has changed since this view "
                             "of it was made", "open it anew")
        values[at, 0] = piece.values()[0]
        return values

    def _token_ids(self, token: slice) -> npt.NDArray[np.int64]:
        """The token ids at positions, int64 ``[tokens]``; -1 where nobody told: of an engine that was lost, rows alone
        know what was generated.
        """
        positions = self._positions(token)
        told = np.frombuffer(self.capture.prompt_tokens + self.capture.output_tokens, "<u4")
        found = np.full(len(positions), -1, np.int64)
        known = positions < len(told)
        found[known] = told[positions[known]]
        if not known.all():
            self._ask_rows(positions, found)
        return found

    def _ask_rows(self, positions: npt.NDArray[np.int64], found: npt.NDArray[np.int64]) -> None:
        """Fills in ids that rows have, those that are fewest bytes first."""
        for site in sorted(self._coverage.sites, key=lambda site: self._widths[site]):
            step = max(1, limits.zarr_chunk_bytes_target // (4 * max(1, self._widths[site])))
            for group in self._coverage.sites[site]:
                unknown = np.flatnonzero(found < 0)
                unknown = unknown[np.isin(positions[unknown], group.rows.positions)]
                for first in range(0, len(unknown), step):
                    which = unknown[first:first + step]
                    asked = [(self.capture.id, int(position)) for position in positions[which]]
                    found[which] = self._reader.rows_at(asked, site, group.layers[:1], self._owner).token_ids


def _tokens(name: str, tokens: bytes) -> ViewArray:
    ids = np.frombuffer(tokens, "<u4")
    chunk = max(1, min(len(ids), limits.zarr_chunk_tokens_max))
    return ViewArray("uint32", ids.shape, (chunk,), (f"{name}_token",), lambda token: ids[token])


def _group(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def _consolidated(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of what is below a group, as zarr-python has it: a store without a list needs no more."""
    return {"kind": "inline", "must_understand": False, "metadata": dict(metadata)}
