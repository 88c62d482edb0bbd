"""Coverage of a capture: the rows that are there, and the reason why others are not. For every site × layer, expected =
captured + missing.

The latest computation of a (site, layer, position) wins by its sequence number. A drop supersedes older rows in its
range. Rows at or past the end of a finished capture are stale and never served.

Drafts of speculative decoding are rows like others, but flagged. While a capture runs, a draft is served once a row
that is no draft follows it: the step that made this row began after the draft was accepted. When the capture is
finished, its tokens decide. A draft that the final sequence does not have is rejected, and so are all rows that its
step computed after it. This holds even where a token happens to be equal, because its context was wrong. An older row
never takes the place of a newer one that is not served.

With an engine on several ranks all this holds for each rank's part, whose numbers and drops are its own. Then the
columns of rows that are shared out are put together (schemas.catalog.parts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from schemas import limits
from schemas.catalog.parts import ALONE, Parts, matched, merged, runs_of
from schemas.catalog.records import Capture, Drop, Extent
from schemas.catalog.tables import EVERY_PART
from schemas.manifest import ELSEWHERE, Missing
from schemas.spec import Resolved, intervals
from schemas.wire.layout import Columns
from schemas.wire.row_table import FLAG_DRAFT, FLAG_RECOMPUTED

__all__ = ["Coverage", "LayerGroup", "Rows", "cover", "status_of", "status_of_cover"]

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_UNFINISHED = "pending"


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows by position: ``extent`` is an index into Coverage.extents[site], ``row`` a row of that frame.

    Two are the same only where they are one object.
    """

    positions: I64
    extent: I64
    row: I64
    step: I64 | None = None  # that computed each, where its columns are put together with others

    def __getitem__(self, which: slice | Bools | I64) -> Rows:
        return Rows(self.positions[which], self.extent[which], self.row[which],
                    None if self.step is None else self.step[which])


@dataclass(frozen=True, slots=True)
class Shared:
    """Columns ``[start, stop)`` of the rows of a group of layers, and of its rejected drafts, in the same order."""

    start: int
    stop: int
    rows: Rows
    rejected: Rows


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a site with the same rows, sorted by position; ``rejected`` drafts by position, then by age.

    Where ranks share the columns out, ``shares`` has all of them, from the left to the right; ``rows`` and ``rejected``
    are those of the first.
    """

    layers: tuple[int, ...]
    expected: int
    rows: Rows
    missing: list[Missing]
    rejected: Rows
    shares: tuple[Shared, ...] = ()


@dataclass(frozen=True, slots=True)
class Coverage:
    """The rows of a capture by site; ``end`` is where expected positions end (exclusive), ``ranges`` ``[start, stop)``
    are those that are expected of every site and layer.

    ``waits``: some rank's part of it may still come. ``uncounted``: some rank never told what edits did in its layers.
    """

    end: int
    sites: dict[str, list[LayerGroup]]
    extents: dict[str, list[Extent]]
    waits: bool = False
    ranges: list[tuple[int, int]] = field(default_factory=list)
    uncounted: bool = False


def cover(capture: Capture, extents: Sequence[Extent], drops: Sequence[Drop], parts: Parts = ALONE) -> Coverage:
    """Hold what was stored of an opened capture against what it asked for."""
    if capture.resolved is None:
        return Coverage(0, {}, {})
    resolved = msgspec.json.decode(capture.resolved, type=Resolved)
    drops = [*drops, *(Drop(site, 0, tuple(layers), 0, limits.position_max + 1, ELSEWHERE, EVERY_PART)
                       for site, layers in resolved.elsewhere.items())]
    highest = _computed(extents)
    finished = capture.finish_seq is not None
    if finished:
        served, expected_end = capture.end or 0, capture.expected_end
    else:
        served = expected_end = max(capture.prompt_len, highest)
    ranges = clip(intervals(resolved.positions, capture.prompt_len), expected_end)
    by_site: dict[str, list[LayerGroup]] = {}
    kept: dict[str, list[Extent]] = {}
    for site, layers in resolved.layers.items():
        kept[site] = [extent for extent in extents if extent.site == site]
        site_drops = [drop for drop in drops if drop.site == site]
        told: dict[Told, int] = {}  # few: most are equal
        of_extent = [told.setdefault((extent.part, extent.layers), len(told)) for extent in kept[site]]
        of_drop = [told.setdefault((drop.part, drop.layers), len(told)) for drop in site_drops]
        by_site[site] = []
        part_of = [part for part, _ in told]
        for members, columns, theirs in _alike(layers, list(told), partial(parts.columns, site)):
            groups = []
            for one in columns:
                mine = {number for number in theirs if part_of[number] in (one.part, EVERY_PART)}
                which = [number for number, of in enumerate(of_extent) if of in mine]
                dropped = [drop for drop, of in zip(site_drops, of_drop, strict=True) if of in mine]
                dropped.sort(key=attrgetter("seq"))
                groups.append(_group(capture, members, kept[site], which, dropped, ranges, served,
                                     parts.rest(capture, one.part)))
            by_site[site].append(groups[0] if len(groups) == 1 else _joined(columns, groups, capture, parts))
    return Coverage(expected_end, by_site, kept, parts.waits(resolved), ranges, parts.uncounted(capture))


Told = tuple[int, tuple[int, ...]]  # the part that tells something, and of which layers


def _alike(layers: Iterable[int], told: Sequence[Told], columns_of: Callable[[int], tuple[Columns, ...]]
           ) -> list[tuple[tuple[int, ...], tuple[Columns, ...], set[int]]]:
    """Layers of which the same is told: they, who has their columns, and which of ``told``."""
    sets = [frozenset(each[1]) for each in told]
    groups: dict[tuple[tuple[Columns, ...], tuple[bool, ...]], list[int]] = {}
    for layer in layers:
        having = tuple(layer in has for has in sets)
        groups.setdefault((columns_of(layer), having), []).append(layer)
    return [(tuple(members), columns, {number for number, has in enumerate(having) if has})
            for (columns, having), members in groups.items()]


def _joined(columns: Sequence[Columns], groups: Sequence[LayerGroup], capture: Capture, parts: Parts) -> LayerGroup:
    """Groups of the same layers, one of each part that has some of their columns, put together."""
    rows, rejected = (_matching([getattr(group, name) for group in groups]) for name in ("rows", "rejected"))
    missing = [gap for group in groups for gap in group.missing]
    held = reduce(np.intersect1d, [group.rows.positions for group in groups])
    uneven = np.setdiff1d(held, rows[0].positions, assume_unique=True)  # of other steps, in one part or another
    if len(uneven):
        steps = np.stack([_steps(group.rows)[np.searchsorted(group.rows.positions, uneven)] for group in groups])
        behind = (steps < steps.max(0)).argmax(0)  # the first part that lacks the newest
        for number, one in enumerate(columns):
            missing += runs_of(uneven[behind == number], parts.rest(capture, one.part))
    shares = tuple(Shared(one.start, one.stop, *both) for one, *both in zip(columns, rows, rejected, strict=True))
    return LayerGroup(groups[0].layers, groups[0].expected, rows[0], merged(missing), rejected[0], shares)


def _matching(rows: Sequence[Rows]) -> list[Rows]:
    found = matched([(each.positions, _steps(each)) for each in rows])
    return [each[which] for each, which in zip(rows, found, strict=True)]


def _steps(rows: Rows) -> I64:
    assert rows.step is not None  # of whoever has columns alone
    return rows.step


def _group(
    capture: Capture, layers: tuple[int, ...], extents: Sequence[Extent], which: Sequence[int], drops: Sequence[Drop],
    ranges: list[tuple[int, int]], served: int, rest: str,
) -> LayerGroup:
    starts = np.asarray([start for start, _ in ranges], np.int64)
    stops = np.asarray([stop for _, stop in ranges], np.int64)
    columns = np.frombuffer(b"".join([extents[i].table for i in which]), "<u4").reshape(-1, 4)
    position, row, token, flags = columns.T.astype(np.int64, order="C")
    extent = np.repeat(np.asarray(which, np.int64), [len(extents[i].table) // 16 for i in which])
    seq = np.asarray([part.seq for part in extents], np.int64)[extent]
    steps = np.frombuffer(b"".join([extents[i].steps for i in which]), "<u8").astype(np.int64)
    step = steps if len(steps) == len(position) else None  # no rank of a group tells none
    age = np.lexsort((row, seq))
    position, row, token, flags, extent, seq = (column[age] for column in (position, row, token, flags, extent, seq))
    draft = flags & FLAG_DRAFT != 0
    if capture.finish_seq is None:
        served = min(served, int(position[~draft].max(initial=-1)) + 1)  # this site may lag behind others
        stale = np.zeros(len(position), bool)
    else:
        final = np.frombuffer(capture.prompt_tokens + capture.output_tokens, "<u4")
        stale = _rejected(position, token, draft, final, np.searchsorted([drop.seq for drop in drops], seq))
    order = np.argsort(position, kind="stable")
    position, flags, seq, draft, stale = (column[order] for column in (position, flags, seq, draft, stale))
    rows = Rows(position, extent[order], row[order], None if step is None else step[age][order])
    latest = np.append(position[1:] != position[:-1], True) if len(position) else np.zeros(0, bool)
    # What was accepted and then computed again after a preemption was no bad guess.
    again = np.append(flags[1:] & FLAG_RECOMPUTED != 0, False) if len(position) else np.zeros(0, bool)
    asked = np.searchsorted(starts, position, "right") > np.searchsorted(stops, position, "right")
    rejected = draft & (stale | ~latest & ~again | (position >= served) & (capture.finish_seq is not None))
    keep = latest & asked & (position < served)
    for drop in drops:
        older = (position >= drop.start) & (position < drop.stop) & (seq < drop.seq)
        # From the cache: not computed again, so what is there stays, unless it was a guess that nobody decided on.
        keep &= ~(older & draft) if drop.reason == "prefix_cached" else ~older
    refused = position[keep & stale]
    keep &= ~stale
    # Between the start of a range and its end, every row that is there ends a gap and begins the next.
    gaps = np.stack([np.sort(np.append(starts, position[keep] + 1)), np.sort(np.append(stops, position[keep]))])
    missing = _missing(capture, gaps[:, gaps[0] < gaps[1]], drops, refused, rest)
    return LayerGroup(layers, int((stops - starts).sum()), rows[keep], missing, rows[rejected])


def _computed(extents: Sequence[Extent]) -> int:
    """One past the highest position of a row that is no draft."""
    table = np.frombuffer(b"".join([extent.table for extent in extents]), "<u4").reshape(-1, 4)
    settled = table[table[:, 3] & FLAG_DRAFT == 0, 0]
    return int(settled.max()) + 1 if len(settled) else 0


def _rejected(position: I64, token: I64, draft: Bools, tokens: npt.NDArray[np.uint32], era: I64) -> Bools:
    """Drafts that the final sequence does not have, and the drafts after them in their steps; rows oldest first.

    A step's rows begin with one that is no draft. If that row was not asked for, they begin where positions fall back.
    If it was dropped, they begin where ``era`` changes: the number of drops before the row.
    """
    if not draft.any():
        return draft
    known = position < len(tokens)
    wrong = draft & ~known
    wrong[known] = draft[known] & (tokens[position[known]] != token[known])
    begins = ~draft | np.append(True, (position[1:] <= position[:-1]) | (era[1:] != era[:-1]))
    count = np.cumsum(wrong)
    before_step = np.maximum.accumulate(np.where(begins, count - wrong, 0))
    return draft & (count > before_step)


def _missing(capture: Capture, gaps: I64, drops: Sequence[Drop], refused: I64, rest: str) -> list[Missing]:
    """Ranges of absent positions with their reasons; ``gaps`` are sorted, disjoint ``[start or stop, n]``.

    At the positions ``refused`` there is a row, of a draft that was not accepted. ``rest`` is the reason of what
    nothing is told of.

    Positions are never counted out one by one: a capture may claim billions of them.
    """
    if not gaps.size:
        return []
    edges = {capture.end or 0, capture.cached, *(drop.start for drop in drops), *(drop.stop for drop in drops),
             *refused.tolist(), *(refused + 1).tolist()}
    cuts = np.asarray(sorted(edges), np.int64)
    cuts = cuts[np.searchsorted(gaps[0], cuts, "left") > np.searchsorted(gaps[1], cuts, "right")]  # inside a gap
    absent, ends = np.sort(np.append(gaps[0], cuts)), np.sort(np.append(gaps[1], cuts))
    names: list[str] = []

    def name(reason: str) -> int:
        if reason not in names:
            names.append(reason)
        return names.index(reason)

    finished = capture.finish_seq is not None
    reason = np.full(len(absent), name(rest), np.int64)
    if finished and capture.finish_reason in ("abort", "error"):
        reason[absent >= (capture.end or 0)] = name("aborted")
    reason[absent < capture.cached] = name("prefix_cached")
    if len(refused):
        reason[np.isin(absent, refused)] = name("rejected_draft")
    for drop in drops:
        told = (absent >= drop.start) & (absent < drop.stop)
        if drop.reason == "fenced":  # a copy of the engine had rows that nobody took: no more is known of these
            told &= (reason == name(rest)) & (rest != _UNFINISHED)
        reason[told] = name(drop.reason)
    first = np.flatnonzero(np.append(True, (absent[1:] != ends[:-1]) | (np.diff(reason) != 0)))
    last = np.append(first[1:], len(absent)) - 1
    return [Missing(int(absent[a]), int(ends[b]), names[reason[a]]) for a, b in zip(first, last, strict=True)]


def clip(ranges: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """The ranges below ``end``."""
    return [(max(start, 0), min(stop, end)) for start, stop in ranges if start < end and stop > 0]


def status_of(capture: Capture, extents: Sequence[Extent], drops: Sequence[Drop], parts: Parts = ALONE) -> str:
    """The status that follows from what is stored, as the catalog has it: `empty` is made of `complete` when read."""
    return status_of_cover(capture, cover(capture, extents, drops, parts))


def status_of_cover(capture: Capture, coverage: Coverage) -> str:
    """``status_of`` where the coverage is known."""
    if capture.deleted:
        return "deleted"
    if capture.resolved is None:
        return "failed" if capture.failed is not None else "pending"
    if capture.finish_seq is None:
        return "incomplete" if capture.lost else "running"
    if coverage.waits:
        return "running"
    if coverage.uncounted:
        return "incomplete"
    resolved = msgspec.json.decode(capture.resolved, type=Resolved)
    allowed = {"prefix_cached"} if resolved.prefix_cache == "allow" else set()
    groups = (group for groups in coverage.sites.values() for group in groups)
    reasons = {missing.reason for group in groups for missing in group.missing}
    return "incomplete" if reasons - allowed else "complete"
