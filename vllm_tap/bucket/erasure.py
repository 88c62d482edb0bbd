"""Deletion by a push: objects that no head names any more, because a capture was deleted since they went up.

They belong to epochs that are over, so no head will ever name them again. If a push is cut off here, the next one
deletes the rest. The head tells it which epochs to look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from schemas.bucket.snapshots import fetch_snapshot, knows_deleted, read_blocks
from schemas.errors import BucketError
from schemas.objects.layout import RETIRED, Head, epoch_of, folder_of
from schemas.objects.objects import Objects
from vllm_tap.bucket.inventory import read_heads, retired_of

__all__ = ["Erased", "erase"]


@dataclass(slots=True)
class Erased:
    """Counts of what was deleted. ``retired`` names retired heads that still have captures that were deleted, and heads
    that cannot be read. Nothing is deleted while one cannot be read.
    """

    objects: int = 0
    nbytes: int = 0
    retired: list[str] = field(default_factory=list)


def erase(objects: Objects, head: Head, snapshot: Path, there: Mapping[str, int], took_over: str | None) -> Erased:
    """Delete objects of epochs before the last deletion that neither ``head`` nor a retired head names.

    ``snapshot`` is that of ``head``, ``there`` a listing of the bucket. ``took_over``: the push that was taken over
    from.
    """
    done = Erased()
    named = {key for key, _ in read_blocks(snapshot).values()} | {head.catalog_key}
    gone = [key for key in there if (epoch := epoch_of(key)) is not None and epoch < head.erased_epoch
            and folder_of(key) not in named]
    pushes = sorted({push for key in there if key.startswith(f"{RETIRED}/") and (push := retired_of(key))}
                    | ({took_over} if took_over else set()))
    if not gone and not (pushes and head.erased_epoch == head.epoch):
        return done
    unknown = False
    for push, found in read_heads(objects, pushes):
        path = snapshot.with_name(f"retired-{push}.sqlite")
        try:
            if isinstance(found, BucketError):
                raise found
            fetch_snapshot(objects, found, path)
        except BucketError as error:
            if error.passing:
                raise
            done.retired.append(push)
            unknown = True
            continue
        named |= {key for key, _ in read_blocks(path).values()} | {found.catalog_key}
        if knows_deleted(path, snapshot):
            done.retired.append(push)
        path.unlink()
    if not unknown:
        gone = [key for key in gone if folder_of(key) not in named]
        objects.delete(gone)
        done.objects, done.nbytes = len(gone), sum(there[key] for key in gone)
    return done
