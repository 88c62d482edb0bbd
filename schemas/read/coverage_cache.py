"""Captures as the catalog has them, worked out once and cached for as long as it says the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from schemas.catalog.aliases import find
from schemas.catalog.parts import ALONE, Parts, load_parts
from schemas.catalog.records import Capture, Drop, Extent, Segment, load_drops, load_extents, load_segment
from schemas.catalog.view import Moment
from schemas.lru import Lru
from schemas.read.coverage import Coverage, Rows, cover
from schemas.read.row_locations import RowLocations
from schemas.read.slices import RowFormat
from schemas.spec import Resolved

__all__ = ["CoverageCache", "CoveredCapture"]

rows_cached_max: Final = 1 << 20  # as CoveredCapture counts them; each takes at most about 120 bytes
_ENTRY_ROWS: Final = 32  # what a capture without rows counts for


@dataclass(slots=True)
class CoveredCapture:
    """One capture: its rows at one site, or at all. ``segments`` are those that have rows of it."""

    capture: Capture
    extents: list[Extent]
    drops: list[Drop]
    segments: dict[int, Segment | None]
    coverage: Coverage
    resolved: Resolved | None
    version: int  # of the catalog that last said so
    parts: Parts = ALONE
    row_format: RowFormat | None = None  # how its rows at that site are stored, once it was asked
    locations: dict[Rows, RowLocations] = field(default_factory=dict)  # once they were read

    @property
    def size(self) -> int:
        """The size in rows. Each row counts once by its frame, and once more for every group of layers that has it:
        what follows from a row (``locations`` too) is kept for each group.
        """
        groups = [group for groups in self.coverage.sites.values() for group in groups]
        return _ENTRY_ROWS + sum(len(extent.table) // 16 for extent in self.extents) + sum(
            len(group.rows.positions) + len(group.rejected.positions) for group in groups)


class CoverageCache:
    """Captures as the catalog has them. Nothing that is kept is ever older: the catalog says whether it has changed.

    Whoever calls is inside a moment of the catalog, and so alone.
    """

    def __init__(self) -> None:
        self._cached = Lru[tuple[str, str | None, str | None], CoveredCapture](rows_cached_max, lambda one: one.size)

    @property
    def rows(self) -> int:
        """Rows that all cached captures count for."""
        return self._cached.total

    def of(self, now: Moment, ref: str, owner: str | None, site: str | None = None) -> CoveredCapture:
        """The capture of a name, at one site or at all; NotFoundError where there is none."""
        key = (ref, owner, site)
        cached = self._cached.get(key)
        if cached is not None and cached.version == now.version:
            return cached
        whole = self._cached.get((ref, owner, None))
        if whole is not None and whole.version != now.version:
            whole = None
        found = _read(now, ref, owner, site, cached, whole)
        if found is not cached:
            self._cached.put(key, found)
        return found

    def forget(self, segment: int) -> None:
        """Work anew what has rows in a segment."""
        for key, covered in self._cached.items():
            if segment in covered.segments:
                self._cached.pop(key)


def _read(now: Moment, ref: str, owner: str | None, site: str | None, cached: CoveredCapture | None,
          whole: CoveredCapture | None) -> CoveredCapture:
    """The capture as the catalog has it; ``cached`` where that is the same. ``whole``, where known, is of all sites."""
    if whole is not None:
        capture, drops, parts = whole.capture, whole.drops, whole.parts
        extents = [extent for extent in whole.extents if extent.site == site]
        segments = {number: whole.segments[number] for number in {extent.segment for extent in extents}}
    else:
        capture = find(now.db, ref, owner)
        parts = load_parts(now.db, capture)
        extents, drops = load_extents(now.db, capture.id, site), load_drops(now.db, capture.id)
        segments = {number: load_segment(now.db, number) for number in {extent.segment for extent in extents}}
    if cached is not None and (cached.capture, cached.drops, cached.segments, cached.parts) == (
            capture, drops, segments, parts) and cached.extents == extents:
        cached.version = now.version
        return cached
    resolved = None if capture.resolved is None else msgspec.json.decode(capture.resolved, type=Resolved)
    return CoveredCapture(capture, extents, drops, segments, cover(capture, extents, drops, parts), resolved,
                          now.version, parts)
