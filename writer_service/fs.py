"""File work of the writer: durable writes, appends from foreign memory, punching, renames, syncs.

Callers go through this module (``fs.datasync(fd)``), so that a test can put a failing disk behind it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

direct_align: Final = 4096  # bytes: of memory, and of places in files, that ``write_direct`` is good for
_IOV_MAX: Final = 1024  # Linux's UIO_MAXIOV
_PUNCH_KEEP_SIZE: Final = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_START_WRITING: Final = 0x02  # SYNC_FILE_RANGE_WRITE
_libc: Final = ctypes.CDLL(None, use_errno=True)

Buffer = bytes | bytearray | memoryview


def open_new(path: Path) -> int:
    """A descriptor of a file that must not exist yet, read and write."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def open_existing(path: Path) -> int:
    """A descriptor of an existing file, read and write."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def write_at(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write all buffers one after the other from ``offset`` on; the offset after them. OSError as it comes."""
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    first = 0
    while first < len(views):
        written = os.pwritev(fd, views[first : first + _IOV_MAX], offset)
        if written == 0:
            raise OSError(5, "pwritev wrote nothing")
        offset += written
        while first < len(views) and written >= len(views[first]):
            written -= len(views[first])
            first += 1
        if written:
            views[first] = views[first][written:]
    return offset


def write_direct(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write as ``write_at``, but whole blocks at the beginning go to the disk from where they lie. They must lie at
    multiples of ``direct_align`` in memory and in the file. This takes no new pages of the page cache and a fifth of
    the processor's time. All other bytes are written as usual, with the errors of that.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    blocks, written = whole_blocks(views, offset), 0
    if blocks:
        with contextlib.suppress(OSError):
            written = write_blocks(fd, blocks, offset)
    offset += written
    while views and written >= len(views[0]):
        written -= len(views.pop(0))
    if not views:
        return offset
    return write_at(fd, [views[0][written:], *views[1:]], offset)


def whole_blocks(views: Sequence[memoryview], offset: int) -> list[memoryview]:
    """The beginning of ``views`` (of bytes) that can go past the page cache, to a file's ``offset``, in one call."""
    found: list[memoryview] = []
    if offset % direct_align:
        return found
    for view in views[:_IOV_MAX]:
        nbytes = len(view) // direct_align * direct_align
        if np.frombuffer(view, np.uint8).ctypes.data % direct_align or not nbytes:
            break
        found.append(view[:nbytes])
        if nbytes < len(view):
            break
    return found


def write_blocks(fd: int, blocks: Sequence[memoryview], offset: int) -> int:
    """Write ``whole_blocks`` past the page cache; how many bytes the disk took. OSError as it comes, EINVAL where the
    file system knows no such writes. No other write of ``fd`` runs beside.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        return os.pwritev(fd, blocks, offset)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def write_synced(file: int, buffers: Sequence[Buffer]) -> int:
    """Write a file's beginning and put it on the disk, to see how long that takes; bytes written. OSError as it comes.
    """
    written = os.pwritev(file, buffers, 0)
    os.fdatasync(file)
    return written


def datasync(fd: int) -> None:
    """The file's bytes and its size are on the disk; an OSError means that they may not be, now or ever."""
    os.fdatasync(fd)


def truncate(fd: int, nbytes: int) -> None:
    """Cut the file to ``nbytes``."""
    os.ftruncate(fd, nbytes)


def cut(path: Path, end: int) -> int:
    """Cut a file off at ``end``, and put what stays on the disk; how many bytes were cut.

    A writer that was killed may not have synced it, and from now on senders are told that it is safe.
    """
    extra = path.stat().st_size - end
    fd = open_existing(path)
    try:
        if extra > 0:
            truncate(fd, end)
        datasync(fd)
    finally:
        close(fd)
    return max(extra, 0)


def sync_dir(path: Path) -> None:
    """The directory's entries are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs(path: Path) -> None:
    """The directory and its parents, each entry synced."""
    if path.is_dir():
        return
    make_dirs(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync_dir(path.parent)


def write_durable(path: Path, data: bytes) -> None:
    """Replace a small file whole: temporary file, sync, rename, sync of the directory."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_new(temporary, data)
    sync_files([temporary])
    rename(temporary, path)


def write_new(path: Path, *data: Buffer, direct: bool = False) -> None:
    """A file under a name that nobody reads yet: written, not synced. ``direct``: see ``write_direct``."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        (write_direct if direct else write_at)(fd, data, 0)
    finally:
        os.close(fd)


def sync_files(paths: Sequence[Path]) -> None:
    """The files' bytes are on the disk, as after ``datasync`` of each.

    All are sent on their way before any is waited for: one commit of the file system's journal then does for all.
    """
    with contextlib.ExitStack() as stack:
        fds = []
        for path in paths:
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
            if hasattr(_libc, "sync_file_range"):  # a hint: what it cannot do, and what fails, datasync does and tells
                _libc.sync_file_range(fds[-1], ctypes.c_int64(0), ctypes.c_int64(0), _START_WRITING)
        for fd in fds:
            datasync(fd)


def rename(source: Path, target: Path) -> None:
    """Rename, and sync the directories on both sides."""
    source.rename(target)
    sync_dir(target.parent)
    if source.parent != target.parent:
        sync_dir(source.parent)


def remove(path: Path) -> None:
    """Unlink a file; the directory is synced."""
    path.unlink(missing_ok=True)
    sync_dir(path.parent)


def remove_all(paths: Sequence[Path]) -> None:
    """Unlink files of one directory, which is synced once."""
    for path in paths:
        path.unlink(missing_ok=True)
    if paths:
        sync_dir(paths[0].parent)


def remove_tree(path: Path) -> None:
    """Remove a directory and what is in it, never following a link."""
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            Path(entry.path).unlink()
    path.rmdir()


def punch(fd: int, offset: int, nbytes: int) -> bool:
    """Free the blocks of a byte range, which then reads as zeros; False where the file system cannot."""
    if not hasattr(_libc, "fallocate"):
        return False
    call = _libc.fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return int(call(fd, _PUNCH_KEEP_SIZE, offset, nbytes)) == 0


def lock(path: Path, shared: bool = False) -> int | None:
    """A descriptor holding the lock of ``path`` until it is closed; None where another has it.

    The lock is exclusive. With ``shared`` it is held together with others that ask for no more. The file must then be
    there, and may be on a disk that cannot be written from here.
    """
    fd = os.open(path, (os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT) | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def close(fd: int) -> None:
    """Close without an error: what counts was synced before."""
    with contextlib.suppress(OSError):
        os.close(fd)
