"""Every message on the wire, as msgspec structs: frames of rows, control records, and the writer's answers.

A *stream* is one sender: an engine's worker rank, an API process, a front end. It numbers what it sends (``seq`` from
1, frames and records in one sequence) and keeps each until the writer's Ack covers it. After a reconnect it sends again
what was not covered. The writer drops what it already has by (stream, epoch, seq).

An engine on several ranks has a stream a rank. They are a *group*: its rank 0 opens and finishes captures, the others
join them, and each sends its share of their rows (layout.py).

A message is a ZeroMQ multipart: part 0 is the msgpack struct. A Frame adds its row table and, where the payload does
not lie in the shared ring, the payload parts. No part is ever unpickled.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from schemas.limits import PROTOCOL_VERSION
from schemas.wire.engine_info import EngineInfo
from schemas.wire.records import Record

# ── from senders ────────────────────────────────────────────────────────────────────────────────────────────────


class Hello(msgspec.Struct, tag="hello", forbid_unknown_fields=True):
    """First message of a connection, and again after every reconnect."""

    stream: str  # ULID, new for every process
    role: str  # "engine", "front_end", "api", "cli"
    epoch: int  # milliseconds at the stream's start; a smaller one than seen is refused
    rank: int = 0
    shard: int = 0
    pid: int = 0
    version: int = PROTOCOL_VERSION
    engine: EngineInfo | None = None
    ring_path: str | None = None
    ring_bytes: int = 0


class Connect(Hello, tag="hello", forbid_unknown_fields=True):
    """A Hello as it travels: with what tells the sender from a copy of it (identity.py). Journaled without."""

    nonces: list[int] = []  # drawn for the connections of late, the newest last; none: not told
    sent: int = -1  # the last number that was given; -1: not told


class TapCounters(msgspec.Struct):
    """Counters of an engine's tap since its start; a row here is one of one layer.

    Fields that a writer does not know are passed over, here and in the Ping that carries them: a heartbeat that is
    refused would end the engine's captures.
    """

    steps: int = 0  # of the model, with rows taken
    rows: int = 0
    bytes: int = 0  # encoded
    dropped: int = 0  # rows that found no room
    failures: int = 0  # of ours, beside which generation went on
    position_mismatches: int = 0  # frames whose positions were not those that the host expected
    waits: int = 0  # steps that waited for room (on_full = wait)
    captures_refused: int = 0  # not begun, because too much waits for a writer that is away
    waited_copies_seconds: float = 0.0  # those waits, by what room had to wait for: copies from the device,
    waited_sender_seconds: float = 0.0  # the sender, which had not taken all that it was given,
    waited_writer_seconds: float = 0.0  # or the writer, who had all of it, or was away


class TapState(msgspec.Struct):
    """State of an engine's tap."""

    counters: TapCounters
    ring_bytes: int
    ring_used_bytes: int
    waiting: int  # messages that no Ack covers yet


class Ping(msgspec.Struct, tag="ping"):
    """Heartbeat; answered by an Ack, in which is ``Ack.store`` where it ``asks``."""

    tap: TapState | None = None  # of an engine
    asks: bool = False
    uncaptured: int = 0  # requests of a front end so far that were all to be captured, and could not be


class Bye(msgspec.Struct, tag="bye", forbid_unknown_fields=True):
    """The stream ends; ``seq`` is its last number. Captures still open are closed as engine_lost."""

    seq: int


class StreamPart(msgspec.Struct, frozen=True):
    """One stream of a frame's payload: ``nbytes`` and xxh3 over its runs one after the other."""

    name: str
    nbytes: int
    xxh3: int
    extents: list[tuple[int, int]] = []  # (offset, bytes) in the ring, one a run; empty where parts are sent


class Frame(msgspec.Struct, tag="frame", forbid_unknown_fields=True):
    """Rows of one site in one codec.

    Rows come in *runs*, one a step: run i holds ``runs[i]`` rows. In every stream the bytes of a run lie
    ``[layer][row][piece]``; runs follow each other. The row table (part 1) is four little-endian uint32 arrays of
    ``sum(runs)`` each: index into ``captures``, position, token id, flags.

    Of a group every frame has ``steps``, one a run: numbers that all ranks give to a step of the engine alike. Columns
    of a row are put together only where they were computed in the same step. ``width`` is that of the sender's share.
    """

    seq: int
    site: str
    codec: str
    dtype: str  # of the rows before their codec: the model's, float32 of a probe's scores
    width: int
    layers: list[int]
    captures: list[str]
    runs: list[int]
    table_xxh3: int
    streams: list[StreamPart]
    fingerprint: str
    rank: int = 0
    shard: int = 0
    time_ns: int = 0
    steps: list[int] | msgspec.UnsetType = msgspec.UNSET


# ── from the writer ─────────────────────────────────────────────────────────────────────────────────────────────


class Welcome(msgspec.Struct, tag="welcome", forbid_unknown_fields=True):
    """Answer to Hello: what the writer already holds of this stream, and whether it can read its ring."""

    store: str
    durable: int
    ring: bool
    version: int = PROTOCOL_VERSION


class StoreState(msgspec.Struct, frozen=True):
    """The rate at which a store takes rows, and the bytes of engines' rings that wait for it.

    ``bytes_s``: bytes of rows a second that become durable, 0.0 where that is not known yet. ``measured``: "start", by
    what the writer wrote at its start for this; "traffic", by rows that came as fast as they were taken; else "".
    """

    bytes_s: float = 0.0
    measured: str = ""
    rings: dict[str, tuple[int, int]] = {}  # by the engine's name: bytes of its ranks' rings, and how many are taken


class Ack(msgspec.Struct, tag="ack", forbid_unknown_fields=True):
    """Everything of the stream up to ``durable`` survives power loss, up to ``visible`` a crash of the writer.

    ``refused`` lists (seq, code, reason) of messages that were taken off the wire but not stored; codes: conflict,
    malformed, stale, not_found, held. They count as covered. ``store`` is there for a Ping that asks alone: senders of
    earlier versions do not know it.
    """

    durable: int
    visible: int
    refused: list[tuple[int, str, str]] = []
    store: StoreState | msgspec.UnsetType = msgspec.UNSET


class Refuse(msgspec.Struct, tag="refuse", forbid_unknown_fields=True, omit_defaults=True):
    """The stream as a whole is refused (version, stale epoch, no Hello yet: code "hello").

    "fenced": another process goes on with ``stream``; this one must begin a stream of its own.
    """

    code: str
    reason: str
    stream: str = ""  # where the code is "fenced"


FromSender = Connect | Ping | Bye | Frame | Record
FromWriter = Welcome | Ack | Refuse

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_from_sender: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromSender)
_from_writer: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromWriter)
_record: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Record)


def encode(message: Hello | FromSender | FromWriter) -> bytes:
    """The msgpack bytes of part 0."""
    return _encoder.encode(message)


def unpack(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    """Decode a message; any bytes that are none raise msgspec.DecodeError (or its ValidationError).

    msgspec itself lets UnicodeDecodeError and RecursionError through.
    """
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def decode_from_sender(data: bytes | memoryview) -> FromSender:
    """A message of a sender; msgspec.ValidationError or DecodeError on anything else."""
    return unpack(_from_sender, data)  # type: ignore[no-any-return]


def decode_from_writer(data: bytes | memoryview) -> FromWriter:
    """A message of the writer; msgspec.ValidationError or DecodeError on anything else."""
    return unpack(_from_writer, data)  # type: ignore[no-any-return]


def decode_record(data: bytes | memoryview) -> Record:
    """A record; msgspec.ValidationError or DecodeError on anything else."""
    return unpack(_record, data)  # type: ignore[no-any-return]
