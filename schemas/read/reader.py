"""Read a store from disk: captures, manifests and slices. Needs no server, and works while the writer is down.

>>> store = StoreReader("captures")                                              # doctest: +SKIP
>>> store.slice("01J...", "resid_post", [12], 0, 10).values().shape              # doctest: +SKIP
(1, 10, 4096)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from schemas import limits
from schemas.catalog.records import load_segment
from schemas.errors import StoreError
from schemas.read.captures import CaptureRow, Progress, read_store_uuid
from schemas.read.evicted.segments import LocalSegments
from schemas.read.journal_tail import FrameAt, JournalTail
from schemas.read.live_rows import LiveRows, PartsCursor, live_of
from schemas.read.row_locations import UnsettledError
from schemas.read.row_reader import RowReader, given_as, row_format
from schemas.read.slices import Places, RowsAt, Slice

__all__ = ["CaptureRow", "LiveRows", "PartsCursor", "Places", "Progress", "RowsAt", "Slice", "StoreReader",
           "read_store_uuid"]


class StoreReader(RowReader):
    """A store opened read-only: its captures, their rows, and what comes while they are made; safe for threads."""

    def __init__(self, path: str | Path, cache: str | Path | None = None, cache_bytes: int | None = None,
                 answer_s: float | None = None, sweepers: int = 0) -> None:
        """``cache`` keeps at most ``cache_bytes`` (4 GiB) of rows that were evicted to a bucket; a read of that which
        takes longer than ``answer_s`` seconds is given up. ``sweepers`` as of a BucketReader.
        """
        super().__init__(path)
        self._maps = LocalSegments(self.path, self.uuid, None if cache is None else Path(cache), cache_bytes,
                                   answer_s, sweepers)
        self._tail = JournalTail(self.path, self.uuid, self._durable_end)

    def appended(self) -> set[str]:
        """The captures that have got rows since this was last asked, be they durable or not yet."""
        return self._tail.look()

    def frames(self, capture: str, site: str, after: int) -> list[FrameAt]:
        """The frames with rows of a capture at a site whose number is above ``after``, in order.

        Those of them that are durable, and what ``appended`` has found beyond.
        """
        with self._catalog.moment() as now:
            query = "SELECT seq, segment, offset FROM extents WHERE capture = ? AND site = ? AND seq > ?"
            rows = now.db.execute(query, (capture, site, after)).fetchall()
            segments = {number: load_segment(now.db, number) for number in {row["segment"] for row in rows}}
        found = {row["seq"]: FrameAt(row["seq"], segment, row["offset"], True) for row in rows
                 if (segment := segments[row["segment"]]) is not None}
        for frame in self._tail.frames(capture, site):
            if frame.seq > after:
                found.setdefault(frame.seq, frame)
        return [found[seq] for seq in sorted(found)]

    def live_rows(self, frame: FrameAt, capture: str, layers: Sequence[int], first: int = 0) -> LiveRows | None:
        """The rows of a capture in a frame, of those of ``layers`` that it has; None where there are none.

        From the capture's row number ``first`` in it on, at most ``limits.live_event_bytes_max`` of them. CorruptError
        where the frame is not whole: one that is not durable may be so in a moment, or come again.
        """
        return self._settled(lambda: self._live_rows(frame, capture, layers, first))

    def _live_rows(self, frame: FrameAt, capture: str, layers: Sequence[int], first: int) -> LiveRows | None:
        if not frame.durable:
            # It may be cut off at this moment, so it is not mapped; and other bytes may take its place.
            return live_of(frame, self._tail.read(frame), capture, layers, first, lambda *_: None)
        try:
            view = self._maps.frame(frame.segment, frame.offset)
            return live_of(frame, view, capture, layers, first, partial(self._maps.verify, frame.segment, view))
        except StoreError as error:
            raise UnsettledError(frame.segment.number, error) from None

    def in_parts(self, capture: str) -> bool:
        """Whether several ranks send a capture's rows; who follows these reads them with ``part_rows``."""
        with self._catalog.moment() as now:
            return bool(self._coverage_cache.of(now, capture, None).parts.places)

    def part_rows(self, cursor: PartsCursor, capture: str, site: str, layers: Sequence[int]) -> LiveRows | None:
        """The next rows of a capture that several ranks send, whole and durable; None where there are none yet.

        At most ``limits.live_event_bytes_max`` of them; their ``seq`` is the step up to which all have come.
        """
        return self._settled(lambda: self._part_rows(cursor, capture, site, layers))

    def _part_rows(self, cursor: PartsCursor, capture: str, site: str, layers: Sequence[int]) -> LiveRows | None:
        with self._catalog.moment() as now:
            covered = self._coverage_cache.of(now, capture, None, site)
            stored = row_format(now, covered, site, layers)
        row_bytes = 4 * len(layers) * stored.decoded_width
        going = copy.deepcopy(cursor)  # a read that fails comes again
        taken = going.take(covered, site, layers, max(1, limits.live_event_bytes_max // row_bytes))
        if taken is None:
            cursor.follow(going)
            return None
        group, wanted, which = taken
        given = given_as(stored, [(group, [], which)])
        placed = self._located(covered, site, stored, group, which, False)
        values = given.decoded(self._copied(covered.segments, placed, wanted, given))
        cursor.follow(going)
        return LiveRows(cursor.told, True, False, wanted, group.rows.positions[which].astype(np.uint32),
                        placed[0].rows.token_ids, placed[0].rows.flags, values)

    def _durable_end(self, segment: int) -> int:
        """The offset up to which the catalog has the frames of a segment."""
        query = "SELECT MAX(offset + bytes) FROM frames WHERE segment = ?"
        with self._catalog.moment() as now:
            return int(now.db.execute(query, (segment,)).fetchone()[0] or 0)
