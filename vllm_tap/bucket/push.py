"""``vllm-tap push``: the sealed blocks of a store and a snapshot of its catalog go up to a bucket.

Blocks go first, then the snapshot. The names of both follow from their contents, so a push that was cut short is taken
up again. Nobody sees any of it until one conditional write of the head shows all of it at once. A head that is there
already must be one that this folder pushed. Objects are deleted only where captures were deleted since they went up.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from schemas.bucket.snapshots import fetch_snapshot, hash_file, pieces, read_blocks
from schemas.errors import BucketError, CatalogError, ConflictError, FencedError, OutrunError, StoreError, TapError
from schemas.objects.evicted import read_away
from schemas.objects.heads import fetch_head
from schemas.objects.layout import (
    CATALOGS,
    CONDITIONS,
    FORMAT,
    HEAD,
    RETIRED,
    VERSION,
    Head,
    retired_key,
)
from schemas.objects.objects import Objects, Version, keeps_versions
from schemas.read.captures import read_store_uuid
from schemas.store.paths import block_name
from vllm_tap.bucket.blocks import BlockSender, files_of, named_block, send_block
from vllm_tap.bucket.erasure import Erased, erase
from vllm_tap.bucket.eviction import Room, evict, keep_read_times
from vllm_tap.bucket.known import TAKE_OVER, KnownHeads
from vllm_tap.bucket.postgres import Brought, PostgresCatalog
from vllm_tap.bucket.snapshot import (
    BlockAt,
    Left,
    ahead_of,
    copy_catalog,
    is_outdated,
    newly_deleted,
    pack_file,
    restrict,
    sealed,
    waiting,
)
from vllm_tap.store_control import delete
from writer_service.upkeep import evicted_blocks

__all__ = ["Pushed", "check_head", "push"]

erasing_s_max: Final = 60.0
_MOMENTS: Final = 8  # of the catalog that are tried, where captures are deleted meanwhile
_OURS: Final = ("blocks/", f"{CATALOGS}/", f"{RETIRED}/", ".head.lock", CONDITIONS)
_OWN_PREFIX: Final = ("push each writer's store to a prefix of its own, such as s3://BUCKET/PREFIX/NAME: all below "
                      "s3://BUCKET/PREFIX are read together")
Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result of a push. ``superseded`` counts blocks that the head before named and the new one does not; they stay
    in the bucket.

    ``retired``: the push that was taken over from, whose head stays whole. ``only_retired`` counts the captures that
    are there alone.
    """

    url: str
    generation: int
    changed: bool  # whether there is a new head
    captures: int
    left_out: int  # captures that are not final, or have rows that are not sealed yet
    blocks: int
    new_blocks: int
    new_bytes: int
    superseded: int
    retired: str | None = None
    only_retired: int = 0
    erased: Erased = field(default_factory=Erased)
    is_versioned: bool = False  # the bucket keeps what is deleted
    room: Room | None = None  # that was made on the disk, where it was asked for and no other push ran
    catalog: Brought | None = None  # what the catalog in Postgres got, where one was named
    followed: int = 0  # captures that were deleted in the bucket, and with this push here too


class _GoneError(Exception):
    """The store has changed under a push: it begins with a later moment."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The bucket as a push found it: its head, and every object's bytes, to which the push adds what it sent.

    ``had_objects``: there was something before the push.
    """

    head: Head | None
    version: Version | None
    there: dict[str, int]
    had_objects: bool


@dataclass(slots=True)
class _Push:
    store: Path
    uuid: bytes
    objects: Objects
    known: KnownHeads
    seen: _Seen
    sender: BlockSender
    tell: Tell
    takes_over: bool
    head_is_whole: bool  # what the head names is there, its snapshot at least
    done: dict[int, BlockAt] = field(default_factory=dict)


def push(store: Path, url: str, tell: Tell = lambda done, total: None, verify: bool = False,
         take_over: bool = False, local_bytes: int | None = None, catalog: str | None = None,
         without_catalog: bool = False) -> Pushed:
    """Bring the sealed part of a store to the bucket at ``url``. Objects that were lost there are sent again.

    ``tell`` is told bytes. ``verify``: rows of all blocks are read back; the snapshot and indexes of new blocks always
    are. ``take_over``: go on from a head that this folder did not push; that head stays whole below ``retired/``.
    ``local_bytes``: once the head is there, rows that it has leave the disk until rows take no more than this.
    ``catalog``: the URL of a Postgres database that gets the catalog too, for readers. Without it, a push is refused if
    the last push of this folder to ``url`` named one, unless ``without_catalog``. After a push that ended with an
    error, another goes on.

    FencedError: the head is of a later state of the store, or of another folder. OutrunError: another push was first.
    CatalogError: the database does not get the catalog; the bucket may have the push then. TapError: the service
    ignores conditions, the bucket holds something else, or the push lacks a catalog as above. StoreError: rows of
    deleted captures are not erased within a minute; a writer has to run for that.
    """
    uuid, owner = read_store_uuid(store), store.stat().st_uid
    if local_bytes is not None and owner != os.geteuid():  # the writer and readers could not read what it leaves
        raise StoreError("evict from", store, f"it is user {owner}'s, and this is user {os.geteuid()}",
                         "push with --local-bytes as the writer's user")
    objects = Objects(url, make=True)
    known = KnownHeads(store, objects.url)
    try:
        known.touch()
        seen = _look(objects, uuid)
        if catalog is None and not without_catalog:
            _check_without_catalog(objects, known)
        if (postgres := None if catalog is None else PostgresCatalog(catalog, uuid.hex(), objects)) is not None:
            postgres.check()
        takes_over = take_over and seen.head is not None
        if seen.head is not None and not takes_over:
            known.check(seen.head, objects.url)
        with evicted_blocks.pushing(store) as is_alone, tempfile.TemporaryDirectory(prefix="vllm-tap-push-") as work:
            before, is_whole = _blocks_of(objects, seen.head, Path(work))
            missing, followed = _check_ahead(store, objects.url, seen.head, Path(work) / "before.sqlite", takes_over)
            epoch = (seen.head.epoch if seen.head else 0) + takes_over
            going = _Push(store, uuid, objects, known, seen, BlockSender(objects, seen.there, before, verify, epoch),
                          tell, takes_over, is_whole)
            snapshot = Path(work) / "catalog.sqlite"
            left = _bring(going, snapshot)
            used = {number: going.done[number] for number in read_blocks(snapshot)}
            made, changed = _commit(going, snapshot)
            brought = None if postgres is None else _bring_catalog(postgres, made, snapshot, seen.head)
            if not isinstance(brought, CatalogError):
                known.cataloged("" if brought is None else brought.place)
            retired = made.parent if takes_over else None
            is_ended = changed and made.epoch == made.erased_epoch  # then what this push sent may have to go too
            erased = erase(objects, made, snapshot, objects.sizes() if is_ended else seen.there, retired)
            room = None
            if local_bytes is not None:  # another push reads the files: what may go leaves with the next
                room = evict(store, objects, used, local_bytes) if is_alone() else None
    finally:
        objects.close()
    if isinstance(brought, CatalogError):
        raise brought
    superseded = len({at.key for at in before.values()} - {at.key for at in used.values()})
    return Pushed(objects.url, made.generation, changed, left.taken, left.left_out, len(used), going.sender.new_blocks,
                  going.sender.new_bytes, superseded, retired, missing, erased,
                  keeps_versions(seen.version or {}), room, brought, followed)


def _check_without_catalog(objects: Objects, known: KnownHeads) -> None:
    """TapError where the last push of this folder brought its catalog to a database."""
    if place := known.catalog():
        raise TapError(f"push to {objects.url}: its catalog is at {place} too, and would fall behind: readers that use "
                       "it would wait, and then end. Name it with --catalog, or push with --no-catalog if nobody uses "
                       "it")


def _bring_catalog(postgres: PostgresCatalog, made: Head, snapshot: Path, before: Head | None
                   ) -> Brought | CatalogError:
    """The rows that the catalog in Postgres got. If it got none because of an error, the error is returned, and raised
    once all else is done.
    """
    try:
        return postgres.bring(made, snapshot, snapshot.with_name("before.sqlite"),
                              None if before is None else before.push)
    except CatalogError as error:
        return CatalogError(error.op, error.where, error.reason, "the bucket has the push, the catalog there is as it "
                            "was: push again" + (f"; {error.hint}" if error.hint else ""))


def check_head(store: Path, url: str) -> None:
    """Raise what a push without ``take_over`` would raise of the head at ``url``; nothing is sent."""
    objects = Objects(url, make=True)
    try:
        with suppress(FileNotFoundError):
            head, _ = _read_head(objects, read_store_uuid(store))
            KnownHeads(store, objects.url).check(head, objects.url)
    finally:
        objects.close()


def _read_head(objects: Objects, uuid: bytes) -> tuple[Head, Version]:
    """The head, of this store; FileNotFoundError where there is none."""
    head, version = fetch_head(objects)
    if head.store != uuid.hex():
        raise TapError(f"{objects.url}: holds the store {head.store}, this one is {uuid.hex()}; {_OWN_PREFIX}")
    return head, version


def _look(objects: Objects, uuid: bytes) -> _Seen:
    """The head, if there is one, and the objects beside it."""
    try:
        head, version = _read_head(objects, uuid)
    except FileNotFoundError:
        there = objects.sizes()
        if HEAD not in there:
            if others := [key for key in there if not key.startswith(_OURS)]:
                raise TapError(f"{objects.url}: has objects of something else, {others[0]!r} first; name another prefix"
                               ) from None
            return _Seen(None, None, there, bool(there))
        head, version = _read_head(objects, uuid)  # another push was first, a moment ago
    return _Seen(head, version, objects.sizes(), True)


def _blocks_of(objects: Objects, head: Head | None, work: Path) -> tuple[dict[int, BlockAt], bool]:
    """The blocks of a head, and whether its snapshot matches it: a snapshot that was lost or damaged is sent anew."""
    if head is None:
        return {}, True
    path = work / "before.sqlite"
    try:
        fetch_snapshot(objects, head, path)
    except BucketError as error:
        path.unlink(missing_ok=True)
        if error.passing:
            raise
        return {}, False
    return {number: BlockAt(*at) for number, at in read_blocks(path).items()}, True


def _check_ahead(store: Path, url: str, head: Head | None, before: Path, takes_over: bool
                 ) -> tuple[int, int]:
    """The number of captures that the head has and the store does not have; FencedError where that must not be.

    What was deleted in the bucket since this folder pushed is deleted here, and counted second. A take-over does not
    bring back a capture either that a later push deleted.
    """
    follows = head is not None and head.origin != "" and not takes_over
    if not before.exists():
        if follows:
            raise FencedError("push to", url, "captures were deleted there, and its catalog, which names them, is lost "
                              "or damaged", "delete them here too, with vllm-tap rm; then push with --take-over")
        return 0, 0
    ahead = ahead_of(store, before)
    if ahead.undeleted and takes_over:
        raise FencedError("push to", url, f"{len(ahead.undeleted):,} captures that are in {store} were deleted there, "
                          f"{ahead.undeleted[0]} first", "a deleted capture does not come back: vllm-tap rm "
                          "deletes them here too; then take over")
    if not takes_over and (ahead.missing or (ahead.undeleted and not follows)):
        what = (f"{ahead.missing:,} captures that {store} has not whole, {ahead.first_missing} first" if ahead.missing
                else f"deleted {len(ahead.undeleted):,} captures that {store} still has, {ahead.undeleted[0]} first")
        raise FencedError("push to", url, f"its head has {what}: the folder was put back to an earlier state",
                          TAKE_OVER)
    if follows and ahead.undeleted:
        try:
            delete(store, ahead.undeleted)
        except ConflictError as error:
            raise FencedError("push to", url, f"captures were deleted there, and here {error}",
                              "a deleted capture does not come back: vllm-tap release lifts the hold") from None
    return ahead.missing, len(ahead.undeleted)


def _bring(going: _Push, snapshot: Path) -> Left:
    """Bring up all blocks of one moment of the catalog, and leave in ``snapshot`` what is whole in them."""
    for _ in range(_MOMENTS):
        deadline = time.monotonic() + erasing_s_max
        while True:
            copy_catalog(going.store, snapshot)
            if not waiting(snapshot):
                break
            if time.monotonic() > deadline:
                raise StoreError("push", going.store, "rows of deleted captures are still to be erased",
                                 "let a writer run on the store for a moment: it erases them")
            time.sleep(0.2)
        try:
            numbers = sealed(snapshot)
            _bring_blocks(going, numbers)
        except _GoneError:
            continue
        if not is_outdated(going.store, snapshot):
            return restrict(snapshot, {number: going.done[number] for number in numbers})
    raise StoreError("push", going.store, f"captures were deleted, or blocks compacted, {_MOMENTS} times meanwhile",
                     "try again when it is calmer: what went up is not sent again")


def _bring_blocks(going: _Push, numbers: list[int]) -> None:
    folders = {number: going.store / block_name(number) for number in numbers}
    try:
        nbytes = {number: sum(path.stat().st_size for path in files_of(folder).values())
                  for number, folder in folders.items()}
        done, total = 0, sum(nbytes.values())
        for number, folder in folders.items():
            going.tell(done, total)
            if (away := read_away(going.store, number)) is not None:
                going.done[number] = named_block(going.sender, away)
            else:
                with keep_read_times(folder):
                    going.done[number] = send_block(going.sender, number, folder)
            done += nbytes[number]
        going.tell(done, total)
    except FileNotFoundError:
        raise _GoneError from None


def _commit(going: _Push, snapshot: Path) -> tuple[Head, bool]:
    """Put the snapshot, and then the head in the place of the one before, if that is still there; the head, and whether
    it is new.
    """
    objects, before = going.objects, going.seen.head
    catalog = hash_file(snapshot)
    is_same = before is not None and before.catalog == catalog
    if before is not None and is_same and going.head_is_whole and not going.takes_over:
        return before, False
    packed = snapshot.with_suffix(".gz")
    pack_file(snapshot, packed)
    epoch, erased_epoch = going.sender.epoch, 0 if before is None else before.erased_epoch
    if going.seen.had_objects and newly_deleted(snapshot, snapshot.with_name("before.sqlite")):
        erased_epoch = epoch + 1
    head = Head(FORMAT, VERSION, going.uuid.hex(), secrets.token_hex(16), None if before is None else before.push,
                1 if before is None else before.generation + 1, time.time_ns() // 1_000_000, catalog,
                packed.stat().st_size, max(epoch, erased_epoch),
                before.catalog_epoch if before is not None and is_same else epoch, erased_epoch=erased_epoch)
    if not going.head_is_whole or going.seen.there.get(head.catalog_key) != head.packed_bytes:
        objects.put(head.catalog_key, lambda: pieces(packed))
    fetch_snapshot(objects, head, snapshot.with_suffix(".read-back"))
    objects.check_conditions(CONDITIONS)
    if before is not None and going.takes_over:
        objects.put(retired_key(before.push), msgspec.json.encode(before))
    going.known.begin(head)
    try:
        objects.swap(HEAD, msgspec.json.encode(head), going.seen.version)
    except BucketError as error:
        return _head_after(going, head, error)
    going.known.settle(head)
    return head, True


def _head_after(going: _Push, head: Head, error: BucketError) -> tuple[Head, bool]:
    """The head after a write of it that failed: the answer may have been lost, and the head may be ours all the same.
    """
    objects, before = going.objects, going.seen.head
    try:
        now, _ = fetch_head(objects)
    except FileNotFoundError:
        raise error from None
    if now.store != head.store:
        raise OutrunError("push to", objects.url, f"another store, {now.store}, was pushed there first", _OWN_PREFIX
                          ) from None
    if now.push == head.push:
        going.known.settle(now)
        return now, True
    if now == before:
        raise error
    if before is not None and now.push == before.push:
        raise OutrunError("push to", objects.url, "what no head names was removed meanwhile",
                          "push again: what went up meanwhile is sent again") from None
    if not going.known.has(now):
        raise OutrunError("push to", objects.url, f"another push was first, generation {now.generation}, from a copy "
                          "of this folder", TAKE_OVER) from None
    if now.catalog == head.catalog:
        return now, False  # another of this folder said the same
    raise OutrunError("push to", objects.url, f"another push was first, generation {now.generation}",
                      "push again: what went up is not sent again") from None
