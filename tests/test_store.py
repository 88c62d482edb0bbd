"""A store on disk whose writer is away: what is not final will not become so, and is not waited for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from schemas.errors import NotFoundError
from schemas.ids import new_ulid
from tests.store_helpers import SITE, Sender, WriterProcess, engine_info, until
from vllm_tap import NotComplete, open_store

WIDTH = 96


def test_nothing_is_waited_for_where_no_writer_has_the_store(tmp_path: Path) -> None:
    store, capture, gone = tmp_path / "store", new_ulid(), r"is running, and no writer has the store: start one"
    with WriterProcess(store) as writer, Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
        engine.open(capture, prompt_len=8)
        engine.frame([(capture, 0, range(8))], width=WIDTH)
        engine.wait()
        with open_store(store) as reader:
            assert until(lambda: [row.status for row in reader.captures()] == ["running"])
        writer.kill()
    with open_store(store) as reader:
        began = time.monotonic()
        with pytest.raises(NotComplete, match=gone):
            reader[capture][SITE, 2]
        with pytest.raises(NotComplete, match=gone):
            reader[capture].wait(30)
        with pytest.raises(NotComplete, match=gone):
            reader.wait([capture], 30)
        with pytest.raises(NotFoundError):
            reader.manifest(new_ulid(), 30)
        assert reader[capture].manifest().status == "running"
        assert reader[capture].slice(SITE, 2, allow_missing=True).values.shape == (1, 8, WIDTH)
        assert time.monotonic() - began < 5
        with WriterProcess(store, "--engine-lost-s", "0.5") as writer:
            assert reader[capture].wait(30).status == "incomplete"
            writer.stop()
