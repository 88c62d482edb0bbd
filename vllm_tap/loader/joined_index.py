"""The rows of several stores as one index: those of each store after the other's, in the order of the stores' uuids.

A segment's number is its store's own, so each store keeps an index of its own, and is read by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from schemas.bucket.places import is_url, prefix_of
from schemas.bucket.reader import open_reader, share_of, stores_of
from schemas.errors import ArgumentError, ConflictError, NotFoundError
from schemas.read.captures import CaptureRow
from schemas.read.slices import RowFormat
from vllm_tap.loader.row_index import I32, InBucket, Key, RowIndex, build_index
from vllm_tap.progress import ProgressReport
from vllm_tap.store import Store, folder_of

__all__ = ["AnyIndex", "JoinedIndex", "OneStore", "check_once", "index_each", "joined", "stores_named"]

OneStore = Path | InBucket


@dataclass(frozen=True, slots=True)
class JoinedIndex:
    """Two stores' rows, or more; arrays and ``order`` as of a RowIndex, over all of them."""

    parts: tuple[RowIndex, ...]
    captures: list[str]
    capture: I32
    position: npt.NDArray[np.uint32]
    order: str

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.position)

    @property
    def keys(self) -> tuple[Key, ...]:
        """Same as for each store, and so are these."""
        return self.parts[0].keys

    @property
    def kinds(self) -> tuple[RowFormat, ...]:
        return self.parts[0].kinds

    @property
    def names(self) -> list[str]:
        return self.parts[0].names

    def width(self, name: str) -> int:
        return self.parts[0].width(name)


AnyIndex = RowIndex | JoinedIndex


def stores_named(store: object) -> list[OneStore]:
    """The stores that a caller means: a folder, a URL, several, all below ``URL/*``, or those of an open Store."""
    given, cache, cache_bytes = store.opened if isinstance(store, Store) else (store, None, None)
    if isinstance(store, Store):
        names = store.stores
    elif isinstance(given, str | Path) and not is_url(given):
        names = [str(folder_of(given))]
    elif isinstance(given, str | Path) and prefix_of(given) is None and "#" in str(given):
        names = [str(given)]
    else:
        with open_reader(given) as reader:  # type: ignore[arg-type]  # what is no place is refused
            names = stores_of(reader, given)  # type: ignore[arg-type]
    share, catalog = share_of(cache_bytes, len(names)), store.catalog if isinstance(store, Store) else None
    return [InBucket(name, cache, share, catalog=catalog) if is_url(name) else Path(name) for name in names]


def index_each(stores: Sequence[OneStore], keys: tuple[Key, ...], wanted: Callable[[int, CaptureRow], bool],
               codec: str | None, progress: ProgressReport, allow_missing: bool) -> list[RowIndex]:
    """An index for each store that has rows of captures that are ``wanted``, by the store's number, in their order.

    What ``build_index`` raises, NotFoundError only where no store has rows; SpecError where stores hold rows of
    different kinds.
    """
    found: list[RowIndex] = []
    nothing: NotFoundError | None = None
    for number, store in enumerate(stores):
        def is_here(row: CaptureRow, number: int = number) -> bool:
            return wanted(number, row)

        try:
            found.append(build_index(store, keys, is_here, codec, progress, allow_missing))
        except NotFoundError as error:
            nothing = error
    if not found:
        raise NotFoundError(f"none of {len(stores)} stores has such rows; the last: {nothing}")
    for other in found[1:]:
        if (other.kinds, other.keys) != (found[0].kinds, found[0].keys):
            raise ArgumentError("codec", codec, f"{found[0].place} and {other.place} hold rows of different kinds: "
                                                "choose with codec=… or where=…")
    return found


def joined(indexes: Sequence[RowIndex]) -> AnyIndex:
    """One index of all; ConflictError where two have one capture."""
    parts = tuple(sorted(indexes, key=lambda index: index.uuid))
    if len(parts) == 1:
        return parts[0]
    check_once(parts)
    firsts = np.cumsum([0, *(len(part.captures) for part in parts[:-1])])
    order = xxhash.xxh3_64("".join(part.uuid.hex() + part.order for part in parts).encode())
    numbers = [part.capture + np.int32(first) for part, first in zip(parts, firsts, strict=True)]
    return JoinedIndex(parts, [capture for part in parts for capture in part.captures], np.concatenate(numbers),
                       np.concatenate([part.position for part in parts]), order.hexdigest())


def check_once(parts: Sequence[RowIndex]) -> None:
    """ConflictError where two indexes have rows of one capture."""
    home: dict[str, RowIndex] = {}
    for part in parts:
        for capture in part.captures:
            if (other := home.setdefault(capture, part)) is not part:
                raise ConflictError(f"capture {capture} is in several stores, {other.place} and {part.place}: its rows "
                                    "would be counted twice; leave one out with where=…, or delete it there")


def with_parts(index: JoinedIndex, parts: Sequence[RowIndex]) -> JoinedIndex:
    """The same rows, where they lie by now."""
    return replace(index, parts=tuple(parts))
