"""Choosing captures: the same filters over HTTP, on a store, for the training loader and for exports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from schemas import limits
from schemas.errors import SpecError
from schemas.manifest import STATUSES
from schemas.reader import CaptureRow
from schemas.sites import parse_site

__all__ = ["FINAL", "Filters", "Where"]

FINAL: Final = frozenset(("complete", "incomplete", "failed"))
Where = Mapping[str, str] | Callable[[CaptureRow], bool] | None
Fetch = Callable[[int, str | None], list[CaptureRow]]  # (how many, after which id) → a page, newest first


@dataclass(frozen=True, slots=True)
class Filters:
    """Which captures of a list are wanted.

    ``tags`` must all be there; ``site`` must have been captured; ``since`` and ``until`` bound when it was made
    (``since`` included, ``until`` not). SpecError on a status or site that does not exist.
    """

    status: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    site: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        if self.status is not None and self.status not in STATUSES:
            raise SpecError("status", self.status, f"valid: {', '.join(STATUSES)}")
        if self.site is not None:
            parse_site(self.site, "site")

    def accepts(self, row: CaptureRow) -> bool:
        """Whether a line of the list is wanted; ``status`` is left to who makes the list."""
        return (all(row.tags.get(key) == value for key, value in self.tags.items())
                and (self.site is None or parse_site(self.site)[0] in row.sites)
                and (self.since is None or row.created_ms >= self.since.timestamp() * 1000)
                and (self.until is None or row.created_ms < self.until.timestamp() * 1000))

    def _over(self, row: CaptureRow) -> bool:
        """Whether everything from here on is too old."""
        return self.since is not None and row.created_ms < self.since.timestamp() * 1000

    def pages(self, fetch: Fetch, limit: int | None, before: str | None) -> Iterator[CaptureRow]:
        """What is wanted of all pages, newest first, at most ``limit``."""
        left = limit
        while left is None or left > 0:
            page = fetch(self._page(left), before)
            for row in page:
                if self.accepts(row) and left != 0:
                    left = None if left is None else left - 1
                    yield row
            if not page or self._over(page[-1]):
                return
            before = page[-1].id

    async def apages(self, fetch: Callable[[int, str | None], Awaitable[list[CaptureRow]]], limit: int | None,
                     before: str | None) -> AsyncIterator[CaptureRow]:
        """``pages`` for a list that is awaited."""
        left = limit
        while left is None or left > 0:
            page = await fetch(self._page(left), before)
            for row in page:
                if self.accepts(row) and left != 0:
                    left = None if left is None else left - 1
                    yield row
            if not page or self._over(page[-1]):
                return
            before = page[-1].id

    def _page(self, left: int | None) -> int:
        """A small page where nothing is sifted out and few are wanted."""
        sifted = self.tags or self.site or self.until
        return limits.captures_page_max if left is None or sifted else min(left, limits.captures_page_max)


def wanted(where: Where, row: CaptureRow) -> bool:
    """Whether a capture is chosen by tags, or by a function of its line."""
    if where is None:
        return True
    return bool(where(row)) if callable(where) else Filters(tags=where).accepts(row)
