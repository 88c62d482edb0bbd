"""What the front end tells of captures' ends while the writer is away, and when it is back."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine_side import front
from schemas import limits
from schemas.ids import new_ulid
from schemas.reader import StoreReader
from tests.store_helpers import WriterProcess, until


def test_ends_beyond_what_may_wait_are_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    captures = [new_ulid() for _ in range(limits.control_records_pending_max)]
    with WriterProcess(tmp_path / "store") as writer, caplog.at_level(logging.WARNING, "vllm.tap"):
        writer.kill()
        front.use(writer.endpoint, None)
        for capture in captures:
            front.report_finish(capture, "stop", None, [1])
        assert not caplog.records
        for _ in range(3):
            front.report_finish(new_ulid(), "stop", None, [1])
        (said,) = caplog.records
        assert "records wait already" in said.getMessage() and said.exc_info is None
        writer.start()
        with StoreReader(tmp_path / "store") as reader:
            assert until(lambda: reader.capture(captures[-1]), 30)
        front.report_finish(new_ulid(), "stop", None, [1])
        assert len(caplog.records) == 2 and "of 3 captures" in caplog.records[-1].getMessage()
        front.retire(writer.endpoint)
