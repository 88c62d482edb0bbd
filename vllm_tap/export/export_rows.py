"""The rows of an export: the positions that every chosen site and layer has, read a block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.bucket.reader import AnyReader
from schemas.errors import StoreError
from schemas.manifest import Manifest, SiteInfo
from schemas.read.reader import Slice
from schemas.spec import intervals

__all__ = ["ExportRows"]

_BLOCK_BYTES: Final = 64 << 20


@dataclass(slots=True)
class ExportRows:
    """``chosen`` layers by site of a capture; ``positions`` int64 and ``token_ids`` uint32, both ``[rows]``."""

    reader: AnyReader
    manifest: Manifest
    chosen: dict[str, list[int]]
    positions: npt.NDArray[np.int64] = field(init=False)
    token_ids: npt.NDArray[np.uint32] = field(init=False)

    def __post_init__(self) -> None:
        self.positions = _common_positions(self.manifest, self.chosen)
        tokens = np.array(self.manifest.prompt_token_ids + self.manifest.output_token_ids, np.uint32)
        if len(self.positions) and self.positions[-1] >= len(tokens):
            # A capture without a finish: only its rows know what was generated.
            site, layers = next(iter(self.chosen.items()))
            self.token_ids = np.concatenate([part.token_ids[kept] for part, kept in self.parts(site, layers[0])])
        else:
            self.token_ids = tokens[self.positions]

    def site(self, site: str) -> SiteInfo:
        """The manifest's entry of a site."""
        return next(info for info in self.manifest.sites if info.site == site)

    def parts(self, site: str, layer: int) -> Iterator[tuple[Slice, npt.NDArray[np.bool_]]]:
        """Slices that hold the positions, a block at a time, and which of their rows those are."""
        rows = max(1, _BLOCK_BYTES // max(1, 4 * self.site(site).decoded_width))
        for first in range(0, len(self.positions), rows):
            block = self.positions[first:first + rows]
            part = self.reader.slice(self.manifest.id, site, [layer], int(block[0]), int(block[-1]) + 1)
            kept = np.isin(part.positions, block)
            if int(kept.sum()) != len(block):
                raise StoreError("export", self.reader.path, f"rows of {site}.{layer} went away while they were read",
                                 "was the capture deleted?")
            yield part, kept


def _common_positions(manifest: Manifest, chosen: dict[str, list[int]]) -> npt.NDArray[np.int64]:
    """Positions that every chosen site and layer has."""
    asked = manifest.resolved["positions"]
    ranges = intervals(asked if isinstance(asked, str) else [(a, b) for a, b in asked], manifest.prompt_len)
    there = np.zeros(manifest.end, bool)
    for start, stop in ranges:
        there[max(start, 0):min(stop, manifest.end)] = True
    for row in manifest.rows:
        if row.layer in chosen.get(row.site, ()):
            for gap in row.missing:
                there[gap.start:gap.stop] = False
    return np.flatnonzero(there)
