"""Events of the step thread for the sender's process, in order; each is one message of msgpack in shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.spec import Resolved
from schemas.wire.messages import TapCounters

I64 = npt.NDArray[np.int64]

# The ring is free up to its first number when all marks up to this one are released; the second tells runs apart.
Mark = tuple[int, int]


class Entry(NamedTuple):
    """One site of a plan: its layers in one codec."""

    site: str
    codec: str
    layers: tuple[int, ...]


class Opened(msgspec.Struct, tag=True, array_like=True):
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
    edits: str


class Joined(msgspec.Struct, tag=True, array_like=True):
    """The same on a rank that does not lead, for its share of the rows: ``layers`` by site."""

    slot: int
    capture: str
    layers: dict[str, list[int]]
    prompt_len: int = 0
    edits: str = ""  # as in Opened, where it counts any of them


class Run(msgspec.Struct, tag=True, array_like=True):
    """Rows encoded into the ring; they lie there once the copies up to number ``copied`` are over.

    ``steps`` steps of decode made a block each, of the same requests one position further, ``stride`` bytes apart in
    the ring; the columns and offsets are those of the first.
    """

    entry: Entry
    slot: np.ndarray[Any, Any]  # int64 [rows], as are the next two
    position: np.ndarray[Any, Any]
    flags: np.ndarray[Any, Any]
    extents: dict[str, tuple[int, int]]  # stream → (offset, bytes)
    tokens: int  # offset of the rows' int32 token ids
    positions: int  # offset of the rows' int64 positions as the model used them
    mark: Mark
    copied: int = 0
    steps: int = 1
    stride: int = 0
    number: int = 0  # of the first step, as every rank of the engine counts them
    pace: int = 1  # from one step's number to the next one's


class Freed(msgspec.Struct, tag=True, array_like=True):
    """A region of the ring that holds no rows after all; free once the copies up to ``copied`` are over."""

    mark: Mark
    copied: int = 0


class Lost(msgspec.Struct, tag=True, array_like=True):
    """Rows that were selected and could not be kept, or that are never computed: the prefix cache has them."""

    entry: Entry
    slot: np.ndarray[Any, Any]  # int64 [rows], as is the next
    position: np.ndarray[Any, Any]
    reason: str = "dropped"  # or "prefix_cached"


class EditsCounted(msgspec.Struct, tag=True, array_like=True):
    """Counts of how often a capture's edits were made (``edit_counts``), before its Finished.

    ``count`` int32 lie in the ring once the copies up to ``copied`` are over; none where ``mark`` is None. First come
    [places + 1, combinations]. Where the capture has a condition, the positions where that changed follow, −1 for none.
    """

    capture: str
    places: list[tuple[str, int]]
    combinations: list[tuple[int, ...]]
    cached: list[tuple[int, int]]  # positions that were read from the prefix cache
    count: int = 0
    offset: int = 0
    mark: Mark | None = None
    copied: int = 0


class Finished(msgspec.Struct, tag=True, array_like=True):
    """The request in ``slot`` ended."""

    slot: int
    capture: str
    reason: str
    stop_reason: str | int | None
    output_token_ids: list[int]
    end: int
    recomputed: int


class PartFinished(msgspec.Struct, tag=True, array_like=True):
    """The same on a rank that does not lead."""

    slot: int
    capture: str
    end: int


class Counted(msgspec.Struct, tag=True, array_like=True):
    """The tap's counters since its start."""

    counters: TapCounters


Event = Opened | Joined | Run | Freed | Lost | EditsCounted | Finished | PartFinished | Counted


def _plain(value: Any) -> bytes | int:
    """An array as it travels, its int64 numbers; a token id that is NumPy's."""
    if isinstance(value, np.ndarray):
        return np.asarray(value, np.int64).tobytes()
    if isinstance(value, np.integer):
        return int(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be part of an event")


def _array_of(kind: type, value: Any) -> Any:
    return np.frombuffer(value, np.int64)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Event, dec_hook=_array_of)


def encode(event: Event) -> bytes:
    """The message of an event."""
    return _encoder.encode(event)


def decode(message: bytes | memoryview) -> Event:
    """The event of a message; msgspec.MsgspecError on anything else."""
    found: Event = _decoder.decode(message)
    return found
