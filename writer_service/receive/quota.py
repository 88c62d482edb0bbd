"""The quota of a store: rows of captures that begin while it is full are not taken; everything else goes on."""

from __future__ import annotations


class Quota:
    """``limit`` bytes, None for none. Between two measurements what is appended is added up."""

    def __init__(self, limit: int | None, used: int) -> None:
        self.limit, self.used = limit, used
        self._since = 0  # appended since the measurement that runs began

    @property
    def over(self) -> bool:
        """Whether a capture that begins now gets no rows."""
        return self.limit is not None and self.used >= self.limit

    def appended(self, nbytes: int) -> None:
        """So much came since the last measurement."""
        self.used += nbytes
        self._since += nbytes

    def measuring(self) -> None:
        """A measurement begins: it may see what is appended meanwhile, or not."""
        self._since = 0

    def measured(self, nbytes: int) -> None:
        """What the store takes by the measurement that ended."""
        self.used = nbytes + self._since
