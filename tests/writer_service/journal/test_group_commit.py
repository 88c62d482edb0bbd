"""When a commit is due: with a record at once, but with the frames that came just before it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

from schemas import limits
from schemas.ids import new_ulid
from schemas.wire.messages import ClientFinish
from tests.support.store_helpers import WriterProcess
from writer_service.config import Config
from writer_service.journal.group_commit import Waker
from writer_service.journal.journal import Journal
from writer_service.sender_state import SenderState


def test_a_record_is_committed_with_the_frames_that_lanes_write(tmp_path: Path) -> None:
    """The end of a capture stands in the line behind its last frames: a commit, and the catalog's work, for both."""
    store = tmp_path / "store"
    with WriterProcess(store) as writer:
        writer.stop()
    journal = Journal(Config(store, "ipc:///tmp/w"), bytes(16), 90, 90, Waker())
    try:
        journal.start_commit()  # of the log that was begun
        while journal.end_commit() is None:
            time.sleep(0.001)
        assert journal.wait_s(time.monotonic()) is None
        written: Future[None] = Future()
        journal._appender._given.append((None, written))  # type: ignore[arg-type]
        journal.append_entry(SenderState("s", 1, "api"), ClientFinish(1, new_ulid(), "stop", None, b""))
        now = time.monotonic()
        wait = journal.wait_s(now)
        assert wait is not None and 0 < wait <= limits.commit_delay_ms / 1000 / 2
        assert journal.wait_s(now + wait + 0.001) == 0, "a disk that takes long keeps no record waiting"
        journal._appender._given.clear()
        assert journal.wait_s(now) == 0
    finally:
        journal.close()
