"""Stored rows of an index, copied by their numbers in blocks, wherever these lie; each is compared with its checksum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from schemas.bucket.reader import OneReader
from vllm_tap.loader.row_index import RowIndex

__all__ = ["Stored", "copy_by_block"]

I64 = npt.NDArray[np.int64]
Stored = dict[str, npt.NDArray[np.uint8]]  # pieces by stream, uint8 [rows, piece bytes]


def copy_by_block(reader: OneReader, index: RowIndex, keys: Sequence[int], numbers: I64, stored: Sequence[Stored],
                  slots: I64) -> npt.NDArray[np.uint32]:
    """Copy rows ``numbers`` of sealed blocks to ``slots`` of the keys' arrays, and give their token ids [n].

    ``stored`` has an entry for every key of the index; the entry of a key that is not wanted has no arrays. ``keys``,
    at least one, lie in the same rows of the same frames. It raises what ``stored_rows`` raises.
    """
    frames, rows = index.frames[index.frame[keys[0]][numbers]], index.row[keys[0]][numbers].astype(np.int64)
    for key in keys:
        token_ids, pieces = reader.stored_rows(index.segments, frames, rows, index.kinds[key].streams,
                                               index.keys[key][1], not stored[key])
        for array, found in zip(stored[key].values(), pieces, strict=True):
            array[slots] = found
    return token_ids
