"""``vllm-tap rm --store URL``: captures of a store in a bucket are deleted from anywhere, without the store's folder.

A new snapshot is the head's without what that says of them. One conditional write of the head shows it to readers, as a
push would. Blocks are left alone: the folder may know rows in them that the bucket does not. The folder's next push
deletes the captures there too, and only then do their rows leave the bucket.
"""

from __future__ import annotations

import secrets
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from schemas.bucket.snapshots import fetch_snapshot, hash_file, pieces
from schemas.catalog.aliases import of_one_owner, samples
from schemas.catalog.records import find_capture
from schemas.errors import ArgumentError, BucketError, ConflictError, OutrunError
from schemas.objects.layout import VERSION_ORIGIN, Head
from schemas.objects.objects import Objects, keeps_versions
from vllm_tap.bucket.check import current_head
from vllm_tap.bucket.erasure import Erased, erase
from vllm_tap.bucket.postgres import Brought, PostgresCatalog
from vllm_tap.bucket.removal import replace_head
from vllm_tap.bucket.snapshot import pack_file
from writer_service.catalog.entries import forget

__all__ = ["Hidden", "hide"]

_OP: Final = "delete in"
_OTHERS: Final = "a push or another deletion"


@dataclass(frozen=True, slots=True)
class Hidden:
    """The captures that are hidden now, and what left the bucket with them: the snapshot that told of them."""

    url: str
    captures: list[str]
    erased: Erased
    is_versioned: bool  # the bucket keeps what is deleted
    catalog: Brought | None = None  # what the catalog in Postgres got, where one was named


def hide(url: str, refs: Sequence[str], catalog: str | None = None) -> Hidden:
    """Delete captures in the bucket at ``url``: no reader finds them from now on.

    ``refs`` are their ids, response ids or X-Request-Ids. ``catalog``: the URL of the Postgres database that has the
    store's catalog too. NotFoundError where the bucket has no such capture. ConflictError: one is on hold. OutrunError:
    a push or another deletion was first. BucketError: the bucket does not answer. CatalogError: the database does not
    get it; the captures may be deleted in the bucket then, and the next push brings it.
    """
    if "#" in url:
        raise ArgumentError("--store", url, "a head that was taken over from stays as it is; name the URL without '#'")
    objects = Objects(url)
    try:
        before, seen = current_head(objects)
        postgres = None if catalog is None else PostgresCatalog(catalog, before.store, objects)
        if postgres is not None:
            postgres.check()
        with tempfile.TemporaryDirectory(prefix="vllm-tap-rm-") as work:
            earlier, snapshot = Path(work) / "before.sqlite", Path(work) / "catalog.sqlite"
            _fetch(objects, before, before, earlier)
            shutil.copyfile(earlier, snapshot)
            captures = _forget(snapshot, refs)
            head = _send(objects, before, snapshot)
            replace_head(_OP, objects, before, head, seen, _OTHERS)
            brought = None if postgres is None else postgres.bring(head, snapshot, earlier, before.push)
            erased = erase(objects, head, snapshot, objects.sizes(), None)
    finally:
        objects.close()
    return Hidden(objects.url, captures, erased, keeps_versions(seen), brought)


def _fetch(objects: Objects, head: Head, before: Head, out: Path) -> None:
    """The snapshot of a head. OutrunError where it cannot be read and the bucket's head is not the one ``before`` any
    more: the deletion that was first has taken it away.
    """
    try:
        fetch_snapshot(objects, head, out)
    except BucketError as error:
        if current_head(objects)[0] == before:
            raise
        raise OutrunError(_OP, objects.url, f"{_OTHERS} was first", "try again") from error


def _forget(snapshot: Path, refs: Iterable[str]) -> list[str]:
    """Leave tombstones of captures in a snapshot, and nothing else; their ids."""
    with closing(sqlite3.connect(snapshot, isolation_level=None)) as db:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA secure_delete = ON")  # nothing of them stays in free pages
        captures: dict[str, None] = {}
        for ref in refs:  # all of them, before the first goes
            of_one_owner(db, ref)
            captures |= dict.fromkeys(samples(db, ref, None))
        db.execute("BEGIN")
        for capture in captures:
            found = find_capture(db, capture)
            if found is not None and found.hold:
                raise ConflictError(f"capture {capture} is on hold; lift the hold first, with vllm-tap release on its "
                                    "own node, and push")
            forget(db, capture)
        for table in ("doomed", "scrub"):  # for writers alone
            db.execute(f"DELETE FROM {table}")
        db.execute("COMMIT")
    return list(captures)


def _send(objects: Objects, before: Head, snapshot: Path) -> Head:
    """Put a snapshot; the head that names it. What the epochs before have of the captures goes with them."""
    packed, epoch = snapshot.with_suffix(".gz"), before.epoch + 1
    pack_file(snapshot, packed)
    head = msgspec.structs.replace(
        before, version=VERSION_ORIGIN, push=secrets.token_hex(16), parent=before.push,
        generation=before.generation + 1, pushed_ms=time.time_ns() // 1_000_000, catalog=hash_file(snapshot),
        packed_bytes=packed.stat().st_size, epoch=epoch, catalog_epoch=epoch, erased_epoch=epoch,
        origin=before.origin or before.push)
    objects.put(head.catalog_key, lambda: pieces(packed))
    _fetch(objects, head, before, snapshot.with_suffix(".read-back"))
    return head
