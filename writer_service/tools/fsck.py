"""Check a whole store: every frame, every array of every block, the control logs, and the catalog against them.

Nothing is changed. Files are read once from end to end; what is wrong is named down to the row where that can be said.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from schemas.catalog.records import Segment, connect_read, load_segment, unpack_layers
from schemas.errors import StoreError
from schemas.objects.evicted import read_away
from schemas.read.reader import read_store_uuid
from schemas.store.paths import block_name, building_name, journal_folder, open_name
from schemas.wire.row_table import steps_of
from writer_service.control_log import log_end, log_numbers, log_path, read_log
from writer_service.recover.store_lock import is_free
from writer_service.tools.findings import Finding, View, below, lost_extents
from writer_service.tools.fsck_ranks import check_tokens
from writer_service.tools.fsck_segments import check_block, check_cold, check_evicted, check_open
from writer_service.upkeep.block_removal import COVERED, read_covered, removable
from writer_service.upkeep.cold_blocks import need_library, numbers_on_disk
from writer_service.upkeep.erasing import read_redo, redo_paths
from writer_service.upkeep.log_merging import damaged_heads, superseded

__all__ = ["Report", "fsck"]

erasing_s: Final = 60.0  # how long an erasure takes at most
recheck_s: Final = 0.5  # a writer may be moving or erasing what is being read


@dataclass(slots=True)
class Report:
    """Numbers of what was checked, and what of it is bad."""

    bad: list[Finding]
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
    report.bad += [*_check_logs(store, uuid), *_check_merges(store, uuid), *_check_erasures(store)]
    db = connect_read(store / "catalog.sqlite")
    try:
        if (answer := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            report.bad.append(Finding(f"the catalog is damaged ({answer}); rebuild it", "catalog.sqlite"))
            return report
        report.captures = db.execute("SELECT count(*) FROM captures WHERE deleted = 0").fetchone()[0]
        numbers = sorted(numbers_on_disk(store) | {row["number"] for row in db.execute("SELECT number FROM segments")})
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
        report.bad += check_tokens(db, lambda number: below(store, _place(store, number) or store / block_name(number)))
        progress(total, total)
    finally:
        db.close()
    return report


def _check_logs(store: Path, uuid: bytes) -> Iterator[Finding]:
    journal = store / journal_folder()
    numbers = log_numbers(journal)
    for number in numbers:
        path = log_path(journal, number)
        try:
            end = max((after for after, _ in read_log(path, uuid)), default=log_end)
            size = path.stat().st_size
        except FileNotFoundError:
            continue  # merged with a later one at this moment
        except (StoreError, OSError) as error:
            yield Finding(str(error), below(store, path))
            continue
        if end < size and not (number == numbers[-1] and not is_free(store)):
            yield Finding("a damaged record; it and all after it in this log are lost" if number != numbers[-1]
                      else "the last record is not whole; the next start cuts it off", below(store, path), end)


def _check_merges(store: Path, uuid: bytes) -> Iterator[Finding]:
    """A log that another stands for goes at the next start; of a writer that runs, at this moment."""
    if is_free(store):
        journal = store / journal_folder()
        for path in superseded(journal, uuid):
            yield Finding("a later log has its records too; the next start of the writer removes it",
                          below(store, path))
        for path in damaged_heads(journal, uuid):
            yield Finding("its head is damaged: it names logs whose records it has not; nothing is removed for that",
                      below(store, path), 0)


def _check_erasures(store: Path) -> Iterator[Finding]:
    """Check what erasing and removing leave beside the logs. A running writer has a redo record for a moment; none is
    left where it stopped."""
    try:
        read_covered(store)
    except (OSError, StoreError) as error:
        yield Finding(str(error), f"{journal_folder()}/{COVERED}")
    for path in redo_paths(store):
        try:
            read_redo(path)
            if not is_free(store) and time.time() - path.stat().st_mtime < erasing_s:
                continue
            yield Finding("rows of deleted captures are half erased; the next start of the writer ends it",
                      below(store, path))
        except FileNotFoundError:
            continue  # it is done
        except (OSError, StoreError, msgspec.DecodeError) as error:
            yield Finding(f"rows of deleted captures are half erased, and cannot be: {error}", below(store, path))


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


def _check_segment(store: Path, uuid: bytes, db: sqlite3.Connection, number: int, report: Report) -> Iterator[Finding]:
    segment = load_segment(db, number)
    place = _place(store, number)
    if segment is None:
        yield Finding("not in the catalog; rebuild it", below(store, place) if place else block_name(number))
        return
    if place is None and removable(db, number):
        return  # taken away, and the catalog has not heard of it yet
    if place is None:
        yield Finding("the segment is not there", block_name(number), None, segment.site)
        yield from lost_extents(db, segment, block_name(number))
        return
    report.segments += 1
    good: dict[int, View] = {}
    try:
        if (evicted := read_away(store, number)) is not None:
            yield from check_evicted(evicted, segment, db)
            return
        if segment.cold:
            yield from check_cold(store, place, segment, db, good)
        elif place.is_dir():
            yield from check_block(store, uuid, place, segment, db, good)
        else:
            yield from check_open(store, uuid, place, segment, db, good)
    except (OSError, StoreError, ValueError, KeyError, TypeError) as error:
        yield Finding(f"cannot be read: {error!r}", below(store, place), None, segment.site)
        yield from lost_extents(db, segment, below(store, place))
        return
    report.frames += len(good)
    report.rows += sum(view.rows for view in good.values())
    yield from _check_extents(db, segment, good, below(store, place))


def _check_extents(db: sqlite3.Connection, segment: Segment, good: Mapping[int, View], file: str) -> Iterator[Finding]:
    """The catalog's rows against the frames that are whole."""
    for row in db.execute("SELECT * FROM extents WHERE segment = ? ORDER BY offset", (segment.number,)):
        view = good.get(row["offset"])
        if view is None:
            continue  # told already
        columns = np.frombuffer(row["rows"], "<u4").reshape(-1, 4)
        at = columns[:, 1]
        fits = len(columns) == row["n"] and int(at.max(initial=0)) < view.rows and row["capture"] in view.frame.captures
        if fits:
            table, steps = view.table, steps_of(view.frame)
            fits = bool((table.position[at] == columns[:, 0]).all() and (table.token_id[at] == columns[:, 2]).all()
                        and (table.capture[at] == view.frame.captures.index(row["capture"])).all()
                        and unpack_layers(row["layers"]) == tuple(view.frame.layers)
                        and row["steps"] == (b"" if steps is None else steps[at].astype("<u8").tobytes()))
        if not fits:
            yield Finding("the catalog does not match the frame; rebuild it", file, row["offset"], segment.site,
                      row["capture"], unpack_layers(row["layers"]), tuple(columns[:, 0].tolist()))
