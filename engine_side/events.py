"""What the step thread hands to the sender thread, in order, through one deque."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_side.selection import Entry
from schemas.spec import Resolved

I64 = npt.NDArray[np.int64]

# The ring is free up to its first number when all marks up to this one are released; the second tells runs apart.
Mark = tuple[int, int]


@dataclass(slots=True)
class Opened:
    """A request with a capture is running in ``slot``."""

    slot: int
    capture: str
    request: str
    asked: str
    resolved: Resolved
    absent: dict[str, list[int]]  # by site, layers asked for that this model's site does not have
    prompt_token_ids: list[int]
    cached: int
    created_ms: int
    adapter: str


@dataclass(slots=True)
class Run:
    """Rows encoded into the ring; valid once ``ready`` (a device event, or None) has happened.

    ``steps`` steps of decode made a block each, of the same requests one position further, ``stride`` bytes apart in
    the ring; the columns and offsets are those of the first.
    """

    entry: Entry
    slot: I64
    position: I64
    flags: I64
    extents: dict[str, tuple[int, int]]  # stream → (offset, bytes)
    tokens: int  # offset of the rows' int32 token ids
    positions: int  # offset of the rows' int64 positions as the model used them
    mark: Mark
    ready: Any = None
    steps: int = 1
    stride: int = 0


@dataclass(slots=True)
class Freed:
    """A region of the ring that holds no rows after all; free once ``ready`` has happened."""

    mark: Mark
    ready: Any = None


@dataclass(slots=True)
class Lost:
    """Rows that were selected and could not be kept, or that are never computed: the prefix cache has them."""

    entry: Entry
    slot: I64
    position: I64
    reason: str = "dropped"  # or "prefix_cached"


@dataclass(slots=True)
class Finished:
    """The request in ``slot`` ended."""

    slot: int
    capture: str
    reason: str
    stop_reason: str | int | None
    output_token_ids: list[int]
    end: int
    recomputed: int


Event = Opened | Run | Freed | Lost | Finished
