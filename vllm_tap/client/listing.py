"""Choosing captures: the same filters over HTTP, on a store, for the training loader and for exports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from schemas import limits
from schemas.catalog.filters import CaptureFilter, milliseconds, moment
from schemas.errors import ArgumentError
from schemas.manifest import STATUSES
from schemas.read.captures import CaptureRow
from schemas.sites import ask_site

__all__ = ["Filters", "Where", "filtered", "wanted"]

Where = Mapping[str, str] | Callable[[CaptureRow], bool] | None
Page = tuple[list[CaptureRow], str | None]  # lines, newest first, and the id to go on after; None on the last page


class HasPages(Protocol):
    """A reader of lists: of one store, or of several."""

    def page(self, owner: str | None = None, status: str | None = None, limit: int = 100, before: str | None = None,
             wanted: CaptureFilter | None = None) -> Page:
        """A page, and the ``before`` of the next one."""


@dataclass(frozen=True, slots=True)
class Filters:
    """A choice of captures.

    A capture must have all ``tags`` (value None: any) and have captured ``site``. ``model`` is the model's name, or its
    LoRA adapter's. A capture must have been made at ``since`` or later, and before ``until``. ``text`` is part of an
    id, a name or a tag. Moments are datetimes, or texts as the service takes them. SpecError on a status or site that
    does not exist, and on what is no moment.
    """

    status: str | None = None
    tags: Mapping[str, str | None] = field(default_factory=dict)
    model: str | None = None
    site: str | None = None
    since: datetime | str | None = None
    until: datetime | str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if self.status is not None and self.status not in STATUSES:
            raise ArgumentError("status", self.status, f"valid: {', '.join(STATUSES)}")
        if self.site is not None:
            ask_site(self.site, "site", ArgumentError)
        if not isinstance(self.tags, Mapping):
            raise ArgumentError("tags", self.tags, 'valid: a mapping such as {"run": "a"}, None for any value')
        for name, when in (("since", self.since), ("until", self.until)):
            _ms(name, when)

    def capture_filter(self) -> CaptureFilter:
        """The filter that a store's reader takes."""
        site = None if self.site is None else ask_site(self.site)[0]
        return CaptureFilter(list(self.tags.items()), self.model, site, _ms("since", self.since),
                             _ms("until", self.until), self.text)

    def params(self) -> dict[str, Any]:
        """The parameters that the service takes."""
        tags = [key if value is None else f"{key}={value}" for key, value in self.tags.items()]
        asked = {"status": self.status, "tag": tags or None, "model": self.model, "site": self.site,
                 "since": _ms("since", self.since), "until": _ms("until", self.until), "text": self.text}
        return {name: value for name, value in asked.items() if value is not None}

    def of(self, reader: HasPages, limit: int | None = None, before: str | None = None) -> Iterator[CaptureRow]:
        """The wanted captures of a store, newest first, page by page as they are taken."""
        return filtered(reader, self.status, self.capture_filter(), limit, before)

    @staticmethod
    def pages(fetch: Callable[[int, str | None], Page], limit: int | None, before: str | None) -> Iterator[CaptureRow]:
        """The lines of all pages, at most ``limit``; ``fetch`` takes how many and after which id."""
        left = limit
        while left is None or left > 0:
            page, before = fetch(_count(left), before)
            yield from page
            left = None if left is None else left - len(page)
            if before is None:
                return

    @staticmethod
    async def apages(fetch: Callable[[int, str | None], Awaitable[Page]], limit: int | None, before: str | None
                     ) -> AsyncIterator[CaptureRow]:
        """``pages`` where pages are awaited."""
        left = limit
        while left is None or left > 0:
            page, before = await fetch(_count(left), before)
            for row in page:
                yield row
            left = None if left is None else left - len(page)
            if before is None:
                return


def filtered(reader: HasPages, status: str | None, chosen: CaptureFilter, limit: int | None, before: str | None
           ) -> Iterator[CaptureRow]:
    """The captures of a store that pass, newest first, page by page as they are taken."""
    return Filters.pages(lambda count, after: reader.page(None, status, count, after, chosen), limit, before)


def wanted(where: Where, row: CaptureRow) -> bool:
    """Whether a capture is chosen by tags, or by a function of its line."""
    if where is None:
        return True
    return bool(where(row)) if callable(where) else all(row.tags.get(key) == value for key, value in where.items())


def _ms(name: str, when: datetime | str | None) -> int | None:
    return milliseconds(when) if isinstance(when, datetime) else moment(name, when)


def _count(left: int | None) -> int:
    return limits.captures_page_max if left is None else min(left, limits.captures_page_max)
