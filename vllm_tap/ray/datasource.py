"""Captures as a datasource of Ray Data; imported where Ray is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from vllm_tap.loader.row_index import Key, RowIndex, only
from vllm_tap.ray.row_part import RowPart, row_bytes, rows_a_task
from vllm_tap.ray.stores import Chosen, index_again

__all__ = ["CaptureDatasource"]

_KNOWN: Final = pyarrow.schema({"capture": pyarrow.large_string(), "position": pyarrow.int64(), "row": pyarrow.int64()})
I64 = npt.NDArray[np.int64]


@dataclass
class CaptureDatasource(Datasource):  # type: ignore[misc]  # Ray is not looked into
    """The rows of ``keys`` of chosen captures, cut into tasks; what each of them reads follows from this alone.

    Ray sends it from process to process without the index of the rows, which is then made anew of the same captures.
    """

    chosen: tuple[Chosen, ...]
    keys: tuple[Key, ...]
    codec: str | None
    dtype: str
    verify: bool
    task_bytes: int
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__init__()
        self._projection_map: dict[str, str] | None = None
        self._indexes: list[RowIndex] | None = None

    def keep(self, indexes: list[RowIndex]) -> None:
        """Take the indexes of the rows, one a store, from who made them."""
        self._indexes = indexes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_indexes": None}

    def __copy__(self) -> CaptureDatasource:
        made = object.__new__(CaptureDatasource)
        made.__dict__.update(self.__dict__)
        return made

    # ── what Ray asks ───────────────────────────────────────────────────────────────────────────────────────────

    def get_name(self) -> str:
        """The name of the tasks."""
        return "Captures"

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all rows as they are in memory."""
        indexes = self._rows()
        return sum(map(len, self._picked())) * row_bytes(indexes[0], self.dtype, self._columns())

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
                       ) -> list[ReadTask]:
        """Tasks of ``task_bytes``, however many Ray would have."""
        indexes, columns, first = self._rows(), self._columns(), 0
        step = rows_a_task(indexes[0], self.dtype, self.task_bytes, columns)
        nbytes = row_bytes(indexes[0], self.dtype, columns)
        schema = RowPart(indexes[0], np.empty(0, np.int64), columns, self.dtype, self.verify).empty().schema
        tasks = []
        for index, picked in zip(indexes, self._picked(), strict=True):
            for begin in range(0, len(picked), step):
                rows = picked[begin:begin + step][:per_task_row_limit]
                part = RowPart(only(index, rows), first + rows, columns, self.dtype, self.verify)
                about = BlockMetadata(num_rows=len(rows), size_bytes=len(rows) * nbytes, exec_stats=None,
                                      input_files=[str(index.place)])
                tasks.append(ReadTask(part.read, about, schema, per_task_row_limit))
            first += index.rows
        return tasks

    def supports_projection_pushdown(self) -> bool:
        """Columns that are not asked for are not read."""
        return True

    def supports_predicate_pushdown(self) -> bool:
        """Rows are chosen before they are read, by what is known of them."""
        return True

    def apply_predicate(self, predicate_expr: Any) -> CaptureDatasource:
        """This source of the rows alone that a condition chooses; itself where the rows must be read to find out."""
        try:
            _KNOWN.empty_table().filter(predicate_expr.to_pyarrow())
        except (pyarrow.ArrowInvalid, TypeError, ValueError, NotImplementedError):
            return self
        made: CaptureDatasource = super().apply_predicate(predicate_expr)
        return made

    # ── its rows ────────────────────────────────────────────────────────────────────────────────────────────────

    def _rows(self) -> list[RowIndex]:
        if self._indexes is None:
            keys = tuple(dict.fromkeys(self.keys))
            self._indexes = [index_again(chosen, keys, self.codec) for chosen in self.chosen]
        return self._indexes

    def _columns(self) -> tuple[str, ...]:
        projected = self._projection_map
        return self.columns if projected is None else tuple(name for name in projected if name in self.columns)

    def _picked(self) -> list[I64]:
        """The numbers of the rows that a condition chooses, by store, ascending."""
        condition, picked, first = self.get_current_predicate(), [], 0
        for index in self._rows():
            rows = np.arange(index.rows)
            if condition is not None:
                rows = _known(index, first).filter(condition.to_pyarrow())["row"].to_numpy() - first
            picked.append(rows)
            first += index.rows
        return picked


def _known(index: RowIndex, first: int) -> pyarrow.Table:
    """The columns that an index knows of each row; ``first`` rows are before it."""
    names = pyarrow.array(index.captures, pyarrow.large_string()).take(pyarrow.array(index.capture))
    return pyarrow.table([names, index.position.astype(np.int64), first + np.arange(index.rows)], schema=_KNOWN)
