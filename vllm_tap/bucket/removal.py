"""Removal of objects that no head of a bucket names, while others push.

First the epoch ends, by a conditional write of the head. A push that began before fails in its own write of the head. A
push that begins later gives names of the new epoch to what it sends. Then everything is listed. Objects of past epochs
that no head names are deleted. No head will ever name them again, so a deletion does no harm however late it comes.
"""

from __future__ import annotations

import secrets
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from schemas.bucket.snapshots import fetch_snapshot
from schemas.errors import ArgumentError, BucketError, OutrunError
from schemas.objects.layout import CATALOGS, CONDITIONS, HEAD, VERSION, Head, folder_of, retired_key
from schemas.objects.objects import Objects, Version, keeps_versions
from vllm_tap.bucket.check import BucketReport, Tell, current_head, examine
from vllm_tap.bucket.inventory import Inventory, read_heads, retired_of

__all__ = ["Sweeper", "Swept", "forget", "remove_orphans", "replace_head"]


def remove_orphans(url: str, older_than_s: float, deep: bool = False,
                   tell: Tell = lambda done, total: None) -> BucketReport:
    """Check a bucket, and delete objects that no head names, in folders that nobody wrote to for ``older_than_s`` by
    the service's clock.

    OutrunError where a push was first. BucketError where a head cannot be read, because its names are then unknown.
    """
    objects = Objects(url)
    try:
        head = _end_epoch(objects)
        with tempfile.TemporaryDirectory(prefix="vllm-tap-fsck-") as work, closing(
                Inventory(objects, Path(work) / "objects.sqlite")) as inventory:
            report = examine(objects, head, inventory, Path(work), deep, tell)
            report.is_versioned = keeps_versions(current_head(objects)[1])
            for bad in report.bad:
                if retired_of(bad.key) or bad.key.startswith(f"{CATALOGS}/"):
                    raise BucketError("remove orphans from", objects.url, f"{bad.key}: {bad.what}",
                                      "push again, which sends it anew; fsck --forget PUSH gives up a retired head")
            swept = _delete(objects, inventory, head, older_than_s)
            report.removed, report.removed_bytes = swept.objects, swept.nbytes
        return report
    finally:
        objects.close()


@dataclass(frozen=True, slots=True)
class Swept:
    """Objects that were deleted, and their bytes."""

    url: str
    objects: int = 0
    nbytes: int = 0


class Sweeper:
    """Deletes orphans of a bucket, from time to time: those that it found at the last call too. So whoever reads by an
    earlier head has had that long to move on.
    """

    def __init__(self, url: str) -> None:
        self._url, self._found = url, set[str]()

    def __call__(self) -> Swept:
        """Delete what no head has named since the last call, without a look at anything else. No epoch ends where there
        is nothing to delete. Errors as of ``remove_orphans``.
        """
        objects = Objects(self._url)
        try:
            head, _ = current_head(objects)
            with _listed(objects, head) as inventory:
                found = {folder_of(key) for part in inventory.removable(head.epoch + 1, _before_ms(objects, 0))
                         for key, _ in part}
            due, self._found = found & self._found, found
            if not due:
                return Swept(objects.url)
            head = _end_epoch(objects)
            with _listed(objects, head) as inventory:
                return _delete(objects, inventory, head, 0, due)
        finally:
            objects.close()


@contextmanager
def _listed(objects: Objects, head: Head) -> Iterator[Inventory]:
    """A listing that knows what this head and all retired ones name; BucketError where one cannot be read."""
    with tempfile.TemporaryDirectory(prefix="vllm-tap-sweep-") as work, closing(
            Inventory(objects, Path(work) / "objects.sqlite")) as inventory:
        snapshot = Path(work) / "snapshot.sqlite"
        for found in (head, *(found for _, found in read_heads(objects, inventory.retired()))):
            if isinstance(found, BucketError):
                raise found
            fetch_snapshot(objects, found, snapshot)
            inventory.name_snapshot(found, snapshot)
            snapshot.unlink()
        yield inventory


def _before_ms(objects: Objects, older_than_s: float) -> int:
    """The time so many seconds ago, by the clock of the service, which may tell whole seconds of one object and finer
    times in a listing.
    """
    return objects.modified_ms(HEAD) + 999 - int(older_than_s * 1000)


def _delete(objects: Objects, inventory: Inventory, head: Head, older_than_s: float, folders: set[str] | None = None
            ) -> Swept:
    """Delete orphans of earlier epochs, in these folders alone where they are given."""
    removed = nbytes = 0
    for page in inventory.removable(head.epoch, _before_ms(objects, older_than_s)):
        part = [each for each in page if folders is None or folder_of(each[0]) in folders]
        objects.delete([key for key, _ in part])
        removed, nbytes = removed + len(part), nbytes + sum(size for _, size in part)
    return Swept(objects.url, removed, nbytes)


def _end_epoch(objects: Objects) -> Head:
    """Write the head anew, as it is but for its epoch."""
    head, seen = current_head(objects)
    made = msgspec.structs.replace(head, version=max(head.version, VERSION), epoch=head.epoch + 1,
                                   fence=secrets.token_hex(16))
    replace_head("remove orphans from", objects, head, made, seen, "a push")
    return made


def replace_head(op: str, objects: Objects, before: Head, made: Head, seen: Version, others: str) -> None:
    """Write a head in the place of the one before. OutrunError where that is not there any more: ``others`` were first.
    """
    objects.check_conditions(CONDITIONS)
    try:
        objects.swap(HEAD, msgspec.json.encode(made), seen)
    except BucketError as error:
        now = current_head(objects)[0]
        if now == made:  # the answer was lost
            return
        if now == before:
            raise
        raise OutrunError(op, objects.url, f"{others} was first", "try again") from error


def forget(url: str, push: str) -> int:
    """Give up a retired head, and return how many captures were in it alone. No head may name its objects from then on.

    ArgumentError where there is none, or it has captures on hold that the current head does not have.
    """
    objects = Objects(url)
    try:
        if retired_of(retired_key(push)) is None:
            raise ArgumentError("--forget", push, "the 32 hex digits of a retired head, as fsck lists them")
        head, _ = current_head(objects)
        found = dict(read_heads(objects, [push])).get(push)
        if found is None:
            raise ArgumentError("--forget", push, f"{objects.url} has no such retired head")
        if push == head.push:
            raise ArgumentError("--forget", push, "it is the current head as well: a take-over may be on its way")
        alone = _alone(objects, head, found) if isinstance(found, Head) else 0
        objects.delete([retired_key(push)])
        return alone
    finally:
        objects.close()


def _alone(objects: Objects, head: Head, retired: Head) -> int:
    """The number of captures that a retired head has and the current one never had; ArgumentError where one is on hold.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-tap-fsck-") as work:
        now, then = Path(work) / "now.sqlite", Path(work) / "then.sqlite"
        fetch_snapshot(objects, head, now)
        try:
            fetch_snapshot(objects, retired, then)
        except BucketError as error:
            if error.passing:
                raise
            return 0  # nobody can read it
        with closing(sqlite3.connect(then)) as db:
            db.execute("ATTACH ? AS now", (str(now),))
            alone = "FROM captures WHERE deleted = 0 AND id NOT IN (SELECT id FROM now.captures)"
            held = db.execute(f"SELECT MIN(id), COUNT(*) {alone} AND hold <> 0").fetchone()
            if held[1]:
                raise ArgumentError("--forget", retired.push, f"{held[1]:,} captures on hold are in it alone, "
                                    f"{held[0]} first: they are kept")
            return int(db.execute(f"SELECT COUNT(*) {alone}").fetchone()[0])
