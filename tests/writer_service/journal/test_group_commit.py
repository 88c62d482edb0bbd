"""When a commit is due: with a record at once, with the end of a capture a moment later where frames are written."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

from schemas import limits
from schemas.ids import new_ulid
from schemas.wire.records import ClientFinish, Own
from tests.support.store_helpers import WriterProcess
from writer_service.config import Config
from writer_service.journal.group_commit import Waker
from writer_service.journal.journal import Journal
from writer_service.sender_state import SenderState


def test_the_end_of_a_capture_is_committed_with_the_frames_that_lanes_write(tmp_path: Path) -> None:
    """One commit, and the catalog's work once, for captures that end together. A record that somebody waits for does
    not wait: the API forwards no request before its captures are announced.
    """
    store = tmp_path / "store"
    with WriterProcess(store) as writer:
        writer.stop()
    journal = Journal(Config(store, "ipc:///tmp/w"), bytes(16), 90, 90, Waker())
    try:
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
        journal._appender._given.append((None, written))  # type: ignore[arg-type]
        assert journal.wait_s(now) != 0
        journal.append_entry(SenderState("s", 1, "api"), Own(2, new_ulid(), 1, "", [], {}, 1))
        assert journal.wait_s(now) == 0
        journal._appender._given.clear()
    finally:
        journal.close()
