"""Snapshots of a catalog: brought from a bucket, held against their hashes."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import quote

import xxhash

from schemas.errors import BucketError
from schemas.objects.layout import Head, Stored
from schemas.objects.objects import Objects

__all__ = ["fetch_snapshot", "hash_file", "hash_pieces", "knows_deleted", "matches", "pieces", "read_blocks"]

_STEP_BYTES: Final = 1 << 20
_FILE_BYTES: Final = 8 << 20


def fetch_snapshot(objects: Objects, head: Head, out: Path) -> None:
    """The snapshot of a head; BucketError where it is not what the head says."""
    where = f"{objects.url}/{head.catalog_key}"

    def unpack(pieces: Iterator[bytes]) -> str:
        unpacker, hashed, left = zlib.decompressobj(wbits=31), xxhash.xxh3_128(), head.catalog.nbytes
        with out.open("wb") as file:
            for piece in pieces:
                while piece:
                    data = unpacker.decompress(piece, _STEP_BYTES)
                    if (left := left - len(data)) < 0:
                        raise ValueError(f"more than {head.catalog.nbytes:,} bytes")
                    hashed.update(data)
                    file.write(data)
                    piece = unpacker.unconsumed_tail
                if unpacker.unused_data:
                    raise ValueError("bytes behind its end")
            data = unpacker.flush()
            hashed.update(data)
            file.write(data)
        return hashed.hexdigest()

    try:
        found = objects.stream(head.catalog_key, head.packed_bytes, unpack)
    except FileNotFoundError:
        raise BucketError("read", where, "it is not there", "the head names it: was it removed?") from None
    except zlib.error as error:
        raise BucketError("read", where, f"it does not match its checksum: {error}") from None
    if found != head.catalog.xxh3:
        raise BucketError("read", where, "it does not match its checksum")
    _check_tables(out, where)


def _check_tables(snapshot: Path, where: str) -> None:
    """BucketError where a snapshot has a view, which may run without an end, or lacks a table."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(snapshot))}?mode=ro", uri=True)) as db:
            found = dict(db.execute("SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')"))
    except sqlite3.DatabaseError as error:
        raise BucketError("read", where, f"it is no catalog: {error}") from None
    if views := [name for name, kind in found.items() if kind == "view"]:
        raise BucketError("read", where, f"it has a view, {views[0][:80]!r}, which no catalog of ours has")
    if lacking := {"blocks", "captures", "extents", "meta"} - found.keys():
        raise BucketError("read", where, f"it lacks the tables {', '.join(sorted(lacking))}")


def read_blocks(snapshot: Path) -> dict[int, tuple[str, Stored]]:
    """The places of blocks, as a snapshot says, and their indexes."""
    with closing(sqlite3.connect(f"file:{quote(str(snapshot))}?mode=ro", uri=True)) as db:
        return {number: (key, Stored(nbytes, xxh3))
                for number, key, nbytes, xxh3 in db.execute("SELECT * FROM blocks")}


def knows_deleted(earlier: Path, snapshot: Path) -> bool:
    """Whether a snapshot has captures that ``snapshot`` says are deleted."""
    query = """SELECT EXISTS (SELECT 1 FROM captures AS earlier JOIN now.captures AS later ON later.id = earlier.id
               WHERE earlier.deleted = 0 AND later.deleted <> 0)"""
    with closing(sqlite3.connect(f"file:{quote(str(earlier))}?mode=ro", uri=True)) as db:
        db.execute("ATTACH ? AS now", (f"file:{quote(str(snapshot))}?mode=ro",))
        return bool(db.execute(query).fetchone()[0])


def hash_file(path: Path) -> Stored:
    """A file's bytes and hash."""
    return hash_pieces(pieces(path))


def hash_pieces(data: Iterator[bytes]) -> Stored:
    """The bytes and the hash of an object that comes in pieces."""
    hashed, nbytes = xxhash.xxh3_128(), 0
    for piece in data:
        hashed.update(piece)
        nbytes += len(piece)
    return Stored(nbytes, hashed.hexdigest())


def matches(path: Path, wanted: Stored) -> bool:
    """Whether a file is there and what it must be."""
    try:
        return path.stat().st_size == wanted.nbytes and hash_file(path) == wanted
    except OSError:
        return False


def pieces(path: Path) -> Iterator[bytes]:
    """A file's bytes, 8 MiB at a time."""
    with path.open("rb") as file:
        while piece := file.read(_FILE_BYTES):
            yield piece
