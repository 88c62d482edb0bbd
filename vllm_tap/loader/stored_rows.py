"""Stored rows of an index, wherever they lie: in a folder, in a bucket, or in several stores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_tap.loader.block_rows import Stored
from vllm_tap.loader.bucket_rows import BucketRows
from vllm_tap.loader.joined_index import AnyIndex, JoinedIndex, with_parts
from vllm_tap.loader.row_files import RowFiles
from vllm_tap.loader.row_index import RowIndex

__all__ = ["StoredRows", "open_rows"]

I64 = npt.NDArray[np.int64]


class JoinedRows:
    """Rows by their numbers in an index of several stores; a store is opened when its rows are asked for."""

    def __init__(self, index: JoinedIndex, verify: bool, sweepers: int) -> None:
        self._index, self._verify, self._sweepers = index, verify, sweepers
        self._ends = np.cumsum([part.rows for part in index.parts])
        self._files: dict[int, RowFiles | BucketRows] = {}

    @property
    def index(self) -> JoinedIndex:
        """The index of the same rows where they lie by now."""
        parts = list(self._index.parts)
        for number, files in self._files.items():
            parts[number] = files.index
        return with_parts(self._index, parts)

    def fill(self, chosen: I64, slots: I64, stored: Sequence[Stored], token_id: I64) -> None:
        """Same as for one store."""
        store = self._ends.searchsorted(chosen, side="right")
        for number in np.unique(store).tolist():
            part = self._index.parts[number]
            if (files := self._files.get(number)) is None:
                files = self._files[number] = _open_one(part, self._verify, self._sweepers)
            mine = np.flatnonzero(store == number)
            files.fill(chosen[mine] - (self._ends[number] - part.rows), slots[mine], stored, token_id)

    def close(self) -> None:
        """Close what is open; what was copied stays."""
        for files in self._files.values():
            files.close()


StoredRows = RowFiles | BucketRows | JoinedRows


def open_rows(index: AnyIndex, verify: bool, sweepers: int = 1) -> StoredRows:
    """The rows of an index, for one process of ``sweepers``, each with rows of its own."""
    return JoinedRows(index, verify, sweepers) if isinstance(index, JoinedIndex) else _open_one(index, verify, sweepers)


def _open_one(index: RowIndex, verify: bool, sweepers: int) -> RowFiles | BucketRows:
    return RowFiles(index, verify, sweepers) if index.bucket is None else BucketRows(index, index.bucket, sweepers)
