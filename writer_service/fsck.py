"""Check a whole store: every frame, every array of every block, the control logs, and the catalog against them.

Nothing is changed. Files are read once from end to end; what is wrong is named down to the row where that can be said.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.catalog import Segment, connect_read, load_frames, load_segment, unpack_layers
from schemas.cold import CHUNK_ROWS, ColdBlock, ColdFrame
from schemas.errors import CorruptError, StoreError
from schemas.map_file import map_file
from schemas.reader import read_store_uuid
from schemas.segment import FrameView, check_streams, parse_frame, verify_payload
from schemas.zarr_layout import WRITER, block_name, building_name, journal_folder, main_chunk, open_name
from writer_service.block import Block, open_block
from writer_service.cold_blocks import need_library
from writer_service.control_log import log_end, log_numbers, log_path, read_log
from writer_service.crc32c import crc32c
from writer_service.erasing import read_redo, redo_paths
from writer_service.frame_hashes import FrameHasher
from writer_service.recovery import is_free
from writer_service.removal import COVERED, read_covered, removable
from writer_service.sealing import MISSING, ROW_COLUMNS, gather

erasing_s: Final = 60.0  # how long an erasure takes at most
recheck_s: Final = 0.5  # a writer may be moving or erasing what is being read

I64 = npt.NDArray[np.int64]
View = FrameView | ColdFrame
Index = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Bad:
    """One finding; rows are those of ``capture`` at ``positions`` in all of ``layers``. ``file`` is below the store."""

    what: str
    file: str
    offset: int | None = None
    site: str = ""
    capture: str = ""
    layers: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()


@dataclass(slots=True)
class Report:
    """What was looked at, and what of it is bad."""

    bad: list[Bad]
    segments: int = 0
    frames: int = 0
    rows: int = 0
    nbytes: int = 0
    captures: int = 0


Progress = Callable[[int, int], None]  # bytes done, bytes in all


def fsck(store: Path, progress: Progress = lambda done, total: None) -> Report:
    """Look at everything; StoreError where ``store`` is no store, its catalog cannot be opened at all, or what unpacks
    its compressed blocks is not installed.
    """
    uuid = read_store_uuid(store)
    need_library(store)
    report = Report([])
    report.bad += [*_check_logs(store, uuid), *_check_erasures(store)]
    db = connect_read(store / "catalog.sqlite")
    try:
        if (answer := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            report.bad.append(Bad(f"the catalog is damaged ({answer}); rebuild it", "catalog.sqlite"))
            return report
        report.captures = db.execute("SELECT count(*) FROM captures WHERE deleted = 0").fetchone()[0]
        numbers = sorted(_numbers_on_disk(store) | {row["number"] for row in db.execute("SELECT number FROM segments")})
        total, done = sum(_size(store, number) for number in numbers), 0
        for number in numbers:
            progress(done, total)
            size = _size(store, number)
            bad = list(_check_segment(store, uuid, db, number, report))
            if bad and not is_free(store):
                time.sleep(recheck_s)
                bad = list(_check_segment(store, uuid, db, number, Report([])))
            report.bad += bad
            done += size
            report.nbytes += size
        progress(total, total)
    finally:
        db.close()
    return report


def _check_logs(store: Path, uuid: bytes) -> Iterator[Bad]:
    journal = store / "writers" / WRITER / "journal"
    numbers = log_numbers(journal)
    for number in numbers:
        path = log_path(journal, number)
        try:
            end = max((after for after, _ in read_log(path, uuid)), default=log_end)
        except (StoreError, OSError) as error:
            yield Bad(str(error), _below(store, path))
            continue
        if end < path.stat().st_size and not (number == numbers[-1] and not is_free(store)):
            yield Bad("a damaged record; it and all after it in this log are lost" if number != numbers[-1]
                      else "the last record is not whole; the next start cuts it off", _below(store, path), end)


def _check_erasures(store: Path) -> Iterator[Bad]:
    """What erasing and removing leave beside the logs. A writer that runs has a redo record for a moment, and none is
    left where it stopped."""
    try:
        read_covered(store)
    except (OSError, StoreError) as error:
        yield Bad(str(error), f"{journal_folder()}/{COVERED}")
    for path in redo_paths(store):
        try:
            read_redo(path)
            if not is_free(store) and time.time() - path.stat().st_mtime < erasing_s:
                continue
            yield Bad("rows of deleted captures are half erased; the next start of the writer ends it",
                      _below(store, path))
        except FileNotFoundError:
            continue  # it is done
        except (OSError, StoreError, msgspec.DecodeError) as error:
            yield Bad(f"rows of deleted captures are half erased, and cannot be: {error}", _below(store, path))


def _numbers_on_disk(store: Path) -> set[int]:
    journal = store / "writers" / WRITER / "journal"
    names = [*(store / "blocks").glob(f"{WRITER}-*.zarr"), *journal.glob("[0-9]*.open")]
    return {int(path.name.split(".")[0].rsplit("-", 1)[-1]) for path in names}


def _place(store: Path, number: int) -> Path | None:
    """The folder or journal file of a segment as it is now."""
    for name in (open_name(number), building_name(number), block_name(number)):
        if (store / name).exists():
            return store / name
    return store / block_name(number) if (store / block_name(number)).exists() else None


def _size(store: Path, number: int) -> int:
    place = _place(store, number)
    try:
        if place is None or place.is_file():
            return 0 if place is None else place.stat().st_size
        return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    except FileNotFoundError:  # it moved
        return 0


def _check_segment(store: Path, uuid: bytes, db: sqlite3.Connection, number: int, report: Report) -> Iterator[Bad]:
    segment = load_segment(db, number)
    place = _place(store, number)
    if segment is None:
        yield Bad("not in the catalog; rebuild it", _below(store, place) if place else block_name(number))
        return
    if place is None and removable(db, number):
        return  # taken away, and the catalog has not heard of it yet
    if place is None:
        yield Bad("the segment is not there", block_name(number), None, segment.site)
        yield from _lost_extents(db, segment, block_name(number))
        return
    report.segments += 1
    good: dict[int, View] = {}
    try:
        if segment.cold:
            yield from _check_cold(store, place, segment, db, good)
        elif place.is_dir():
            yield from _check_block(store, uuid, place, segment, db, good)
        else:
            yield from _check_open(store, uuid, place, segment, db, good)
    except (OSError, StoreError, ValueError, KeyError, TypeError) as error:
        yield Bad(f"cannot be read: {error!r}", _below(store, place), None, segment.site)
        yield from _lost_extents(db, segment, _below(store, place))
        return
    report.frames += len(good)
    report.rows += sum(view.rows for view in good.values())
    yield from _check_extents(db, segment, good, _below(store, place))


def _check_open(
    store: Path, uuid: bytes, path: Path, segment: Segment, db: sqlite3.Connection, good: dict[int, View]
) -> Iterator[Bad]:
    """A journal file: frames that the catalog has, and those that follow up to the first that is not whole."""
    known = {offset: offset + nbytes for offset, nbytes in load_frames(db, segment.number)}
    data, offset = map_file(path), 0  # after the catalog was asked: it may grow meanwhile
    file = _below(store, path)
    while offset < max(len(data), *known.values(), 0):
        try:
            view = parse_frame(data, offset, uuid, segment.number, path)
        except CorruptError as error:
            following = min((at for at in known if at > offset), default=None)
            if offset in known:
                yield Bad(f"{error.reason}; its rows are lost", file, offset, segment.site)
                yield from _lost_extents(db, segment, file, offset, known[offset])
            if following is None:
                return
            offset = following
            continue
        try:
            verify_payload(view, path)
            good[offset] = view
        except CorruptError as error:
            yield from _rows_bad(str(error.reason), file, view, np.ones((view.rows, len(view.frame.layers)), bool))
        offset = view.end


def _check_block(
    store: Path, uuid: bytes, folder: Path, segment: Segment, db: sqlite3.Connection, good: dict[int, View]
) -> Iterator[Bad]:
    block, whole, hasher = open_block(folder), list[tuple[FrameView, int, Index]](), FrameHasher()
    path = folder / main_chunk(block.declared[0].name)
    # Read and not mapped: to fault in a page of what was erased, a tmpfs that is full would have to find space for it.
    data, file = memoryview(path.read_bytes()), _below(store, path)
    try:
        index = block.index()
    except StoreError as error:
        index = None
        yield Bad(str(error.reason), file, None, segment.site)
    starts: dict[int, int] = {}
    row = 0
    for offset in block.frames.tolist():
        try:
            view = parse_frame(data, offset, uuid, segment.number, path)
        except CorruptError as error:
            rows = _rows_between(block, index, offset)
            yield from _block_rows_bad(str(error.reason), file, offset, block, rows, block.present[rows])
            row = int(rows[-1]) + 1 if len(rows) else row
            continue
        starts[offset], row = row, row + view.rows
        streams, checksums = hasher.hash(view)
        try:
            check_streams(view, streams, path)
            good[offset] = view
            whole.append((view, starts[offset], checksums))
        except CorruptError as error:
            rows = np.arange(starts[offset], row)
            at = np.searchsorted(block.layers, view.frame.layers)
            found = checksums[view.pieces(np.arange(len(at)), np.arange(view.rows)).T]
            wrong = np.zeros((len(rows), len(block.layers)), bool)
            wrong[:, at] = found != block.checksum[np.ix_(rows, at)]
            yield from _block_rows_bad(str(error.reason), file, offset, block, rows, wrong & block.present[rows])
    there = set(block.frames.tolist())
    for offset, nbytes in load_frames(db, segment.number):
        if offset not in there:  # left out when the segment was sealed
            yield Bad("the frame was damaged before its segment was sealed", file, offset, segment.site)
            yield from _lost_extents(db, segment, file, offset, offset + nbytes)
    yield from _check_arrays(store, block, index, whole)


def _check_cold(
    store: Path, folder: Path, segment: Segment, db: sqlite3.Connection, good: dict[int, View]
) -> Iterator[Bad]:
    """A cold block: its arrays by frame, its rows by their checksums, its shard indexes against each other."""
    block = ColdBlock.open(folder)
    for stream in block.declared:
        path = folder / main_chunk(stream.name)
        nbytes = CHUNK_ROWS * stream.nbytes
        footer = path.read_bytes()[-(block.chunk.size * 16 + 4):]
        index = np.frombuffer(footer[:-4], "<u8").reshape(*block.chunk.shape, 2)
        there = block.chunk >= 0
        rank = block.chunk[there]
        sizes = np.full(len(rank), nbytes, np.uint64) if block.packed is None else block.packed.sizes
        starts = np.cumsum(np.append(np.uint64(0), sizes), dtype=np.uint64)  # one after the other, and then the index
        fits = ((index == MISSING).all(-1) == ~there).all() and len(sizes) == len(rank) and (
            index[there] == np.stack([starts[rank], sizes[rank]], axis=1)).all() and (
            path.stat().st_size == int(starts[-1]) + len(footer))
        if crc32c(footer[:-4]) != int.from_bytes(footer[-4:], "little") or not fits:
            yield Bad("the shard index does not match its checksum or the main stream's", _below(store, path), None,
                      segment.site)
    file = _below(store, block.main)
    for offset in block.first.tolist():
        try:
            view = block.frame(offset)
        except CorruptError as error:
            query = "SELECT * FROM extents WHERE segment = ? AND offset = ?"
            lost = db.execute(query, (segment.number, offset)).fetchall()
            yield from _extents_bad(str(error.reason), lost, segment, _below(store, folder))
            if not lost:
                yield Bad(str(error.reason), _below(store, folder), offset, segment.site)
            continue
        wrong = view.wrong()
        if wrong.any():
            yield from _rows_bad("the row does not match its checksum", file, view, wrong.T)
        else:
            good[offset] = view


def _rows_between(block: Block, index: Index | None, offset: int) -> I64:
    """The rows of the frame at ``offset``, whose head is lost, as the index has them."""
    if index is None:
        return np.zeros(0, np.int64)
    at = int(np.searchsorted(block.frames, offset))
    end = int(block.frames[at + 1]) if at + 1 < len(block.frames) else int(block.attributes["frames_end"])
    return block.rows_between(offset, end, index)


def _check_arrays(
    store: Path, block: Block, index: Index | None, frames: Sequence[tuple[FrameView, int, Index]]
) -> Iterator[Bad]:
    """The block's arrays against what they are made of: frames, the first row and the rows' checksums of each."""
    if not frames:
        return
    columns = gather([view for view, _, _ in frames], [found for _, _, found in frames], block.declared, block.layers)
    rows = np.concatenate([np.arange(start, start + view.rows) for view, start, _ in frames])

    def differ(name: str, found: npt.NDArray[Any], made: npt.NDArray[Any]) -> Iterator[Bad]:
        """``found`` and ``made`` are ``[rows, …]`` or ``[rows, layers, …]``."""
        wrong = (found.reshape(len(rows), -1) != made.reshape(len(rows), -1))
        if wrong.any():
            layered = wrong.reshape(len(rows), len(block.layers), -1).any(-1) if found.ndim > 1 else \
                np.broadcast_to(wrong, (len(rows), len(block.layers)))
            file = _below(store, block.folder / name)
            yield from _block_rows_bad("the array does not match the frames", file, None, block, rows, layered)

    names = np.asarray(block.captures, object)[np.minimum(block.row["capture"][rows], len(block.captures) - 1)]
    yield from differ("capture", names, np.asarray(columns.captures, object)[columns.row["capture"]])
    for name in ROW_COLUMNS[1:]:
        yield from differ(name, block.row[name][rows], columns.row[name])
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


def _check_extents(db: sqlite3.Connection, segment: Segment, good: Mapping[int, View], file: str) -> Iterator[Bad]:
    """The catalog's rows against the frames that are whole."""
    for row in db.execute("SELECT * FROM extents WHERE segment = ? ORDER BY offset", (segment.number,)):
        view = good.get(row["offset"])
        if view is None:
            continue  # told already
        columns = np.frombuffer(row["rows"], "<u4").reshape(-1, 4)
        at = columns[:, 1]
        fits = len(columns) == row["n"] and int(at.max(initial=0)) < view.rows and row["capture"] in view.frame.captures
        if fits:
            table = view.table
            fits = bool((table.position[at] == columns[:, 0]).all() and (table.token_id[at] == columns[:, 2]).all()
                        and (table.capture[at] == view.frame.captures.index(row["capture"])).all()
                        and unpack_layers(row["layers"]) == tuple(view.frame.layers))
        if not fits:
            yield Bad("the catalog does not match the frame; rebuild it", file, row["offset"], segment.site,
                      row["capture"], unpack_layers(row["layers"]), tuple(columns[:, 0].tolist()))


def _lost_extents(
    db: sqlite3.Connection, segment: Segment, file: str, start: int = 0, stop: int = 2**63 - 1
) -> Iterator[Bad]:
    """What the catalog has at bytes ``[start, stop)`` of a segment where no frame can be read."""
    query = "SELECT * FROM extents WHERE segment = ? AND offset >= ? AND offset < ? ORDER BY offset"
    yield from _extents_bad("the rows are not there", db.execute(query, (segment.number, start, stop)), segment, file)


def _extents_bad(what: str, extents: Iterable[sqlite3.Row], segment: Segment, file: str) -> Iterator[Bad]:
    for row in extents:
        positions = np.frombuffer(row["rows"], "<u4").reshape(-1, 4)[:, 0]
        yield Bad(what, file, row["offset"], segment.site, row["capture"], unpack_layers(row["layers"]),
                  tuple(positions.tolist()))


def _rows_bad(what: str, file: str, view: View, wrong: npt.NDArray[np.bool_]) -> Iterator[Bad]:
    names = [view.frame.captures[index] for index in view.table.capture.tolist()]
    yield from _named(what, file, view.offset, view.frame.site, names, view.table.position, view.frame.layers, wrong)


def _block_rows_bad(
    what: str, file: str, offset: int | None, block: Block, rows: I64, wrong: npt.NDArray[np.bool_]
) -> Iterator[Bad]:
    names = [block.captures[index] if index < len(block.captures) else "?"
             for index in block.row["capture"][rows].tolist()]
    found = list(_named(what, file, offset, block.site, names, block.row["position"][rows], block.layers, wrong))
    yield from found or [Bad(what, file, offset, block.site)]


def _named(
    what: str, file: str, offset: int | None, site: str, names: Sequence[str], positions: npt.NDArray[np.uint32],
    layers: Sequence[int], wrong: npt.NDArray[np.bool_],
) -> Iterator[Bad]:
    """Wrong (row, layer) pairs as findings: rows of a capture that are wrong in the same layers together."""
    groups: dict[tuple[str, bytes], list[int]] = {}
    for row in np.flatnonzero(wrong.any(1)).tolist():
        groups.setdefault((names[row], wrong[row].tobytes()), []).append(row)
    for (capture, _), rows in groups.items():
        which = tuple(layer for layer, bad in zip(layers, wrong[rows[0]].tolist(), strict=True) if bad)
        yield Bad(what, file, offset, site, capture, which, tuple(positions[rows].tolist()))


def ranges(positions: Iterable[int]) -> list[tuple[int, int]]:
    """Positions as ranges ``[start, stop)``."""
    ordered = sorted(set(positions))
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1), len(ordered)]
    return [(ordered[a], ordered[b - 1] + 1) for a, b in pairwise(cuts) if a < b]


def _below(store: Path, path: Path) -> str:
    return str(path.relative_to(store))


__all__ = ["Bad", "Report", "fsck", "ranges"]
