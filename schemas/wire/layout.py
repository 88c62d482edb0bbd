"""Layouts of the engines that run on several ranks: which of them sends which columns of which layers of a site.

A layout is arithmetic: every rank works out the whole of it from the engine's settings, and all say the same one. The
ranks of one engine are the *parts* of each of its captures; part 0 leads: it opens and finishes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from schemas import codecs, limits
from schemas.errors import ProtocolError
from schemas.sites import is_site
from schemas.spec import Resolved

__all__ = ["LEADER", "WHOLE", "Columns", "Part", "Share", "check_codecs", "check_layout", "places_of", "share_of",
           "share_widths", "siblings"]

LEADER: Final = 0


class Share(msgspec.Struct, frozen=True):
    """Columns ``[start, stop)`` of some layers of a site."""

    layers: list[int]
    start: int
    stop: int


class Part(msgspec.Struct, frozen=True):
    """The share that one rank sends, by site: a layer of a site in one share at most."""

    rank: int
    shares: dict[str, list[Share]]


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns ``[start, stop)`` of a row, as part ``part`` has them; 0, 0 are all columns of an engine of one rank."""

    part: int
    start: int
    stop: int

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.stop - self.start


WHOLE: Final = (Columns(LEADER, 0, 0),)


def places_of(layout: Sequence[Part]) -> dict[tuple[str, int], tuple[Columns, ...]]:
    """The columns that each rank has of each (site, layer), from the left to the right."""
    found: dict[tuple[str, int], list[Columns]] = {}
    for part in layout:
        for site, shares in part.shares.items():
            for share in shares:
                columns = Columns(part.rank, share.start, share.stop)
                for layer in share.layers:
                    found.setdefault((site, layer), []).append(columns)
    return {place: tuple(sorted(each, key=lambda one: (one.start, one.stop))) for place, each in found.items()}


def share_of(part: Part, site: str, layers: Iterable[int]) -> Share | None:
    """The share of a part that has all of these layers; None where none has."""
    wanted = set(layers)
    return next((share for share in part.shares.get(site, ()) if wanted <= set(share.layers)), None)


def share_widths(part: Part | None, widths: dict[str, int]) -> dict[str, int]:
    """Numbers in the rows that a rank sends, by site; ``widths``: in whole rows, which an engine of one rank sends."""
    if part is None:
        return dict(widths)
    return {site: share.stop - share.start for site, shares in part.shares.items() for share in shares[:1]}


def check_layout(layout: Sequence[Part], armed: Iterable[tuple[str, int]], widths: dict[str, int]) -> None:
    """ProtocolError where not every column of every armed (site, layer) is of exactly one part, naming the first."""
    _need(len(layout) <= limits.parts_max, f"{len(layout)} parts, at most {limits.parts_max}")
    ranks = [part.rank for part in layout]
    _need(ranks == list(range(len(ranks))), f"ranks are {ranks[:8]}, they must be 0, 1, … in order")
    named = sum(len(share.layers) for part in layout for shares in part.shares.values() for share in shares)
    _need(named <= limits.layout_places_max, f"{named} layers of shares, at most {limits.layout_places_max}")
    for part in layout:
        _check_part(part, widths)
    places = places_of(layout)
    for site, layer in sorted(set(armed) | set(places)):
        _check_columns(f"{site}.{layer}", places.get((site, layer), ()), widths.get(site, 0))


def _check_part(part: Part, widths: dict[str, int]) -> None:
    for site, shares in part.shares.items():
        _need(is_site(site), f"rank {part.rank} names the unknown site {site[:64]!r}")
        width, seen = widths.get(site, 0), set[int]()
        for share in shares:
            what = f"rank {part.rank}, {site}: columns {share.start} to {share.stop}"
            _need(0 <= share.start < share.stop <= width, f"{what}; valid: 0 to {width}")
            _need(bool(share.layers) and not seen & set(share.layers), f"{what}: layers must be named, each once")
            seen |= set(share.layers)


def _check_columns(place: str, found: Sequence[Columns], width: int) -> None:
    """The columns must follow each other from 0 to the width."""
    at, before = 0, -1
    for one in found:
        _need(one.start <= at, f"columns {at} to {one.start} of {place} are sent by no rank")
        _need(one.start >= at, f"columns {one.start} to {min(at, one.stop)} of {place} are sent by ranks {before} and "
              f"{one.part}")
        at, before = one.stop, one.part
    _need(at == width, f"columns {at} to {width} of {place} are sent by no rank")


def siblings(group: str) -> str:
    """The name that the groups of one server's data-parallel engines have in common: they differ behind the last "-".

    The whole name of a group that has none.
    """
    return group[: group.rfind("-") + 1] or group


def check_codecs(layout: Sequence[Part], resolved: Resolved) -> None:
    """ProtocolError where a codec that says something of whole rows alone is to encode shares of them."""
    shared = {site for (site, _), columns in places_of(layout).items() if len(columns) > 1}
    for site in sorted(shared & set(resolved.codec)):
        if codecs.identified(resolved.codec[site]).family.whole_rows:
            raise ProtocolError(f"codec {resolved.codec[site]}: it is of whole rows, and ranks share out the columns "
                                f"of {site}; valid: a codec that keeps every column, such as int8b64")


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ProtocolError(f"layout: {what}")
