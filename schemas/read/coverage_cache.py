"""What the catalog says of captures, worked out once and kept for as long as it says the same."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import msgspec

from schemas.catalog.aliases import find
from schemas.catalog.records import Capture, Drop, Extent, Segment, load_drops, load_extents, load_segment
from schemas.catalog.view import Moment
from schemas.read.coverage import Coverage, Rows, cover
from schemas.read.row_locations import Located
from schemas.read.slices import Kind
from schemas.spec import Resolved

__all__ = ["Covered", "Coverings"]

rows_kept_max: Final = 1 << 20  # of all that is kept, as Covered counts them; each takes at most about 120 bytes
_ENTRY_ROWS: Final = 32  # what a capture without rows counts for


@dataclass(slots=True)
class Covered:
    """One capture: its rows at one site, or at all. ``segments`` are those that have rows of it."""

    capture: Capture
    extents: list[Extent]
    drops: list[Drop]
    segments: dict[int, Segment | None]
    coverage: Coverage
    resolved: Resolved | None
    version: int  # of the catalog that last said so
    kind: Kind | None = None  # how its rows at that site are stored, once it was asked
    located: dict[Rows, Located] = field(default_factory=dict)  # once they were read

    @property
    def size(self) -> int:
        """In rows: each once by its frame, and once more for every group of layers that has it, as what follows from
        it, ``located`` too, is kept for each of them."""
        groups = [group for groups in self.coverage.sites.values() for group in groups]
        return _ENTRY_ROWS + sum(len(extent.table) // 16 for extent in self.extents) + sum(
            len(group.rows.positions) + len(group.rejected.positions) for group in groups)


class Coverings:
    """Captures as the catalog has them. Nothing that is kept is ever older: the catalog says whether it has changed.

    Whoever calls is inside a moment of the catalog, and so alone.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str | None, str | None], Covered] = OrderedDict()
        self.rows = 0  # of all that is kept

    def of(self, now: Moment, ref: str, owner: str | None, site: str | None = None) -> Covered:
        """The capture of a name, at one site or at all; NotFoundError where there is none."""
        key = (ref, owner, site)
        kept = self._kept.get(key)
        if kept is not None and kept.version == now.version:
            self._kept.move_to_end(key)
            return kept
        whole = self._kept.get((ref, owner, None))
        if whole is not None and whole.version != now.version:
            whole = None
        found = _read(now, ref, owner, site, kept, whole)
        if found is not kept:
            self._drop(key)
            self._kept[key] = found
            self.rows += found.size
        self._kept.move_to_end(key)
        while self.rows > rows_kept_max and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))
        return found

    def forget(self, segment: int) -> None:
        """Work anew what has rows in a segment."""
        for key in [key for key, covered in self._kept.items() if segment in covered.segments]:
            self._drop(key)

    def _drop(self, key: tuple[str, str | None, str | None]) -> None:
        if (dropped := self._kept.pop(key, None)) is not None:
            self.rows -= dropped.size


def _read(now: Moment, ref: str, owner: str | None, site: str | None, kept: Covered | None, whole: Covered | None
          ) -> Covered:
    """What the catalog says; ``kept`` where that is the same. ``whole`` is what it says of all sites, where known."""
    if whole is not None:
        capture, drops = whole.capture, whole.drops
        extents = [extent for extent in whole.extents if extent.site == site]
        segments = {number: whole.segments[number] for number in {extent.segment for extent in extents}}
    else:
        capture = find(now.db, ref, owner)
        extents, drops = load_extents(now.db, capture.id, site), load_drops(now.db, capture.id)
        segments = {number: load_segment(now.db, number) for number in {extent.segment for extent in extents}}
    if kept is not None and (kept.capture, kept.drops, kept.segments) == (capture, drops, segments) \
            and kept.extents == extents:
        kept.version = now.version
        return kept
    resolved = None if capture.resolved is None else msgspec.json.decode(capture.resolved, type=Resolved)
    return Covered(capture, extents, drops, segments, cover(capture, extents, drops), resolved, now.version)
