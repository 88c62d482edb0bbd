"""Rows of several stores, such as those of many engines: a capture that more than one has is counted once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from schemas.bucket.reader import OneReader
from schemas.errors import NotFoundError
from schemas.read.reader import StoreReader
from vllm_tap.client.listing import Filters, Where, wanted
from vllm_tap.loader.joined_index import OneStore, check_once, index_each
from vllm_tap.loader.row_index import InBucket, Key, RowIndex, build_index
from vllm_tap.progress import ProgressReport

__all__ = ["Chosen", "index_again", "index_stores"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The captures of a store whose rows are read."""

    store: OneStore
    captures: tuple[str, ...]


def index_stores(stores: Sequence[OneStore], keys: tuple[Key, ...], where: Where, codec: str | None,
                 progress: ProgressReport, allow_missing: bool) -> list[RowIndex]:
    """An index for each store that has rows, in their order; what ``build_index``, ``index_each`` and ``check_once``
    raise.
    """
    if len(stores) == 1:
        return [build_index(stores[0], keys, where, codec, progress, allow_missing)]
    home = _homes(stores)
    found = index_each(stores, keys, lambda number, row: (row.writer is not None or home.get(row.id) == number)
                       and wanted(where, row), codec, progress, allow_missing)
    check_once(found)
    return found


def index_again(chosen: Chosen, keys: tuple[Key, ...], codec: str | None) -> RowIndex:
    """The index of captures that were chosen before; NotFoundError where one is gone since."""
    wanted_ids = set(chosen.captures)
    found = build_index(chosen.store, keys, lambda row: row.id in wanted_ids, codec)
    if gone := wanted_ids - set(found.captures):
        raise NotFoundError(f"capture {min(gone)} was deleted after the dataset was made; make the dataset again: it "
                            "is left out then")
    return found


def _homes(stores: Sequence[OneStore]) -> dict[str, int]:
    """The store's number of each capture that has ended: the first that has it complete, else the first that has it.
    Of a divided one each store has rows of its own.
    """
    home: dict[str, int] = {}
    complete: set[str] = set()
    for number, store in enumerate(stores):
        with _open(store) as reader:
            for row in Filters().of(reader):
                if row.status == "complete" and row.id not in complete:
                    complete.add(row.id)
                    home[row.id] = number
                elif row.status == "incomplete":
                    home.setdefault(row.id, number)
    return home


def _open(store: OneStore) -> AbstractContextManager[OneReader]:
    return store.open() if isinstance(store, InBucket) else StoreReader(store)
