"""The writer as a process: what goes in over the socket comes out of the reader, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from schemas.errors import NotFoundError
from schemas.ids import new_ulid
from schemas.reader import StoreReader
from tests.store_helpers import SITE, Sender, WriterProcess, assert_adds_up, assert_rows


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value or time.monotonic() > deadline:
            return value
        time.sleep(0.02)


def test_a_capture_from_open_to_slice(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with WriterProcess(store) as writer:
        engine = Sender(writer.endpoint)
        assert engine.hello().durable == 0
        capture = new_ulid()
        engine.open(capture)
        engine.frame([(capture, 1, range(8))])
        engine.frame([(capture, 1, [8]), ], runs=[1])
        engine.frame([(capture, 1, [9, 10])], runs=[1, 1])
        engine.finish(capture, end=11, output=4)
        engine.wait()
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(capture).status == "complete", 1.0)
            manifest = reader.manifest(capture)
            assert_adds_up(manifest)
            assert (manifest.expected, manifest.captured, manifest.total_len) == (44, 44, 12)
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 11), 1, range(11))
            part = reader.slice(capture, "blocks.2.hook_resid_post", [2], 7, 100)
            assert part.clipped and part.stop == 11
            assert_rows(part, 1, [7, 8, 9, 10])
            assert reader.engine().model == "tiny"
            with pytest.raises(NotFoundError):
                reader.capture(new_ulid())
            writer.stop()
            assert (store / "blocks" / "w0-00000001.zarr" / "zarr.json").exists()
            assert_rows(reader.slice(capture, SITE, [0, 3], 0, 11), 1, range(11))
