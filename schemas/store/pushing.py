"""State of pushes that go on by themselves: a small file of a store, which a service tells as metrics."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from schemas.store.paths import pushing_name
from schemas.store.small_files import write_durable

__all__ = ["Pushing", "forget_pushing", "read_pushing", "write_pushing"]

_BYTES_MAX: Final = 1 << 16
_REASON_MAX: Final = 1000


class Pushing(msgspec.Struct, frozen=True):
    """The pushes of a store to a bucket. ``pushed_ms``: when the last turn that succeeded began, since 1970, 0 before
    the first. What was sealed then is in the bucket. ``failed`` says why the last turn failed, "" if it did not.
    """

    url: str
    every_s: float
    pushed_ms: int = 0
    failed: str = ""


def write_pushing(store: Path, state: Pushing) -> None:
    """Replace the file; OSError."""
    write_durable(store / pushing_name(), msgspec.json.encode(
        msgspec.structs.replace(state, failed=state.failed[:_REASON_MAX])))


def read_pushing(store: Path) -> Pushing | None:
    """The file's statement; None where nothing pushes, or the file cannot be read."""
    try:
        with (store / pushing_name()).open("rb") as file:
            return msgspec.json.decode(file.read(_BYTES_MAX), type=Pushing)
    except (OSError, msgspec.MsgspecError):
        return None


def forget_pushing(store: Path) -> None:
    """Remove the file, if there is one: nothing pushes any more."""
    with suppress(FileNotFoundError):
        (store / pushing_name()).unlink()
