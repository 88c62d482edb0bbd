"""Erase rows of deleted captures inside a sealed block: their bytes, their token ids, every copy in its arrays.

What is to be done is written down first, whole, as a redo record; then it is done; then the record is removed. Every
part of it can be done again, so a crash anywhere ends in the next start doing all of it once more:
 1. heads of frames: token ids zeroed, rows flagged erased, the frame flagged redacted and hashed anew
 2. payload: pages punched out of the file, what is less than a page overwritten with zeros
 3. the shard index: entries set to missing
 4. the block's small arrays: token id 0, flags erased, not present, checksum 0, side streams filled
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from google_crc32c import value as crc32c

from schemas.errors import CorruptError, StoreError
from schemas.store.block import MISSING, Block, open_block
from schemas.store.map_file import map_file
from schemas.store.paths import block_name, redo_name
from schemas.store.segment import FrameView, parse_frame, redacted_head
from schemas.wire.row_table import FLAG_ERASED
from writer_service import fs, log
from writer_service.seal.columns import fill_of

page_bytes: Final = 4096
MAGIC: Final = b"TAPREDO1"
DAMAGED: Final = (OSError, StoreError, ValueError, KeyError, TypeError, IndexError)  # of what cannot be read

I64 = npt.NDArray[np.int64]


class Redo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plan of all that is done to one block; offsets and bytes are of its main file."""

    segment: int
    heads: list[tuple[int, bytes]]  # where, and the new head
    ranges: list[tuple[int, int]]  # offset and bytes to clear
    rows: bytes  # little-endian uint32: rows of the block that are gone


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Redo)


def erase(store: Path, uuid: bytes, number: int, captures: Sequence[str]) -> int:
    """Erase every row of ``captures`` in a block; the number of rows. OSError or StoreError leave it to be redone."""
    if (begun := store / redo_name(number)).exists():
        redo_one(store, begun)  # a plan that is made of a half erased block would take the rows of others with it
    redo = plan(store, uuid, number, captures)
    if redo is None:
        return 0
    path = write_redo(store, redo)
    apply(store, redo)
    fs.remove(path)
    return len(redo.rows) // 4


def write_redo(store: Path, redo: Redo) -> Path:
    """Write down what is to be done; where."""
    path = store / redo_name(redo.segment)
    body = _encoder.encode(redo)
    fs.write_durable(path, MAGIC + xxhash.xxh3_64_digest(body) + body)
    return path


def redo_all(store: Path) -> list[str]:
    """Do what a crash left half done, before anything reads the blocks; why that was not possible, by record.

    Such a record stays, and nothing else is erased in its block: the next start tries it again.
    """
    failed = []
    for path in redo_paths(store):
        try:
            redo_one(store, path)
        except DAMAGED as error:
            log.warn("not_erased", f"rows of deleted captures may be left: {error!r}", file=path, error=str(error))
            failed.append(f"{path.name}: {error}")
    return failed


def redo_paths(store: Path) -> list[Path]:
    """The redo records that are there."""
    return sorted((store / redo_name(0)).parent.glob("erase-[0-9]*.redo"))


def redo_one(store: Path, path: Path) -> None:
    """Do what a record says, and remove it; one of DAMAGED where it or its block cannot be read."""
    number = int(path.stem.removeprefix("erase-"))
    if (store / block_name(number)).exists():  # all of it may have been taken away since
        apply(store, read_redo(path))
    fs.remove(path)


def read_redo(path: Path) -> Redo:
    """A redo record; StoreError where it is not whole."""
    data = path.read_bytes()
    if data[:8] != MAGIC or xxhash.xxh3_64_digest(data[16:]) != data[8:16]:
        raise StoreError("read redo record", path, "it does not match its checksum",
                         "the block that it names may be half erased: vllm-tap fsck names the rows that are lost; "
                         "remove the record, and the block is erased from what is left of it")
    return _decoder.decode(data[16:])


def plan(store: Path, uuid: bytes, number: int, captures: Sequence[str]) -> Redo | None:
    """Plan of what there is to do in a block; None where nothing is left of the captures."""
    block = open_block(store / block_name(number))
    wanted = [index for index, name in enumerate(block.captures) if name in set(captures)]
    gone = np.isin(block.row["capture"], wanted) & (block.row["flags"] & FLAG_ERASED == 0)
    redo = Redo(number, [], [], np.flatnonzero(gone).astype("<u4").tobytes())
    for frame, rows in _frames(block, uuid, number):
        which = np.flatnonzero(gone[rows])
        if not len(which) and len(rows):
            continue
        if isinstance(frame, FrameView):
            ranges, digests = _cut(frame, which)
            redo.heads.append((frame.offset, redacted_head(frame, uuid, number, which, digests)))
            redo.ranges.extend(ranges)
        else:  # nobody can read anything of it any more: all of it goes
            redo.ranges.append(frame)
    return redo if redo.ranges else None


def _frames(block: Block, uuid: bytes, number: int) -> Iterator[tuple[FrameView | tuple[int, int], I64]]:
    """Each frame with its rows in the block. A frame whose head cannot be read is given as (offset, bytes).

    So are the bytes between frames: damaged frames without a row in the block. It is not known any more whose they are.
    """
    data = map_file(block.main)
    ends = [*block.frames.tolist()[1:], block.attributes["frames_end"]]
    row = 0
    if block.frames[0]:
        yield (0, int(block.frames[0])), np.zeros(0, np.int64)
    for offset, end in zip(block.frames.tolist(), ends, strict=True):
        try:
            view = parse_frame(data, offset, uuid, number, block.main)
        except CorruptError:
            rows = block.rows_between(offset, end)
            row = int(rows[-1]) + 1 if len(rows) else row
            yield (offset, end - offset), rows
        else:
            yield view, np.arange(row, row + view.rows)
            row += view.rows
            if view.end < end:
                yield (view.end, end - view.end), np.zeros(0, np.int64)
    if row != len(block.present):
        raise StoreError("erase", block.main, f"{row} rows in its frames, {len(block.present)} in its arrays",
                         "vllm-tap fsck names what is damaged")


def _cut(view: FrameView, rows: I64) -> tuple[list[tuple[int, int]], list[int]]:
    """Cut ``rows`` out of a frame: the byte ranges of the file to clear, and the xxh3 of every stream after it."""
    pieces = np.sort(view.pieces(np.arange(len(view.frame.layers)), rows).reshape(-1))
    first = np.flatnonzero(np.diff(pieces, prepend=-2) != 1)
    spans = [(int(pieces[a]), int(pieces[b - 1]) + 1) for a, b in pairwise([*first.tolist(), len(pieces)])]
    ranges, digests = [], []
    for index, (stream, at) in enumerate(zip(view.declared, view.layout.parts, strict=True)):
        section = view.section(index)
        digest, last = xxhash.xxh3_64(), 0
        for start, stop in spans:
            digest.update(section[last:start].reshape(-1).data)
            digest.update(bytes((stop - start) * stream.nbytes))
            last = stop
            ranges.append((view.offset + at + start * stream.nbytes, (stop - start) * stream.nbytes))
        digest.update(section[last:].reshape(-1).data)
        digests.append(digest.intdigest())
    return ranges, digests


def apply(store: Path, redo: Redo) -> None:
    """Do what a plan says; may be done any number of times."""
    block = open_block(store / block_name(redo.segment))
    rows = np.frombuffer(redo.rows, "<u4").astype(np.int64)
    fd = fs.open_existing(block.main)
    try:
        for offset, head in redo.heads:
            fs.write_at(fd, [head], offset)
        for offset, nbytes in redo.ranges:
            clear(fd, offset, nbytes)
        at = int(block.attributes["frames_end"])
        # Read as it lies there: after a crash its checksum may be of before.
        index = np.fromfile(block.main, "<u8", block.present.size * 2, offset=at).reshape(*block.present.shape, 2)
        index[rows] = MISSING
        body = index.tobytes()
        fs.write_at(fd, [body, crc32c(body).to_bytes(4, "little")], at)
        fs.datasync(fd)
    finally:
        fs.close(fd)
    block.row["token_id"][rows] = 0
    block.row["flags"][rows] |= np.uint32(FLAG_ERASED)
    block.present[rows] = False
    block.checksum[rows] = 0
    for stream in block.declared[1:]:
        side = block.side(stream)
        side[rows] = fill_of(stream)
        _overwrite(block.side_file(stream), np.ascontiguousarray(side.swapaxes(0, 1)))
    for name in ("token_id", "flags"):
        _overwrite(block.folder / name / "c" / "0", block.row[name])
    for name, array in (("present", block.present), ("checksum", block.checksum)):
        _overwrite(block.folder / name / "c" / "0" / "0", array)


def clear(fd: int, offset: int, nbytes: int) -> None:
    """Make a byte range zeros; its whole pages go back to the file system where that can take them."""
    start, stop = -(-offset // page_bytes) * page_bytes, (offset + nbytes) // page_bytes * page_bytes
    if start >= stop or not fs.punch(fd, start, stop - start):
        _zeros(fd, offset, nbytes)
        return
    _zeros(fd, offset, start - offset)
    _zeros(fd, stop, offset + nbytes - stop)


def _zeros(fd: int, offset: int, nbytes: int) -> None:
    step = 1 << 20
    for at in range(offset, offset + nbytes, step):
        fs.write_at(fd, [bytes(min(step, offset + nbytes - at))], at)


def _overwrite(path: Path, array: npt.NDArray[Any]) -> None:
    fd = fs.open_existing(path)
    try:
        fs.write_at(fd, [array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()], 0)
        fs.datasync(fd)
    finally:
        fs.close(fd)
