"""Main streams that go from the ring to the disk, past the page cache: the same bytes, whatever the disk does."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import pytest

from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import PROGRAMS, SITE, Sender, WriterProcess, assert_rows, engine_info, until
from tests.support.writers.power import Certain
from tests.writer_service.seal.test_sealing import can_write_direct, pages_in_memory
from writer_service import fs

FAULTY = PROGRAMS / "faulty_writer.py"
BLOCK = fs.direct_align
WIDTH, ROWS, COUNT = 4096, 32, 4
SLOT = WIDTH * ROWS * 4 * 4  # bytes of a frame's main stream, whole blocks


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = fs.open_new(tmp_path / "file")
    yield fd
    fs.close(fd)


def aligned(sizes: Sequence[int], off: int = 0) -> list[memoryview]:
    """Noise in buffers of these sizes, each at a block of memory, ``off`` bytes further."""
    steps = [-(-size // BLOCK) * BLOCK for size in sizes]
    room = mmap.mmap(-1, sum(steps) + BLOCK)
    room.write(random.Random(sum(sizes)).randbytes(len(room)))
    return [memoryview(room)[at + off : at + off + size]
            for at, size in zip(accumulate([0, *steps]), sizes, strict=False)]


def content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


@pytest.mark.parametrize("sizes", [
    [4 * BLOCK], [BLOCK, 3 * BLOCK, 5], [2 * BLOCK + 512, 2 * BLOCK], [BLOCK] * 1100, [9],
])
@pytest.mark.parametrize(("off", "at"), [(0, 2 * BLOCK), (64, 2 * BLOCK), (0, 100)])
def test_buffers_are_written_one_after_the_other(file: int, sizes: list[int], off: int, at: int) -> None:
    buffers = aligned(sizes, off)
    os.pwrite(file, b"-" * at, 0)
    assert fs.write_direct(file, [*buffers, b"", b"end"], at) == at + sum(sizes) + 3
    assert content(file) == b"-" * at + b"".join(buffers) + b"end"


def test_only_what_lies_at_blocks_goes_past_the_cache() -> None:
    blocks = aligned([BLOCK, 2 * BLOCK + 7, BLOCK])
    assert [len(view) for view in fs.whole_blocks(blocks, BLOCK)] == [BLOCK, 2 * BLOCK]
    assert fs.whole_blocks(blocks, 512) == []
    assert fs.whole_blocks(aligned([BLOCK], 512), 0) == []
    assert len(fs.whole_blocks(aligned([BLOCK] * 1100), 0)) == 1024  # what one call takes


@pytest.mark.parametrize("taken", [0, 512, BLOCK, 2 * BLOCK + 512, 6 * BLOCK])
def test_a_direct_write_cut_short_goes_on_as_usual(file: int, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    def short(fd: int, blocks: Sequence[memoryview], offset: int) -> int:
        return os.pwrite(fd, b"".join(blocks)[:taken], offset)

    monkeypatch.setattr(fs, "write_blocks", short)
    buffers = aligned([BLOCK, 2 * BLOCK, 3 * BLOCK])
    assert fs.write_direct(file, [*buffers, b"end"], 0) == 6 * BLOCK + 3
    assert content(file) == b"".join(buffers) + b"end"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO, errno.ENOSPC])
def test_a_disk_that_takes_no_direct_write_takes_an_ordinary_one(
        file: int, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Wherever the refusal comes from: of the flag, or of the write."""
    def refused(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fs, "write_blocks", refused)
    buffers = aligned([BLOCK, BLOCK])
    assert fs.write_direct(file, buffers, 0) == 2 * BLOCK and content(file) == b"".join(buffers)


def test_an_ordinary_write_that_fails_then_is_the_error(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, buffers: Sequence[bytes], offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(fs, "write_blocks", full)
    monkeypatch.setattr(fs, "write_at", full)
    with pytest.raises(OSError, match="full"):
        fs.write_direct(file, aligned([BLOCK]), 0)


def test_a_direct_write_is_lost_with_the_power_until_it_is_synced(tmp_path: Path) -> None:
    """A disk that took the bytes has neither the file's size nor, perhaps, what it took."""
    fs.make_dirs(tmp_path / "store")
    disk = Certain(tmp_path / "store", tmp_path / "certain")
    first, second = aligned([4 * BLOCK, 3 * BLOCK])
    with disk.watching():
        fd = fs.open_new(path := disk.store / "file")
        fs.sync_dir(disk.store)
        end = fs.write_direct(fd, [first], 0)
        fs.datasync(fd)
        fs.write_direct(fd, [second], end)
        fs.close(fd)
    disk.lose()
    assert path.read_bytes() == bytes(first)


def test_the_descriptor_writes_as_usual_afterwards(file: int) -> None:
    with contextlib.suppress(OSError):
        fs.write_blocks(file, aligned([BLOCK]), 0)
    assert not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
    assert os.pwrite(file, b"unaligned", 3) == 9


def greeted(writer: WriterProcess, folder: Path, off: int) -> Sender:
    path = folder / "ring"
    path.write_bytes(bytes(COUNT * SLOT + BLOCK))
    return Sender(writer.endpoint, engine=engine_info(WIDTH), ring=path, ring_bytes=COUNT * SLOT + off)


def opened(engine: Sender) -> str:
    capture = new_ulid()
    engine.open(capture, prompt_len=COUNT * ROWS, codec="raw")
    engine.wait()
    return capture


def finished(engine: Sender, store: Path, capture: str) -> str:
    engine.finish(capture, end=COUNT * ROWS, output=0)
    engine.wait()
    with StoreReader(store) as reader:
        until(lambda: reader.capture(capture).status != "running")
        return reader.capture(capture).status


def sent(engine: Sender, capture: str, off: int, first: int = 0, last: int = COUNT) -> None:
    for number in range(first, last):
        rows = [(capture, 1, range(number * ROWS, (number + 1) * ROWS))]
        engine.frame(rows, codec="raw", width=WIDTH, ring_at=number * SLOT + off)


def assert_stored(store: Path, capture: str) -> None:
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 3], 0, COUNT * ROWS), 1, range(COUNT * ROWS))
        assert sum(extent.rows for extent in reader.manifest(capture).sites[0].extents) == COUNT * ROWS


@pytest.mark.parametrize("off", [0, 64], ids=["at a block", "beside it"])
def test_rows_are_the_same_while_they_are_written_and_when_they_are_sealed(tmp_path: Path, off: int) -> None:
    """A reader maps the file, and reads what is there, before more of it goes past what it has in memory."""
    store = tmp_path / "store"
    with WriterProcess(store) as writer, greeted(writer, tmp_path, off) as engine, StoreReader(store) as reader:
        capture = opened(engine)
        for number in range(COUNT):
            sent(engine, capture, off, number, number + 1)
            engine.wait()
            files = list((store / "writers/w0/journal").glob("*.open"))
            if number == 0 and can_write_direct(tmp_path):
                pages = sum(map(pages_in_memory, files))
                assert pages <= 8 if not off else pages >= SLOT // mmap.PAGESIZE
            rows = (number + 1) * ROWS
            until(lambda rows=rows: len(reader.slice(capture, SITE, [0, 3], 0, rows).positions) == rows)
            assert_rows(reader.slice(capture, SITE, [0, 3], 0, rows), 1, range(rows))
        assert finished(engine, store, capture) == "complete"
        assert "disk_errors=" not in writer.stop()
    assert_stored(store, capture)


@pytest.mark.parametrize("fault", ["write_blocks:.open:1:9:EINVAL", "write_blocks:.open:2:2:EIO"])
def test_a_direct_write_that_fails_in_the_midst_costs_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULT_FIRED", str(fired := tmp_path / "fired"))
    store = tmp_path / "store"
    with WriterProcess(store, script=FAULTY) as writer, greeted(writer, tmp_path, 0) as engine:
        capture = opened(engine)
        sent(engine, capture, 0)
        assert finished(engine, store, capture) == "complete" and fired.exists()
        assert "disk_errors=" not in writer.stop()
    assert_stored(store, capture)


def test_a_disk_that_takes_neither_leaves_nothing_and_all_comes_again(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second main stream: the head before it was written, and the rest of it fails as well."""
    monkeypatch.setenv("FAULT", "write_blocks:.open:2:1:ENOSPC,write_at:.open:3:1:ENOSPC")
    store = tmp_path / "store"
    with WriterProcess(store, script=FAULTY) as writer, greeted(writer, tmp_path, 0) as engine:
        capture = opened(engine)
        sent(engine, capture, 0)
        assert finished(engine, store, capture) == "complete"
        assert "disk_errors=" in writer.stop()
    assert_stored(store, capture)


@pytest.mark.parametrize("call", [1, 3])
def test_a_writer_killed_in_a_direct_write_recovers(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    store = tmp_path / "store"
    monkeypatch.setenv("FAULT", f"write_blocks:.open:{call}:1:die")
    with WriterProcess(store, script=FAULTY) as writer, greeted(writer, tmp_path, 0) as engine:
        capture = opened(engine)
        before = engine.durable
        for number in range(call - 1):
            sent(engine, capture, 0, number, number + 1)
            engine.wait()
        sent(engine, capture, 0, call - 1)
        writer.process.wait(PATIENCE_S)
        durable = engine.durable - before
    assert durable >= call - 1
    with WriterProcess(store) as writer, greeted(writer, tmp_path, 0) as engine:
        again = opened(engine)
        sent(engine, again, 0)
        assert finished(engine, store, again) == "complete"
        writer.stop()
    assert_stored(store, again)
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 3], 0, durable * ROWS), 1, range(durable * ROWS))
