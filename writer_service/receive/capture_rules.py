"""Rules of who may do what to which capture: every record is held against them before it is journaled."""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas import limits
from schemas.ids import is_ulid, sample_id, split_capture_id
from schemas.manifest import REASONS
from schemas.sites import is_site
from schemas.wire.layout import LEADER
from schemas.wire.records import (
    Abandon,
    ClientFinish,
    Delete,
    Dropped,
    Finish,
    Hold,
    Join,
    Open,
    Own,
    PartFinish,
    Record,
)
from writer_service.receive.record_checks import RefusedError, are_layers, check_open, check_own, need, number_max

remembered_max = 20_000


class Member(NamedTuple):
    """The rank and group of a sender; of none where ``group`` is empty."""

    group: str = ""
    rank: int = LEADER


ALONE = Member()


@dataclass(slots=True)
class PartState:
    """State of a part that another rank than the leader sends."""

    sender: tuple[str, int]  # stream and epoch
    open_seq: int
    finish_seq: int | None = None


@dataclass(slots=True)
class CaptureState:
    """State of one capture as far as the rules need it."""

    own: tuple[str, int] | None = None  # stream and number of its Own
    opener: tuple[str, int, str] | None = None  # stream, epoch, request
    open_seq: int = 0
    finish_seq: int | None = None
    failed: bool = False
    deleted: bool = False
    hold: bool = False
    quota: bool = False  # its rows are not taken
    batch: int = 0  # the commit that its last change belongs to
    group: str = ""  # of whoever opened or joined it first
    parts: dict[int, PartState] = field(default_factory=dict)  # by rank, those that joined

    @property
    def closed(self) -> bool:
        """Whether nothing more will come."""
        return self.deleted or self.failed or self.finish_seq is not None


Effect = Callable[[], None]


def _nothing() -> None:
    pass


class CaptureRules:
    """Rules over the captures in use; others are looked up in the catalog, which may lag by a few commits."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._known: OrderedDict[str, CaptureState] = OrderedDict()
        self._ulids: dict[str, set[str]] = {}
        self.batch = 1  # the commit now being filled
        self.applied = 0  # the last commit that the catalog has

    def get(self, capture: str) -> CaptureState | None:
        """The state of exactly this id."""
        if capture in self._known:
            return self._known[capture]
        row = self._db.execute("SELECT * FROM captures WHERE id = ?", (capture,)).fetchone()
        if row is None:
            return None
        own = (row["own_stream"], row["own_seq"]) if row["own_stream"] else None
        opener = (row["stream"], row["epoch"], row["request"]) if row["stream"] else None
        state = CaptureState(own, opener, row["open_seq"] or 0, row["finish_seq"], row["failed"] is not None,
                            bool(row["deleted"]), bool(row["hold"]), bool(row["quota"]), group=row["group"])
        if state.group:
            query = "SELECT * FROM parts WHERE capture = ? AND stream <> ''"
            state.parts = {part["part"]: PartState((part["stream"], part["epoch"]), part["open_seq"],
                                                   part["finish_seq"]) for part in self._db.execute(query, (capture,))}
        return self._remember(capture, state)

    def resolve(self, ref: str) -> list[str]:
        """The captures that a record names: the exact one, or all samples of a ULID."""
        if self.get(ref) is not None:
            return [ref]
        if not is_ulid(ref):
            return []
        rows = self._db.execute("SELECT id FROM captures WHERE ulid = ?", (ref,))
        return sorted({row["id"] for row in rows} | self._ulids.get(ref, set()))

    def accept(self, stream: str, epoch: int, record: Record, member: Member = ALONE) -> Effect:
        """Hold a record of a sender, ``member`` of a group, against the rules; RefusedError if it may not be stored.

        The result is called once the record lies in the log: until then nothing has changed.
        """
        match record:
            case Own():
                return self._own(stream, record)
            case Open():
                return self._open(stream, epoch, record, member)
            case Join():
                return self._join(stream, epoch, record, member)
            case Finish() | PartFinish() | Dropped():
                return self._from_opener(stream, record, member)
            case ClientFinish():
                return self._client_finish(record)
            case Abandon():
                pending = [s for s in self._named(record.capture) if s.opener is None]
                if not pending:
                    raise RefusedError("conflict", f"capture {record.capture} was already started by an engine")
                return self._set(pending, failed=True)
            case Delete():
                named = self._named(record.capture)
                if any(state.hold for state in named):
                    raise RefusedError("held", f"capture {record.capture} is on hold; lift the hold first")
                return self._set(named, deleted=True)
            case Hold():
                return self._set(self._named(record.capture), hold=record.on)

    def _set(self, states: list[CaptureState], **values: bool) -> Effect:
        def effect() -> None:
            for state in states:
                state.batch = self.batch
                for name, value in values.items():
                    setattr(state, name, value)

        return effect

    def rows_count(self, stream: str, epoch: int, seq: int, capture: str) -> bool:
        """Whether rows of a capture in a frame will be served (the catalog applies the same rule)."""
        state = self.get(capture)
        if state is None or state.deleted or state.quota:
            return False
        begun: CaptureState | PartState | None = state
        if state.opener is None or state.opener[:2] != (stream, epoch):
            begun = next((part for part in state.parts.values() if part.sender == (stream, epoch)), None)
        return begun is not None and begun.open_seq < seq and (begun.finish_seq is None or seq < begun.finish_seq)

    def refuse_rows(self, capture: str) -> None:
        """Take nothing of the capture: the store is over its quota."""
        if (state := self.get(capture)) is not None:
            state.quota, state.batch = True, self.batch

    def over_quota(self, captures: Sequence[str]) -> bool:
        """Whether rows of none of these captures are taken."""
        return all((state := self.get(capture)) is not None and state.quota for capture in captures)

    def forget(self) -> None:
        """Drop what is remembered, after a commit that failed: the catalog has what counts."""
        self._known.clear()
        self._ulids.clear()

    def open_captures(self) -> Iterator[tuple[str, str]]:
        """(stream, capture) of everything that an engine has opened, or joined, and not finished, from the catalog."""
        query = ("SELECT stream, id FROM captures WHERE stream IS NOT NULL AND finish_seq IS NULL AND lost = 0 "
                 "AND deleted = 0 UNION ALL SELECT stream, capture FROM parts WHERE finish_seq IS NULL AND lost = 0")
        for row in self._db.execute(query):
            yield row["stream"], row["id"]

    def _own(self, stream: str, own: Own) -> Effect:
        check_own(own)
        for taken in self.resolve(own.capture):
            state = self.get(taken)
            if state is not None and state.own != (stream, own.seq):
                raise RefusedError("conflict", f"capture id {own.capture} is already taken")

        def effect() -> None:
            for index in range(own.count):
                capture = sample_id(own.capture, index, own.count)
                if self.get(capture) is None:
                    self._remember(capture, CaptureState(own=(stream, own.seq), batch=self.batch))

        return effect

    def _open(self, stream: str, epoch: int, opened: Open, member: Member) -> Effect:
        check_open(opened)
        need(member.rank == LEADER, "Open", f"from rank {LEADER} of a group, not from rank {member.rank}")
        opener = (stream, epoch, opened.request)
        state = self.get(opened.capture)
        if state is not None:
            if state.opener is not None and (state.opener != opener or state.open_seq != opened.seq):
                raise RefusedError("conflict", f"capture {opened.capture} was already opened by another request")
            if state.deleted or state.failed:
                what = "deleted" if state.deleted else "closed as failed"
                raise RefusedError("conflict", f"capture {opened.capture} was {what}")
            if state.parts and state.group != member.group:
                raise RefusedError("conflict", f"capture {opened.capture} was joined by ranks of another engine")

        def effect() -> None:
            known = state or self._remember(opened.capture, CaptureState())
            known.opener, known.open_seq, known.batch = opener, opened.seq, self.batch
            known.group = member.group

        return effect

    def _join(self, stream: str, epoch: int, joined: Join, member: Member) -> Effect:
        """Before its Open or after it: streams do not wait for each other. Who came first says whose it is."""
        need(split_capture_id(joined.capture) is not None, "capture", "a capture id")
        need(bool(member.group) and member.rank != LEADER, "Join",
              f"from a rank of a group other than {LEADER}, not from rank {member.rank} of group {member.group!r}")
        state, part = self.get(joined.capture), PartState((stream, epoch), joined.seq)
        if state is not None:
            if state.deleted or state.failed:
                what = "deleted" if state.deleted else "closed as failed"
                raise RefusedError("conflict", f"capture {joined.capture} was {what}")
            if (state.opener is not None or state.parts) and state.group != member.group:
                raise RefusedError("conflict", f"capture {joined.capture} belongs to another engine")
            known = state.parts.get(member.rank)
            if known is not None and (known.sender, known.open_seq) != (part.sender, part.open_seq):
                raise RefusedError("conflict", f"rank {member.rank} has already joined capture {joined.capture}")

        def effect() -> None:
            known = state or self._remember(joined.capture, CaptureState())
            known.group, known.batch = member.group, self.batch
            known.parts.setdefault(member.rank, part)

        return effect

    def _from_opener(self, stream: str, record: Finish | PartFinish | Dropped, member: Member) -> Effect:
        """The effect of a record that only those may send who opened the capture or joined it, of what they send
        themselves.
        """
        state = self.get(record.capture)
        begun: CaptureState | PartState | None = state
        if state is not None and member.rank != LEADER:
            begun = state.parts.get(member.rank)
        if state is None or begun is None or (begun is state and state.opener is None):
            raise RefusedError("not_found", f"no open capture {record.capture[:40]!r}")
        fenced = isinstance(record, Dropped) and record.reason == "fenced"  # it supersedes nothing
        sender = begun.sender if isinstance(begun, PartState) else (state.opener or ("", 0, ""))
        if sender[0] != stream and not fenced:
            raise RefusedError("conflict", f"capture {record.capture} was opened by another engine")
        if state.deleted:
            raise RefusedError("not_found", f"capture {record.capture} was deleted")
        if begun.finish_seq is not None and begun.finish_seq != record.seq and not fenced:
            raise RefusedError("stale", f"capture {record.capture} is already finished")
        if isinstance(record, Dropped):
            need(is_site(record.site), "site", "a known site")
            need(are_layers(record.layers), "layers", "ascending layers")
            need(0 <= record.start < record.stop <= limits.position_max + 1, "start", "a range [start, stop)")
            need(record.reason in REASONS, "reason", f"one of {', '.join(REASONS)}")
            return _nothing
        if isinstance(record, Finish):
            need(begun is state, "Finish", f"from rank {LEADER}; rank {member.rank} sends PartFinish")
            need(0 <= record.end <= limits.position_max, "end", f"0 to {limits.position_max}")
            need(len(record.output_token_ids) % 4 == 0, "output_token_ids", "4 bytes a token")
            need(0 <= record.recomputed <= number_max, "recomputed", f"0 to {number_max}")
        else:
            need(begun is not state, "PartFinish", "from a rank that joined; the rank that opened a capture sends "
                                                   "Finish")

        def effect() -> None:
            begun.finish_seq, state.batch = record.seq, self.batch

        return effect

    def _client_finish(self, record: ClientFinish) -> Effect:
        # The front end is a stream of its own: after a short request its word can be here before the engine's Open.
        need(split_capture_id(record.capture) is not None, "capture", "a capture id")
        need(len(record.output_token_ids) % 4 == 0, "output_token_ids", "4 bytes a token")

        def effect() -> None:
            if self.get(record.capture) is None:
                self._remember(record.capture, CaptureState(batch=self.batch))

        return effect

    def _named(self, ref: str) -> list[CaptureState]:
        found = [state for capture in self.resolve(ref) if (state := self.get(capture)) and not state.deleted]
        if not found:
            raise RefusedError("not_found", f"no capture {ref[:40]!r}")
        return found

    def _remember(self, capture: str, state: CaptureState) -> CaptureState:
        self._known[capture] = state
        ulid = capture[:26]
        self._ulids.setdefault(ulid, set()).add(capture)
        if len(self._known) > remembered_max:
            self._evict()
        return state

    def _evict(self) -> None:
        """Forget the oldest that the catalog knows as well: it answers for them from now on."""
        safe = [c for c, s in self._known.items() if s.batch <= self.applied][: remembered_max // 4]
        for capture in safe:
            del self._known[capture]
            names = self._ulids[capture[:26]]
            names.discard(capture)
            if not names:
                del self._ulids[capture[:26]]
