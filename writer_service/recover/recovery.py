"""What a writer does before it receives anything: take the lock, mend the journal, make the catalog true.

Policy: of every journal file the frames that the catalog has are kept, and the longest valid prefix of what follows
them; the rest is cut. A damaged frame among those, or inside a sealed block, costs that frame alone.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid as uuids
from dataclasses import dataclass, field
from pathlib import Path

from schemas import codecs, limits
from schemas.catalog.records import load_frames
from schemas.errors import CorruptError, StartError, StoreError
from schemas.read.reader import read_store_uuid
from schemas.store.cold_block import ColdBlock, cold_attributes
from schemas.store.map_file import map_file
from schemas.store.paths import KEYS_FILE, WRITER, block_name, main_chunk
from schemas.store.segment import FrameView, frames_end, newer_frame, verify_payload, walk, whole_frames
from schemas.wire.messages import Bye, Hello
from writer_service import fs, log
from writer_service.catalog import catalog
from writer_service.catalog.catalog_file import (
    DAMAGED,
    REBUILDING,
    REPLACED,
    damaged,
    open_catalog,
    remove_catalog,
    set_aside,
)
from writer_service.catalog.changes import Change, Indexed, SegmentGone, SegmentMade, SegmentSealed
from writer_service.catalog.entries import note_streams
from writer_service.control_log import log_numbers, log_path, read_log
from writer_service.recover.store_lock import take_lock
from writer_service.seal import sealing
from writer_service.upkeep import block_removal, cold_blocks, erasing, log_merging

apply_at_once = 512
MADE_FIRST = ("writers", "blocks", ".store.json.tmp", KEYS_FILE)  # what may be there without a store.json


@dataclass(slots=True)
class Sequence:
    """What the store holds of one stream: ``covered`` and everything below, and single numbers past it."""

    epoch: int
    role: str
    covered: int = 0
    seqs: set[int] = field(default_factory=set)
    records: set[int] = field(default_factory=set)  # those of them that are records
    unopened: set[int] = field(default_factory=set)  # frames with a capture whose Open is not there
    bye: bool = False

    def note(self, epoch: int, covered: int, seq: int, record: bool = False) -> None:
        """A frame or entry was found."""
        if epoch < self.epoch:
            return
        if epoch > self.epoch:
            self.epoch, self.covered, self.bye = epoch, 0, False
            self.seqs.clear()
            self.records.clear()
            self.unopened.clear()
        self.covered = max(self.covered, covered)
        if seq > self.covered:
            self.seqs.add(seq)
            if record:
                self.records.add(seq)

    def settle(self) -> None:
        """Count on from ``covered`` over what is there without a gap."""
        while self.covered + 1 in self.seqs:
            self.covered += 1
        self.seqs = {seq for seq in self.seqs if seq > self.covered}
        self.records &= self.seqs


@dataclass(slots=True)
class Recovered:
    """The state that a writer goes on from."""

    uuid: bytes
    epoch: int
    lock: int
    next_segment: int
    next_log: int
    streams: dict[str, Sequence]
    to_seal: list[int]
    cut_bytes: int = 0
    rebuilt: bool = False
    skipped: list[str] = field(default_factory=list)  # blocks that cannot be read
    not_erased: list[str] = field(default_factory=list)  # erasures that cannot be ended, and why
    log_read: str = ""  # how far the control logs were read, as the catalog notes it


def check_folder(store: Path) -> None:
    """StartError where the folder is somebody else's, StoreError where the store is of another version."""
    fs.make_dirs(store)
    if (store / "store.json").exists():
        read_store_uuid(store)
    elif strange := [entry.name for entry in store.iterdir() if entry.name not in MADE_FIRST]:
        raise StartError(f"store {store}: the folder is not empty and has no store.json (it has {strange[0]!r}); "
                         "name a new or empty folder")


def make_store(store: Path) -> bytes:
    """The store's uuid; the folder becomes a store where it is none yet."""
    file = store / "store.json"
    if not file.exists():
        document = {"format": "vllm-tap store", "version": limits.STORE_VERSION, "uuid": str(uuids.uuid4()),
                    "created_ms": time.time_ns() // 1_000_000}
        fs.write_durable(file, json.dumps(document, indent=1).encode())
    return read_store_uuid(store)


def recover(store: Path) -> Recovered:
    """Everything above; StartError or StoreError where the store cannot be used."""
    check_folder(store)
    lock, epoch = take_lock(store)
    uuid = make_store(store)  # under the lock: two writers that start at once must not both name the store
    db, rebuilt = open_catalog(store, uuid)
    try:
        state = mend(store, uuid, lock, epoch, db, rebuilt)
    except sqlite3.DatabaseError as error:
        # An index that does not match its table is not seen before something is changed that it has: looking for that
        # at every start takes 10 s of a million captures.
        if rebuilt or not damaged(error):
            raise
        set_aside(store, DAMAGED)
        state = mend(store, uuid, lock, epoch, *open_catalog(store, uuid))
    for name in (DAMAGED, REBUILDING, REPLACED):  # they tell what was deleted since
        remove_catalog(store, name)
    return state


def mend(store: Path, uuid: bytes, lock: int, epoch: int, db: sqlite3.Connection, rebuilt: bool) -> Recovered:
    """Journals and blocks made whole and the catalog true; ``db`` is closed."""
    try:
        state = Recovered(uuid, epoch, lock, 1, 1, {}, [], rebuilt=rebuilt)
        _load_streams(db, state)
        finish_seals(store)
        block_removal.finish_removals(store)
        cold_blocks.finish_cut(store)
        log_merging.finish_merges(store, uuid)
        state.not_erased = erasing.redo_all(store)
        _note_removed(store, state)
        touched = replay_logs(db, store, state)
        touched |= _index_blocks(db, store, state)
        touched |= _scan_open(db, store, state)
        with catalog.transaction(db):
            catalog.refresh(db, touched)
            for name, sequence in state.streams.items():
                sequence.settle()
                _take_again(db, name, sequence)
            note_streams(db, [(name, s.epoch, s.role, s.covered) for name, s in state.streams.items()])
            if state.log_read:  # with the numbers that were read there: a start cut short before this reads it again
                catalog.set_meta(db, "log", state.log_read)
            # Records past a gap are not read again, and are no frames: nothing else would tell that they are there.
            catalog.set_meta(db, "ahead", json.dumps(
                {name: [s.epoch, sorted(s.records)] for name, s in sorted(state.streams.items()) if s.records}))
        cold_blocks.finish_replacing(store, db)
        return state
    finally:
        db.close()


def finish_seals(store: Path) -> None:
    """Go on with seals that had passed the point of no return, throw the others away."""
    blocks = store / "blocks"
    for building in blocks.glob(f".building-{WRITER}-*"):
        if not sealing.finish_cut(store, int(building.name.rsplit("-", 1)[1])):
            fs.remove_tree(building)
    fs.sync_dir(blocks)


def _take_again(db: sqlite3.Connection, stream: str, sequence: Sequence) -> None:
    """Frames past a gap that came before the Open of a capture in them: once the Open is there again, so must they be.

    A power loss can keep a segment's frames and lose the log's newest records. Those frames have no index.
    """
    for seq in sequence.seqs & sequence.unopened:
        db.execute("DELETE FROM frames WHERE stream = ? AND epoch = ? AND seq = ?", (stream, sequence.epoch, seq))
        sequence.seqs.discard(seq)


def _opened(db: sqlite3.Connection, captures: list[str]) -> bool:
    """Whether every capture is known and was opened by somebody, or never will be."""
    query = "SELECT 1 FROM captures WHERE id = ? AND (stream IS NOT NULL OR deleted OR failed IS NOT NULL)"
    return all(db.execute(query, (capture,)).fetchone() for capture in captures)


def _load_streams(db: sqlite3.Connection, state: Recovered) -> None:
    for row in db.execute("SELECT * FROM streams"):
        state.streams[row["stream"]] = Sequence(row["epoch"], row["role"], row["covered"], bye=bool(row["bye"]))
    for row in db.execute("SELECT f.* FROM frames f JOIN streams s ON s.stream = f.stream AND s.epoch = f.epoch "
                          "WHERE f.seq > s.covered"):
        state.streams[row["stream"]].note(row["epoch"], row["covered"], row["seq"])
    for stream, (epoch, seqs) in json.loads(catalog.get_meta(db, "ahead") or "{}").items():
        for seq in seqs:
            state.streams[stream].note(epoch, 0, seq, record=True)


def _note_removed(store: Path, state: Recovered) -> None:
    """What only blocks that were taken away could tell."""
    known = block_removal.read_covered(store)
    state.next_segment = known["next_segment"]
    for stream, epoch, role, covered in known["streams"]:
        sequence = state.streams.setdefault(stream, Sequence(epoch, role))
        sequence.note(epoch, covered, covered)


def replay_logs(db: sqlite3.Connection, store: Path, state: Recovered) -> set[str]:
    """Apply what the catalog lacks of the control logs; a torn tail is cut off the newest."""
    journal = store / "writers" / WRITER / "journal"
    log, _, offset = (catalog.get_meta(db, "log") or "0:0").partition(":")
    touched: set[str] = set()
    numbers = log_numbers(journal)
    for number in numbers:
        if number < int(log):
            continue
        path = log_path(journal, number)
        end = start = int(offset) if number == int(log) else 0
        entries: list[Change] = []
        for after, entry in read_log(path, state.uuid, start):
            end = after
            entries.append(entry)
            if not entry.stream:  # the writer's own decision
                continue
            known = state.streams.setdefault(entry.stream, Sequence(entry.epoch, "engine"))
            known.note(entry.epoch, entry.covered, entry.seq, record=True)
            if entry.epoch < known.epoch:
                continue  # a merged log is read from its beginning, also where the catalog knows more
            if isinstance(entry.message, Hello):
                known.role = entry.message.role
            elif isinstance(entry.message, Bye):
                known.bye = True
        with catalog.transaction(db):
            touched |= catalog.apply(db, entries, number)
        state.log_read = f"{number}:{end}"
        if number == numbers[-1]:
            state.cut_bytes += _keep(path, end)
    state.next_log = numbers[-1] + 1 if numbers else 1
    return touched


def _keep(path: Path, end: int) -> int:
    """Cut off what follows ``end``, and put what does not on the disk; how many bytes were cut.

    A writer that was killed may not have synced it, and from now on senders are told that it is safe.
    """
    extra = path.stat().st_size - end
    fd = fs.open_existing(path)
    try:
        if extra > 0:
            fs.truncate(fd, end)
        fs.datasync(fd)
    finally:
        fs.close(fd)
    return max(extra, 0)


def _indexed(view: FrameView, number: int) -> Indexed:
    header = view.header
    return Indexed(header.stream, header.epoch, header.covered, number, view.offset, view.layout.total, header.frame,
                   view.table)


def _made(view: FrameView, number: int) -> SegmentMade:
    frame = view.frame
    return SegmentMade(number, frame.site, frame.codec, frame.dtype, frame.width, frame.fingerprint)


def _note_all(db: sqlite3.Connection, state: Recovered, number: int, views: list[FrameView]) -> set[str]:
    """Index frames that the catalog lacks and count them for their streams.

    Those with rows that were not served are looked at again: what opens their capture may have come since.
    """
    strays = {row["offset"] for row in db.execute("SELECT offset FROM strays WHERE segment = ?", (number,))}
    known = {(row["stream"], row["epoch"], row["seq"])
             for row in db.execute("SELECT stream, epoch, seq, offset FROM frames WHERE segment = ?", (number,))
             if row["offset"] not in strays}
    changes: list[Change] = [_made(views[0], number)] if views else []
    for view in views:
        header = view.header
        sequence = state.streams.setdefault(header.stream, Sequence(header.epoch, "engine"))
        sequence.note(header.epoch, header.covered, header.frame.seq)
        if (header.stream, header.epoch, header.frame.seq) not in known:
            changes.append(_indexed(view, number))
            if not _opened(db, header.frame.captures):
                sequence.unopened.add(header.frame.seq)
    touched: set[str] = set()
    for start in range(0, len(changes), apply_at_once):
        with catalog.transaction(db):
            touched |= catalog.apply(db, changes[start : start + apply_at_once])
    return touched


def _index_blocks(db: sqlite3.Connection, store: Path, state: Recovered) -> set[str]:
    """Blocks that the catalog does not know as sealed."""
    touched: set[str] = set()
    known = {row["number"] for row in db.execute("SELECT number FROM segments WHERE sealed = 1")}
    for block in sorted((store / "blocks").glob(f"{WRITER}-*.zarr")):
        number = int(block.name.removesuffix(".zarr").rsplit("-", 1)[1])
        state.next_segment = max(state.next_segment, number + 1)
        if number in known:
            continue
        try:
            if _is_cold(block):
                change = cold_blocks.compacted(ColdBlock.open(block), number)
                with catalog.transaction(db):
                    touched |= catalog.apply(db, [change])
                continue
            views = _block_frames(block, number, state.uuid)
        except (StoreError, OSError) as error:  # it costs its own rows; the next start tries again
            log.warn("block_skipped", f"a block cannot be read and is left out: {error}", segment=number,
                      error=str(error))
            state.skipped.append(block.name)
            continue
        touched |= _note_all(db, state, number, views)
        with catalog.transaction(db):
            catalog.apply(db, [SegmentSealed(number)])
    for number in known:  # taken away, and the catalog did not hear of it any more
        if not (store / block_name(number)).exists() and block_removal.removable(db, number):
            with catalog.transaction(db):
                catalog.apply(db, [SegmentGone(number)])
    return touched


def _is_cold(block: Path) -> bool:
    """StoreError where the block does not say what it holds."""
    try:
        return cold_attributes(block) is not None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError("read block", block, repr(error), "put a good copy of it in its place") from None


def _block_frames(block: Path, number: int, uuid: bytes) -> list[FrameView]:
    """The whole frames of a block: its list of offsets leads past a damaged one, and is not needed where none is.

    StoreError or OSError where the block does not say what it holds, or has no rows.
    """
    try:
        attributes = json.loads((block / "zarr.json").read_text())["attributes"]
        main = codecs.streams(attributes["codec"]["name"], attributes["width"], attributes["model_dtype"])[0].name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError("read block", block, repr(error), "put a good copy of it in its place") from None
    try:
        listed = memoryview((block / "frame" / "c" / "0").read_bytes()).cast("Q").tolist()
    except (OSError, TypeError):
        listed = []
    path = block / main_chunk(main)
    data = map_file(path)
    views: dict[int, FrameView] = {}
    for start in sorted({0, *listed}):
        if start not in views:
            views.update((view.offset, view) for view in walk(data, uuid, number, path, verify=None, start=start))
    if listed and listed == sorted(set(listed)) and views.keys() >= set(listed):
        # A whole frame that such a list leaves out was given up before the block was sealed: its sender sends it again,
        # and the next erasure clears it.
        return [views[offset] for offset in listed]
    return [view for view in views.values() if view.offset in listed or _is_whole(view, path)]


def _is_whole(view: FrameView, path: Path) -> bool:
    """Whether a frame that a damaged list does not name is one nevertheless."""
    try:
        verify_payload(view, path)
    except CorruptError:
        return False
    return True


def _scan_open(db: sqlite3.Connection, store: Path, state: Recovered) -> set[str]:
    """Journal files: keep the longest valid prefix, cut the rest, and have them sealed."""
    touched: set[str] = set()
    journal = store / "writers" / WRITER / "journal"
    for path in sorted(journal.glob("[0-9]*.open")):
        number = int(path.stem)
        state.next_segment = max(state.next_segment, number + 1)
        data = map_file(path)
        known = [(offset, nbytes) for offset, nbytes in load_frames(db, number) if offset + nbytes <= len(data)]
        views: list[FrameView] = []
        for found in whole_frames(data, state.uuid, number, path, known):
            if isinstance(found, FrameView):
                views.append(found)
            else:
                log.warn("frame_damaged", f"the rows of a frame are lost: {found}", segment=number, error=str(found))
        end = frames_end(views, known)
        for at in (*(offset for offset, _ in known), end):
            if newer_frame(data, at, state.uuid):
                raise StoreError("read segment", path, f"a frame at byte {at} is of a newer version",
                                 "use the newer program: this one would cut it off")
        if views:  # before the catalog hears of them: what it knows is on the disk
            state.cut_bytes += _keep(path, end)
        gone = _forget_rows(db, number, {view.offset for view in views}, end)
        touched |= gone | _note_all(db, state, number, views)
        del data
        if views:
            del views
            state.to_seal.append(number)
        elif not known:  # acknowledged frames stay, however damaged
            state.cut_bytes += path.stat().st_size
            fs.remove(path)
            with catalog.transaction(db):
                catalog.apply(db, [SegmentGone(number)])
    return touched


def _forget_rows(db: sqlite3.Connection, number: int, whole: set[int], end: int) -> set[str]:
    """Take rows out of the index whose frames are not whole; their captures. Those below ``end`` stay in the file, to
    be erased with their captures."""
    lost = [(row["capture"], number, row["offset"]) for row in db.execute(
        "SELECT capture, offset FROM extents WHERE segment = ?", (number,)) if row["offset"] not in whole]
    with catalog.transaction(db):
        db.executemany("INSERT OR IGNORE INTO strays VALUES (?, ?, ?)", [place for place in lost if place[2] < end])
        db.executemany("DELETE FROM extents WHERE capture = ? AND segment = ? AND offset = ?", lost)
        db.execute("DELETE FROM frames WHERE segment = ? AND offset + bytes > ?", (number, end))
        db.executemany("UPDATE captures SET total_len = coalesce((SELECT max(pos_max) + 1 FROM extents "
                       "WHERE capture = captures.id), 0) WHERE id = ?", [(capture,) for capture, *_ in lost])
    return {capture for capture, *_ in lost}


__all__ = ["Recovered", "Sequence", "block_name", "recover"]
