"""Delete that erases: bytes, token ids and spec are gone from every file, whatever is cut short on the way."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from schemas import codecs
from schemas.catalog.records import connect_read, connect_write
from schemas.errors import NotFoundError, StoreError
from schemas.ids import new_ulid
from schemas.read import row_reader as reader_module
from schemas.read.reader import StoreReader, read_store_uuid
from schemas.spec import Resolved
from schemas.store.paths import journal_folder, redo_name
from schemas.wire.messages import StreamPart
from schemas.wire.records import Delete, Finish, Open, Own
from tests.support.consistency import assert_rebuilt_equal, dump
from tests.support.store_helpers import PROGRAMS, SITE, Sender, WriterProcess, assert_rows, engine_info, until
from tests.support.writers.power import Certain
from writer_service import fs
from writer_service.catalog import catalog
from writer_service.config import Config
from writer_service.control_log import log_numbers, log_path
from writer_service.journal.group_commit import Waker
from writer_service.journal.journal import Journal
from writer_service.recover.recovery import recover
from writer_service.seal.columns import fill_of
from writer_service.sender_state import SenderState
from writer_service.tools.fsck import fsck
from writer_service.upkeep import block_removal
from writer_service.upkeep.erasing import clear, plan, write_redo
from writer_service.upkeep.scrubbing import scrub_log
from writer_service.upkeep.upkeep import Upkeep

FIRST = 70_000  # where the positions of the deleted capture begin: token ids that nobody else has
WIDTH = 4096
SECRET = np.arange(900_000, 900_064, dtype="<u4").tobytes()
WORD = "classified"


@dataclass(frozen=True)
class Sample:
    """A store in which ``gone`` was deleted but nothing of it erased; ``kept`` shares segment and frames with it."""

    store: Path
    gone: str
    kept: str


def fill(engine: Sender, gone: str, kept: str) -> None:
    """``kept`` at 0–11 and ``gone`` at FIRST … FIRST + 63, frames of one and of both."""
    args: dict[str, Any] = {"width": WIDTH}
    engine.send(Open(engine.next(), gone, "r", json.dumps({"tags": {"topic": WORD}}),
                     Resolved({SITE: [0, 1, 2, 3]}, {SITE: "int8b64"}, "all", "allow"), 64, SECRET, 0, 1))
    engine.open(kept, prompt_len=12)
    frame, (table, *parts) = engine.frame([(gone, 1, range(FIRST, FIRST + 32))], runs=[20, 12], send=False, **args)
    payload = [noise(len(part)) for part in parts]
    engine.send(msgspec.structs.replace(frame, streams=[
        StreamPart(part.name, part.nbytes, xxhash.xxh3_64_intdigest(data))
        for part, data in zip(frame.streams, payload, strict=True)]), table, *payload)
    engine.frame([(kept, 2, range(8)), (gone, 1, range(FIRST + 32, FIRST + 64))], runs=[30, 10], **args)
    engine.frame([(kept, 2, range(8, 12))], layers=[1, 3], **args)
    engine.send(Finish(engine.next(), gone, "stop", WORD, SECRET, FIRST + 64))
    engine.finish(kept, end=12)
    engine.wait()


def noise(nbytes: int) -> bytes:
    """Bytes that nothing else has."""
    return np.random.default_rng(nbytes).bytes(nbytes)


@contextmanager
def writing(store: Path, *flags: str) -> Iterator[tuple[WriterProcess, Sender]]:
    with WriterProcess(store, *flags) as writer, Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
        yield writer, engine


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    made = Sample(tmp_path_factory.mktemp("erasing") / "store", new_ulid(), new_ulid())
    with writing(made.store, "--keep-s", "1000") as (writer, engine):
        fill(engine, made.gone, made.kept)
        writer.stop()
    with writing(made.store, "--keep-s", "1000") as (writer, engine):
        assert until(lambda: StoreReader(made.store).captures())
        engine.delete(made.gone)
        engine.wait()
        until(lambda: dump(made.store)["doomed"])
        writer.stop()
    return made


def contents(store: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file())


def traces(store: Path) -> list[str]:
    """What can still be read of the deleted capture in any file."""
    q, *sides = (stream.nbytes for stream in codecs.streams("int8b64", WIDTH, "float32"))
    rows = 32 * 4
    data = contents(store)
    needles = {
        "a row": [noise(rows * q)[at : at + 64] for at in range(0, rows * q, WIDTH // 2)],
        "scales": [noise(rows * side)[at : at + 8] for side in sides for at in range(0, rows * side, side)],
        "token ids of rows": [np.arange(p + 5000, p + 5008, dtype="<u4").tobytes() for p in range(FIRST, FIRST + 56)],
        "prompt or output": [SECRET[at : at + 16] for at in range(0, len(SECRET) - 16, 4)],
        "spec or stop reason": [WORD.encode()],
    }
    return [name for name, words in needles.items() if any(word in data for word in words)]


def look_after(store: Path) -> None:
    """What a writer's upkeep does until nothing is left to do, on a store without a writer."""
    state = recover(store)
    upkeep = Upkeep(store, state.uuid, Waker())
    db = connect_write(store / "catalog.sqlite")
    try:
        for _ in range(2):
            done = upkeep.round()
            assert done.failures == 0
            with catalog.transaction(db):
                catalog.apply(db, done.changes)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.close()
        upkeep.close()
        fs.close(state.lock)


def assert_erased(store: Path, sample: Sample) -> None:
    with StoreReader(store) as reader:
        with pytest.raises(NotFoundError):
            reader.slice(sample.gone, SITE, [0])
        assert [row.id for row in reader.captures(status="deleted")] == [sample.gone]
        assert_rows(reader.slice(sample.kept, SITE, [0, 1, 2, 3], 0, 8), 2, range(8))
        assert_rows(reader.slice(sample.kept, SITE, [1, 3], 0, 12), 2, range(12))
    report = fsck(store)
    assert report.bad == []
    assert traces(store) == []


def test_traces_sees_them(sample: Sample) -> None:
    assert len(traces(sample.store)) == 5


def copied(sample: Sample, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample.store, tmp_path / "store"))


def blocks_on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_the_bytes_are_gone_and_the_space_is_back(sample: Sample, tmp_path: Path) -> None:
    store = copied(sample, tmp_path)
    main = store / "blocks/w0-00000001.zarr/q/c/0/0/0"
    before, size = blocks_on_disk(main), main.stat().st_size
    look_after(store)
    assert_erased(store, sample)
    assert main.stat().st_size == size
    # 64 rows × 4 layers × 4096 bytes, less what shares a page with its neighbours: nothing does
    assert before - blocks_on_disk(main) >= 64 * 4 * WIDTH
    left = dump(store)
    assert not left["doomed"] and not left["scrub"]
    assert_rebuilt_equal(store)


def test_what_was_erased_does_not_come_back(sample: Sample, tmp_path: Path) -> None:
    """A loss of power right after it: what was not synced is what it was before."""
    store = copied(sample, tmp_path)
    disk = Certain(store, tmp_path / "certain")
    with disk.watching():
        look_after(store)
    disk.lose()
    assert_erased(store, sample)


def test_strangers_see_fill_values(sample: Sample, tmp_path: Path) -> None:
    import tensorstore as ts
    import zarr

    store = copied(sample, tmp_path)
    look_after(store)
    block = store / "blocks/w0-00000001.zarr"
    group = zarr.open_group(str(block), mode="r")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(block / "q")}}
    gone = np.asarray(group["flags"][...]) >> 31 == 1
    assert gone.sum() == 64
    for q in (np.asarray(group["q"][...]), np.asarray(ts.open(spec, open=True).result().read().result())):
        assert (q[gone] == -128).all() and (q[~gone][:8] != -128).all()
    stream = next(s for s in codecs.streams("int8b64", WIDTH, "float32") if s.name == "scale")
    scale = np.asarray(group["scale"][...])[gone]
    assert np.array_equal(scale, np.full(scale.shape, fill_of(stream), scale.dtype), equal_nan=True)
    assert not np.asarray(group["present"][...])[gone].any() and not np.asarray(group["token_id"][...])[gone].any()


def test_where_pages_cannot_be_punched_zeros_are_written(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs, "punch", lambda *_: False)
    store = copied(sample, tmp_path)
    look_after(store)
    assert_erased(store, sample)


def test_a_block_of_nothing_else_goes_whole(sample: Sample, tmp_path: Path) -> None:
    store = copied(sample, tmp_path)
    with writing(store, "--keep-s", "0.05") as (writer, engine):
        engine.delete(sample.kept)
        engine.wait()
        assert until(lambda: not list((store / "blocks").iterdir()))
        assert until(lambda: not dump(store)["segments"] and not dump(store)["scrub"])
        capture = new_ulid()
        engine.open(capture, prompt_len=3)
        engine.frame([(capture, 3, range(3))], width=WIDTH)
        engine.finish(capture, end=3)
        engine.wait()
        writer.stop()
    assert [path.name for path in (store / "blocks").iterdir()] == ["w0-00000002.zarr"]  # no number comes twice
    assert_rebuilt_equal(store)
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 3]), 3, range(3))


@pytest.mark.parametrize("cut", [False, True])
def test_a_failed_erasure_in_a_block_that_is_taken_away(sample: Sample, tmp_path: Path, cut: bool) -> None:
    """Its redo record goes with the block; one that a crash left behind stops no start."""
    store = copied(sample, tmp_path)
    redo = plan(store, read_store_uuid(store), 1, [sample.gone])
    assert redo is not None
    write_redo(store, redo)
    if cut:
        (store / "blocks/w0-00000001.zarr").rename(block_removal.removed_name(store, 1))
    else:
        block_removal.remove_block(store, 1)
        assert not (store / redo_name(1)).exists()
    fs.close(recover(store).lock)
    assert not (store / redo_name(1)).exists() and not list((store / "blocks").iterdir())


def test_an_erasure_that_was_begun_is_ended_by_the_next_start(sample: Sample, tmp_path: Path) -> None:
    """Before anything reads the block."""
    store = copied(sample, tmp_path)
    redo = plan(store, read_store_uuid(store), 1, [sample.gone])
    assert redo is not None
    write_redo(store, redo)
    fs.close(recover(store).lock)
    assert not (store / redo_name(1)).exists() and "a row" not in traces(store)


@pytest.mark.parametrize(("offset", "nbytes"), [(100, 10_000), (0, 8192), (4095, 2), (5000, 7), (4096, 4097)])
def test_a_range_is_cleared_to_the_byte(tmp_path: Path, offset: int, nbytes: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xff" * 20_000)
    fd = fs.open_existing(path)
    clear(fd, offset, nbytes)
    fs.close(fd)
    assert path.read_bytes() == b"\xff" * offset + bytes(nbytes) + b"\xff" * (20_000 - offset - nbytes)


UNDOABLE: dict[str, Callable[[Path], object]] = {  # what keeps an erasure from being ended
    "the record is damaged": lambda store: edit(store / redo_name(1), lambda data: data[:-1] + b"?"),
    "the record is cut": lambda store: edit(store / redo_name(1), lambda data: data[:20]),
    "an array is cut": lambda store: edit(store / "blocks/w0-00000001.zarr/present/c/0/0", lambda data: data[:-1]),
    "an array is gone": lambda store: (store / "blocks/w0-00000001.zarr/flags/c/0").unlink(),
    "the block does not say what it is": lambda store: edit(store / "blocks/w0-00000001.zarr/zarr.json",
                                                            lambda data: data[:50]),
}


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("name", UNDOABLE)
def test_an_erasure_that_cannot_be_ended_stops_no_start(sample: Sample, tmp_path: Path, name: str) -> None:
    """It is named, nothing else is erased in that block, and once it can be it is."""
    store = copied(sample, tmp_path)
    redo = plan(store, read_store_uuid(store), 1, [sample.gone])
    assert redo is not None
    write_redo(store, redo)
    shutil.copytree(store, whole := tmp_path / "whole")
    UNDOABLE[name](store)
    before = contents(store / "blocks")
    state = recover(store)
    upkeep = Upkeep(store, state.uuid, Waker())
    done = upkeep.round()
    upkeep.close()
    fs.close(state.lock)
    assert len(state.not_erased) == 1 and "erase-00000001.redo" in state.not_erased[0]
    assert done.failures == 1 and not done.erased_rows and contents(store / "blocks") == before
    assert redo_name(1) in {bad.file for bad in fsck(store).bad}
    shutil.rmtree(store)
    shutil.copytree(whole, store)
    look_after(store)
    assert_erased(store, sample)


def test_a_scrubbed_log_and_a_catalog_of_before(tmp_path: Path) -> None:
    """Power is lost before the catalog is synced: it notes a place in a log that was written anew since."""
    store, captures = tmp_path / "store", [new_ulid() for _ in range(6)]
    with writing(store, "--keep-s", "1000") as (writer, engine):
        for number, capture in enumerate(captures):
            engine.open(capture, prompt_len=2000)
            engine.frame([(capture, number, range(4))], width=WIDTH)
            engine.finish(capture, end=4, output=500)
            engine.wait()
            if number == 3:
                assert until(lambda: len(dump(store)["extents"]) == 4)
                with sqlite3.connect(store / "catalog.sqlite") as db, sqlite3.connect(tmp_path / "before") as before:
                    db.backup(before)
        writer.stop()
    with writing(store, "--keep-s", "1000") as (writer, engine):
        engine.delete(captures[1])
        engine.wait()
        writer.stop()
    look_after(store)
    assert dump(store)["scrub"] == []
    for path in store.glob("catalog.sqlite*"):
        path.unlink()
    shutil.copy(tmp_path / "before", store / "catalog.sqlite")
    look_after(store)
    with StoreReader(store) as reader:
        assert {row.id for row in reader.captures()} == {*captures} - {captures[1]}
        for number in (0, 2, 3, 4, 5):
            assert_rows(reader.slice(captures[number], SITE, [0, 3], 0, 4), number, range(4))
    assert_rebuilt_equal(store)


def test_a_disk_that_is_full_when_sqlites_log_is_to_be_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an erasure nothing of it may stay in that log. Where it cannot be emptied now, the writer goes on."""
    store, gone, kept = tmp_path / "store", new_ulid(), new_ulid()
    monkeypatch.setenv("CATALOG", "full")
    with WriterProcess(store, "--seal-idle-s", "0.1", "--keep-s", "0.1",
                       script=PROGRAMS / "faulty_catalog.py") as writer, Sender(writer.endpoint) as engine:
        for capture in (gone, kept):
            engine.open(capture)
            engine.frame([(capture, 1, range(4))])
            engine.finish(capture, end=4)
        engine.wait()
        engine.delete(gone)
        assert until(lambda: rows_in(store, "extents") == 1 and not rows_in(store, "doomed") + rows_in(store, "scrub"))
        engine.wait()
        assert writer.process.poll() is None
        writer.stop()


def test_a_reader_in_the_midst_of_sqlites_log_when_it_is_to_be_emptied(tmp_path: Path) -> None:
    """It is emptied as soon as the reader has ended, whatever else happens."""
    store, gone, secret = tmp_path / "store", new_ulid(), b"nobody shall know this"
    with WriterProcess(store, "--seal-idle-s", "0.1", "--keep-s", "0.1") as writer, \
         Sender(writer.endpoint, "api") as api:
        api.own(gone, tags={"k": secret.decode()})
        api.wait()
        with contextlib.closing(connect_read(store / "catalog.sqlite")) as db:
            db.execute("BEGIN")
            assert db.execute("SELECT count(*) FROM captures").fetchone()[0] == 1
            api.delete(gone)
            api.wait()
            assert until(lambda: dump(store)["captures"] and not dump(store)["scrub"])
            time.sleep(1.0)
            assert secret in contents(store)
        assert until(lambda: secret not in contents(store))
        writer.stop()


def test_a_log_left_after_a_write_that_failed_ends_with_its_last_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a full disk took of a record is no damage in the log, which is left for another so that it can be scrubbed.
    """
    monkeypatch.setenv("FAULT", "write_at:control-:5:1:ENOSPC")
    store, captures = tmp_path / "store", [new_ulid() for _ in range(2)]
    with WriterProcess(store, "--keep-s", "0.1", script=PROGRAMS / "faulty_writer.py") as writer, \
            Sender(writer.endpoint, role="api") as api:  # the log's head, the Hello, and three records
        api.own(captures[0], tags={"said": "secret"})
        api.delete(captures[0])
        api.own(captures[1], tags={"said": "x" * 200})
        assert until(lambda: log_numbers(store / journal_folder()) == [1, 2] and not rows_in(store, "scrub"))
        assert api.durable < api.seq
        api.wait()
        writer.stop()
    assert fsck(store).bad == []
    assert b"secret" not in log_path(store / journal_folder(), 1).read_bytes()


def test_a_log_is_left_once(tmp_path: Path) -> None:
    """The next round waits until the catalog knows the new log: else it would leave that one too."""
    store, capture, sender = tmp_path / "store", new_ulid(), SenderState(new_ulid(), 1, "api")
    state = recover(store)
    journal = Journal(Config(store, "ipc:///nowhere"), state.uuid, state.next_log, state.next_segment, Waker())
    upkeep = Upkeep(store, state.uuid, Waker(), round_s=0.0)
    journal.append_entry(sender, Own(1, capture, 1, "", [], {"said": "secret"}, 7))
    journal.append_entry(sender, Delete(2, capture))
    journal.start_commit()
    assert until(journal.end_commit) and until(lambda: journal.idle) and rows_in(store, "scrub")
    assert upkeep.step(0.0, applied=1) and until(lambda: upkeep.take(0.0, journal))
    assert log_numbers(store / journal_folder()) == [1, 2]
    assert not upkeep.step(1.0, applied=1) and upkeep.step(1.0, applied=2)
    upkeep.close()
    journal.close()
    fs.close(state.lock)


def rows_in(store: Path, table: str) -> int:
    return len(dump(store)[table])


def test_a_damaged_log_is_not_scrubbed(sample: Sample, tmp_path: Path) -> None:
    store = copied(sample, tmp_path)
    log = log_path(store / journal_folder(), 1)
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        scrub_log(store, read_store_uuid(store), 1, {sample.gone})
    assert log.read_bytes() == data


def test_rows_of_an_open_segment(tmp_path: Path) -> None:
    """It is sealed for it; rows that still come of a deleted capture go the same way."""
    store, gone, kept = tmp_path / "store", new_ulid(), new_ulid()
    with writing(store, "--seal-idle-s", "600", "--keep-s", "0.1") as (writer, engine):
        fill(engine, gone, kept)
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(gone).status)
            engine.delete(gone)
            engine.wait()
            assert until(lambda: not dump(store)["doomed"] and not dump(store)["scrub"])
            engine.frame([(gone, 1, range(FIRST, FIRST + 16))], width=WIDTH)
            engine.wait()
            assert until(lambda: dump(store)["doomed"]) and until(lambda: not dump(store)["doomed"])
            assert until(lambda: traces(store) == [])
        assert_erased(store, Sample(store, gone, kept))
        writer.stop()


class Killed(BaseException):
    """The process would be gone."""


def cut_short(monkeypatch: pytest.MonkeyPatch, at: int, torn: bool) -> Callable[[], int]:
    """The ``at``-th change of the disk does not happen (``torn``: happens by half), nor does anything after it."""
    calls = 0

    def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < at:
                return real(*args)
            if torn and calls == at and name == "write_at":
                body = b"".join(bytes(part) for part in args[1])
                real(args[0], [body[: len(body) // 2]], args[2])
            raise Killed

        return call

    for name in ("open_new", "write_at", "punch", "rename", "write_new", "datasync", "sync_dir", "remove"):
        monkeypatch.setattr(fs, name, failing(name, getattr(fs, name)))
    return lambda: calls


@pytest.mark.parametrize(("whole", "step"), [
    (False, 5), (True, 1), pytest.param(False, 1, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
    ids=["rows", "block", "rows_all"])
def test_cut_at_every_change_of_the_disk(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, step: int
) -> None:
    """Every ``step``-th, that is, each by turns left undone and half done."""
    monkeypatch.setattr(reader_module, "settle_s_max", 0.02)
    template = copied(sample, tmp_path)
    if whole:
        db = sqlite3.connect(template / "catalog.sqlite")
        db.execute("DELETE FROM extents")
        db.commit()
        db.close()
    uuid, turn, finished = read_store_uuid(template), 0, False
    while not finished:
        turn += 1
        at = 1 + turn // 2 * step
        store = tmp_path / "cut"
        shutil.copytree(template, store)
        with monkeypatch.context() as patch:
            upkeep = Upkeep(store, uuid, Waker())
            calls = cut_short(patch, at, turn % 2 == 0)
            try:
                upkeep.round()
                finished = True
            except Killed:
                pass
            upkeep.close()
            assert finished or calls() == at, "nothing may go on after the process is gone"
        if not whole:
            # A reader that comes before the next writer gets rows, or an error that says why; never other rows.
            with StoreReader(store) as reader:
                with contextlib.suppress(StoreError):
                    assert_rows(reader.slice(sample.kept, SITE, [0, 2], 0, 8), 2, range(8))
                assert_rows(reader.slice(sample.kept, SITE, [1, 3], 8, 12), 2, range(8, 12))
        look_after(store)
        if whole:
            assert traces(store) == [] and not (store / "blocks/w0-00000001.zarr").exists()
        else:
            assert_erased(store, sample)
        shutil.rmtree(store)
    assert at > (5 if whole else 20)


def test_a_power_loss_in_the_midst_of_an_erasure(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of what was written is on the disk and some is not, page by page: the next start ends it all the same."""
    template, store, rng = copied(sample, tmp_path), tmp_path / "cut", random.Random(1)
    uuid, finished, at = read_store_uuid(template), False, 0
    while not finished:
        at += 19
        shutil.copytree(template, store)
        disk = Certain(store, tmp_path / f"certain-{at}")
        with disk.watching(), monkeypatch.context() as patch:
            upkeep = Upkeep(store, uuid, Waker())
            cut_short(patch, at, torn=False)
            try:
                upkeep.round()
                finished = True
            except Killed:
                pass
            upkeep.close()
        disk.lose(rng)
        look_after(store)
        assert_erased(store, sample)
        shutil.rmtree(store)
    assert at > 20
