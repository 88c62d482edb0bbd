"""Faults that are injected to prove that the checks find them: rows that are not those to be put back.

All of them come in through the rows that a request hands in. The engine is as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_tap.verify.laboratory import F32

__all__ = ["FAULTS", "SALT", "Material", "injected"]

SALT: Final = "missing salt"  # looked for apart: it is no fault of rows
# Of a number of this dtype, in the float32 that it is handed in as.
_LOWEST_BIT: Final = {"float32": 0, "bfloat16": 16, "float16": 13}


@dataclass(frozen=True, slots=True)
class Material:
    """Rows [positions, width] that faults are made of.

    ``rows`` are those to be put back. ``other_layer`` are those of another layer, None where there is none.
    ``run_before`` are those of the run before, which had another prompt. ``decoded`` are the right ones through a lossy
    codec.
    """

    rows: F32
    other_layer: F32 | None
    run_before: F32
    decoded: F32
    dtype: str


def _wrong_row(given: Material) -> F32:
    return np.roll(given.rows, 1, axis=0)


def _neighbours_row(given: Material) -> F32:
    rows, at = given.rows.copy(), len(given.rows) // 2
    rows[at] = given.run_before[at]
    return rows


def _one_bit(given: Material) -> F32:
    """The lowest bit that the model's dtype has, in the largest number of a row."""
    rows = np.ascontiguousarray(given.rows).copy()
    row = rows[len(rows) // 2]
    row.view(np.uint32)[np.abs(row).argmax()] ^= np.uint32(1 << _LOWEST_BIT[given.dtype])
    return rows


def _padding(given: Material) -> F32:
    rows = given.rows.copy()
    rows[len(rows) // 2] = 0
    return rows


FAULTS: Final[dict[str, Callable[[Material], F32 | None]]] = {
    "wrong row": _wrong_row,
    "wrong layer": lambda given: given.other_layer,
    "neighbour's row": _neighbours_row,
    "stale buffer": lambda given: given.run_before,
    "one flipped bit": _one_bit,
    "decoded for raw": lambda given: given.decoded,
    "padding row": _padding,
}


def injected(given: Material) -> Iterator[tuple[str, F32 | None]]:
    """The faults by name with the rows to hand in; None for one that this model cannot have."""
    for name, fault in FAULTS.items():
        yield name, fault(given)
