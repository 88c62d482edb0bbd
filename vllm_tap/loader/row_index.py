"""The rows of a store that a training run reads, and the place of each: arrays alone, so that workers share them.

Rows are numbered in the order in which they lie on the disk (segment, frame, row). That order is cut into units of at
most ``BLOCK_ROWS`` neighbours, which are read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from schemas.bucket.reader import BucketReader
from schemas.catalog.records import Segment
from schemas.errors import ArgumentError, NotFoundError
from schemas.manifest import ELSEWHERE
from schemas.read.reader import CaptureRow, Places, StoreReader
from schemas.read.slices import RowFormat
from schemas.sites import parse_site, site_named
from vllm_tap.client.captures import Layers, layers_of
from vllm_tap.client.listing import Filters, Where, wanted
from vllm_tap.errors import MissingRows
from vllm_tap.progress import ProgressReport, reporting

__all__ = ["BLOCK_ROWS", "InBucket", "RowIndex", "build_index", "keys_of", "name_of", "only", "relocated"]

BLOCK_ROWS: Final = 128
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Key = tuple[str, int]  # (site, layer)
Found = tuple[str, dict[str, list[Places]]]  # a capture, and by site the places of its rows' columns


@dataclass(frozen=True, slots=True)
class InBucket:
    """A store in a bucket, which every process opens for itself; ``push``: the head that an index was made of."""

    url: str
    cache: str | Path | None = None
    cache_bytes: int | None = None
    push: str = ""
    catalog: str | None = field(default=None, repr=False)  # the URL of a Postgres database; it may hold a password

    def __str__(self) -> str:
        return self.url

    def open(self, sweepers: int = 0) -> BucketReader:
        """A reader, of the head that there is now."""
        return BucketReader(self.url, self.cache, self.cache_bytes, sweepers=sweepers, catalog=self.catalog)


@dataclass(frozen=True, slots=True)
class RowIndex:
    """The places of ``rows`` rows, each of which has all ``keys``. Where ranks share out the columns of a key, the key
    is there once for each rank, from the left to the right; ``share`` counts these.

    ``store`` is the folder; of a store in a ``bucket``, the folder of its cache. ``order`` is a digest of which row has
    which number: of ids, ``capture`` and ``position``. ``cache`` and ``cache_bytes`` are for rows of a folder that were
    evicted to a bucket.

    ``frames`` int64 ``[frames, 2]``: segment and byte offset. By key, int32 ``[rows]``: ``frame`` (a row of ``frames``)
    and ``row`` (of that frame). ``capture`` int32 ``[rows]`` counts in ``captures``; ``position`` uint32 ``[rows]``.
    """

    store: Path
    uuid: bytes
    keys: tuple[Key, ...]
    kinds: tuple[RowFormat, ...]
    share: tuple[int, ...]
    captures: list[str]
    segments: dict[int, Segment]
    frames: I64
    frame: tuple[I32, ...]
    row: tuple[I32, ...]
    capture: I32
    position: npt.NDArray[np.uint32]
    order: str
    bucket: InBucket | None = None
    cache: str | Path | None = None
    cache_bytes: int | None = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.position)

    @property
    def place(self) -> Path | InBucket:
        """The store."""
        return self.store if self.bucket is None else self.bucket

    @property
    def names(self) -> list[str]:
        """``site.layer`` of the keys, each once."""
        return list(dict.fromkeys(map(name_of, self.keys)))

    def width(self, name: str) -> int:
        """Numbers that a row of a key decodes to."""
        return sum(kind.decoded_width for key, kind in zip(self.keys, self.kinds, strict=True) if name_of(key) == name)


def name_of(key: Key) -> str:
    """``site.layer``, as arrays are named everywhere."""
    return f"{key[0]}.{key[1]}"


def keys_of(site: str | Sequence[str], layer: Layers) -> tuple[Key, ...]:
    """Sites × layers; a name that fixes a layer stands for itself. SpecError where a layer is not named."""
    names = [site] if isinstance(site, str) else list(site)
    layers = layers_of(layer)
    keys: list[Key] = []
    for name in names:
        parsed, fixed = parse_site(name, "site", ArgumentError)
        if not site_named(parsed).per_layer:
            fixed = 0
        if fixed is None and not layers:
            raise ArgumentError("layer", layer,
                                f"name a layer of {name}: 12, or blocks.12.hook_… as its name")
        keys += [(parsed, number) for number in ([fixed] if fixed is not None else layers or ())]
    if not keys or len(set(keys)) != len(keys):
        raise ArgumentError("site", site, "name at least one site and layer, each once")
    return tuple(keys)


def build_index(store: str | Path | InBucket, keys: tuple[Key, ...], where: Where = None, codec: str | None = None,
                progress: ProgressReport = False, allow_missing: bool = True) -> RowIndex:
    """The rows of all captures that have ended, that ``where`` chooses and that have every key.

    ``codec`` leaves out captures whose rows are stored otherwise. NotFoundError where nothing is left, SpecError where
    what is left is stored in more than one way; MissingRows where one lacks rows of a key and not ``allow_missing``.
    """
    by_site: dict[str, list[int]] = {}
    for site, layer in keys:
        by_site.setdefault(site, []).append(layer)
    with store.open() if isinstance(store, InBucket) else StoreReader(store) as reader:
        listed = [row for row in Filters().of(reader)
                  if row.status in ("complete", "incomplete") and set(by_site) <= set(row.sites) and wanted(where, row)]
        listed.sort(key=lambda row: (row.created_ms, row.id))
        found: list[Found] = []
        with reporting(progress, "indexing") as tell:
            for done, row in enumerate(listed, 1):
                if (places := _places(reader, row, by_site, codec, allow_missing)) is not None:
                    found.append((row.id, places))
                tell(done, len(listed))
        if not found:
            chosen = "" if where is None else f" that where = {where!r} chooses"
            raise NotFoundError(f"no rows of {', '.join(map(name_of, keys))} in {store}: " + (
                f"of {len(listed)} captures with these sites{chosen} none has the layers" if listed else
                f"no capture that has ended{chosen} has these sites") + (f" as {codec}" if codec else "")
                + "; look at vllm-tap ls")
        kinds = {site: _kinds(found, site) for site in by_site}
        segments = sorted({int(number) for _, places in found for parts in places.values() for part in parts
                           for number in np.unique(part.segment)})
        made = _joined(reader, keys, kinds, found, {number: reader.segment(number) for number in segments})
        if isinstance(reader, BucketReader) and isinstance(store, InBucket):
            return replace(made, bucket=replace(store, push=reader.head.push))
        return made


def _check_whole(reader: StoreReader | BucketReader, row: CaptureRow, by_site: dict[str, list[int]]) -> None:
    """MissingRows where a capture lacks rows that it was asked for; none of what is in another store."""
    try:
        layers = reader.manifest(row.id).rows
    except NotFoundError:
        return  # deleted meanwhile
    for each in layers:
        lacks = [gap for gap in each.missing if gap.reason != ELSEWHERE]
        if lacks and each.layer in by_site.get(each.site, ()):
            raise MissingRows(row.id, f"{each.site}, layer {each.layer}", lacks)


def _places(reader: StoreReader | BucketReader, row: CaptureRow, by_site: dict[str, list[int]], codec: str | None,
            allow_missing: bool) -> dict[str, list[Places]] | None:
    """The places, by site, of the positions that all sites have; None where there are none."""
    try:
        places = {site: reader.places(row.id, site, layers) for site, layers in by_site.items()}
    except NotFoundError:
        return None  # deleted meanwhile, or captured in other layers
    if codec is not None and any(part.codec != codec for part, *_ in places.values()):
        return None
    if not allow_missing and row.status == "incomplete":
        _check_whole(reader, row, by_site)
    common = next(iter(places.values()))[0].positions
    for part, *_ in places.values():
        common = np.intersect1d(common, part.positions, assume_unique=True)
    if not len(common):
        return None
    return {site: [_only(part, common) for part in parts] for site, parts in places.items()}


def _only(part: Places, common: npt.NDArray[np.uint32]) -> Places:
    kept = np.isin(part.positions, common)
    if kept.all():
        return part
    return replace(part, positions=common, segment=part.segment[:, kept], offset=part.offset[:, kept],
                   row=part.row[:, kept])


def _kinds(found: list[Found], site: str) -> tuple[RowFormat, ...]:
    """The formats in which all captures store a site's rows: in one piece, or by the columns that each rank has."""
    kinds = {tuple(RowFormat(part.codec, part.dtype, part.width) for part in places[site]) for _, places in found}
    if len(kinds) > 1:
        shown = "; ".join(sorted(f"{kind[0].codec}, {kind[0].dtype}, width "
                                 + " + ".join(str(part.width) for part in kind) for kind in kinds))
        raise ArgumentError("codec", None,
                            f"{site} is stored in several ways ({shown}): choose with codec=… or where=…")
    return kinds.pop()


def _joined(reader: StoreReader | BucketReader, asked: tuple[Key, ...], kinds: dict[str, tuple[RowFormat, ...]],
            found: list[Found], segments: dict[int, Segment]) -> RowIndex:
    """Everything in one, in the order of the disk."""
    sites = [site for site, _ in asked]
    member = [sites[:number].count(site) for number, site in enumerate(sites)]  # which of its site's layers a key is
    stored = [(key, at, share) for key, at in zip(asked, member, strict=True) for share in range(len(kinds[key[0]]))]
    where = [np.concatenate([_address(places[site][share], at) for _, places in found])
             for (site, _), at, share in stored]
    first = next(iter(found[0][1]))
    lengths = [len(places[first][0].positions) for _, places in found]
    capture = np.repeat(np.arange(len(found), dtype=np.int32), lengths)
    position = np.concatenate([places[first][0].positions for _, places in found])
    order = np.lexsort((where[0][:, 2], where[0][:, 1], where[0][:, 0]))
    frames, frame, row = _by_frame([part[order] for part in where])
    names, capture, position = [name for name, _ in found], capture[order], position[order]
    keys, share = tuple(key for key, _, _ in stored), tuple(number for _, _, number in stored)
    formats = tuple(kinds[site][number] for (site, _), _, number in stored)
    return RowIndex(reader.path, reader.uuid, keys, formats, share, names, segments, frames, frame, row, capture,
                    position, _digest(names, capture, position))


def _digest(names: list[str], capture: I32, position: npt.NDArray[np.uint32]) -> str:
    hashed = xxhash.xxh3_64("\n".join(names).encode())
    hashed.update(capture.astype("<i4", copy=False).data)
    hashed.update(position.astype("<u4", copy=False).data)
    return str(hashed.hexdigest())


def _by_frame(where: list[I64]) -> tuple[I64, tuple[I32, ...], tuple[I32, ...]]:
    """The frames of addresses ``[rows, 3]`` by key; and of each key the rows' frames among them and rows in these."""
    frames, numbers = np.unique(np.concatenate([part[:, :2] for part in where]), axis=0, return_inverse=True)
    frame = list(numbers.reshape(len(where), -1).astype(np.int32))
    row = [part[:, 2].astype(np.int32) for part in where]
    for number in range(len(where)):
        for before in range(number):  # layers of a site nearly always lie in the same rows
            if np.array_equal(frame[before], frame[number]) and np.array_equal(row[before], row[number]):
                frame[number], row[number] = frame[before], row[before]
                break
    return frames, tuple(frame), tuple(row)


def only(index: RowIndex, rows: I64) -> RowIndex:
    """An index of some rows of another, in the order given, with only the parts of it that they need."""
    used, numbered = np.unique(index.capture[rows], return_inverse=True)
    names, capture = [index.captures[number] for number in used], numbered.astype(np.int32)
    position = index.position[rows]
    frame = {id(part): part[rows] for part in index.frame}  # keys that lie alike have the same arrays
    row = {id(part): part[rows] for part in index.row}
    numbers = np.unique(np.concatenate(list(frame.values())))
    moved = {part: np.searchsorted(numbers, old).astype(np.int32) for part, old in frame.items()}
    frames = index.frames[numbers]
    return replace(index, captures=names, frames=frames, capture=capture, position=position,
                   segments={number: index.segments[number] for number in np.unique(frames[:, 0]).tolist()},
                   frame=tuple(moved[id(part)] for part in index.frame), row=tuple(row[id(part)] for part in index.row),
                   order=_digest(names, capture, position))


def relocated(index: RowIndex, reader: BucketReader | None = None) -> RowIndex:
    """The same rows, in the same order, at the places where they are now: compaction moves them, and erasing beside
    them may.

    ``reader`` is that of a bucket. NotFoundError where a row is not there any more, because its capture was deleted.
    """
    layers: dict[str, list[int]] = {}
    for site, layer in dict.fromkeys(index.keys):
        layers.setdefault(site, []).append(layer)
    where = [np.empty((index.rows, 3), np.int64) for _ in index.keys]
    order = np.argsort(index.capture, kind="stable")
    with StoreReader(index.store) if reader is None else nullcontext(reader) as now:
        for begin, end in pairwise(np.searchsorted(index.capture[order], np.arange(len(index.captures) + 1)).tolist()):
            rows = order[begin:end]
            if not len(rows):
                continue
            capture = index.captures[int(index.capture[rows[0]])]
            places = {site: now.places(capture, site, members) for site, members in layers.items()}
            for number, (site, layer) in enumerate(index.keys):
                part, wanted = places[site][index.share[number]], index.position[rows]
                at = np.searchsorted(part.positions, wanted)
                last = len(part.positions) - 1
                if last < 0 or not np.array_equal(part.positions[np.minimum(at, last)], wanted):
                    raise NotFoundError(f"rows of {name_of((site, layer))} of capture {capture} are not there any more")
                where[number][rows] = _address(part, layers[site].index(layer))[at]
        segments = {int(number): now.segment(int(number)) for part in where for number in np.unique(part[:, 0])}
    frames, frame, row = _by_frame(where)
    return replace(index, segments=segments, frames=frames, frame=frame, row=row)


def _address(part: Places, layer: int) -> I64:
    return np.stack([part.segment[layer], part.offset[layer], part.row[layer]], axis=1)
