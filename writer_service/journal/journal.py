"""The journal: segments and control log behind one group commit; what is on the disk is then told to the catalog."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import msgspec

from schemas.errors import ProtocolError
from schemas.store.paths import journal_folder
from schemas.store.segment import FrameHeader
from schemas.wire.records import ClientFinish, Finish, PartFinish
from writer_service import fs, log
from writer_service.catalog.changes import (
    Change,
    Compacted,
    Erased,
    Indexed,
    LogBegun,
    Scrubbed,
    SegmentGone,
    SegmentMade,
    SegmentSealed,
)
from writer_service.config import Config
from writer_service.control_log import ControlLog, LogEntry, Message
from writer_service.journal.checksum_cache import ChecksumCache
from writer_service.journal.group_commit import Batch, CatalogThread, Syncer, SyncResult, Waker
from writer_service.journal.open_segments import OpenSegment, SegmentSet
from writer_service.journal.parallel_append import ParallelAppend, PendingAppend, ReceivedFrame
from writer_service.journal.store_rate import StoreRate
from writer_service.metrics import Counters, sync_seconds
from writer_service.sender_state import SenderState

log_bytes_max: Final = 64 * 1024 * 1024
_TOGETHER_S: Final = 0.02  # that the end of a capture waits for frames that lanes write: others end with them
_ENDS: Final = (ClientFinish, Finish, PartFinish)


class Journal:
    """Journal of one store. Appends come from the main loop alone; syncs and the catalog run beside it."""

    def __init__(self, config: Config, uuid: bytes, next_log: int, next_segment: int, waker: Waker) -> None:
        self._config, self._uuid = config, uuid
        self.counters = Counters()
        self.folder = config.store / journal_folder()
        self._next_log = next_log
        self._log = self._new_log()
        self.segments = SegmentSet(config.store, next_segment, config.segment_bytes, config.lanes)
        self._appender = ParallelAppend(uuid, config.lanes, waker.wake)
        self.checksums = ChecksumCache()
        self._syncer = Syncer(waker)
        self.sync_seconds = sync_seconds()
        self.rate = StoreRate()
        self.catalog = CatalogThread(config.store / "catalog.sqlite", waker)
        self._batch = Batch(1, [LogBegun(self._log.number)])

    @property
    def batch_number(self) -> int:
        """The number of the commit now being filled."""
        return self._batch.number

    @property
    def idle(self) -> bool:
        """Whether everything appended is on the disk and in the catalog."""
        return not (self._batch.started or self._appender or self._syncer.batch or self.catalog.backlog)

    def lag_s(self, now: float) -> float:
        """Age of the oldest thing that is not on the disk, 0 where everything is."""
        syncing = self._syncer.batch
        began = [batch.started for batch in (self._batch, syncing) if batch is not None and batch.started]
        return max(0.0, now - min(began)) if began else 0.0

    def pending_for(self, stream: str) -> bool:
        """Whether the commit now being filled has something of a stream."""
        return stream in self._batch.covered

    # ── append ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def appending_bytes(self) -> int:
        """Bytes of payload that lanes were given, and that were not taken note of; 0 where there is none."""
        return self._appender.nbytes

    @property
    def appended(self) -> bool:
        """Whether ``finish_append`` need not wait."""
        return self._appender.done

    def start_append(self, received: ReceivedFrame) -> None:
        """Append a frame from wherever its bytes lie, beside the main loop; ``finish_append`` takes note of it.

        OSError: nothing happened, it can come again.
        """
        self._appender.give(self._placed(received))

    def finish_append(self) -> ProtocolError | None:
        """Wait until the first of the frames that were started is appended: why it was not stored, None where it was.

        OSError: none of those that were started was appended, all of them can come again.
        """
        item = self._appender.take()
        self._index(item)
        return item.fault

    def append(self, received: ReceivedFrame) -> ProtocolError | None:
        """Append a frame here and now, where none was started: why it was not stored, None where it was.

        OSError: nothing happened, it can come again.
        """
        item = self._placed(received)
        self._appender.write(item)
        self._index(item)
        return item.fault

    def give_up_append(self) -> None:
        """Wait for what was started, and take it back: nobody is to write once the store is somebody else's."""
        self._appender.give_up()

    def _placed(self, received: ReceivedFrame) -> PendingAppend:
        segment, made = self.segments.for_frame(received.frame)
        if made:
            self.change(segment.made)
        state, frame = received.state, received.frame
        header = FrameHeader(state.stream, state.epoch, state.durable, frame)
        return PendingAppend(received, segment, header, keep=not self.checksums.full)

    def _index(self, item: PendingAppend) -> None:
        self.counters.appending_seconds = self._appender.seconds
        self._batch.wrote = self._batch.wrote or item.began
        if item.fault is not None:
            return
        header, received = item.header, item.received
        bare = msgspec.structs.replace(received.frame, streams=[])  # where it lay in the ring is nobody's business now
        self.change(Indexed(header.stream, header.epoch, header.covered, item.segment.number, item.offset, item.nbytes,
                            bare, received.table))
        if item.checksums is not None:
            kept = self.checksums.put(item.segment.number, item.offset, received.frame, item.checksums)
            self.counters.frames_checksummed += kept
        self._batch.nbytes += item.nbytes
        self._batch.payload_bytes += received.nbytes
        self.counters.frames += 1
        self.counters.rows += len(received.table.position)
        self.counters.payload_bytes += received.nbytes

    def append_entry(self, state: SenderState, message: Message) -> None:
        """A record to the control log. OSError: nothing happened, it can come again."""
        log = self._log
        # A full log is left only when all of it is on the disk: the next commit syncs the new one alone.
        if log.poisoned or (log.tail >= log_bytes_max and log.tail == log.good):
            self._turn_log()
        entry = LogEntry(state.stream, state.epoch, state.durable, time.time_ns() // 1_000_000, message)
        before = self._log.tail
        self._log.append(entry)
        self.change(entry)
        self._batch.nbytes += self._log.tail - before
        if isinstance(message, _ENDS):
            self._batch.ends = True
        else:
            self._batch.urgent = True

    def try_append(self, state: SenderState, message: Message) -> bool:
        """``append_entry``; False, with the error counted, where the disk does not take it now."""
        try:
            self.append_entry(state, message)
        except OSError as error:
            self.disk_error("append", self.folder, error)
            return False
        return True

    def rotate_log(self) -> bool:
        """Leave the log for a new one, where all of it is on the disk; whether that was so."""
        if self._log.tail > self._log.good or self._log.poisoned or self._syncer.batch is not None:
            return False
        try:
            self._turn_log()
        except OSError as error:
            self.disk_error("begin a log in", self.folder, error)
            return False
        return True

    def _turn_log(self) -> None:
        log, self._log = self._log, self._new_log()
        fs.close(log.fd)
        self.change(LogBegun(self._log.number))

    def _new_log(self) -> ControlLog:
        number, self._next_log = self._next_log, self._next_log + 1  # a number whose file failed is not used again
        return ControlLog.create(self.folder, number, self._uuid)

    def change(self, change: Change) -> None:
        """Tell the catalog of a change with the next commit."""
        self._begin()
        self._batch.changes.append(change)

    def note(self, state: SenderState) -> None:
        """The next commit covers what was taken of the stream so far."""
        self._begin()
        self._batch.covered[state.stream] = (state.epoch, state.role, state.received)

    def _begin(self) -> None:
        if not self._batch.started:
            self._batch.started = time.monotonic()

    # ── commit ──────────────────────────────────────────────────────────────────────────────────────────────────

    def wait_s(self, now: float) -> float | None:
        """Seconds until a commit is due, None where nothing waits for one."""
        batch = self._batch
        if not batch.started or self._syncer.batch is not None:
            return None
        if self.catalog.full:
            return 0.02
        if batch.urgent or batch.nbytes >= self._config.commit_bytes:
            return 0.0
        delay_s = self._config.commit_delay_s
        if batch.ends:  # lanes wake the loop
            delay_s = min(delay_s, _TOGETHER_S) if self._appender else 0.0
        return max(0.0, batch.started + delay_s - now)

    def commit_if_due(self, now: float) -> None:
        """Start a commit where one is due."""
        if self.wait_s(now) == 0.0:
            self.start_commit()

    def start_commit(self) -> None:
        """Sync what was appended since the last commit, while the main loop goes on; one at a time."""
        if not self._batch.started or self._syncer.batch is not None:
            return
        batch = self._batch
        batch.full = batch.nbytes >= self._config.commit_bytes
        batch.log_position = (self._log.number, self._log.tail)
        files: list[OpenSegment | ControlLog] = [
            segment for segment in self.segments.all() if segment.tail > segment.good and not segment.poisoned
        ]
        if self._log.tail > self._log.good:
            files.append(self._log)
        self._batch = Batch(batch.number + 1)
        self.rate.start()
        self._syncer.start(batch, files)

    def end_commit(self) -> tuple[Batch, bool] | None:
        """The commit that ended, once, and whether it is on the disk; None while none has."""
        finished = self._syncer.finished()
        if finished is None:
            return None
        batch, results = finished
        self.counters.syncing_seconds = self._syncer.seconds
        for result in results:
            self.sync_seconds.observe(result.seconds)
        if any(result.error for result in results):
            self._give_up(batch, results)
            return batch, False
        self.counters.commits += 1
        for result in results:
            result.file.good = max(result.file.good, result.tail)
        self.rate.commit(batch.payload_bytes, batch.full, batch.wrote or batch.started, time.monotonic())
        self.catalog.put(batch)
        return batch, True

    def _give_up(self, failed: Batch, results: list[SyncResult]) -> None:
        """A failed sync is final for its file, and everything appended since the last good commit is given up.

        All files are cut back to that commit, so that there is one line between what is there and what is not. All
        senders are told to send again; what they send goes into new files.
        """
        self.give_up_append()
        for result in results:
            if result.error is not None:
                self.disk_error("sync", result.file.path, result.error)
                result.file.poisoned = True
        files: list[OpenSegment | ControlLog] = [*self.segments.all(), self._log]
        for file in files:
            if file.tail > file.good or file.poisoned:
                file.poisoned = True
                try:
                    fs.truncate(file.fd, file.good)
                    file.tail = file.good
                    if isinstance(file, OpenSegment):
                        file.end = file.good
                except OSError as error:
                    self.disk_error("truncate", file.path, error)
        while self.catalog.backlog and self.catalog.failed is None:
            time.sleep(0.01)
        lost = (*failed.changes, *self._batch.changes)
        made = {segment.number for segment in self.segments.all() if not segment.poisoned}  # what comes next goes there
        self._batch = Batch(self._batch.number + 1)
        for change in lost:
            # True whatever was synced:
            if isinstance(change, SegmentSealed | SegmentGone | LogBegun | Erased | Scrubbed | Compacted) or (
                    isinstance(change, SegmentMade) and change.number in made):
                self.change(change)

    def take_sealable(self, now: float, idle_s: float) -> list[int]:
        """Numbers of segments that take no more frames and are wholly on the disk. They are closed; the caller seals
        them.
        """
        self.segments.retire(now, idle_s)
        ready = self.segments.take_sealable()
        for bad in self.segments.drop_poisoned():
            self.checksums.forget(bad.number)
            ready += [bad.number] if bad.tail == bad.good else []
            log.warn("segment_poisoned", f"segment {bad.number} takes no more frames after a failed sync",
                     segment=bad.number)
        return ready

    def close(self) -> None:
        """End the threads; the catalog is left clean."""
        self._appender.close()
        self._syncer.close()
        self.catalog.close()
        for segment in self.segments.all():
            fs.close(segment.fd)
        fs.close(self._log.fd)

    def disk_error(self, op: str, path: Path, error: OSError) -> None:
        """Count it; say so without filling the terminal."""
        self.counters.disk_errors += 1
        if self.counters.disk_errors in (1, 10, 100) or self.counters.disk_errors % 1000 == 0:
            log.warn("disk_error", f"{op} {path}: {error} (error {self.counters.disk_errors}; senders keep what is "
                      "not acknowledged)", op=op, path=path, error=str(error), count=self.counters.disk_errors)
