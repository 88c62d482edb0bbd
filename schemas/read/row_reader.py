"""Rows of captures read from disk: slices of one, and any rows of any."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from schemas.catalog.records import Extent, Segment, load_segment
from schemas.catalog.view import Moment, View
from schemas.codecs import Stream
from schemas.errors import ArgumentError, CorruptError, NotFoundError, StoreError
from schemas.read.captures import CatalogReader, resolved_of
from schemas.read.coverage import LayerGroup, Rows, Shared
from schemas.read.coverage_cache import CoveredCapture
from schemas.read.manifests import shape_of
from schemas.read.row_copies import copy_rows
from schemas.read.row_locations import RowLocations, UnsettledError, in_blocks, joined, locate
from schemas.read.segment_maps import SegmentMaps
from schemas.read.slices import (
    DECODED,
    Part,
    Pick,
    Places,
    RowFormat,
    RowsAt,
    Slice,
    Which,
    check_layers,
    common_rows,
    missing_of,
)
from schemas.sites import BY_MODEL, ask_site, parse_site, site_meant
from schemas.store.paths import redo_name

__all__ = ["RowReader", "given_as", "row_format"]

T = TypeVar("T")
I64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Alike = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]  # which of the layers rows have; first column and width
settle_s_max: Final = 5.0  # a read waits at most so long for rows of others to be erased


class Placed(NamedTuple):
    """Columns of rows from ``start`` on: how and where they are stored."""

    start: int
    stored: RowFormat
    rows: RowLocations


class RowReader(CatalogReader):
    """A store's captures and their rows; safe for threads."""

    def __init__(self, path: str | Path, *, uuid: bytes | None = None, catalog: View | None = None,
                 maps: SegmentMaps | None = None) -> None:
        super().__init__(path, uuid=uuid, catalog=catalog)
        self._maps = maps or SegmentMaps(self.path, self.uuid)

    def close(self) -> None:
        """Release files; slices taken before stay valid."""
        with self._catalog.lock:
            super().close()
            self._maps.close()

    def tidy(self) -> None:
        """Let go of files that were removed since they were read, so that their bytes are free.

        A reader does so by itself while it reads on; one that rests should be told now and then.
        """
        self._maps.tidy()

    def refresh(self) -> bool:
        """See what was pushed to a bucket since; whether there was any. A store in a folder is always as it is."""
        return False

    @property
    def pushes(self) -> tuple[str, ...]:
        """The pushes whose heads are read; none of a store in a folder."""
        return ()

    # ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────

    def slice(
        self, ref: str, site: str, layers: Sequence[int], start: int = 0, stop: int | None = None,
        owner: str | None = None, rejected: bool = False,
    ) -> Slice:
        """Rows at positions ``[start, stop)`` of some layers of a site, clipped to what the capture can have.

        ``rejected``: instead of the sequence's own rows, those of drafts (speculative decoding) that were not accepted.
        They come by position and, where one was guessed at more than once, oldest first; ``token_ids`` are the guesses.

        LimitError over ``limits.slice_bytes_max`` of stored bytes; CorruptError where stored bytes do not match.
        """
        site = self.site_of(ref, site, owner)
        return self._settled(lambda: self._slice(ref, site, layers, start, stop, owner, rejected))

    def site_of(self, ref: str, name: str, owner: str | None = None) -> str:
        """The site that a name means on the model of a capture; ArgumentError of none."""
        key, _ = ask_site(name, "site", ArgumentError)
        return site_meant(key, self.names(ref, owner) if key in BY_MODEL else {}, name, "site", ArgumentError)

    def rows_at(self, rows: Sequence[tuple[str, int]], site: str, layers: Sequence[int], owner: str | None = None
                ) -> RowsAt:
        """Any rows, each named by its capture and position, of some layers of a site.

        NotFoundError names the first that is not there; SpecError where not all are stored in one way. LimitError and
        CorruptError as ``slice``. Faster by far than a slice a row: rows of a segment are copied together.
        """
        site = parse_site(site, "site", ArgumentError)[0]
        return self._settled(lambda: self._rows_at(rows, site, layers, owner))

    def _settled(self, read: Callable[[], T]) -> T:
        """Call ``read`` until it succeeds, or its error is no passing one.

        The writer may erase rows, and move or remove segments, at any moment of a read. A read that met it begins
        anew: then it sees the store after it.
        """
        deadline, waits = time.monotonic() + settle_s_max, iter((0.002, 0.01, 0.05))
        while True:
            try:
                return read()
            except UnsettledError as error:
                erasing = (self.path / redo_name(error.segment)).exists()
                wait = 0.005 if erasing else next(waits, None)
                if wait is None:
                    raise error.cause from None
                if erasing and time.monotonic() > deadline:
                    raise StoreError("read slice", self.path, f"rows beside these in segment {error.segment} are being "
                                     "erased", "a writer that was killed in the middle of it ends it at its next start"
                                     ) from None
                self._forget(error.segment)
            time.sleep(wait)

    def _forget(self, segment: int) -> None:
        """Look at a segment anew: its rows are others, or elsewhere."""
        with self._catalog.lock:
            self._maps.forget(segment)
            self._coverage_cache.forget(segment)

    def _slice(
        self, ref: str, site: str, layers: Sequence[int], start: int, stop: int | None, owner: str | None,
        rejected: bool,
    ) -> Slice:
        with self._catalog.moment() as now:
            covered = self._coverage_cache.of(now, ref, owner, site)
            stored = row_format(now, covered, site, layers)
        groups, end = covered.coverage.sites[site], covered.coverage.end
        first = max(start, 0)
        if rejected:  # guesses reach past the end
            end = max((int(group.rejected.positions.max(initial=-1)) + 1 for group in groups), default=0)
        last = max(end if stop is None else min(stop, end), first)
        clipped = start < 0 or (stop is not None and stop > end)
        positions, picks = common_rows(groups, layers, first, last, rejected)
        given = given_as(stored, picks)
        for each in {stored, given}:
            each.check_bytes(len(layers) * len(positions))
        parts = []
        for group, members, which in picks:
            placed = self._located(covered, site, stored, group, which, rejected)
            copied = self._copied(covered.segments, placed, [layers[i] for i in members], given)
            parts.append(Part(members, None, copied))
        located = placed[0].rows
        missing = [] if rejected else missing_of(groups, layers, first, last)
        return Slice(covered.capture.id, site, list(layers), given.codec, given.dtype, given.width, first, last,
                     positions.astype(np.uint32), located.token_ids, located.flags,
                     given.assembled(len(layers), len(positions), parts), missing, clipped)

    def _rows_at(self, rows: Sequence[tuple[str, int]], site: str, layers: Sequence[int], owner: str | None) -> RowsAt:
        refs, position = [ref for ref, _ in rows], np.array([position for _, position in rows], np.int64)
        number_of = {ref: number for number, ref in enumerate(dict.fromkeys(refs))}
        of = np.fromiter(map(number_of.__getitem__, refs), np.int64, len(refs))
        grouped = np.argsort(of, kind="stable")
        bounds = np.searchsorted(of[grouped], np.arange(len(number_of) + 1)).tolist()
        wanted = {ref: grouped[bounds[number]:bounds[number + 1]] for ref, number in number_of.items()}
        found, stored = self._stored_alike(list(wanted), site, layers, owner, len(rows))
        stored.check_bytes(len(layers) * len(rows))
        alike: dict[Alike, list[tuple[list[Placed], I64]]] = {}
        given = stored
        for ref, numbers in wanted.items():
            covered, asked = found[ref], position[numbers]
            groups = covered.coverage.sites[site]
            there, picks = common_rows(groups, layers, 0, covered.coverage.end, False)
            at = there.searchsorted(asked)
            known = there.take(at, mode="clip") == asked if len(there) else at < 0
            if not known.all():
                raise _no_row(covered, site, layers, int(asked[~known][0]))
            given = given if given != stored else given_as(stored, picks)
            for group, members, which in picks:
                chosen = at + which.start if isinstance(which, slice) else which[at]
                placed = self._located(covered, site, stored, group, chosen, False)
                columns = tuple((one.start, one.stored.width) for one in placed)
                alike.setdefault((tuple(members), columns), []).append((placed, numbers))
        given.check_bytes(len(layers) * len(rows))
        segments = {number: segment for covered in found.values() for number, segment in covered.segments.items()}
        token_ids, flags = np.empty((2, len(rows)), np.uint32)
        parts = []
        for (together, columns), places in alike.items():
            order = np.concatenate([numbers for _, numbers in places])
            ordered, at = np.argsort(order), np.sort(order)
            placed = [Placed(start, stored.of_columns(width), joined([part[share].rows for part, _ in places])[ordered])
                      for share, (start, width) in enumerate(columns)]
            token_ids[at], flags[at] = placed[0].rows.token_ids, placed[0].rows.flags
            copied = self._copied(segments, placed, [layers[i] for i in together], given)
            parts.append(Part(list(together), None if len(at) == len(rows) else at, copied))
        return RowsAt(site, list(layers), given.codec, given.dtype, given.width, token_ids, flags,
                      given.assembled(len(layers), len(rows), parts))

    def _stored_alike(self, refs: Sequence[str], site: str, layers: Sequence[int], owner: str | None, rows: int
                      ) -> tuple[dict[str, CoveredCapture], RowFormat]:
        """Captures by their refs, and the one way in which all of them store a site; ArgumentError where there is none.
        """
        with self._catalog.moment() as now:
            found = {ref: self._coverage_cache.of(now, ref, owner, site) for ref in refs}
            formats, checked = set[RowFormat](), set[str | None]()
            for covered in found.values():
                if covered.capture.resolved not in checked or covered.row_format is None:  # most were asked for alike
                    checked.add(covered.capture.resolved)
                    row_format(now, covered, site, layers)
                formats.add(cast(RowFormat, covered.row_format))
        if len(formats) != 1:
            ways = "; ".join(sorted(f"{each.codec}, {each.dtype}, {each.width}" for each in formats)) or "none at all"
            raise ArgumentError("rows", rows, f"name rows that are stored in one way, not {ways}")
        return found, formats.pop()

    def _located(self, covered: CoveredCapture, site: str, stored: RowFormat, group: LayerGroup, which: Which,
                 rejected: bool) -> list[Placed]:
        """Rows of a group of layers: whole, or the columns that each rank has of them."""
        shares = group.shares or (Shared(0, stored.width, group.rows, group.rejected),)
        formats = [stored.of_columns(share.stop - share.start) for share in shares]
        return [Placed(share.start, each, self._locations(covered, covered.coverage.extents[site], each.streams,
                                                          share.rejected if rejected else share.rows, which))
                for share, each in zip(shares, formats, strict=True)]

    def _copied(self, segments: Mapping[int, Segment | None], placed: Sequence[Placed], layers: Sequence[int],
                given: RowFormat) -> list[Bytes]:
        """Pieces by stream of rows as they are ``given``, uint8 ``[layers, n, piece bytes]``."""
        copied = [copy_rows(self._maps, segments, one.rows, one.stored.streams, layers) for one in placed]
        if placed[0].stored == given:
            return copied[0]
        tokens = placed[0].rows.token_ids
        values = np.empty((len(layers), len(tokens), given.width), np.float32)
        for one, pieces in zip(placed, copied, strict=True):
            if not np.array_equal(one.rows.token_ids, tokens):
                raise CorruptError("read rows", self.path, "ranks name other tokens at the same positions and steps")
            values[:, :, one.start:one.start + one.stored.width] = one.stored.decoded(pieces)
        return [values.view(np.uint8)]

    def _locations(self, covered: CoveredCapture, extents: Sequence[Extent], streams: tuple[Stream, ...], rows: Rows,
                   which: Which) -> RowLocations:
        """Locations of some of ``rows``; of a capture that has ended they are found once, for all rows."""
        if (known := covered.locations.get(rows)) is None and covered.capture.finish_seq is not None:
            try:
                known = covered.locations[rows] = locate(self._maps, covered.segments, extents, rows, streams)
            except UnsettledError:
                known = None  # a frame is damaged, or being erased from: who asks for no row of it need not know
        if known is not None:
            return known[which]
        return locate(self._maps, covered.segments, extents, rows[which], streams)

    def places(self, ref: str, site: str, layers: Sequence[int], owner: str | None = None) -> list[Places]:
        """Places of the rows of a capture, of all columns or, from the left to the right, of those that each rank has.

        NotFoundError where it has no such site or layer; ArgumentError where ranks share out some of the layers in
        other ways than others.
        """
        site = parse_site(site, "site", ArgumentError)[0]
        with self._catalog.moment() as now:
            covered = self._coverage_cache.of(now, ref, owner, site)
            stored = row_format(now, covered, site, layers)
        positions, picks = common_rows(covered.coverage.sites[site], layers, 0, covered.coverage.end, False)
        extents = covered.coverage.extents[site]
        segments = np.asarray([extent.segment for extent in extents], np.int64)
        offsets = np.asarray([extent.offset for extent in extents], np.int64)
        columns = {tuple((share.start, share.stop) for share in group.shares) for group, _, _ in picks}
        if len(columns) > 1:
            raise ArgumentError("layers", list(layers), f"ranks share them out in {len(columns)} ways: ask for those "
                                "that are alike together")
        found = []
        for number, (start, stop) in enumerate(columns.pop() or ((0, stored.width),)):
            segment, offset, row = np.zeros((3, len(layers), len(positions)), np.int64)
            for group, members, which in picks if len(positions) else ():
                rows = (group.shares[number].rows if group.shares else group.rows)[which]
                segment[members], offset[members], row[members] = segments[rows.extent], offsets[rows.extent], rows.row
            found.append(Places(covered.capture.id, stored.codec, stored.dtype, stop - start,
                                positions.astype(np.uint32), segment, offset, row, start))
        return found

    def stored_rows(self, segments: Mapping[int, Segment], frames: I64, rows: I64, declared: tuple[Stream, ...],
                    layer: int, tokens_alone: bool = False) -> tuple[npt.NDArray[np.uint32], list[Bytes]]:
        """Token ids ``[n]`` and a layer's pieces by stream, uint8 ``[n, piece bytes]``, of rows of sealed blocks,
        wherever these lie; ``tokens_alone`` without the pieces.

        ``frames`` int64 ``[n, 2]`` are the segment and offset of each row's frame, ``rows`` ``[n]`` count in it. Errors
        as of ``slice``; StoreError where rows were erased.
        """

        def read() -> tuple[npt.NDArray[np.uint32], list[Bytes]]:
            located = in_blocks(self._maps, segments, frames, rows, len(declared))
            copied = [] if tokens_alone else copy_rows(self._maps, segments, located, declared, [layer])
            return located.token_ids, [pieces[0] for pieces in copied]

        return self._settled(read)

    def segment(self, number: int) -> Segment:
        """A segment as the catalog has it now."""
        with self._catalog.moment() as now:
            found = load_segment(now.db, number)
        if found is None:
            raise StoreError("read segment", self.path, f"segment {number} is not in the catalog",
                             "start the writer once: it repairs the catalog")
        return found


def given_as(stored: RowFormat, picks: Sequence[Pick]) -> RowFormat:
    """The format in which rows are handed out: as they are stored, or decoded where ranks share their columns out."""
    return RowFormat(*DECODED, stored.width) if any(group.shares for group, _, _ in picks) else stored


def row_format(now: Moment, covered: CoveredCapture, site: str, layers: Sequence[int]) -> RowFormat:
    """The format of a capture's rows at a site; NotFoundError where it has no such site or layers."""
    resolved = covered.resolved or resolved_of(covered.capture)
    check_layers(covered.capture.id, resolved, site, layers)
    if covered.row_format is None:
        covered.row_format = RowFormat(resolved.codec[site], *shape_of(now.db, covered, site))
    return covered.row_format


def _no_row(covered: CoveredCapture, site: str, layers: Sequence[int], position: int) -> NotFoundError:
    gaps = missing_of(covered.coverage.sites[site], layers, position, position + 1)
    why = gaps[0].reason if gaps else f"its positions end at {covered.coverage.end}, or it was not asked for"
    return NotFoundError(f"capture {covered.capture.id} has no row of {site} at position {position}: {why}")
