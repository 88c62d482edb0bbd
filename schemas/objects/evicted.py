"""Blocks of a store's folder whose rows lie in a bucket alone, and the record of each that says where.

    writers/w0/evicted/<number>.json     written durably before any row leaves the disk, removed after all are back.
    blocks/w0-<number>.zarr/             its small files as they were; a stub is in the place of each file of rows.

The first stream's file says whether the rows are away: it goes first and comes back last.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

import msgspec

from schemas.errors import BucketError, StoreError
from schemas.objects.layout import BLOCK_KEY, INDEX, Stored, digest, unpack_index
from schemas.objects.objects import Objects
from schemas.store.block_files import is_stub
from schemas.store.paths import block_name, evicted_name

__all__ = ["Evicted", "EvictedWatch", "evicted_numbers", "lacking", "read_away", "read_evicted"]

_MOMENT_NS: Final = 1_000_000_000
_NAME: Final = re.compile(r"[0-9]{8,}\.json")


class Evicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of a block's rows: the folder ``key`` below ``url``, with the index that the bucket's head named.

    ``files`` are those that leave the disk, by their names in the block, the first stream's first.
    """

    segment: int
    url: str
    key: str
    index: Stored
    files: list[tuple[str, Stored]]


def evicted_numbers(store: Path) -> set[int]:
    """Numbers of the blocks that have a record."""
    folder = (store / evicted_name(0)).parent
    try:
        return {int(path.stem) for path in folder.iterdir() if _NAME.fullmatch(path.name)}
    except FileNotFoundError:
        return set()


class EvictedWatch:
    """Whether a block was evicted or recalled since this was last asked; each step of that changes the records' folder.
    """

    def __init__(self, store: Path) -> None:
        self._folder = (store / evicted_name(0)).parent
        self._seen_ns: int | None = None

    def has_moved(self) -> bool:
        """Ask; True the first time."""
        try:
            at_ns = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            at_ns = 0
        if at_ns == self._seen_ns:
            return False
        # Two changes of one moment look the same: what has just changed is looked at once more.
        self._seen_ns = at_ns if time.time_ns() - at_ns > _MOMENT_NS else None
        return True


def read_evicted(store: Path, number: int) -> Evicted | None:
    """The record of a block, None where it has none; StoreError where it cannot be read."""
    path = store / evicted_name(number)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Evicted)
        if found.segment != number or not BLOCK_KEY.fullmatch(found.key) or not found.files:
            raise ValueError("it is not of this block")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise StoreError("read where evicted rows lie", path, error, "put a good copy of it in its place: rows of this "
                         "block may be nowhere else") from None
    return found


def read_away(store: Path, number: int) -> Evicted | None:
    """The record of a block whose rows are not on the disk; None of any other. As ``read_evicted``."""
    found = read_evicted(store, number)
    if found is None:
        return None
    try:
        return found if is_stub(store / block_name(number) / found.files[0][0]) else None
    except FileNotFoundError:
        return None


def lacking(objects: Objects, key: str, index: Stored) -> tuple[dict[str, Stored], list[str]]:
    """The objects of a block by its index, and those that the bucket lacks, one line each. The index is read and
    held against its hash, the others' sizes against the listing. BucketError where the bucket does not answer.
    """
    try:
        data, _ = objects.get(f"{key}/{INDEX}", index.nbytes)
        if Stored(len(data), digest(data)) != index:
            return {}, [f"{key}/{INDEX} does not match its checksum"]
        said = unpack_index(data, f"{objects.url}/{key}/{INDEX}")[1]
    except FileNotFoundError:
        return {}, [f"{key}/{INDEX} is not there"]
    except BucketError as error:
        if error.passing:
            raise
        return {}, [str(error)]
    sizes = objects.sizes(key)
    return said, [f"{key}/{name}: " + ("it is not there" if (size := sizes.get(f"{key}/{name}")) is None else
                                       f"{size:,} bytes, {stored.nbytes:,} were sent")
                  for name, stored in said.items() if sizes.get(f"{key}/{name}") != stored.nbytes]
