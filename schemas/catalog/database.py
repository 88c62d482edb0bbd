"""The face of a catalog's database to a reader: SQLite's connection as it is, and Postgres behind the same face."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

__all__ = ["Database", "Rows", "Scanned"]


class Scanned(Protocol):
    """Rows that are fetched as they are taken, by name (``row["id"]``) and by number."""

    def __iter__(self) -> Iterator[Any]: ...

    def close(self) -> object:
        """Take no more."""


class Rows(Scanned, Protocol):
    """The rows of an answer."""

    def fetchone(self) -> Any:
        """The next row, None where there is none."""

    def fetchall(self) -> list[Any]:
        """The rows that are left."""


class Database(Protocol):
    """One SQL text for both: ``?`` stands for a parameter, text is compared by its bytes."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Rows:
        """The answer to a query."""
