"""Rows of sealed blocks leave the disk for a bucket that has them, and come back where the writer has to change them.

 evict    under the lock of blocks: the record, durably; then stubs take the place of the files of rows, the first
          stream's first. Maps of readers keep the files that were there.
 recall   under the same lock: every file is fetched under another name, held against its hash, synced and renamed, the
          first stream's last; then the record goes.

So at any moment a block's rows are on the disk, or there is a record that names the object that has them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from schemas.errors import BucketError, StoreError, TapError
from schemas.objects.evicted import Evicted, evicted_numbers, read_away, read_evicted
from schemas.objects.layout import Stored
from schemas.objects.objects import Objects
from schemas.store.block_files import STUB, is_stub
from schemas.store.paths import WRITER, block_name, evicted_name
from writer_service import fs

room_kept = 256 * 1024 * 1024  # of the disk, when rows come back to it


class SilentBucketError(StoreError):
    """The bucket that has a block's rows does not answer: neither would it for another block now."""


@contextmanager
def locked(store: Path) -> Iterator[None]:
    """The lock under which rows of sealed blocks are changed, evicted and recalled; waits for who has it."""
    with _lock_file(store, "BLOCKS") as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield


@contextmanager
def pushing(store: Path) -> Iterator[Callable[[], bool]]:
    """While a push reads files of rows, nobody puts stubs in their place. What it gives tells whether no other push
    runs, and keeps them away from then on.
    """
    with _lock_file(store, "PUSH") as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield lambda: _is_alone(fd)


def _is_alone(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _lock_file(store: Path, name: str) -> Iterator[int]:
    fd = os.open(store / "writers" / WRITER / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        fs.close(fd)


def evict(store: Path, record: Evicted) -> None:
    """Take a block's rows from the disk; under the lock, of a block that the bucket has whole. Done again, it is ended.
    """
    path = store / evicted_name(record.segment)
    fs.make_dirs(path.parent)
    if read_evicted(store, record.segment) != record:
        fs.write_durable(path, msgspec.json.encode(record))
    drop(store, record)


def drop(store: Path, record: Evicted) -> None:
    """Stubs take the place of the files that a record names."""
    fresh = _fresh(store, record.segment)
    for name, _ in record.files:
        target = store / block_name(record.segment) / name
        if not is_stub(target):
            fs.write_new(fresh, STUB)
            fs.sync_files([fresh])
            fs.rename(fresh, target)


def recall(store: Path, number: int) -> bool:
    """Bring a block's rows back to the disk, for good; whether any were away. Under the lock.

    StoreError where the bucket does not answer, or has not got them: nothing has changed then.
    """
    record = read_evicted(store, number)
    if record is None:
        return False
    was_away = read_away(store, number) is not None
    nbytes, free = bytes_away(store, [number]), shutil.disk_usage(store).free
    if nbytes + room_kept > free:
        raise StoreError("recall", block_name(number), f"its rows take {nbytes:,} bytes, and {free:,} are free, "
                         f"of which {room_kept:,} must stay free", "free some space, or push with a smaller "
                         "--local-bytes")
    _fetch(store, record)
    fs.remove(store / evicted_name(number))
    return was_away


@contextmanager
def at_hand(store: Path, number: int) -> Iterator[None]:
    """A block's rows are on the disk meanwhile. As ``recall``, which takes the lock by itself. They stay for the next
    push to evict where one runs now, which may be sending them.
    """
    if read_evicted(store, number) is None:
        yield
        return
    with locked(store):
        record = read_away(store, number)
        if record is not None:
            _fetch(store, record)
        try:
            yield
        finally:
            if record is not None:
                with _lock_file(store, "PUSH") as fd:
                    if _is_alone(fd):
                        drop(store, record)


def forget(store: Path, number: int) -> None:
    """The block is gone for good, and its record with it."""
    if (path := store / evicted_name(number)).exists():
        fs.remove(path)


def forget_gone(store: Path) -> None:
    """Remove records of blocks that are not there any more, and what fetches left that were cut off."""
    if not (folder := (store / evicted_name(0)).parent).exists():
        return
    with _lock_file(store, "BLOCKS") as fd:
        if not _is_alone(fd):  # a recall that waits for a bucket holds up no start; the next one tidies
            return
        for number in evicted_numbers(store):
            if not (store / block_name(number)).exists():
                forget(store, number)
        fs.remove_all(list(folder.glob("*.new")))


def was_evicting(store: Path) -> bool:
    """Whether rows of the store have ever been evicted."""
    return (store / evicted_name(0)).parent.exists()


def bytes_away(store: Path, numbers: Iterable[int]) -> int:
    """Bytes of rows that lie in a bucket alone."""
    found = [record for number in numbers if (record := read_away(store, number)) is not None]
    return sum(stored.nbytes for record in found for _, stored in record.files)


def _fetch(store: Path, record: Evicted) -> None:
    """Files of a block that are away are on the disk again, the first stream's last."""
    fresh = _fresh(store, record.segment)
    try:
        objects = Objects(record.url)
    except TapError as error:
        raise StoreError("recall", block_name(record.segment), error) from None
    try:
        for name, stored in reversed(record.files):
            target = store / block_name(record.segment) / name
            if not is_stub(target):
                continue
            found = objects.stream(f"{record.key}/{name}", stored.nbytes, lambda data: _write(fresh, data))
            if found != stored:
                raise StoreError("recall", f"{record.url}/{record.key}/{name}", f"read {found}, expected {stored}")
            fs.sync_files([fresh])
            fs.rename(fresh, target)
    except FileNotFoundError as error:
        raise StoreError("recall", f"{record.url}/{record.key}", f"it is not there: {error}",
                         "its rows were evicted from this disk, and the bucket has lost them") from None
    except BucketError as error:
        kind = SilentBucketError if error.passing else StoreError
        raise kind("recall", block_name(record.segment), error) from None
    finally:
        objects.close()


def _write(path: Path, pieces: Iterator[bytes]) -> Stored:
    """Write what comes to a file; its bytes and hash."""
    hashed, at = xxhash.xxh3_128(), 0
    fs.write_new(path)
    fd = fs.open_existing(path)
    try:
        for piece in pieces:
            hashed.update(piece)
            at = fs.write_at(fd, [piece], at)
    finally:
        fs.close(fd)
    return Stored(at, hashed.hexdigest())


def _fresh(store: Path, number: int) -> Path:
    """Path of a file that is about to take another's place."""
    return (store / evicted_name(number)).with_suffix(".new")
