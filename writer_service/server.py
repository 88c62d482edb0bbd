"""The writer's main loop: receive → check → append; commit → ack → catalog; seal what is full or idle."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash
import zmq

from schemas import limits
from schemas.catalog import connect_read, engine_json
from schemas.control import (
    Bye,
    Delete,
    Finish,
    Frame,
    FromWriter,
    Hello,
    Open,
    Ping,
    Record,
    Refuse,
    Welcome,
    decode_from_sender,
    encode,
)
from schemas.errors import ProtocolError, StartError, StoreError
from schemas.frame import RowTable, check_frame, check_table
from schemas.ids import is_ulid
from schemas.limits import PROTOCOL_VERSION
from schemas.segment import FrameHeader
from writer_service import fs
from writer_service.catalog import Change, Indexed, SegmentGone, SegmentSealed
from writer_service.commits import Batch, CatalogThread, Syncer, SyncResult, Waker
from writer_service.config import Config
from writer_service.control_log import ControlLog, Entry, Lost, Message, Refused
from writer_service.ledger import Ledger, RefusedError
from writer_service.payload import find_payload
from writer_service.recovery import Recovered, recover
from writer_service.sealing import seal
from writer_service.segments import OpenSegment, SegmentSet
from writer_service.streams import SenderState, map_ring

receive_at_once: Final = 64
idle_poll_ms: Final = 200
log_bytes_max: Final = 64 * 1024 * 1024
streams_max: Final = 4096
parts_max: Final = 2 + limits.frame_bytes_max // 4096


class _Seq(msgspec.Struct):
    """What can be read of a message that is otherwise malformed."""

    seq: int


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    frames: int = 0
    records: int = 0
    payload_bytes: int = 0
    duplicates: int = 0
    gaps: int = 0
    malformed: int = 0
    refused: int = 0
    rows_not_indexed: int = 0
    disk_errors: int = 0
    commits: int = 0
    sealed: int = 0


class Writer:
    """One store's writer. ``run`` returns after ``stop`` was set and everything is on the disk."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.stop = False
        self.counters = Counters()
        state = recover(config.store)
        self._uuid, self._epoch, self._lock_fd = state.uuid, state.epoch, state.lock
        self._next_log = state.next_log
        self._log = self._new_log()
        self._segments = SegmentSet(config.store, state.next_segment, config.segment_bytes)
        self._waker = Waker()
        self._syncer = Syncer(self._waker)
        catalog_path = config.store / "catalog.sqlite"
        self._catalog = CatalogThread(catalog_path, self._waker)
        self._db = connect_read(catalog_path)
        self._ledger = Ledger(self._db)
        self._batch = Batch(1)
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._sealing: list[tuple[Future[bool], int, int]] = []
        self._streams: dict[str, SenderState] = {}
        self._by_identity: dict[bytes, SenderState] = {}
        self._want_ack: dict[str, SenderState] = {}
        self._load_streams(state)
        for number in state.to_seal:
            self._submit_seal(number, fs.open_existing(self._journal / f"{number:08d}.open"))

    @property
    def _journal(self) -> Path:
        return self.config.store / "writers" / "w0" / "journal"

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Receive until ``stop``; then commit, seal and close. Raises what the catalog thread died of."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._bind(context)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.read_fd, zmq.POLLIN)
        print(f"writer ready {self.config.endpoint}", flush=True)
        last = time.monotonic()
        try:
            while not self.stop:
                poller.poll(self._poll_ms())
                self._waker.drain()
                now = time.monotonic()
                if now - last > 1.0:  # this process stood still: the senders are not to blame for their silence
                    self._forgive(now - last)
                last = now
                quiet = self._receive()
                self._step(now, quiet)
            self._finish()
        finally:
            self._socket.close(linger=200)
            context.term()
            fs.close(self._lock_fd)

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        path = Path(self.config.endpoint.removeprefix("ipc://"))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.parent.stat()
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise StartError(f"--endpoint: {path.parent} must belong to this user alone (mode 0700); "
                             f"it has mode {info.st_mode & 0o777:04o}")
        path.unlink(missing_ok=True)  # of a writer that was killed; the lock says that none lives
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.message_header_bytes_max)
        socket.setsockopt(zmq.RCVHWM, receive_at_once)
        socket.setsockopt(zmq.SNDHWM, 1024)
        socket.setsockopt(zmq.LINGER, 200)
        socket.bind(self.config.endpoint)
        return socket

    def _poll_ms(self) -> int:
        if not self._batch.started or self._syncer.batch is not None:
            return idle_poll_ms
        if self._catalog.full:
            return 20
        if self._batch.urgent:
            return 0
        left = self._batch.started + self.config.commit_delay_s - time.monotonic()
        return max(0, min(idle_poll_ms, int(left * 1000) + 1))

    def _receive(self) -> bool:
        """Take what is waiting, up to a bound; whether nothing was left."""
        for _ in range(receive_at_once):
            try:
                identity = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            parts: list[zmq.Frame] = []
            more = bool(self._socket.getsockopt(zmq.RCVMORE))
            while more:
                part = self._socket.recv(copy=False)
                more = part.more
                if len(parts) < parts_max:
                    parts.append(part)
            if parts:
                self._take(identity, parts)
            if self._batch.nbytes >= self.config.commit_bytes and self._syncer.batch is None:
                self._start_commit()
        return False

    def _step(self, now: float, quiet: bool) -> None:
        """Everything that is due between two receptions."""
        self._end_commit()
        self._take_catalog()
        self._take_seals()
        batch = self._batch
        if batch.started and self._syncer.batch is None and not self._catalog.full and (
            batch.urgent or batch.nbytes >= self.config.commit_bytes
            or now - batch.started >= self.config.commit_delay_s
        ):
            self._start_commit()
        if quiet:
            self._find_lost(now)
            self._segments.retire(now, self.config.seal_idle_s)
        for segment in self._segments.take_sealable():
            self._submit_seal(segment.number, segment.fd)
        for bad in self._segments.drop_poisoned():
            print(f"writer: segment {bad.number} is closed after a failed sync", file=sys.stderr, flush=True)
        self._flush_acks()
        if self._catalog.failed is not None:
            raise StoreError("write catalog", self.config.store / "catalog.sqlite", self._catalog.failed,
                             "start again: a damaged catalog is rebuilt")

    # ── receive ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, identity: bytes, parts: list[zmq.Frame]) -> None:
        try:
            message = decode_from_sender(parts[0].buffer)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._take_malformed(identity, parts[0], str(error))
            return
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        state = self._by_identity.get(identity)
        if state is None:
            self._send(identity, Refuse("hello", "say Hello first"))
            return
        state.last_seen = time.monotonic()
        if isinstance(message, Ping):
            self._want_ack[state.stream] = state
        elif state.must_greet:
            return  # it was told so; what it sends until its Hello comes again after it
        elif isinstance(message, Bye):
            self._take_bye(state, message)
        elif self._in_order(state, message.seq):
            if isinstance(message, Frame):
                self._take_frame(state, message, parts)
            else:
                self._take_record(state, message)

    def _take_malformed(self, identity: bytes, part: zmq.Frame, why: str) -> None:
        self.counters.malformed += 1
        state = self._by_identity.get(identity)
        if state is None:
            self._send(identity, Refuse("hello", "say Hello first"))
            return
        try:
            seq = msgspec.msgpack.decode(part.buffer, type=_Seq).seq
        except (msgspec.MsgspecError, RecursionError):
            return
        # It has a number: take it, or the sender would send it for ever.
        if not state.must_greet and self._in_order(state, seq):
            self._refuse(state, seq, "malformed", why)

    def _in_order(self, state: SenderState, seq: int) -> bool:
        """Whether this is the next message; anything else is answered with what is covered."""
        if seq == state.received + 1 and seq not in state.ahead:
            return True
        self._want_ack[state.stream] = state
        if seq == state.received + 1:
            state.ahead.discard(seq)
            state.received = seq
            self._note(state)
            self.counters.duplicates += 1
        elif seq > state.received:
            self.counters.gaps += 1
        else:
            self.counters.duplicates += 1
        return False

    def _greet(self, identity: bytes, hello: Hello) -> None:
        refusal = self._check_hello(hello)
        if refusal is not None:
            self.counters.refused += 1
            self._send(identity, refusal)
            return
        state = self._streams.get(hello.stream)
        if state is not None and hello.epoch > state.epoch:
            self._close_captures(state, "the stream began again")
            if state.ring is not None:
                state.ring.close()
            state = None
        new = state is None
        if state is None:
            state = self._remembered(hello) or SenderState(hello.stream, hello.epoch, hello.role)
        if new or (hello.engine is not None and engine_json(self._db, hello.stream) == {}):
            try:
                self._journal_entry(state, hello)
                self._batch.urgent = True
            except OSError as error:
                self._disk_error("append", self._log.path, error)
                self._send(identity, Refuse("disk", f"{error.strerror}; try again"))
                return
        state.role, state.rank, state.shard = hello.role, hello.rank, hello.shard
        if state.identity is not None and state.identity != identity:
            self._by_identity.pop(state.identity, None)
        previous = self._by_identity.get(identity)
        if previous is not None and previous is not state:
            previous.identity = None
        if state.ring is not None:
            state.ring.close()
        state.ring = map_ring(hello.ring_path, hello.ring_bytes)
        state.identity, state.last_seen, state.ended = identity, time.monotonic(), False
        state.greet()
        self._streams[hello.stream] = self._by_identity[identity] = state
        # What was taken but is not on the disk yet comes again, and is dropped as a duplicate if it gets there.
        os_is_enough = self.config.durability == "os"
        self._send(identity, Welcome(self._uuid.hex(), state.covered(os_is_enough), state.ring is not None))
        self._want_ack[state.stream] = state

    def _check_hello(self, hello: Hello) -> Refuse | None:
        if hello.version != PROTOCOL_VERSION:
            return Refuse("version", f"protocol version {hello.version}; this writer speaks {PROTOCOL_VERSION}")
        if not is_ulid(hello.stream) or hello.epoch <= 0:
            return Refuse("malformed", "stream must be a ULID and epoch positive")
        known = self._streams.get(hello.stream)
        if known is not None and hello.epoch < known.epoch:
            return Refuse("stale", f"epoch {hello.epoch}; this stream was seen with {known.epoch}")
        if known is None and len(self._streams) >= streams_max:
            self._drop_silent()
            if len(self._streams) >= streams_max:
                return Refuse("limit", f"{streams_max} streams are connected")
        return None

    def _take_frame(self, state: SenderState, frame: Frame, parts: list[zmq.Frame]) -> None:
        try:
            rows = check_frame(frame)
            if len(parts) < 2:
                raise ProtocolError(f"frame {frame.seq}: no row table")
            table_bytes = parts[1].bytes
            table = RowTable.from_bytes(table_bytes, rows)
            check_table(frame, table)
            self._check_table_hash(frame, table_bytes)
            payload = find_payload(frame, state.ring, [part.buffer for part in parts[2:]])
        except ProtocolError as error:
            self.counters.malformed += 1
            self._refuse(state, frame.seq, "malformed", str(error))
            return
        header = FrameHeader(state.stream, state.epoch, state.durable, frame)
        try:
            segment, made = self._segments.for_frame(frame)
            if made:
                self._change(segment.made)
            offset = segment.append(self._uuid, header, table_bytes, payload)
        except OSError as error:
            self._disk_error("append", self.config.store, error)
            self._want_ack[state.stream] = state  # it does not progress: the sender tries again
            return
        segment.last_append = time.monotonic()
        nbytes = sum(part.nbytes for part in frame.streams)
        state.received = frame.seq
        self._change(Indexed(state.stream, state.epoch, header.covered, segment.number, offset, segment.tail - offset,
                             _bare(frame), table))
        self._note(state)
        self._batch.nbytes += segment.tail - offset
        self.counters.frames += 1
        self.counters.payload_bytes += nbytes
        for index, capture in enumerate(frame.captures):
            if not self._ledger.rows_count(state.stream, state.epoch, frame.seq, capture):
                self.counters.rows_not_indexed += int((table.capture == index).sum())
        if self.config.durability == "os":
            self._want_ack[state.stream] = state

    @staticmethod
    def _check_table_hash(frame: Frame, table: bytes) -> None:
        if xxhash.xxh3_64_intdigest(table) != frame.table_xxh3:
            raise ProtocolError(f"frame {frame.seq}: the row table does not match its checksum")

    def _take_record(self, state: SenderState, record: Record) -> None:
        try:
            effect = self._ledger.accept(state.stream, state.epoch, record)
        except RefusedError as error:
            self.counters.refused += 1
            self._refuse(state, record.seq, error.code, error.reason)
            return
        if not self._append_entry(state, record):
            return
        effect()
        state.received = record.seq
        self._note(state)
        self.counters.records += 1
        self._batch.urgent = True
        if isinstance(record, Open):
            state.open_captures.add(record.capture)
        elif isinstance(record, Finish | Delete):
            for capture in (record.capture, *self._ledger.under(record.capture)):
                state.open_captures.discard(capture)

    def _refuse(self, state: SenderState, seq: int, code: str, reason: str) -> None:
        if not self._append_entry(state, Refused(seq, code)):
            return
        state.received = seq
        state.refused.append((seq, code, reason[:1000]))
        self._note(state)
        self._batch.urgent = True

    def _take_bye(self, state: SenderState, bye: Bye) -> None:
        if bye.seq > state.received:
            self._want_ack[state.stream] = state  # something before it is missing; it will come again
            return
        self._close_captures(state, "the engine ended")
        if not state.ended and self._append_entry(state, Bye(bye.seq)):
            state.ended = True
            self._batch.urgent = True
        self._want_ack[state.stream] = state

    # ── journal, commit, ack ────────────────────────────────────────────────────────────────────────────────────

    def _append_entry(self, state: SenderState, message: Message) -> bool:
        try:
            self._journal_entry(state, message)
        except OSError as error:
            self._disk_error("append", self._log.path, error)
            self._want_ack[state.stream] = state
            return False
        return True

    def _journal_entry(self, state: SenderState, message: Message) -> None:
        if self._log.tail >= log_bytes_max or self._log.poisoned:
            old, self._log = self._log, self._new_log()
            if not old.poisoned:
                fs.datasync(old.fd)
            fs.close(old.fd)
        entry = Entry(state.stream, state.epoch, state.durable, time.time_ns() // 1_000_000, message)
        before = self._log.tail
        self._log.append(entry)
        self._change(entry)
        self._batch.nbytes += self._log.tail - before

    def _new_log(self) -> ControlLog:
        log = ControlLog.create(self._journal, self._next_log, self._uuid)
        self._next_log += 1
        return log

    def _change(self, change: Change) -> None:
        if not self._batch.started:
            self._batch.started = time.monotonic()
        self._batch.changes.append(change)

    def _note(self, state: SenderState) -> None:
        if not self._batch.started:
            self._batch.started = time.monotonic()
        self._batch.covered[state.stream] = (state.epoch, state.role, state.received)

    def _start_commit(self) -> None:
        batch = self._batch
        batch.log_position = (self._log.number, self._log.tail)
        files: list[OpenSegment | ControlLog] = [s for s in self._segments.all() if s.tail > s.good and not s.poisoned]
        if self._log.tail > self._log.good:
            files.append(self._log)
        self._batch = Batch(batch.number + 1)
        self._ledger.batch = self._batch.number
        self._syncer.start(batch, files)

    def _end_commit(self) -> None:
        finished = self._syncer.finished()
        if finished is None:
            return
        batch, results = finished
        if any(result.error for result in results):
            self._commit_failed(batch, results)
            return
        self.counters.commits += 1
        for result in results:
            result.file.good = max(result.file.good, result.tail)
        for name, (epoch, _, seq) in batch.covered.items():
            state = self._streams.get(name)
            if state is not None and state.epoch == epoch:
                state.durable = max(state.durable, seq)
                if state.role == "engine":
                    self._want_ack[name] = state
        self._catalog.put(batch)

    def _commit_failed(self, failed: Batch, results: list[SyncResult]) -> None:
        """A failed sync is final for its file: what it held since the last good one is taken again into another.

        Everything since then is taken again, from every stream: simple, rare, and right. Numbers that did reach the
        disk in other files are stored twice under the same number, which readers see once.
        """
        for result in results:
            if result.error is not None:
                self._disk_error("sync", result.file.path, result.error)
            result.file.poisoned = True
        for segment in self._segments.all():
            # Frames appended while the sync ran are given up with the rest: one line between good and not.
            if segment.tail > segment.good:
                segment.poisoned = True
                try:
                    fs.truncate(segment.fd, segment.good)
                except OSError as error:
                    self._disk_error("truncate", segment.path, error)
        self._log.poisoned = True
        try:
            fs.truncate(self._log.fd, self._log.good)
        except OSError as error:
            self._disk_error("truncate", self._log.path, error)
        while self._catalog.busy and self._catalog.failed is None:
            time.sleep(0.01)
        self._take_catalog()
        self._ledger.forget()
        lost = (*failed.changes, *self._batch.changes)
        self._batch = Batch(self._batch.number + 1)
        for change in lost:
            if isinstance(change, SegmentSealed | SegmentGone):  # true whatever was synced
                self._change(change)
        self._ledger.batch = self._batch.number
        for state in self._streams.values():
            state.open_captures.clear()
            if state.received > state.durable or state.must_greet:
                state.rewind()
                if state.identity is not None:
                    self._send(state.identity, Refuse("resend", "a sync failed; say Hello and send again"))
        for stream, capture in self._ledger.open_captures():
            if stream in self._streams:
                self._streams[stream].open_captures.add(capture)

    def _take_catalog(self) -> None:
        while self._catalog.done:
            batch = self._catalog.done.popleft()
            self._ledger.applied = batch.number
            for name in batch.covered:
                state = self._streams.get(name)
                # To those who ask questions next, an Ack means that readers see it too.
                if state is not None and state.role != "engine" and state.epoch == batch.covered[name][0]:
                    state.settled = max(state.settled, batch.covered[name][2])
                    self._want_ack[name] = state

    def _flush_acks(self) -> None:
        for state in self._want_ack.values():
            if state.identity is not None and not state.must_greet:
                self._send(state.identity, state.ack(self.config.durability == "os"))
        self._want_ack.clear()

    def _send(self, identity: bytes, message: FromWriter) -> None:
        with contextlib.suppress(zmq.Again):  # its queue is full; Acks are cumulative and come again with a Ping
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)

    # ── senders that vanish ─────────────────────────────────────────────────────────────────────────────────────

    def _load_streams(self, state: Recovered) -> None:
        now = time.monotonic()
        for name, sequence in state.streams.items():
            self._streams[name] = SenderState(
                name, sequence.epoch, sequence.role, received=sequence.covered, durable=sequence.covered,
                settled=sequence.covered, ahead=set(sequence.seqs), last_seen=now, ended=sequence.bye)
        for stream, capture in self._ledger.open_captures():
            if stream in self._streams:
                self._streams[stream].open_captures.add(capture)

    def _find_lost(self, now: float) -> None:
        for state in self._streams.values():
            if state.open_captures and now - state.last_seen > self.config.engine_lost_s:
                self._close_captures(state, f"no sign of life for {self.config.engine_lost_s:g} s")

    def _close_captures(self, state: SenderState, reason: str) -> None:
        if state.open_captures and self._append_entry(state, Lost(sorted(state.open_captures), reason)):
            state.open_captures.clear()
            self._batch.urgent = True

    def _forgive(self, seconds: float) -> None:
        for state in self._streams.values():
            state.last_seen += seconds

    def _remembered(self, hello: Hello) -> SenderState | None:
        """A stream that was dropped from memory; the catalog knows how far it had come."""
        row = self._db.execute("SELECT * FROM streams WHERE stream = ? AND epoch = ?",
                               (hello.stream, hello.epoch)).fetchone()
        if row is None:
            return None
        covered = row["covered"]
        return SenderState(hello.stream, hello.epoch, hello.role, received=covered, durable=covered, settled=covered)

    def _drop_silent(self) -> None:
        """Forget streams that nothing is expected from; they are looked up should they come again."""
        oldest = time.monotonic() - 2 * self.config.engine_lost_s
        for name, state in list(self._streams.items()):
            if not state.open_captures and state.last_seen < oldest and name not in self._batch.covered:
                if state.identity is not None:
                    self._by_identity.pop(state.identity, None)
                if state.ring is not None:
                    state.ring.close()
                del self._streams[name]

    # ── sealing and the end ─────────────────────────────────────────────────────────────────────────────────────

    def _submit_seal(self, number: int, fd: int) -> None:
        future = self._sealer.submit(seal, self.config.store, self._uuid, number, fd, self._epoch, self._engines())
        future.add_done_callback(lambda _: self._waker.wake())
        self._sealing.append((future, number, fd))

    def _engines(self) -> Mapping[str, Mapping[str, Any]]:
        """The newest engines, by stream, as blocks name them."""
        rows = self._db.execute("SELECT stream, info FROM engines ORDER BY epoch DESC LIMIT 16")
        keep = ("model", "revision", "tokenizer", "vllm_version", "tap_version", "n_layers")
        return {r["stream"]: {k: v for k, v in json.loads(r["info"]).items() if k in keep} for r in rows}

    def _take_seals(self) -> None:
        for item in [item for item in self._sealing if item[0].done()]:
            self._sealing.remove(item)
            future, number, fd = item
            error = future.exception()
            fs.close(fd)
            if error is not None:
                # The journal file stays and is readable; the next start seals it.
                self.counters.disk_errors += 1
                print(f"writer: sealing segment {number} failed: {error}", file=sys.stderr, flush=True)
                continue
            self._change(SegmentSealed(number) if future.result() else SegmentGone(number))
            self.counters.sealed += 1

    def _finish(self) -> None:
        """Drain what has arrived, commit, seal, and leave a clean catalog."""
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not self._receive():
            self._step(time.monotonic(), False)
        self._settle()
        self._segments.retire(float("inf"), 0.0)
        for segment in self._segments.take_sealable():
            self._submit_seal(segment.number, segment.fd)
        while self._sealing:
            self._take_seals()
            time.sleep(0.005)
        self._settle()
        self._syncer.close()
        self._sealer.shutdown()
        self._db.close()
        self._catalog.close()

    def _settle(self) -> None:
        """Commit until nothing is left to commit."""
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            if self._batch.started and self._syncer.batch is None:
                self._start_commit()
            self._end_commit()
            self._take_catalog()
            self._flush_acks()
            if not self._batch.started and self._syncer.batch is None and not self._catalog.busy:
                return
            time.sleep(0.002)

    def _disk_error(self, op: str, path: Path, error: OSError) -> None:
        self.counters.disk_errors += 1
        if self.counters.disk_errors in (1, 10, 100) or self.counters.disk_errors % 1000 == 0:
            print(f"writer: {op} {path}: {error} (error {self.counters.disk_errors}; senders keep what is not "
                  "acknowledged)", file=sys.stderr, flush=True)


def _bare(frame: Frame) -> Frame:
    """Without what only the sender's ring needs."""
    return msgspec.structs.replace(frame, streams=[])
