"""The part that one task of Ray Data reads: some rows of a store, as a table of Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas import codecs
from schemas.errors import ArgumentError, StoreError
from schemas.read.reader import read_store_uuid
from schemas.read.slices import RowFormat
from vllm_tap.loader.block_rows import Stored
from vllm_tap.loader.row_index import BLOCK_ROWS, RowIndex, name_of
from vllm_tap.loader.stored_rows import open_rows

__all__ = ["CODES", "DTYPES", "ROW_COLUMNS", "RowPart", "columns_of", "rows_a_task"]

CODES: Final = "codes"
DTYPES: Final = ("float32", "float16", CODES)
ROW_COLUMNS: Final = ("capture", "position", "token_id", "row")
I64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows of an index with their numbers in the whole of it, int64 ``[rows]``, and the columns wanted of them."""

    index: RowIndex
    row: I64
    columns: tuple[str, ...]
    dtype: str
    verify: bool

    def read(self) -> Iterator[Any]:
        """One table; NotFoundError where a capture was deleted meanwhile, CorruptError where bytes are damaged,
        StoreError where this node does not see the store.
        """
        index, count = self.index, len(self.row)
        if index.bucket is None:
            _check_store(index)
        wanted = [bool(_columns_of_key(index, key, self.dtype) & set(self.columns)) for key in range(len(index.keys))]
        stored: list[Stored] = [
            {stream.name: np.empty((count, stream.nbytes), np.uint8) for stream in kind.streams} if is_wanted else {}
            for kind, is_wanted in zip(index.kinds, wanted, strict=True)]
        files, token_id = open_rows(index, self.verify), np.empty(count, np.int64)
        try:
            files.fill(np.arange(count), np.arange(count), stored, token_id)
        finally:
            files.close()
        yield self._table(token_id, stored)

    def empty(self) -> Any:
        """The table of no rows: its schema is that of every other."""
        none = [{stream.name: np.empty((0, stream.nbytes), np.uint8) for stream in kind.streams}
                for kind in self.index.kinds]
        nothing = RowPart(self.index, self.row[:0], self.columns, self.dtype, self.verify)
        return nothing._table(np.empty(0, np.int64), none)

    def _table(self, token_id: I64, stored: Sequence[Stored]) -> Any:
        import pyarrow
        from ray.data.extensions import ArrowTensorArray

        count = len(self.row)
        made: dict[str, Any] = {"token_id": pyarrow.array(token_id), "row": pyarrow.array(self.row),
                                "position": pyarrow.array(self.index.position[:count].astype(np.int64))}
        if "capture" in self.columns:
            names = pyarrow.array(self.index.captures, pyarrow.string())
            made["capture"] = names.take(pyarrow.array(self.index.capture[:count]))
        for name, array in self._tensors(stored):
            made[name] = ArrowTensorArray.from_numpy(array)
        return pyarrow.table(made).select(list(self.columns))  # of no columns too it has its rows

    def _tensors(self, stored: Sequence[Stored]) -> Iterator[tuple[str, Array]]:
        """The columns of keys, one after the other: ``[rows, …]``."""
        index = self.index
        for name in index.names:
            shares = [key for key in range(len(index.keys)) if name_of(index.keys[key]) == name and stored[key]]
            if self.dtype == CODES:
                for key in shares:
                    for stream in index.kinds[key].streams:
                        if (column := f"{name}.{stream.name}") in self.columns:
                            yield column, _typed(stored[key][stream.name], stream)
            elif shares and name in self.columns:
                parts = [_decoded(index.kinds[key], stored[key], self.dtype) for key in shares]
                yield name, parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _check_store(index: RowIndex) -> None:
    """StoreError where the store is not there, or another is."""
    hint = "every node must see the store under this path"
    try:
        uuid = read_store_uuid(index.store)
    except StoreError as error:
        raise StoreError("read rows", index.store, error.reason, hint) from None
    if uuid != index.uuid:
        raise StoreError("read rows", index.store, "another store than the dataset was made of", hint)


def columns_of(index: RowIndex, dtype: str) -> tuple[str, ...]:
    """All columns of a dataset; SpecError where codes of a site are asked for that ranks share out."""
    if dtype != CODES:
        return (*ROW_COLUMNS, *index.names)
    if shared := next((name_of(key) for key, share in zip(index.keys, index.share, strict=True) if share), None):
        raise ArgumentError("dtype", dtype, f"ranks share out the columns of {shared}, whose rows are put together "
                                            "decoded: ask for float32")
    return (*ROW_COLUMNS, *(f"{name_of(key)}.{stream.name}" for key, kind in zip(index.keys, index.kinds, strict=True)
                            for stream in kind.streams))


def rows_a_task(index: RowIndex, dtype: str, task_bytes: int, columns: Sequence[str]) -> int:
    """Rows of which the tensors have so many bytes: a multiple of ``BLOCK_ROWS``, where they hold so many."""
    rows = task_bytes // max(1, row_bytes(index, dtype, columns))
    return max(1, rows // BLOCK_ROWS * BLOCK_ROWS or rows)


def row_bytes(index: RowIndex, dtype: str, columns: Sequence[str]) -> int:
    """Bytes of the wanted tensors of a row, and what stands beside them."""
    total = 56  # an id and three numbers
    for key, kind in enumerate(index.kinds):
        if _columns_of_key(index, key, dtype) & set(columns):
            sizes = [stream.nbytes for stream in kind.streams] if dtype == CODES else [
                kind.decoded_width * np.dtype(dtype).itemsize]
            total += sum(sizes) + 8 * len(sizes)  # and where each tensor begins
    return total


def _columns_of_key(index: RowIndex, key: int, dtype: str) -> set[str]:
    name = name_of(index.keys[key])
    return {f"{name}.{stream.name}" for stream in index.kinds[key].streams} if dtype == CODES else {name}


def _typed(piece: npt.NDArray[np.uint8], stream: codecs.Stream) -> Array:
    return piece.view(stream.dtype).reshape(-1, *stream.shape)


def _decoded(kind: RowFormat, stored: Stored, dtype: str) -> Array:
    """Rows ``[n, decoded width]``; what is no float16 becomes infinite, as torch has it."""
    pieces = {stream.name: _typed(stored[stream.name], stream) for stream in kind.streams}
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(codecs.decode(kind.codec, pieces, kind.width, kind.dtype).astype(dtype, copy=False))
