"""Requests that only a store's folder on its own host can answer: rows that come while a capture is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from schemas.errors import TapError
from schemas.read.journal_tail import FrameAt
from schemas.read.live_rows import LiveRows, PartsCursor

__all__ = ["Unfollowed"]


class Unfollowed:
    """Refuses by name to follow captures at ``url``."""

    @property
    def url(self) -> str:
        """The address that is read."""
        raise NotImplementedError

    def appended(self) -> set[str]:
        """Refused: rows that come are not there."""
        self._refuse()

    def frames(self, capture: str, site: str, after: int) -> list[FrameAt]:
        """Refused, as ``appended``."""
        self._refuse()

    def in_parts(self, capture: str) -> bool:
        """Refused, as ``appended``."""
        self._refuse()

    def live_rows(self, frame: FrameAt, capture: str, layers: Sequence[int], first: int = 0) -> LiveRows | None:
        """Refused, as ``appended``."""
        self._refuse()

    def part_rows(self, cursor: PartsCursor, capture: str, site: str, layers: Sequence[int]) -> LiveRows | None:
        """Refused, as ``appended``."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TapError(f"{self.url}: following captures that are being made is not supported from a bucket, or of "
                       "several stores at once; open the store's folder on its own host")
