"""The control log: every record that was accepted, every engine's Hello, every decision of the writer, in order.

    magic 8 B | version u32 | flags u32 | store uuid 16 B    then records of    bytes u32 | 0 u32 | xxh3 u64 | msgpack.

It is the other half of the journal: catalog, owners, aliases and tombstones can be rebuilt from it and the segments.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from schemas import limits
from schemas.errors import StoreError
from schemas.wire.messages import Bye, Hello, unpack
from schemas.wire.records import Abandon, ClientFinish, Delete, Dropped, Finish, Hold, Join, Open, Own, PartFinish
from writer_service import fs

MAGIC: Final = b"TAPLOG01"
LOG_VERSION: Final = 1
FLAG_SCRUBBED: Final = 1  # written anew without what deleted captures said: its records lie elsewhere than before
span_max: Final = 1 << 24  # the upper bits of the flags: how many numbers below its own a log stands for (merging.py)
_HEAD: Final = struct.Struct("<8sII16s")
_RECORD: Final = struct.Struct("<IIQ")
log_end: Final = _HEAD.size  # of a log without a record


class CapturesLost(msgspec.Struct, tag="lost", forbid_unknown_fields=True):
    """The writer closed captures, or parts of them, whose sender vanished; its Finish or PartFinish that still comes
    wins over it.
    """

    captures: list[str]
    reason: str


class Refused(msgspec.Struct, tag="refused", forbid_unknown_fields=True):
    """A number that was taken off the wire without storing anything: it closes the gap in the sequence."""

    seq: int
    code: str


class RowsOverQuota(msgspec.Struct, tag="over_quota", forbid_unknown_fields=True):
    """The writer takes no rows of a capture: the store was over its quota when it was opened."""

    capture: str


class PartsLost(msgspec.Struct, tag="parts_lost", forbid_unknown_fields=True):
    """Ranks of a group whose rows the capture needs, and that did not join it; a Join that still comes wins over it."""

    capture: str
    parts: list[int]


class RanksLost(msgspec.Struct, tag="ranks_lost", forbid_unknown_fields=True):
    """The ranks of a group whose senders are gone while others go on, all of them: none where they send again."""

    group: str
    ranks: list[int]


Message = (Open | Finish | Join | PartFinish | Dropped | Own | ClientFinish | Abandon | Delete | Hold | Hello | Bye
           | CapturesLost | Refused | RowsOverQuota | PartsLost | RanksLost)


_WITHOUT_NUMBER: Final = (Hello, CapturesLost, Bye, RowsOverQuota, PartsLost, RanksLost)


class LogEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Record with the stream that it came from; ``covered`` as in FrameHeader."""

    stream: str
    epoch: int
    covered: int
    time_ms: int
    message: Message

    @property
    def seq(self) -> int:
        """The number that the entry takes in its stream, 0 where it takes none."""
        return 0 if isinstance(self.message, _WITHOUT_NUMBER) else self.message.seq


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LogEntry)


def log_path(journal: Path, number: int) -> Path:
    """Path of log ``number``."""
    return journal / f"control-{number:08d}.log"


def log_numbers(journal: Path) -> list[int]:
    """The numbers of the logs that are there, oldest first."""
    return sorted(int(path.stem.removeprefix("control-")) for path in journal.glob("control-[0-9]*.log"))


@dataclass(slots=True)
class ControlLog:
    """The log being written; ``tail`` is where the next record goes, ``good`` what is known to be on the disk."""

    number: int
    path: Path
    fd: int
    tail: int
    good: int
    poisoned: bool = False

    @classmethod
    def create(cls, journal: Path, number: int, store: bytes) -> ControlLog:
        """A new log with its head written and its name durable."""
        path = log_path(journal, number)
        fd = fs.open_new(path)
        try:
            fs.write_at(fd, [_HEAD.pack(MAGIC, LOG_VERSION, 0, store)], 0)
            fs.datasync(fd)
            fs.sync_dir(journal)
        except OSError:
            fs.close(fd)
            path.unlink(missing_ok=True)
            raise
        return cls(number, path, fd, _HEAD.size, _HEAD.size)

    def append(self, entry: LogEntry) -> None:
        """Write a record. OSError leaves ``tail`` where it was, and nothing behind it: this may be the log's end."""
        try:
            self.tail = fs.write_at(self.fd, [_record(entry)], self.tail)
        except OSError:
            with contextlib.suppress(OSError):  # which takes no space; the next record overwrites what stays
                fs.truncate(self.fd, self.tail)
            raise


def _record(entry: LogEntry) -> bytes:
    body = _encoder.encode(entry)
    size = struct.pack("<II", len(body), 0)
    return size + struct.pack("<Q", xxhash.xxh3_64_intdigest(size + body)) + body


def log_head(store: bytes, span: int) -> bytes:
    """The head of a log that was written anew."""
    return _HEAD.pack(MAGIC, LOG_VERSION, FLAG_SCRUBBED | span << 8, store)


def scrubbed_log(store: bytes, entries: Iterable[LogEntry], span: int) -> bytes:
    """A whole log, to take the place of one with the same records that told more."""
    return b"".join([log_head(store, span), *map(_record, entries)])


def span_of(path: Path) -> int:
    """Count of numbers below its own that a log stands for; 0 where its head is not whole."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    return int(_HEAD.unpack(head)[2]) >> 8 if len(head) == _HEAD.size and head.startswith(MAGIC) else 0


def read_log(path: Path, store: bytes, start: int = 0) -> Iterator[tuple[int, LogEntry]]:
    """``(offset after it, entry)`` of the longest valid prefix from byte ``start`` on.

    A scrubbed log is read from its beginning: ``start`` may be of before the scrubbing, where power was lost before the
    catalog was synced. A torn or damaged record ends the walk. StoreError where the file is not a log of this store, or
    has a whole record that this version does not know. If such a record counted as the end, records of a newer version
    would be cut off.
    """
    data = path.read_bytes()  # logs are rotated at a bounded size
    if len(data) < _HEAD.size:
        return
    magic, version, flags, uuid = _HEAD.unpack_from(data)
    if magic != MAGIC or version != LOG_VERSION or uuid != store:
        raise StoreError("read control log", path, "not a control log of this store and version",
                         "move it out of the journal folder")
    offset = _HEAD.size if flags & FLAG_SCRUBBED else max(start, _HEAD.size)
    while offset + _RECORD.size <= len(data):
        size, _, digest = _RECORD.unpack_from(data, offset)
        end = offset + _RECORD.size + size
        if size > 2 * limits.message_header_bytes_max or end > len(data):
            return
        body = data[offset + _RECORD.size : end]
        if xxhash.xxh3_64_intdigest(data[offset : offset + 8] + body) != digest:
            return
        try:
            entry = unpack(_decoder, body)
        except msgspec.MsgspecError as error:
            raise StoreError("read control log", path, f"the record at byte {offset} is unknown to this version "
                             f"({error})", "a newer version wrote it; run that version") from None
        yield end, entry
        offset = end


def content_of(entry: LogEntry) -> str | None:
    """The capture (or ULID, of an Own) that a record says something of that a deletion must take away; None: nothing.
    """
    match entry.message:
        case Own(capture=capture, tags=tags) if tags:
            return capture
        case Open(capture=capture, asked=asked, prompt_token_ids=tokens, adapter=adapter, edits=edits) if (
                asked != "{}" or tokens or adapter or edits):
            return capture
        case Finish(capture=capture, stop_reason=stop, output_token_ids=tokens, edits=edits) if (
                tokens or stop is not None or edits):
            return capture
        case PartFinish(capture=capture, edits=edits) if edits:
            return capture
        case ClientFinish(capture=capture, stop_reason=stop, output_token_ids=tokens) if tokens or stop is not None:
            return capture
    return None
