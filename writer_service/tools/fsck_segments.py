"""The rows of one segment, as a journal file, a block or a cold block: every frame, and every array against them.

Each check yields what is bad and puts the frames that are whole into ``good``, by their offsets.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from schemas.catalog.records import Segment, load_frames
from schemas.errors import CorruptError, StoreError, TapError
from schemas.objects.evicted import Evicted, lacking
from schemas.objects.objects import Objects
from schemas.store.block import MISSING, ROW_COLUMNS, Block, open_block
from schemas.store.cold_block import CHUNK_ROWS, open_cold
from schemas.store.frame_hashes import hash_frame
from schemas.store.map_file import map_file
from schemas.store.paths import block_name, main_chunk
from schemas.store.segment import FLAG_REDACTED, FrameView, check_streams, parse_frame, verify_payload
from writer_service.seal.columns import gather
from writer_service.tools.findings import (
    I64,
    Finding,
    View,
    below,
    block_row_findings,
    extent_findings,
    lost_extents,
    row_findings,
)

Index = npt.NDArray[np.uint64]


def check_open(
    store: Path, uuid: bytes, path: Path, segment: Segment, db: sqlite3.Connection, good: dict[int, View]
) -> Iterator[Finding]:
    """A journal file: frames that the catalog has, and those that follow up to the first that is not whole."""
    known = {offset: offset + nbytes for offset, nbytes in load_frames(db, segment.number)}
    data, offset = map_file(path), 0  # after the catalog was asked: it may grow meanwhile
    file = below(store, path)
    while offset < max(len(data), *known.values(), 0):
        try:
            view = parse_frame(data, offset, uuid, segment.number, path)
        except CorruptError as error:
            following = min((at for at in known if at > offset), default=None)
            if offset in known:
                yield Finding(f"{error.reason}; its rows are lost", file, offset, segment.site)
                yield from lost_extents(db, segment, file, offset, known[offset])
            if following is None:
                return
            offset = following
            continue
        try:
            verify_payload(view, path)
            good[offset] = view
        except CorruptError as error:
            yield from row_findings(str(error.reason), file, view, np.ones((view.rows, len(view.frame.layers)), bool))
        offset = view.end


def check_block(
    store: Path, uuid: bytes, folder: Path, segment: Segment, db: sqlite3.Connection, good: dict[int, View]
) -> Iterator[Finding]:
    """A sealed block: its frames, what is left of those that are damaged, and its arrays."""
    block, whole = open_block(folder), list[tuple[FrameView, int, Index]]()
    path = folder / main_chunk(block.declared[0].name)
    # Read and not mapped: to fault in a page of what was erased, a tmpfs that is full would have to find space for it.
    data, file = memoryview(path.read_bytes()), below(store, path)
    try:
        index = block.index()
    except StoreError as error:
        index = None
        yield Finding(str(error.reason), file, None, segment.site)
    row = 0
    for offset in block.frames.tolist():
        try:
            view = parse_frame(data, offset, uuid, segment.number, path)
        except CorruptError as error:
            rows = _rows_between(block, index, offset)
            yield from block_row_findings(str(error.reason), file, offset, block, rows, block.present[rows])
            row = int(rows[-1]) + 1 if len(rows) else row
            continue
        rows = np.arange(row, row + view.rows)
        row += view.rows
        streams, checksums = hash_frame(view)
        at = np.searchsorted(block.layers, view.frame.layers)
        wrong = np.zeros((len(rows), len(block.layers)), bool)
        wrong[:, at] = (checksums[view.pieces(np.arange(len(at)), np.arange(view.rows)).T]
                        != block.checksum[np.ix_(rows, at)]) & block.present[np.ix_(rows, at)]
        try:
            check_streams(view, streams, path)
            if view.flags & FLAG_REDACTED and wrong.any():  # when others went, it was hashed anew as it then was
                raise CorruptError("read rows", f"{path} at byte {offset}", "a row does not match its checksum")
        except CorruptError as error:
            yield from block_row_findings(str(error.reason), file, offset, block, rows, wrong)
        else:
            good[offset] = view
            whole.append((view, int(rows[0]), checksums))
    there = set(block.frames.tolist())
    for offset, nbytes in load_frames(db, segment.number):
        if offset not in there:  # left out when the segment was sealed
            yield Finding("the frame was damaged before its segment was sealed", file, offset, segment.site)
            yield from lost_extents(db, segment, file, offset, offset + nbytes)
    yield from _check_arrays(store, block, index, whole)


def _rows_between(block: Block, index: Index | None, offset: int) -> I64:
    """The rows of the frame at ``offset``, whose head is lost, as the index has them."""
    if index is None:
        return np.zeros(0, np.int64)
    at = int(np.searchsorted(block.frames, offset))
    end = int(block.frames[at + 1]) if at + 1 < len(block.frames) else int(block.attributes["frames_end"])
    return block.rows_between(offset, end, index)


def _check_arrays(
    store: Path, block: Block, index: Index | None, frames: Sequence[tuple[FrameView, int, Index]]
) -> Iterator[Finding]:
    """The block's arrays against what they are made of: frames, the first row and the rows' checksums of each."""
    if not frames:
        return
    columns = gather([view for view, _, _ in frames], [found for _, _, found in frames], block.declared, block.layers)
    rows = np.concatenate([np.arange(start, start + view.rows) for view, start, _ in frames])

    def differ(name: str, found: npt.NDArray[Any], made: npt.NDArray[Any]) -> Iterator[Finding]:
        """``found`` and ``made`` are ``[rows, …]`` or ``[rows, layers, …]``."""
        wrong = (found.reshape(len(rows), -1) != made.reshape(len(rows), -1))
        if wrong.any():
            layered = wrong.reshape(len(rows), len(block.layers), -1).any(-1) if found.ndim > 1 else \
                np.broadcast_to(wrong, (len(rows), len(block.layers)))
            file = below(store, block.folder / name)
            yield from block_row_findings("the array does not match the frames", file, None, block, rows, layered)

    names = np.asarray(block.captures, object)[np.minimum(block.row["capture"][rows], len(block.captures) - 1)]
    yield from differ("capture", names, np.asarray(columns.captures, object)[columns.row["capture"]])
    for name in ROW_COLUMNS[1:]:
        yield from differ(name, block.row[name][rows], columns.row[name])
    if block.step is not None and columns.step is not None:
        yield from differ("step", block.step[rows], columns.step)
    yield from differ("present", block.present[rows], columns.present)
    yield from differ("checksum", block.checksum[rows], columns.checksum)
    if index is not None:
        yield from differ(main_chunk(block.declared[0].name), index[rows], columns.index)
    for stream in block.declared[1:]:
        made = columns.sides[stream.name].swapaxes(0, 1)
        yield from differ(stream.name, _bytes(block.side(stream)[rows]), _bytes(made))


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """``[rows, layers, bytes]``: NaN equals itself."""
    return np.ascontiguousarray(array).reshape(*array.shape[:2], -1).view(np.uint8)


def check_cold(
    store: Path, folder: Path, segment: Segment, db: sqlite3.Connection, good: dict[int, View]
) -> Iterator[Finding]:
    """A cold block: its arrays by frame, its rows by their checksums, its shard indexes against each other."""
    block = open_cold(folder)
    for stream in block.declared:
        path = folder / main_chunk(stream.name)
        nbytes = CHUNK_ROWS * stream.nbytes
        footer = path.read_bytes()[-(block.chunk.size * 16 + 4):]
        index = np.frombuffer(footer[:-4], "<u8").reshape(*block.chunk.shape, 2)
        there = block.chunk >= 0
        rank = block.chunk[there]
        sizes = np.full(len(rank), nbytes, np.uint64) if block.compressed is None else block.compressed.sizes
        starts = np.cumsum(np.append(np.uint64(0), sizes), dtype=np.uint64)  # one after the other, and then the index
        fits = ((index == MISSING).all(-1) == ~there).all() and len(sizes) == len(rank) and (
            index[there] == np.stack([starts[rank], sizes[rank]], axis=1)).all() and (
            path.stat().st_size == int(starts[-1]) + len(footer))
        if crc32c(footer[:-4]) != int.from_bytes(footer[-4:], "little") or not fits:
            yield Finding("the shard index does not match its checksum or the main stream's", below(store, path), None,
                      segment.site)
    file = below(store, block.main)
    for offset in block.frames.tolist():
        try:
            view = block.frame(offset)
        except CorruptError as error:
            query = "SELECT * FROM extents WHERE segment = ? AND offset = ?"
            lost = db.execute(query, (segment.number, offset)).fetchall()
            yield from extent_findings(str(error.reason), lost, segment, below(store, folder))
            if not lost:
                yield Finding(str(error.reason), below(store, folder), offset, segment.site)
            continue
        wrong = view.wrong()
        if wrong.any():
            yield from row_findings("the row does not match its checksum", file, view, wrong.T)
        else:
            good[offset] = view


def check_evicted(record: Evicted, segment: Segment, db: sqlite3.Connection) -> Iterator[Finding]:
    """A block whose rows lie in a bucket alone: its index by its hash, its objects by their sizes."""
    try:
        objects = Objects(record.url)
        try:
            _, lost = lacking(objects, record.key, record.index)
        finally:
            objects.close()
    except TapError as error:
        yield Finding(f"its rows were evicted to a bucket that cannot be asked: {error}", block_name(segment.number),
                      None, segment.site)
        return
    for what in lost:
        yield Finding(f"its rows were evicted, and {record.url} has lost them: {what}", block_name(segment.number),
                      None, segment.site)
    if lost:
        yield from lost_extents(db, segment, block_name(segment.number))
