"""Blocks of a bucket in the place of mapped segments (schemas.read.segment_maps)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from schemas.catalog.records import Segment
from schemas.errors import CorruptError, StoreError
from schemas.objects.block_objects import BlockObjects
from schemas.read.evicted.blocks import object_mismatch, open_objects, sealed_rows
from schemas.read.segment_maps import FrameRows, SegmentMaps, View
from schemas.store.block import Block

__all__ = ["BucketSegments"]


class BucketSegments(SegmentMaps):
    """Segments by their numbers; ``find`` gives the objects of a block."""

    def __init__(self, place: Path, uuid: bytes, find: Callable[[int], BlockObjects]) -> None:
        super().__init__(place, uuid)
        self._find, self._closed = find, 0

    def rows_of(self, segment: Segment, offset: int) -> FrameRows:
        """The description of the rows of the frame at ``offset``; CorruptError where the block has none there."""
        if segment.cold:
            return self.frame(segment, offset)
        block = self.block(segment)
        assert block is not None
        return sealed_rows(block, offset)

    def mismatch(self, segment: Segment, offset: int) -> CorruptError:
        """Same as for a mapped segment; what the cache has of the block is read from the bucket again."""
        block = self.block(segment)
        assert block is not None
        return object_mismatch(block, offset)

    def block(self, segment: Segment) -> Block | None:
        """Same as for a folder. One that was opened while all were forgotten may be of an earlier head: it is opened
        anew.
        """
        while True:
            closed, found = self._closed, super().block(segment)
            if closed == self._closed:
                return found
            self.forget(segment.number)

    def close(self) -> None:
        """Forget all blocks: they may lie elsewhere from now on."""
        self._closed += 1
        super().close()

    def tidy(self) -> None:
        """Blocks in a bucket stay."""

    def _parse(self, segment: Segment, offset: int) -> View:
        if not segment.cold:
            raise StoreError("read frame", f"segment {segment.number}", "frames of sealed blocks cannot be had from a "
                             "bucket", "ask for slices or rows")
        return self.cold(segment).frame(offset)

    def _open(self, segment: Segment) -> Block:
        return open_objects(self._find(segment.number), segment.cold)
