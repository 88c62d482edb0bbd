"""Eviction: rows that a bucket has leave the disk of the store that pushes, the least recently read first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from schemas.errors import BucketError
from schemas.objects.evicted import Evicted, evicted_numbers, lacking, read_away
from schemas.objects.layout import Stored, identity_of
from schemas.objects.objects import Objects
from schemas.store.block_files import STUB
from schemas.store.paths import block_name, redo_name
from vllm_tap.bucket.blocks import read_block
from vllm_tap.bucket.snapshot import BlockAt
from writer_service.upkeep import evicted_blocks
from writer_service.upkeep.usage import Usage, disk_bytes

__all__ = ["Room", "evict", "keep_read_times", "recall_all"]


@dataclass(frozen=True, slots=True)
class Room:
    """The result of an eviction: bytes that rows take on the disk now, blocks whose rows went, and bytes that they
    took.
    """

    local_bytes: int = 0
    blocks: int = 0
    nbytes: int = 0


def evict(store: Path, objects: Objects, named: Mapping[int, BlockAt], local_bytes: int) -> Room:
    """Evict blocks until rows take at most ``local_bytes`` of the store's disk, or none is left that may go.

    ``named`` are the blocks that the bucket's head names. A block may go only if the bucket has it as it is here. Its
    small files have the identity that the head names, its index is read back, and every object is there with its size.
    BucketError where the bucket does not answer, or has lost something; blocks that were evicted before stay so.
    """
    used, blocks, freed = Usage(store).measure(), 0, 0
    for number in sorted(named, key=lambda number: _last_read(store, number)):
        folder, at = store / block_name(number), named[number]
        is_away = read_away(store, number) is not None
        if used <= local_bytes and not is_away:
            continue
        said = {} if is_away else _said(objects, at)
        with evicted_blocks.locked(store):
            if (record := read_away(store, number)) is not None:
                evicted_blocks.drop(store, record)  # what a kill left of it
                continue
            before = disk_bytes(folder)
            if is_away or not _evict_one(store, objects.url, number, at, said):
                continue
            gone = max(before - disk_bytes(folder), 0)
        used, blocks, freed = used - gone, blocks + 1, freed + gone
    return Room(used, blocks, freed)


def _said(objects: Objects, at: BlockAt) -> dict[str, Stored]:
    """The objects of a block in the bucket; BucketError where not all are there."""
    said, lost = lacking(objects, at.key, at.index)
    if lost:
        raise BucketError("evict to", objects.url, f"it has lost what its head names, {lost[0]} first",
                          "push again: what was lost is sent again")
    return said


def _evict_one(store: Path, url: str, number: int, at: BlockAt, said: Mapping[str, Stored]) -> bool:
    """Evict a block if it may go, and tell whether it did. It may not if rows were erased from it since it went up, or
    if it was compacted.
    """
    folder = store / block_name(number)
    if (store / redo_name(number)).exists() or not folder.exists():
        return False
    found = read_block(folder)
    if found.identity != identity_of(at.key):
        return False
    large = sorted(found.large, key=lambda name: (name != found.block.main_name, name))  # the first stream's first
    files = [(name, said[name]) for name in large if name == large[0] or said[name].nbytes > len(STUB)]
    if files[0][1].nbytes <= len(STUB):
        return False
    if any((folder / name).stat().st_size != stored.nbytes for name, stored in files):
        return False
    evicted_blocks.evict(store, Evicted(number, url, at.key, at.index, files))
    return True


def recall_all(store: Path, tell: Callable[[int, int], None] = lambda done, total: None) -> tuple[int, int]:
    """Bring all evicted rows back to the disk, and return the numbers of blocks and of their bytes. StoreError where
    the bucket does not have them; rows that came before stay.
    """
    numbers = sorted(evicted_numbers(store))
    total, done, blocks = evicted_blocks.bytes_away(store, numbers), 0, 0
    for number in numbers:
        tell(done, total)
        with evicted_blocks.locked(store):
            nbytes = evicted_blocks.bytes_away(store, [number])
            blocks += evicted_blocks.recall(store, number)
        done += nbytes
    tell(done, total)
    return blocks, done


def _last_read(store: Path, number: int) -> int:
    """The time at which a block's rows were last read or made, in nanoseconds, from the file system."""
    found = _rows_file(store / block_name(number))
    return 0 if found is None else max(found[1].st_atime_ns, found[1].st_mtime_ns)


def _rows_file(folder: Path) -> tuple[Path, os.stat_result] | None:
    """A block's largest file, with its stat result: every read of rows reads it."""
    found = []
    for path in folder.rglob("c/**/*"):
        with suppress(FileNotFoundError):
            found.append((path, path.stat()))
    return max(found, key=lambda one: one[1].st_size * S_ISREG(one[1].st_mode), default=None)


@contextmanager
def keep_read_times(folder: Path) -> Iterator[None]:
    """Keep the time of a block's last read: reads of its files inside the ``with`` block do not count.

    Some file systems note only one read a day. They still note the next read after this, because they note the first
    one after such a change.
    """
    before = _rows_file(folder)
    yield
    if before is not None:
        path, was = before
        with suppress(OSError):  # another took its place, or it is another user's
            if path.stat().st_mtime_ns == was.st_mtime_ns:
                os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
