"""Findings in a damaged store: rows by their capture, positions and layers, where they can be told."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from schemas.catalog.records import Segment, unpack_layers
from schemas.store.block import Block
from schemas.store.cold_block import ColdFrame
from schemas.store.segment import FrameView

I64 = npt.NDArray[np.int64]
View = FrameView | ColdFrame


@dataclass(frozen=True, slots=True)
class Finding:
    """Damage in ``file``, below the store; rows are those of ``capture`` at ``positions`` in all of ``layers``."""

    what: str
    file: str
    offset: int | None = None
    site: str = ""
    capture: str = ""
    layers: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()


def lost_extents(
    db: sqlite3.Connection, segment: Segment, file: str, start: int = 0, stop: int = 2**63 - 1
) -> Iterator[Finding]:
    """Rows that the catalog has at bytes ``[start, stop)`` of a segment where no frame can be read."""
    query = "SELECT * FROM extents WHERE segment = ? AND offset >= ? AND offset < ? ORDER BY offset"
    lost = db.execute(query, (segment.number, start, stop))
    yield from extent_findings("the rows are not there", lost, segment, file)


def extent_findings(what: str, extents: Iterable[sqlite3.Row], segment: Segment, file: str) -> Iterator[Finding]:
    """Rows of the catalog's ``extents``, all of them."""
    for row in extents:
        positions = np.frombuffer(row["rows"], "<u4").reshape(-1, 4)[:, 0]
        yield Finding(what, file, row["offset"], segment.site, row["capture"], unpack_layers(row["layers"]),
                  tuple(positions.tolist()))


def row_findings(what: str, file: str, view: View, wrong: npt.NDArray[np.bool_]) -> Iterator[Finding]:
    """Rows of a frame that are ``wrong`` [rows, layers]."""
    names = [view.frame.captures[index] for index in view.table.capture.tolist()]
    yield from _named(what, file, view.offset, view.frame.site, names, view.table.position, view.frame.layers, wrong)


def block_row_findings(
    what: str, file: str, offset: int | None, block: Block, rows: I64, wrong: npt.NDArray[np.bool_]
) -> Iterator[Finding]:
    """Rows of a block, among ``rows``, that are ``wrong`` [rows, layers]; the place alone where none is."""
    names = [block.captures[index] if index < len(block.captures) else "?"
             for index in block.row["capture"][rows].tolist()]
    found = list(_named(what, file, offset, block.site, names, block.row["position"][rows], block.layers, wrong))
    yield from found or [Finding(what, file, offset, block.site)]


def _named(
    what: str, file: str, offset: int | None, site: str, names: Sequence[str], positions: npt.NDArray[np.uint32],
    layers: Sequence[int], wrong: npt.NDArray[np.bool_],
) -> Iterator[Finding]:
    """Wrong (row, layer) pairs as findings: rows of a capture that are wrong in the same layers together."""
    groups: dict[tuple[str, bytes], list[int]] = {}
    for row in np.flatnonzero(wrong.any(1)).tolist():
        groups.setdefault((names[row], wrong[row].tobytes()), []).append(row)
    for (capture, _), rows in groups.items():
        which = tuple(layer for layer, bad in zip(layers, wrong[rows[0]].tolist(), strict=True) if bad)
        yield Finding(what, file, offset, site, capture, which, tuple(positions[rows].tolist()))


def ranges(positions: Iterable[int]) -> list[tuple[int, int]]:
    """Positions as ranges ``[start, stop)``."""
    ordered = sorted(set(positions))
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1), len(ordered)]
    return [(ordered[a], ordered[b - 1] + 1) for a, b in pairwise(cuts) if a < b]


def below(store: Path, path: Path) -> str:
    """A file as a finding names it."""
    return str(path.relative_to(store))
