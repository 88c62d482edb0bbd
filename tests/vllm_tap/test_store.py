"""A store on disk whose writer is away: what is not final will not become so, and is not waited for long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from schemas.errors import NotFoundError
from schemas.ids import new_ulid
from schemas.manifest import Manifest
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import SITE, Sender, WriterProcess, engine_info, until
from vllm_tap import NotComplete, Store, open_store
from writer_service import fs
from writer_service.recover.store_lock import take_lock

WIDTH = 96


@pytest.fixture
def left(tmp_path: Path) -> Iterator[tuple[Store, str]]:
    """A store whose writer was killed, and a capture that was running then."""
    capture = new_ulid()
    with WriterProcess(tmp_path) as writer, Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
        engine.open(capture, prompt_len=8)
        engine.frame([(capture, 0, range(8))], width=WIDTH)
        engine.wait()
        with open_store(tmp_path) as reader:
            assert until(lambda: [row.status for row in reader.captures()] == ["running"])
            assert until(lambda: len(reader[capture].slice(SITE, 2, allow_missing=True).positions) == 8)
        writer.kill()
    with open_store(tmp_path) as store:
        yield store, capture


def test_nothing_is_waited_for_where_no_writer_has_the_store(left: tuple[Store, str]) -> None:
    store, capture = left

    def unknown() -> Manifest:
        with open_store(store.path) as other:
            return other.manifest(new_ulid(), 30)

    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        other = pool.submit(unknown)
        with pytest.raises(NotComplete, match=r"is running, and no writer has the store: start one"):
            store.wait([capture], 30)
        with pytest.raises(NotFoundError):
            other.result()
    assert time.monotonic() - began < 10
    assert store[capture].status == "running"
    assert store[capture].slice(SITE, 2, allow_missing=True).values.shape == (1, 8, WIDTH)
    with WriterProcess(store.path, "--engine-lost-s", "0.5") as writer:
        assert store[capture].wait(PATIENCE_S).status == "incomplete"
        writer.stop()


def test_a_writer_that_is_being_started_again_is_waited_for(left: tuple[Store, str]) -> None:
    """The store is free before and after, but never for long."""
    store, capture = left

    def again() -> None:
        time.sleep(0.6)
        taken, _ = take_lock(store.path)
        time.sleep(0.9)
        fs.close(taken)

    with ThreadPoolExecutor() as pool:
        writer = pool.submit(again)
        with pytest.raises(NotComplete, match=r"is running after 3\.5 s$"):
            store[capture].wait(3.5)
        writer.result()
    with pytest.raises(NotComplete, match=r"is running after 0\.1 s$"):
        store[capture].wait(0.1)
