"""The errors that every side shares.

    TapError
    ├── SpecError            what the caller asked for cannot be had (HTTP 400)
    │   ├── ArgumentError    … in an argument, not in a spec
    │   ├── NotArmedError    … because the engine has no tap for it
    │   └── EditError        … because an edit cannot be made; with UnarmedEditError, which is both
    ├── ConflictError        the id is already taken (HTTP 409)
    ├── NotFoundError        no such capture, site or layer (HTTP 404)
    ├── LimitError           larger than a stated limit (HTTP 413)
    ├── ProtocolError        a message that breaks the frame protocol
    ├── StoreError           a file operation failed; says which, where, and what to do
    │   └── CorruptError     bytes that do not match their checksum
    ├── BucketError          an object store refused, or did not answer; says which object, and what to do
    │   ├── NoHeadError      … because no store's head is there
    │   ├── OutrunError      … because another has written the object since it was read
    │   └── FencedError      … because its head is of a later state of the store, or of another folder
    ├── CatalogError         the Postgres server with a store's catalog refused, or did not answer
    └── StartError           the engine, writer or API cannot start as configured
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentError",
    "BucketError",
    "CatalogError",
    "ConflictError",
    "CorruptError",
    "EditError",
    "FencedError",
    "LimitError",
    "Missing",
    "NoHeadError",
    "NotArmedError",
    "NotFoundError",
    "OutrunError",
    "ProtocolError",
    "SpecError",
    "StartError",
    "StoreError",
    "TapError",
    "UnarmedEditError",
    "json_fault",
    "shown",
]


class Missing:
    """Value of a field that is not there: the class itself stands for it."""


class TapError(Exception):
    """Base of every error raised on purpose by this project; goes whole from a worker process to who waits for it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(kind: type[TapError], args: tuple[object, ...], fields: dict[str, Any]) -> TapError:
    """An error of another process: its message is made, and ``__init__`` takes what it is made from."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class SpecError(TapError, ValueError):
    """A capture spec that cannot be honoured; names the field, its value and what would be valid."""

    def __init__(self, field: str, value: object, reason: str) -> None:
        given = ": missing;" if value is Missing else f" = {shown(value)}:"
        super().__init__(f"{self.name_of(field)}{given} {reason}")
        self.field, self.value, self.reason = field, value, reason

    @staticmethod
    def name_of(field: str) -> str:
        """The field's name for a caller."""
        return f"capture.{field}" if field else "capture"


class ArgumentError(SpecError):
    """An argument of a function or a command, or a parameter of a query, that cannot be had."""

    @staticmethod
    def name_of(field: str) -> str:
        return field


class NotArmedError(SpecError):
    """The site or layer exists, but the engine was not started with a tap for it."""


class EditError(SpecError):
    """An edit that cannot be made; ``field`` begins with its number in brackets, and is empty where all are meant."""

    @staticmethod
    def name_of(field: str) -> str:
        return f"edit{field}" if field.startswith("[") else f"edit.{field}" if field else "edit"


class UnarmedEditError(EditError, NotArmedError):
    """The site or layer exists, but the engine was not started with an edit armed there."""


class ConflictError(TapError):
    """The capture id is already in use."""


class NotFoundError(TapError):
    """The name has nothing under it, or nothing that this caller may see."""


class LimitError(TapError):
    """The request is larger than a stated limit."""

    def __init__(self, what: str, asked: int, limit: int, hint: str = "") -> None:
        super().__init__(f"{what}: {asked} asked, limit {limit}" + (f"; {hint}" if hint else ""))
        self.what, self.asked, self.limit = what, asked, limit


class ProtocolError(TapError):
    """A message that does not follow the frame protocol; the peer's message is dropped and counted."""


class StoreError(TapError):
    """A file operation that failed, with its place and a hint."""

    def __init__(self, op: str, path: object, reason: object, hint: str = "") -> None:
        super().__init__(f"{op} {path}: {reason}" + (f" ({hint})" if hint else ""))
        self.op, self.path, self.reason, self.hint = op, str(path), reason, hint


class CorruptError(StoreError):
    """Stored bytes that do not match their checksum or their declared shape."""


class BucketError(TapError):
    """A request to an object store that failed; ``passing`` where it may succeed another time."""

    def __init__(self, op: str, url: str, reason: object, hint: str = "", passing: bool = False) -> None:
        super().__init__(f"{op} {url}: {reason}" + (f" ({hint})" if hint else ""))
        self.op, self.url, self.reason, self.hint, self.passing = op, url, reason, hint, passing


class NoHeadError(BucketError):
    """A prefix of a bucket in which no store's head is."""


class CatalogError(TapError):
    """A Postgres server refused, did not answer, or lacks something; ``where`` names it without user and password."""

    def __init__(self, op: str, where: str, reason: object, hint: str = "") -> None:
        super().__init__(f"{op} {where}: {reason}" + (f" ({hint})" if hint else ""))
        self.op, self.where, self.reason, self.hint = op, where, reason, hint


class OutrunError(BucketError):
    """A conditional write that came too late: another has written since."""


class FencedError(BucketError):
    """A head that a store's folder does not know: the folder was put back to an earlier state, or is a copy."""


class StartError(TapError):
    """A process that refuses to start, saying what it looked for and what it found."""


def json_fault(error: ValueError | RecursionError) -> str:
    """Describe what is wrong with a text that ``json.loads`` refused."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def shown(value: object) -> str:
    """A value as an error names it: what is long is cut."""
    text = repr(value[:120] if isinstance(value, str) else value)  # one of megabytes takes its time
    return text if len(text) <= 120 else text[:117] + "..."
