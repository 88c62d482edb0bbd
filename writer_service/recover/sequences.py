"""The state that recovery gathers: how far the store holds each stream, and the frames that prove it."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

from schemas.store.segment import FrameView
from writer_service.catalog import catalog
from writer_service.catalog.changes import Change, Indexed, SegmentMade
from writer_service.upkeep import block_removal

apply_at_once = 512


@dataclass(slots=True)
class StreamSequence:
    """Numbers of one stream that the store holds: ``covered`` and everything below, and single ones past it."""

    epoch: int
    role: str
    covered: int = 0
    seqs: set[int] = field(default_factory=set)
    records: set[int] = field(default_factory=set)  # those of them that are records
    unopened: set[int] = field(default_factory=set)  # frames with a capture whose Open, or Join, is not there
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
    streams: dict[str, StreamSequence]
    to_seal: list[int]
    cut_bytes: int = 0
    rebuilt: bool = False
    skipped: list[str] = field(default_factory=list)  # blocks that cannot be read
    not_erased: list[str] = field(default_factory=list)  # erasures that cannot be ended, and why
    log_read: str = ""  # how far the control logs were read, as the catalog notes it


def load_streams(db: sqlite3.Connection, state: Recovered) -> None:
    """Take over what the catalog knows of streams."""
    for row in db.execute("SELECT * FROM streams"):
        state.streams[row["stream"]] = StreamSequence(row["epoch"], row["role"], row["covered"], bye=bool(row["bye"]))
    for row in db.execute("SELECT f.* FROM frames f JOIN streams s ON s.stream = f.stream AND s.epoch = f.epoch "
                          "WHERE f.seq > s.covered"):
        state.streams[row["stream"]].note(row["epoch"], row["covered"], row["seq"])
    for stream, (epoch, seqs) in json.loads(catalog.get_meta(db, "ahead") or "{}").items():
        for seq in seqs:
            state.streams[stream].note(epoch, 0, seq, record=True)


def note_removed(store: Path, state: Recovered) -> None:
    """Take over what blocks that were removed said of streams and numbers."""
    known = block_removal.read_covered(store)
    state.next_segment = known["next_segment"]
    for stream, epoch, role, covered in known["streams"]:
        sequence = state.streams.setdefault(stream, StreamSequence(epoch, role))
        sequence.note(epoch, covered, covered)


def index_frames(db: sqlite3.Connection, state: Recovered, number: int, views: list[FrameView]) -> set[str]:
    """Index frames that the catalog lacks and count them for their streams.

    Those with rows that were not served are looked at again: what opens their capture may have come since.
    """
    strays = {row["offset"] for row in db.execute("SELECT offset FROM strays WHERE segment = ?", (number,))}
    known = {(row["stream"], row["epoch"], row["seq"])
             for row in db.execute("SELECT stream, epoch, seq, offset FROM frames WHERE segment = ?", (number,))
             if row["offset"] not in strays}
    changes: list[Change] = [SegmentMade.of(views[0].frame, number)] if views else []
    for view in views:
        header = view.header
        sequence = state.streams.setdefault(header.stream, StreamSequence(header.epoch, "engine"))
        sequence.note(header.epoch, header.covered, header.frame.seq)
        if (header.stream, header.epoch, header.frame.seq) not in known:
            changes.append(Indexed(header.stream, header.epoch, header.covered, number, view.offset, view.layout.total,
                                   header.frame, view.table))
            if not _begun(db, header.stream, header.frame.captures):
                sequence.unopened.add(header.frame.seq)
    touched: set[str] = set()
    for start in range(0, len(changes), apply_at_once):
        with catalog.transaction(db):
            touched |= catalog.apply(db, changes[start : start + apply_at_once])
    return touched


def _begun(db: sqlite3.Connection, stream: str, captures: list[str]) -> bool:
    """Whether a stream has opened or joined every capture, or never will: others have it, or it is gone."""
    query = """SELECT 1 FROM captures c WHERE id = :capture AND (deleted OR failed IS NOT NULL OR stream = :stream
               OR (stream IS NOT NULL AND "group" = '')
               OR EXISTS (SELECT 1 FROM parts WHERE capture = c.id AND stream = :stream))"""
    return all(db.execute(query, {"capture": capture, "stream": stream}).fetchone() for capture in captures)


def take_again(db: sqlite3.Connection, stream: str, sequence: StreamSequence) -> None:
    """Forget frames past a gap that came before the Open or Join of a capture in them: with it they must come again.

    A power loss can keep a segment's frames and lose the log's newest records. Those frames have no index.
    """
    for seq in sequence.seqs & sequence.unopened:
        db.execute("DELETE FROM frames WHERE stream = ? AND epoch = ? AND seq = ?", (stream, sequence.epoch, seq))
        sequence.seqs.discard(seq)
