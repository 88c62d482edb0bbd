"""Stored rows of an index, read by ranges from a bucket; each is held against its checksum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from schemas.errors import BucketError, CorruptError, StoreError
from schemas.read.row_locations import FLAGS, PARTS, ROW, SEGMENT, TOKEN, RowLocations
from vllm_tap.loader.row_files import Stored
from vllm_tap.loader.row_index import InBucket, RowIndex, relocated

__all__ = ["BucketRows"]

I64 = npt.NDArray[np.int64]


class BucketRows:
    """Rows by their numbers in the index, from this process; as ``RowFiles`` of a folder.

    The bucket may have another head than the one that the index was made of: then rows are looked up anew.
    """

    def __init__(self, index: RowIndex, bucket: InBucket) -> None:
        self._reader, self.index = bucket.open(), index
        try:
            if self._reader.head.push != bucket.push:
                self._look_up(bucket)
        except BaseException:
            self._reader.close()
            raise
        self._bucket = bucket

    def fill(self, chosen: I64, slots: I64, stored: Sequence[Stored]) -> I64:
        """As of a folder. NotFoundError where a row's capture was deleted since, CorruptError and BucketError where the
        bucket has not what it must have.
        """
        try:
            return self._filled(chosen, slots, stored)
        except CorruptError:
            raise
        except (BucketError, StoreError):
            if not self._reader.refresh():
                raise
            self._look_up(self._bucket)
            return self._filled(chosen, slots, stored)

    def close(self) -> None:
        """Close what is open; what was copied stays."""
        self._reader.close()

    def _look_up(self, bucket: InBucket) -> None:
        self.index = replace(relocated(self.index, self._reader), bucket=replace(bucket, push=self._reader.head.push))

    def _filled(self, chosen: I64, slots: I64, stored: Sequence[Stored]) -> I64:
        index, token_id = self.index, np.empty(len(chosen), np.int64)
        for key, (_, layer) in enumerate(index.keys):
            if key and not stored[key]:
                continue
            located = self._located(key, chosen)
            if key == 0:
                token_id[slots] = located.table[TOKEN]
            if stored[key]:
                pieces = self._reader.pieces(index.segments, located, index.kinds[key].streams, layer)
                for array, found in zip(stored[key].values(), pieces, strict=True):
                    array[slots] = found
        return token_id

    def _located(self, key: int, chosen: I64) -> RowLocations:
        """Rows by their numbers in their blocks, which is all that reading them takes."""
        index, frame, row = self.index, self.index.frame[key][chosen], self.index.row[key][chosen]
        table = np.zeros((PARTS + len(index.kinds[key].streams), len(chosen)), np.int64)
        numbers, table[SEGMENT] = np.unique(index.frames[frame, 0], return_inverse=True)
        order = np.argsort(frame, kind="stable")
        for at in np.split(order, np.flatnonzero(np.diff(frame[order])) + 1):
            segment, offset = index.frames[frame[at[0]]].tolist()
            table[ROW, at], table[TOKEN, at], table[FLAGS, at] = self._reader.rows_of_frame(
                index.segments[segment], offset, row[at].astype(np.int64))
        return RowLocations(index.position[chosen].astype(np.int64), tuple(numbers.tolist()), ((index.keys[key][1],),),
                            table)
