"""Exceptions of the client and the local store.

    TapError                  base of all (schemas.errors).
    ├── MissingRows           some of the rows asked for were never stored; names the ranges and why.
    ├── NotComplete           the capture was not finished within the time given.
    ├── NotFoundError         no such capture, site or layer (schemas.errors).
    └── ServiceError          the service answered with an error; carries its message, status, code and parameter.
        ├── BadRequest        what was asked cannot be had (400, 406, 413, 416, 422); a ValueError too.
        ├── NotFound          404, 410; a NotFoundError too.
        ├── Conflict          409; a ConflictError too.
        └── Unavailable       the service, the writer or the model server is away (429, 5xx, no connection).
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.errors import ConflictError, NotFoundError, TapError
from schemas.manifest import ELSEWHERE, Manifest, Missing

__all__ = ["BadRequest", "Conflict", "MissingRows", "NotComplete", "NotFound", "ServiceError", "Unavailable",
           "not_complete", "service_error"]


class MissingRows(TapError):
    """Rows that the capture should have and has not; ``missing`` holds the ranges with their reasons."""

    def __init__(self, capture: str, what: str, missing: Sequence[Missing]) -> None:
        ranges = ", ".join(f"[{gap.start}, {gap.stop}) {gap.reason}" for gap in missing[:8])
        more = f" and {len(missing) - 8} more ranges" if len(missing) > 8 else ""
        away = "open the stores of all its writers as one, or " if any(
            gap.reason == ELSEWHERE for gap in missing) else ""
        super().__init__(f"{what} of capture {capture} lacks positions {ranges}{more}; {away}"
                         "allow_missing=True (of slice, attention, rows or read_captures) takes those that are there")
        self.capture, self.missing = capture, list(missing)


class NotComplete(TapError):
    """The capture was still running when the time to wait was over."""


class ServiceError(TapError):
    """An error answer; ``status`` is 0 where there was no answer at all."""

    def __init__(self, status: int, code: str | None, message: str, param: str | None = None) -> None:
        Exception.__init__(self, message)
        self.status, self.code, self.param = status, code, param


class BadRequest(ServiceError, ValueError):
    """The request cannot be honoured as it is."""


class NotFound(ServiceError, NotFoundError):
    """The name has nothing under it, or nothing that this caller may see."""


class Conflict(ServiceError, ConflictError):
    """The capture id is taken, or the capture is held."""


class Unavailable(ServiceError):
    """Ask again later: something the service needs is away, or it is busy."""


def not_complete(found: Manifest, wait_s: float, no_writer: bool = False) -> NotComplete:
    """The error of a capture that is not final: after ``wait_s`` seconds, or as no writer has its store."""
    return NotComplete(f"capture {found.id} is {found.status}" + (
        ", and no writer has the store: start one, it closes what a crash left" if no_writer
        else f" after {max(wait_s, 0.0):.3g} s"))


def service_error(status: int, code: str | None, message: str, param: str | None) -> TapError:
    """The exception that stands for an error answer."""
    if code == "timeout":
        return NotComplete(message)
    kinds = {404: NotFound, 410: NotFound, 409: Conflict, 429: Unavailable}
    kind = kinds.get(status, BadRequest if 400 <= status < 500 else Unavailable)
    return kind(status, code, message, param)
