"""Places of stores: a folder, the URL of a bucket's prefix, or all the stores one level below a prefix (``URL/*``)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from schemas import limits
from schemas.errors import ArgumentError, BucketError, LimitError, NoHeadError
from schemas.objects.layout import CATALOGS, HEAD, RETIRED
from schemas.objects.objects import Objects

__all__ = ["Place", "Stores", "check_places", "every_store", "folders_below", "holds_stores", "is_url", "lost_its_head",
           "places_of", "prefix_of", "shown_places"]

Place = str | Path
Stores = Place | Sequence[Place]  # one, or several that are read as one
_EVERY = "/*"


def is_url(place: Place) -> bool:
    """Whether a place is in a bucket."""
    return isinstance(place, str) and "://" in place


def every_store(url: str) -> str:
    """The name of all the stores one level below a prefix."""
    return url.rstrip("/") + _EVERY


def prefix_of(place: Place) -> str | None:
    """The prefix below which a place names all stores; None of one store."""
    return str(place).removesuffix(_EVERY) if is_url(place) and str(place).endswith(_EVERY) else None


def places_of(stores: Stores) -> Sequence[Place]:
    """The places, of one store too."""
    return [stores] if isinstance(stores, str | Path) else stores


def shown_places(stores: Stores) -> str:
    """Places in words."""
    return ", ".join(map(str, places_of(stores)))


def check_places(places: Sequence[Place]) -> None:
    """ArgumentError where no store is named, or one twice; LimitError where too many are."""
    names = [str(place) for place in places]
    if not names or "" in names:
        raise ArgumentError("store", list(places), "valid: a folder or the URL of a bucket, or several of them")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ArgumentError("store", twice, "it is named twice")
    if len(names) > limits.stores_max:
        raise LimitError("stores that are read as one", len(names), limits.stores_max)


def folders_below(prefix: str, answer_s: float | None = None) -> list[str]:
    """The URLs of the folders one level below a prefix, among which its stores are.

    BucketError where the prefix has a store itself, NoHeadError where that has lost its head; LimitError over
    ``limits.stores_max`` folders.
    """
    with closing(Objects(prefix, answer_s=answer_s)) as objects:
        names = objects.folders()
        if has_head(objects):
            raise BucketError("list stores", prefix, "it holds a store itself, and stores below that",
                              "name each of them, without '*'")
    if {CATALOGS, RETIRED} & set(names):
        raise NoHeadError("list stores", prefix, f"it holds objects of a store, and no {HEAD}",
                          "push that store again, or name each store, without '*'")
    if len(names) > limits.stores_max:
        raise LimitError(f"folders below {prefix}", len(names), limits.stores_max, "name the stores, without '*'")
    return [f"{prefix}/{quote(name, safe='')}" for name in names]


def holds_stores(url: str, answer_s: float | None = None) -> bool:
    """Whether there are stores one level below a URL, or may be in a folder that cannot be read."""
    if "://" not in url or "#" in url:
        return False
    try:
        folders = folders_below(url.rstrip("/"), answer_s)
    except (BucketError, LimitError):  # that no store is at the URL itself is told
        return False
    for folder in folders:
        with closing(Objects(folder, answer_s=answer_s)) as objects:
            try:
                if has_head(objects):
                    return True
            except BucketError:
                return True
    return False


def has_head(objects: Objects) -> bool:
    """Whether there is the head of a store."""
    try:
        objects.get(HEAD, limits.bucket_head_bytes_max)
    except FileNotFoundError:
        return False
    return True


def lost_its_head(url: str, answer_s: float | None = None) -> bool:
    """Whether a prefix without a head has catalogs of a store: its head was removed, or its first push is ending."""
    with closing(Objects(url, answer_s=answer_s)) as objects:
        return bool({CATALOGS, RETIRED} & set(objects.folders()))
