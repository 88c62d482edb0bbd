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
from schemas.sites import PROBE, is_probe
from schemas.spec import Armed, Resolved
from schemas.wire.layout import Part


class Editable(msgspec.Struct, frozen=True):
    """The places that requests may edit: layers by site, at most ``depth`` edits of one row, site and layer.
    ``vectors``: names that they may use. ``rows``: the number of rows that edits of requests may set at once.
    ``counted``: for each rank the places (layers by site, ``schemas.sites.edited_place``) where it counts what was
    done; empty where the leader counts all.
    """

    layers: dict[str, list[int]]
    depth: int
    vectors: list[str]
    rows: int = 0
    counted: list[dict[str, list[int]]] = []


class Ring(msgspec.Struct, frozen=True):
    """Memory of a rank for rows on their way to the writer: ``nbytes`` is its size and ``why`` the reason for this
    size. ``on_full`` says what happens when it is full ("drop": rows are dropped; "wait": generation waits).
    """

    nbytes: int
    why: str
    on_full: str


class Attends(msgspec.Struct, frozen=True):
    """The rule by which attention of some layers weighs keys, as ``schemas.attention.AttentionRule`` has it. ``beyond``
    names what no such rule says ("attention sinks"), "" where there is nothing of the kind. ``cache``: the dtype that
    the engine's cache rounds keys to ("fp8"), "" where they stay as they were computed.
    """

    layers: list[int]
    head_size: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    beyond: str = ""
    cache: str = ""


class Proved(msgspec.Struct, frozen=True):
    """The proof at the engine's start that rows of a site are right: the ``identity`` that they fulfil. ``off`` is the
    error of the rows in the layer where it is largest. The error of a sum is relative to the stream's numbers, that of
    equal rows to their length. None where no number is compared.
    """

    identity: str
    off: float | None = None


class Divided(msgspec.Struct, frozen=True):
    """An engine whose ranks send to several writers: the number of this one (0 is that of the first rank), and the
    armed layers by site that the others get. Ranks and layout are those that this writer hears.
    """

    writer: int
    elsewhere: dict[str, list[int]]


class EngineInfo(msgspec.Struct, frozen=True):
    """Description of an engine by itself: enough to name every number it sends."""

    model: str
    model_dtype: str
    fingerprint: str  # xxh3 of the model's configuration and of samples of its weights
    revision: str
    tokenizer: str
    n_layers: int
    armed: Armed
    widths: dict[str, int]  # numbers in a row, by armed site and by probe
    max_model_len: int
    vllm_version: str
    tap_version: str
    runner: str  # module and class of what runs its steps
    async_scheduling: bool = False
    speculative: str = ""  # how drafts are made ("ngram, 3 tokens"), "" where none are
    world_size: int = 1
    meaning: dict[str, str] = {}  # by site: what exactly the value is on this model
    sources: dict[str, str] = {}  # by site: "table" of architectures, or "structure" where the start's search found it
    edits: Editable | None = None  # None: nothing is armed for edits
    group: str = ""  # the same on all ranks of an engine whose rows several of them send, else ""
    layout: list[Part] = []  # what each of these sends: all ranks name the whole of it, and Hello.rank which they are
    attention: list[Attends] = []  # of the layers whose q_rot and k_rot are armed; one of none is not known
    name: str | msgspec.UnsetType = msgspec.UNSET  # by which a gateway in front of several engines knows it
    ring: Ring | msgspec.UnsetType = msgspec.UNSET  # of this rank
    instance: str | msgspec.UnsetType = msgspec.UNSET  # the group; an engine of one rank, which is in none, has one too
    proved: dict[str, Proved] | msgspec.UnsetType = msgspec.UNSET  # by armed site that the start's search found
    unproved: str = ""  # why it found none, where the sites are a table's
    divided: Divided | msgspec.UnsetType = msgspec.UNSET

    @property
    def sent(self) -> dict[str, list[int]]:
        """The layers by site, and by probe, that are sent to this writer."""
        armed = {**self.armed.sites, **{f"{PROBE}{name}": [probe.layer] for name, probe in self.armed.probes.items()}}
        if not isinstance(self.divided, Divided):
            return armed
        left = {site: sorted({*layers} - {*self.divided.elsewhere.get(site, ())}) for site, layers in armed.items()}
        return {site: layers for site, layers in left.items() if layers or site not in self.divided.elsewhere}

    @property
    def called(self) -> str:
        """The engine's name among those of its server, "" where it is not known."""
        return self.group or self.instance or ""

    def dtype_of(self, site: str) -> str:
        """The dtype of a site's rows before their codec: the model's, and float32 of a probe's scores."""
        return "float32" if is_probe(site) else self.model_dtype


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


class Open(msgspec.Struct, tag="open", forbid_unknown_fields=True):
    """Engine: a request with a capture was scheduled for the first time."""

    seq: int
    capture: str
    request: str  # the engine's own request id
    asked: str  # the spec as asked, JSON
    resolved: Resolved
    prompt_len: int
    prompt_token_ids: bytes  # little-endian uint32
    cached: int  # leading prompt positions that came from the prefix cache
    created_ms: int
    adapter: str = ""  # the LoRA adapter that the request runs with
    edits: str = ""  # as in Manifest.edits, JSON; "" for none


class Finish(msgspec.Struct, tag="finish", forbid_unknown_fields=True):
    """Engine: a capture's request ended; every frame with its rows has a smaller seq.

    Positions at or past ``end`` were computed for tokens that the final sequence does not have: stale.
    """

    seq: int
    capture: str
    reason: str  # stop, length, abort, error
    stop_reason: str | int | None
    output_token_ids: bytes  # little-endian uint32
    end: int  # min(positions computed, prompt + output tokens)
    recomputed: int = 0  # rows computed again after a preemption
    edits: str = ""  # those of its Open, each with how often it was made; "" for none


class Join(msgspec.Struct, tag="join", forbid_unknown_fields=True):
    """Engine, a rank that does not lead: it sends its part of a capture's rows. May come before its Open, or after its
    Finish.
    """

    seq: int
    capture: str


class PartFinish(msgspec.Struct, tag="part_finish", forbid_unknown_fields=True):
    """Engine, a rank that does not lead: every frame with its rows of the capture has a smaller seq.

    ``edits``: JSON, for each edit of its Open what of Finish.edits has how often it was made, of the layers that this
    rank counts; unset where there are none.
    """

    seq: int
    capture: str
    edits: str | msgspec.UnsetType = msgspec.UNSET


class Dropped(msgspec.Struct, tag="dropped", forbid_unknown_fields=True):
    """Engine: rows that were selected but not kept; they supersede older rows at the same positions.

    A part of a group says it of its own share. With the reason ``prefix_cached`` they were never computed, and
    supersede nothing. With ``fenced`` it may come from a stream that did not open the capture: a copy of the one that
    did.
    """

    seq: int
    capture: str
    site: str
    layers: list[int]
    start: int
    stop: int
    reason: str = "dropped"


class Own(msgspec.Struct, tag="own", forbid_unknown_fields=True):
    """API or front end: a capture is about to be asked for. Refused ("conflict") where the id is taken."""

    seq: int
    capture: str  # the ULID; samples are ULID.0 … ULID.(count-1) where count > 1
    count: int
    owner: str  # "" on an open loopback service
    aliases: list[str]
    tags: dict[str, str]
    created_ms: int


class ClientFinish(msgspec.Struct, tag="client_finish", forbid_unknown_fields=True):
    """Front end: the end as the client saw it (a stop string looks like an abort inside the engine)."""

    seq: int
    capture: str
    reason: str
    stop_reason: str | int | None
    output_token_ids: bytes


class Abandon(msgspec.Struct, tag="abandon", forbid_unknown_fields=True):
    """API: an owned capture never reached the engine (refused or failed upstream); closes it as failed."""

    seq: int
    capture: str
    reason: str


class Delete(msgspec.Struct, tag="delete", forbid_unknown_fields=True):
    """API: tombstone; readers hide the capture (and its samples) at once."""

    seq: int
    capture: str


class Hold(msgspec.Struct, tag="hold", forbid_unknown_fields=True):
    """API: a hold wins over delete and retention until lifted."""

    seq: int
    capture: str
    on: bool


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


Record = Open | Finish | Join | PartFinish | Dropped | Own | ClientFinish | Abandon | Delete | Hold
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
