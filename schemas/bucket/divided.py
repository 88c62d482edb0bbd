"""Captures that are divided among stores, because ranks of their engine sent to several writers.

Every store has the tokens of the whole capture and the rows of some layers, and says that the others are elsewhere.
What is said of the sequence is what the first store says: its writer also hears how the request ended for the client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce

import msgspec
import numpy as np

from schemas.bucket.joined_rows import join_rows
from schemas.catalog.records import Drop
from schemas.codecs import identified
from schemas.errors import ArgumentError, NotFoundError
from schemas.ids import split_capture_id
from schemas.manifest import Manifest, Missing
from schemas.probes import Probe
from schemas.read.captures import CaptureRow, Progress, progress_of, resolved_of
from schemas.read.coverage import Coverage, LayerGroup, Shared, clip, status_of_cover
from schemas.read.coverage_cache import CoveredCapture
from schemas.read.manifests import rows_of
from schemas.read.row_reader import RowReader
from schemas.read.slices import DECODED, RowFormat, RowsAt, Slice, check_layers, common_rows, missing_of
from schemas.sites import parse_site
from schemas.spec import Resolved
from schemas.wire.layout import LEADER

__all__ = ["DividedReader"]


@dataclass(frozen=True, slots=True)
class DividedReader:
    """Stores in the order of their writers, with the functions of a RowReader for captures that are divided among them.

    ``owner`` is held against the first store alone: an engine's other writers hear of nobody.
    """

    stores: Sequence[RowReader]

    @property
    def first(self) -> RowReader:
        """The store that tells of the sequence."""
        return self.stores[0]

    # ── what is said of them ────────────────────────────────────────────────────────────────────────────────────

    def capture(self, ref: str, owner: str | None = None) -> CaptureRow:
        """Same as for one store, and so are those below."""
        return replace(self.first.capture(ref, owner), status=self.covered(ref, owner)[0].capture.status, writer=None)

    def samples(self, ref: str, owner: str | None = None) -> list[str]:
        return self.first.samples(ref, owner)

    def target(self, ref: str, owner: str | None = None) -> tuple[str, str]:
        return self.first.target(ref, owner)

    def drops(self, capture: str, site: str, after: int) -> list[Drop]:
        return self.first.drops(capture, site, after)

    def engine_name(self, ref: str, owner: str | None = None) -> str | None:
        return self.first.engine_name(ref, owner)

    def probes(self, ref: str, owner: str | None = None) -> dict[str, Probe]:
        return self.first.probes(ref, owner)

    def names(self, ref: str, owner: str | None = None) -> dict[str, str]:
        return self.first.names(ref, owner)

    def sole(self, ref: str, owner: str | None = None) -> Manifest | list[str]:
        samples = self.samples(ref, owner)
        return samples if len(samples) > 1 else self.manifest(samples[0], owner)

    def manifest(self, ref: str, owner: str | None = None) -> Manifest:
        """Same; without the places of rows (``extents``), which are those of one store each, and the states of ranks.
        """
        told, covered = self.first.manifest(ref, owner), self.covered(ref, owner)[0]
        if covered.resolved is None:
            return told
        return msgspec.structs.replace(
            told, status=covered.capture.status, resolved=msgspec.to_builtins(covered.resolved),
            engine={name: value for name, value in told.engine.items() if name != "divided"},
            sites=[msgspec.structs.replace(info, extents=[]) for info in told.sites],
            rows=rows_of(covered.coverage, covered.resolved.codec), parts=[])

    def progress(self, ref: str, owner: str | None = None) -> Progress:
        return progress_of(self.covered(ref, owner)[0])

    def covered(self, ref: str, owner: str | None = None) -> tuple[CoveredCapture, dict[str, int]]:
        """Same, without what only one store can say: extents, drops, segments, and parts."""
        first, widths = self.first.covered(ref, owner)
        if first.resolved is None:  # no engine has begun it there
            return first, widths
        every = [first, *(each.covered(first.capture.id)[0] for each in self._that_have(first.capture.id))]
        asked = {site: sorted({layer for each in every for layer in _resolved(each).layers.get(site, ())})
                 for site in _resolved(first).layers}
        homes = {place: number for number in reversed(range(len(every))) for place in _resolved(every[number]).here}
        sites = {site: [group for number, each in enumerate(every)
                        for group in _groups(each, site, [layer for layer in layers
                                                          if homes.get((site, layer), 0) == number], first)]
                 for site, layers in asked.items()}
        resolved = msgspec.structs.replace(_resolved(first), layers=asked, writer=0, elsewhere={
            site: away for site, layers in asked.items()
            if (away := [layer for layer in layers if (site, layer) not in homes])})
        waits = any(each.coverage.waits or (each.capture.finish_seq is None and not each.capture.lost)
                    for each in every)
        coverage = Coverage(first.coverage.end, sites, {site: [] for site in sites}, waits, first.coverage.ranges)
        status = status_of_cover(first.capture, coverage)
        if status == "complete" and not any(group.expected for groups in sites.values() for group in groups):
            status = "empty"
        return CoveredCapture(replace(first.capture, status=status), [], [], {}, coverage, resolved,
                              sum(each.version for each in every)), widths

    # ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────

    def slice(self, ref: str, site: str, layers: Sequence[int], start: int = 0, stop: int | None = None,
              owner: str | None = None, rejected: bool = False) -> Slice:
        """Same as for one store; rows that stores have in several formats are decoded."""
        capture, site = self.first.capture(ref, owner).id, self.first.site_of(ref, site, owner)
        covered = self.covered(capture, owner)[0]
        check_layers(capture, covered.resolved or resolved_of(covered.capture), site, layers)
        end, groups = covered.coverage.end, covered.coverage.sites[site]
        last = stop if rejected else max(start, 0, end if stop is None else min(stop, end))
        found = [(members, store.slice(capture, site, [layers[i] for i in members], start, last, None, rejected))
                 for store, members in self._by_store(capture, site, layers) if members]
        if rejected and len(found) > 1:
            raise ArgumentError("layers", list(layers), "stores do not tell alike which guesses of a position belong "
                                f"together: ask for those of one store, such as {[layers[i] for i in found[0][0]]}")
        first, keys, missing = found[0][1], [each.positions.astype(np.int64) for _, each in found], list[Missing]()
        if not rejected and last is not None:  # what came meanwhile counts as missing
            missing = missing_of(groups, layers, max(start, 0), last)
            keys.append(common_rows(groups, layers, max(start, 0), last, False)[0])
        common = reduce(lambda a, b: np.intersect1d(a, b, assume_unique=True), keys)
        chosen = [(members, each, np.flatnonzero(np.isin(key, common)))
                  for (members, each), key in zip(found, keys, strict=False)]
        given, pieces = _put_together([(members, each, which) for members, each, which in chosen], len(layers))
        at = chosen[0][2]
        return replace(first, layers=list(layers), codec=given.codec, dtype=given.dtype, width=given.width,
                       positions=first.positions[at], token_ids=first.token_ids[at], flags=first.flags[at],
                       pieces=pieces, missing=missing, start=max(start, 0),
                       stop=first.stop if last is None else last,
                       clipped=start < 0 or (stop is not None and stop > end))

    def rows_at(self, rows: Sequence[tuple[str, int]], site: str, layers: Sequence[int], owner: str | None = None
                ) -> RowsAt:
        """Same as for one store; all of the captures must be divided among these."""
        named = {ref: self.first.capture(ref, owner).id for ref in dict.fromkeys(ref for ref, _ in rows)}
        site = parse_site(site, "site", ArgumentError)[0]
        homes = {ref: self._by_store(capture, site, layers) for ref, capture in named.items()}
        alike: dict[object, list[int]] = {}  # engines may have divided their layers in several ways
        for number, (ref, _) in enumerate(rows):
            alike.setdefault(tuple((id(store), *members) for store, members in homes[ref]), []).append(number)
        parts = []
        for numbers in alike.values():
            asked = [(named[rows[number][0]], rows[number][1]) for number in numbers]
            found = [(members, store.rows_at(asked, site, [layers[i] for i in members]))
                     for store, members in homes[rows[numbers[0]][0]] if members]
            given, pieces = _put_together([(members, each, np.arange(len(asked))) for members, each in found],
                                          len(layers))
            parts.append((numbers, replace(found[0][1], layers=list(layers), codec=given.codec, dtype=given.dtype,
                                           width=given.width, pieces=pieces)))
        return parts[0][1] if len(parts) == 1 else join_rows(parts, len(rows))

    # ── which store has what ────────────────────────────────────────────────────────────────────────────────────

    def _that_have(self, capture: str) -> Iterator[RowReader]:
        """The other stores in which an engine has begun this sample of the request."""
        for store in self.stores[1:]:
            with suppress(NotFoundError):
                if store.covered(capture)[0].resolved is not None:
                    yield store

    def _by_store(self, capture: str, site: str, layers: Sequence[int]) -> list[tuple[RowReader, list[int]]]:
        """The stores, each with the numbers of those of the ``layers`` of a site that it answers for. The first answers
        for what no store has, too.
        """
        ulid, _ = split_capture_id(capture) or ("", None)
        having = [self.first, *self._that_have(capture)]
        found: list[tuple[RowReader, list[int]]] = [(store, []) for store in having]
        told = [store.division(ulid) for store in having]
        for number, layer in enumerate(layers):
            home = next((at for at, each in enumerate(told) if each is not None and (site, layer) in each.places), 0)
            found[home][1].append(number)
        return found


def _resolved(covered: CoveredCapture) -> Resolved:
    assert covered.resolved is not None  # a capture that no engine has begun is not divided
    return covered.resolved


def _groups(covered: CoveredCapture, site: str, layers: Sequence[int], first: CoveredCapture) -> Iterator[LayerGroup]:
    """The rows that a store has of some layers, within the positions that ``first`` has."""
    end, ranges = first.coverage.end, first.coverage.ranges
    beyond = [Missing(max(start, covered.coverage.end), stop, covered.parts.rest(covered.capture, LEADER))
              for start, stop in ranges if stop > covered.coverage.end]
    for group in covered.coverage.sites.get(site, ()):
        if not (mine := tuple(layer for layer in group.layers if layer in layers)):
            continue
        kept = group.rows.positions < end
        missing = [Missing(gap.start, min(gap.stop, end), gap.reason) for gap in group.missing if gap.start < end]
        yield LayerGroup(mine, sum(stop - start for start, stop in clip(ranges, end)), group.rows[kept],
                         [*missing, *beyond], group.rejected,
                         tuple(Shared(one.start, one.stop, one.rows[kept], one.rejected) for one in group.shares))


def _put_together(parts: Sequence[tuple[list[int], Slice | RowsAt, np.ndarray[tuple[int], np.dtype[np.int64]]]],
                  layers: int) -> tuple[RowFormat, dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]]:
    """The chosen rows of all parts as one format and its streams' pieces, ``[layers, n, …]``; of each part the layers
    that it has.
    """
    formats = {RowFormat(each.codec, each.dtype, each.width) for _, each, _ in parts}
    first = parts[0][1]
    given = formats.pop() if len(formats) == 1 else RowFormat(*DECODED, identified(first.codec).decoded_width(
        first.width))
    given.check_bytes(layers * len(parts[0][2]))
    made: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {}
    for stream in given.streams:
        whole = np.empty((layers, len(parts[0][2]), *stream.shape), stream.dtype)
        for members, each, which in parts:
            pieces = each.values() if formats else each.pieces[stream.name]
            whole[members] = pieces[:, which]
        made[stream.name] = whole
    return given, made
