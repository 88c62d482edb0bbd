"""Stored rows of an index, read by ranges from a bucket; each is held against its checksum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from schemas.errors import BucketError, CorruptError, StoreError
from vllm_tap.loader.block_rows import Stored, copy_by_block
from vllm_tap.loader.row_index import InBucket, RowIndex, relocated

__all__ = ["BucketRows"]

I64 = npt.NDArray[np.int64]


class BucketRows:
    """Rows by their numbers in the index, from this process; as ``RowFiles`` of a folder.

    The bucket may have another head than the one that the index was made of: then rows are looked up anew.
    """

    def __init__(self, index: RowIndex, bucket: InBucket, sweepers: int) -> None:
        self._reader, self.index = bucket.open(sweepers), index
        try:
            if self._reader.head.push != bucket.push:
                self._look_up(bucket)
        except BaseException:
            self._reader.close()
            raise
        self._bucket = bucket

    def fill(self, chosen: I64, slots: I64, stored: Sequence[Stored], token_id: I64) -> None:
        """Same as for a folder. NotFoundError where a row's capture was deleted since, CorruptError and BucketError
        where the bucket has not what it must have.
        """
        try:
            self._fill(chosen, slots, stored, token_id)
        except CorruptError:
            raise
        except (BucketError, StoreError):
            if not self._reader.refresh():
                raise
            self._look_up(self._bucket)
            self._fill(chosen, slots, stored, token_id)

    def close(self) -> None:
        """Close what is open; what was copied stays."""
        self._reader.close()

    def _look_up(self, bucket: InBucket) -> None:
        self.index = replace(relocated(self.index, self._reader), bucket=replace(bucket, push=self._reader.head.push))

    def _fill(self, chosen: I64, slots: I64, stored: Sequence[Stored], token_id: I64) -> None:
        for key in range(len(self.index.keys)):
            if key == 0 or stored[key]:
                found = copy_by_block(self._reader, self.index, [key], chosen, stored, slots)
                if key == 0:
                    token_id[slots] = found
