"""Known senders: greeting, finding by connection, closing what a vanished one left open, and their answers."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from schemas import limits
from schemas.catalog.records import engine_json, nonce_of
from schemas.checks import is_name
from schemas.errors import ProtocolError
from schemas.ids import is_ulid
from schemas.limits import PROTOCOL_VERSION
from schemas.wire.engine_info import EngineInfo
from schemas.wire.identity import told_max
from schemas.wire.layout import check_layout
from schemas.wire.messages import Connect, FromWriter, Hello, Refuse, StoreState, encode
from writer_service.control_log import CapturesLost
from writer_service.journal.journal import Journal
from writer_service.metrics import Counters
from writer_service.receive.record_checks import number_max
from writer_service.receive.sockets import Sockets, is_remote
from writer_service.recover.sequences import StreamSequence
from writer_service.sender_state import SenderState, map_ring

streams_max: Final = 4096
remote_streams_max: Final = 1024  # of them: who holds a key of another host cannot keep this one's senders out


class Senders:
    """Streams by name and by connection."""

    def __init__(self, db: sqlite3.Connection, journal: Journal, lost_after_s: float) -> None:
        self._db, self._journal, self._lost_after_s = db, journal, lost_after_s
        self._streams: dict[str, SenderState] = {}
        self._by_address: dict[bytes, SenderState] = {}
        self.rings_max = streams_max  # mapped at a time: each takes descriptors

    def restore(self, sequences: dict[str, StreamSequence], captures: Iterable[tuple[str, str]]) -> None:
        """The streams with something open, as (stream, capture), or stored past a gap; each has a while to come back.
        """
        captures = list(captures)
        now = time.monotonic()
        opened = {stream for stream, _ in captures}
        for name, sequence in sequences.items():
            if name not in opened and not sequence.seqs:
                continue  # looked up in the catalog should it come again
            covered = sequence.covered
            self._streams[name] = SenderState(
                name, sequence.epoch, sequence.role, received=covered, durable=covered, settled=covered,
                ahead=set(sequence.seqs), last_seen=now, begun=now, ended=sequence.bye, nonce=nonce_of(self._db, name))
        self.own_captures(captures)

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[SenderState]:
        return iter(list(self._streams.values()))

    def get(self, stream: str, epoch: int | None = None) -> SenderState | None:
        """The stream in this incarnation, or in whatever."""
        state = self._streams.get(stream)
        return state if state is not None and epoch in (None, state.epoch) else None

    def by_connection(self, address: bytes) -> SenderState | None:
        """Sender that greeted on a connection."""
        return self._by_address.get(address)

    def greet(self, address: bytes, hello: Connect) -> SenderState | Refuse:
        """The state of the sender that greets, or why it is refused."""
        if refusal := self._check(hello, is_remote(address)):
            return refusal
        if is_remote(address) and hello.role not in ("engine", "front_end"):
            return Refuse("forbidden", f"a sender of role {hello.role[:32]!r} must be on the writer's own host")
        engine = hello.engine or self._engine_of(hello)
        if reason := self._check_group(hello, engine):
            return Refuse("malformed", reason)
        known = self._streams.get(hello.stream)
        if known is not None and hello.epoch > known.epoch:
            self.close_captures(known, "the stream began again")
            if known.open_captures:
                return Refuse("disk", "what the stream left open cannot be closed now; try again")
            self._forget(known)
            known = None
        state = known or self._remembered(hello) or SenderState(hello.stream, hello.epoch, hello.role)
        if _is_copy(state, hello):
            return Refuse("fenced", "another process goes on with this stream", hello.stream)
        new = known is None or known.must_greet or (
            hello.engine is not None and not engine_json(self._db, hello.stream))
        if new or hello.nonces:
            try:
                self._journal.append_entry(state, _journaled(hello, hello.engine if new else None))
            except OSError as error:
                self._journal.disk_error("append", self._journal.folder, error)
                return Refuse("disk", f"{error.strerror}; try again")
        state.role, state.rank, state.shard = hello.role, hello.rank, hello.shard
        if engine is not None:
            state.name = engine.name if engine.name and is_name(engine.name) else ""
            state.instance = engine.called
            if engine.group:
                state.group, state.layout = engine.group, engine.layout
        state.nonce = hello.nonces[-1] if hello.nonces else 0
        state.remote = is_remote(address)
        self._connect(state, address)
        state.close_ring()
        # A path that another host names is of that host: it is never opened here.
        mapped = sum(other.ring is not None for other in self._streams.values())
        state.ring = None if state.remote or mapped >= self.rings_max else map_ring(hello.ring_path, hello.ring_bytes)
        state.last_seen, state.ended = time.monotonic(), False
        state.begun = state.last_seen if known is None else state.begun
        state.tap = None  # what it said of itself before is over: more may wait now
        state.greet()
        return state

    def own_captures(self, opened: Iterable[tuple[str, str]]) -> None:
        """Set which captures each stream has open: (stream, capture)."""
        for state in self._streams.values():
            state.open_captures.clear()
        for stream, capture in opened:
            if stream in self._streams:
                self._streams[stream].open_captures.add(capture)

    def find_lost(self, now: float) -> None:
        """Close the captures of senders that have been silent for too long, and let go of their memory."""
        for state in self:
            if now - state.last_seen <= self._lost_after_s or state.waiting:
                continue  # or what was heard of it is still being written
            self.close_captures(state, f"no sign of life for {self._lost_after_s:g} s")
            if state.ring is not None:
                # A dead engine's ring would stay in memory for ever. One that lives is told to greet again.
                self._disconnect(state)

    def close_captures(self, state: SenderState, reason: str) -> None:
        """Journal that a sender's open captures will not be finished by it."""
        if not state.open_captures:
            return
        if self._journal.try_append(state, CapturesLost(sorted(state.open_captures), reason)):  # else at the next look
            state.open_captures.clear()

    def forgive(self, seconds: float) -> None:
        """Add a standstill of this process to all deadlines: nobody else was silent."""
        for state in self._streams.values():
            state.last_seen += seconds

    def _check(self, hello: Connect, remote: bool) -> Refuse | None:
        if hello.version != PROTOCOL_VERSION:
            return Refuse("version", f"protocol version {hello.version}; this writer speaks {PROTOCOL_VERSION}")
        if not is_ulid(hello.stream) or hello.epoch <= 0:
            return Refuse("malformed", "stream must be a ULID and epoch positive")
        if len(hello.nonces) > told_max:
            return Refuse("malformed", f"at most {told_max} nonces")
        if max(hello.epoch, abs(hello.rank), abs(hello.shard)) > number_max:
            return Refuse("malformed", f"epoch, rank and shard must be at most {number_max}")
        known = self._streams.get(hello.stream)
        seen = known.epoch if known is not None else self._epoch_of(hello.stream)
        if hello.epoch < seen:
            return Refuse("stale", f"epoch {hello.epoch}; this stream was seen with {seen}")
        if known is None and self._full(remote):
            self._drop_silent()
            if self._full(remote):
                return Refuse("limit", f"{remote_streams_max if remote else streams_max} streams are connected; come "
                              "again later")
        return None

    def _engine_of(self, hello: Hello) -> EngineInfo | None:
        """The description that a stream gave of itself before, if it greets without one."""
        known = engine_json(self._db, hello.stream)
        return msgspec.convert(known, EngineInfo) if known else None

    def _check_group(self, hello: Hello, engine: EngineInfo | None) -> str:
        """Why a sender cannot be the rank of the group that it says it is; "" where it can."""
        known = self._db.execute('SELECT rank, "group" FROM engines WHERE stream = ?', (hello.stream,)).fetchone()
        live = self._streams.get(hello.stream)  # the catalog may lag
        was = tuple(known) if known is not None else None if live is None else (live.rank, live.group)
        group = "" if engine is None else engine.group
        if was not in (None, (hello.rank, group)):
            return f"this stream was rank {was[0]} of group {was[1]!r}, and stays it"
        if engine is not None and len(engine.called) > limits.alias_chars_max:
            return f"group: at most {limits.alias_chars_max} characters"
        if engine is None or not group:
            return "" if engine is None or not engine.layout else "layout: group must be named"
        if not 0 <= hello.rank < len(engine.layout):
            return f"rank {hello.rank} is not in the layout, which has {len(engine.layout)} parts"
        sent = [(site, layer) for site, layers in engine.sent.items() for layer in layers]
        try:
            check_layout(engine.layout, sent, engine.widths)
        except ProtocolError as error:
            return str(error)
        query = 'SELECT rank, info FROM engines WHERE "group" = ? ORDER BY rowid LIMIT 1'
        told = [(row["rank"], msgspec.json.decode(row["info"], type=EngineInfo).layout)
                for row in self._db.execute(query, (group,))]  # which may lag
        told += [(state.rank, state.layout) for state in self._streams.values() if state.group == group]
        other = next((rank for rank, layout in told if layout != engine.layout), None)
        return "" if other is None else (
            f"layout: rank {other} of group {group!r} named another one than rank {hello.rank}; give every start of an "
            "engine another VLLM_TAP_GROUP, and all of its ranks the same")

    def _full(self, remote: bool) -> bool:
        far = sum(state.remote for state in self._streams.values())
        return far >= remote_streams_max if remote else len(self._streams) - far >= streams_max - remote_streams_max

    def _connect(self, state: SenderState, address: bytes) -> None:
        if state.address is not None and state.address != address:
            self._by_address.pop(state.address, None)
        previous = self._by_address.get(address)
        if previous is not None and previous is not state:
            previous.address = None
        state.address = address
        self._streams[state.stream] = self._by_address[address] = state

    def _epoch_of(self, stream: str) -> int:
        """The epoch of a stream that was dropped from memory, 0 where it is new."""
        row = self._db.execute("SELECT epoch FROM streams WHERE stream = ?", (stream,)).fetchone()
        return 0 if row is None else int(row["epoch"])

    def _remembered(self, hello: Hello) -> SenderState | None:
        """A stream that was dropped from memory; the catalog knows how far it had come."""
        query = "SELECT covered FROM streams WHERE stream = ? AND epoch = ?"
        row = self._db.execute(query, (hello.stream, hello.epoch)).fetchone()
        if row is None:
            return None
        covered = row["covered"]
        return SenderState(hello.stream, hello.epoch, hello.role, received=covered, durable=covered, settled=covered,
                           nonce=nonce_of(self._db, hello.stream))

    def _drop_silent(self) -> None:
        """Forget streams that nothing is expected from; they are looked up should they come again."""
        oldest = time.monotonic() - 2 * self._lost_after_s
        for state in self:
            gone = state.ended or state.last_seen < oldest
            if gone and not state.open_captures and not state.waiting and state.settled == state.received \
                    and not self._journal.pending_for(state.stream):
                self._forget(state)

    def _forget(self, state: SenderState) -> None:
        self._disconnect(state)
        self._streams.pop(state.stream, None)

    def _disconnect(self, state: SenderState) -> None:
        """Answer what comes from it next with a Refuse("hello")."""
        if state.address is not None:
            self._by_address.pop(state.address, None)
            state.address = None
        state.close_ring()


def _is_copy(state: SenderState, hello: Connect) -> bool:
    """Whether another process took the stream on since this one knew how it stood."""
    if 0 <= hello.sent < state.received:
        return True
    return bool(state.nonce and hello.nonces) and state.nonce not in hello.nonces


def _journaled(hello: Connect, engine: EngineInfo | None) -> Hello:
    """Words of a Hello that the logs always had: the nonce lies where the process id does."""
    words = {name: getattr(hello, name) for name in Hello.__struct_fields__}
    return Hello(**{**words, "engine": engine, "pid": hello.nonces[-1] if hello.nonces else hello.pid})


class Acks:
    """Answers to senders: at once, or an Ack at the end of the step, which covers everything before it too.

    ``os_is_enough``: rows count as safe once the operating system has them. ``store``: its state, for who asks.
    """

    def __init__(self, sockets: Sockets, counters: Counters, os_is_enough: bool, store: Callable[[], StoreState]
                 ) -> None:
        self.os_is_enough = os_is_enough
        self._sockets, self._counters, self._store = sockets, counters, store
        self._want_ack: dict[str, SenderState] = {}

    def send(self, address: bytes, message: FromWriter) -> None:
        """Answer now."""
        self._sockets.send(address, encode(message))

    def start_over(self, address: bytes) -> None:
        """Ask a sender for everything after its last Ack once more."""
        self.send(address, Refuse("resend", "a sync failed; say Hello and send again"))

    def ack(self, state: SenderState) -> None:
        """Answer with an Ack at the end of this step."""
        self._want_ack[state.stream] = state

    def flush(self) -> None:
        """Send the Acks that are due: a step ends."""
        for state in self._want_ack.values():
            if state.address is not None and not state.must_greet:
                answer = state.ack(self.os_is_enough)
                if state.asks:
                    answer.store, state.asks = self._store(), False
                self.send(state.address, answer)
                self._counters.acks += 1
        self._want_ack.clear()
