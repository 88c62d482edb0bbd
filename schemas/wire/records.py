"""Control records: what senders say of captures. The writer's log keeps them as they came."""

from __future__ import annotations

import msgspec

from schemas.spec import Resolved


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


Record = Open | Finish | Join | PartFinish | Dropped | Own | ClientFinish | Abandon | Delete | Hold
