"""Rows of several stores, such as those of many engines: a capture that more than one has is counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import ArgumentError, NotFoundError
from schemas.read.reader import CaptureRow, StoreReader
from vllm_tap.client.listing import Filters, Where, wanted
from vllm_tap.loader.row_index import Key, RowIndex, build_index
from vllm_tap.progress import ProgressReport

__all__ = ["Chosen", "index_again", "index_stores"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The captures of a store whose rows are read."""

    store: Path
    captures: tuple[str, ...]


def index_stores(stores: Sequence[Path], keys: tuple[Key, ...], where: Where, codec: str | None,
                 progress: ProgressReport, allow_missing: bool) -> list[RowIndex]:
    """An index for each store that has rows, in their order.

    What ``build_index`` raises, NotFoundError only where no store has rows; SpecError where stores hold rows of
    different kinds.
    """
    if len(stores) == 1:
        return [build_index(stores[0], keys, where, codec, progress, allow_missing)]
    home = _homes(stores)
    found: list[RowIndex] = []
    nothing: NotFoundError | None = None
    for number, store in enumerate(stores):
        def is_here(row: CaptureRow, number: int = number) -> bool:
            return home.get(row.id) == number and wanted(where, row)

        try:
            found.append(build_index(store, keys, is_here, codec, progress, allow_missing))
        except NotFoundError as error:
            nothing = error
    if not found:
        raise NotFoundError(f"none of {len(stores)} stores has such rows; the last: {nothing}")
    for other in found[1:]:
        if (other.kinds, other.keys) != (found[0].kinds, found[0].keys):
            raise ArgumentError("codec", codec, f"{found[0].store} and {other.store} hold rows of different kinds: "
                                                "choose with codec=… or where=…")
    return found


def index_again(chosen: Chosen, keys: tuple[Key, ...], codec: str | None) -> RowIndex:
    """The index of captures that were chosen before; NotFoundError where one is gone since."""
    wanted_ids = set(chosen.captures)
    found = build_index(chosen.store, keys, lambda row: row.id in wanted_ids, codec)
    if gone := wanted_ids - set(found.captures):
        raise NotFoundError(f"capture {min(gone)} was deleted after the dataset was made; make the dataset again: it "
                            "is left out then")
    return found


def _homes(stores: Sequence[Path]) -> dict[str, int]:
    """By capture that has ended the number of its store: the first that has it complete, else the first that has it."""
    home: dict[str, int] = {}
    complete: set[str] = set()
    for number, store in enumerate(stores):
        with StoreReader(store) as reader:
            for row in Filters().of(reader):
                if row.status == "complete" and row.id not in complete:
                    complete.add(row.id)
                    home[row.id] = number
                elif row.status == "incomplete":
                    home.setdefault(row.id, number)
    return home
