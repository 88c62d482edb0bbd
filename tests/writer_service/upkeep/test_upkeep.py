"""Retention, holds and quotas, on a writer that runs; the commands that ask for them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.catalog.records import connect_write
from schemas.errors import NotFoundError, StoreError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader, read_store_uuid
from schemas.spec import Resolved
from schemas.wire.records import Delete, Hold, Open
from tests.support.consistency import assert_consistent, assert_rebuilt_equal, dump
from tests.support.forked import tap
from tests.support.store_helpers import (
    SITE,
    Sender,
    WriterProcess,
    assert_adds_up,
    assert_rows,
    engine_info,
    until,
)
from vllm_tap import store_control
from vllm_tap.store_control import delete, hold
from writer_service import fs
from writer_service.catalog import catalog
from writer_service.control_log import LogEntry
from writer_service.journal.group_commit import Waker
from writer_service.recover.store_lock import take_lock
from writer_service.tools.fsck import fsck
from writer_service.upkeep.upkeep import Upkeep
from writer_service.upkeep.usage import disk_bytes

WIDTH = 4096
DAY_MS = 86_400_000


def store_one(engine: Sender, capture: str, age_days: float = 0.0, finish: bool = True) -> None:
    """A capture of 32 rows × 4 layers (a block of a bit more than 0.5 MB)."""
    made = time.time_ns() // 10**6 - int(age_days * DAY_MS)
    engine.send(Open(engine.next(), capture, "r", "{}", Resolved({SITE: [0, 1, 2, 3]}, {SITE: "int8b64"}, "all",
                                                                 "allow"), 4, b"", 0, made))
    engine.frame([(capture, 1, range(32))], width=WIDTH)
    if finish:
        engine.finish(capture, end=32, output=28)
    engine.wait()


def ids(store: Path) -> set[str]:
    with StoreReader(store) as reader:
        return {row.id for row in reader.captures()}


def settled(store: Path) -> bool:
    tables = dump(store)
    return not tables["doomed"] and not tables["scrub"]


def test_what_is_older_goes_what_is_held_or_running_stays(tmp_path: Path) -> None:
    store, (old, held, running, young) = tmp_path / "store", [new_ulid() for _ in range(4)]
    flags = ("--seal-idle-s", "0.2", "--keep-s", "0.1")
    with WriterProcess(store, *flags) as writer, Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
        for capture, age in ((old, 40), (held, 50), (running, 60), (young, 20)):
            store_one(engine, capture, age, finish=capture != running)
        with Sender(writer.endpoint, role="api") as api:
            api.send(Hold(api.next(), held, True))
            api.wait()
        until(lambda: list((store / "blocks").iterdir()))
        writer.stop()
    with WriterProcess(store, *flags, "--retain-days", "30") as writer:
        with Sender(writer.endpoint, role="api") as api:
            assert until(lambda: ids(store) == {held, running, young})
            api.delete(held)
            api.wait()
            assert api.refused == {1: ("held", f"capture {held} is on hold; lift the hold first")}
            assert until(lambda: settled(store))
            assert ids(store) == {held, running, young} and fsck(store).bad == []
            api.send(Hold(api.next(), held, False))
            api.wait()
            assert until(lambda: ids(store) == {running, young})
            assert until(lambda: settled(store))
        writer.stop()
    assert_rebuilt_equal(store)
    with StoreReader(store) as reader:
        assert_rows(reader.slice(young, SITE, [0, 3]), 1, range(32))
        with pytest.raises(NotFoundError):
            reader.manifest(old)


def test_the_oldest_go_when_there_is_too_much(tmp_path: Path) -> None:
    store, captures = tmp_path / "store", [new_ulid() for _ in range(6)]
    limit = 1_900_000
    with WriterProcess(store, "--segment-bytes", "500000", "--seal-idle-s", "0.1", "--keep-s", "0.1",
                       "--retain-bytes", str(limit)) as writer:
        with Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
            for age, capture in zip((6, 1, 5, 4, 3, 2), captures, strict=True):
                store_one(engine, capture, age)
            assert until(lambda: settled(store) and disk_bytes(store / "blocks") <= limit and len(ids(store)) <= 3)
        writer.stop()
    assert captures[1] in ids(store) and captures[0] not in ids(store)  # by age, not by when they came
    assert 2 <= len(ids(store)) <= 3, "more was deleted than had to be"
    assert fsck(store).bad == []


def test_logs_do_not_count(tmp_path: Path) -> None:
    """Deleting gives nothing of them back: what was asked to be kept is kept, and a quota stays open."""
    store, captures = tmp_path / "store", [new_ulid() for _ in range(3)]
    with WriterProcess(store, "--seal-idle-s", "0.1", "--keep-s", "0.05", "--retain-bytes", "2500000",
                       "--quota-bytes", "2500000") as writer:
        with Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
            for capture in captures[:2]:
                store_one(engine, capture)
            for _ in range(12):
                engine.open(new_ulid(), prompt_len=100_000)
            store_one(engine, captures[2])
            assert disk_bytes(store / "writers") > 4_000_000
            assert until(lambda: list((store / "blocks").glob("w0-*.zarr")))
            time.sleep(0.3)
        out = writer.stop()
    assert set(captures) <= ids(store) and "expired" not in out and "over_quota" not in out


def test_room_that_is_reserved_behind_a_file_does_not_count(tmp_path: Path) -> None:
    """XFS reserves some by itself for files that grow."""
    path = tmp_path / "segment.open"
    path.write_bytes(bytes(5000))
    subprocess.run(["fallocate", "--keep-size", "--length", "1M", path], check=True)
    assert path.stat().st_blocks * 512 >= 1 << 20
    assert 5000 <= disk_bytes(path) <= 64 << 10


def test_what_gives_nothing_back_is_not_deleted_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, captures = tmp_path / "store", [new_ulid() for _ in range(8)]
    with WriterProcess(store, "--keep-s", "1000") as writer, Sender(
            writer.endpoint, engine=engine_info(WIDTH)) as engine:
        for age, capture in enumerate(captures):
            store_one(engine, capture, 8 - age)
        writer.stop()
    monkeypatch.setattr(fs, "punch", lambda *_: False)
    upkeep = Upkeep(store, read_store_uuid(store), Waker(), retain_bytes=disk_bytes(store / "blocks") - 10_000)
    db = connect_write(store / "catalog.sqlite")
    deleted: list[str] = []

    def rounds() -> None:
        for _ in range(12):
            done = upkeep.round()
            deleted.extend(done.expired)
            with catalog.transaction(db):
                catalog.apply(db, done.changes)
                catalog.apply(db, [LogEntry("", 0, 0, 1, Delete(0, capture)) for capture in done.expired])

    rounds()
    assert 2 <= len(deleted) <= 3 and deleted == captures[:len(deleted)]
    # Once as much has come as was deleted in vain, the oldest go again, by what comes then.
    before = len(deleted)
    upkeep._retain_bytes = (upkeep._retain_bytes or 0) - upkeep._owed
    rounds()
    assert len(deleted) == before + 1 and deleted == captures[:len(deleted)]
    upkeep.close()
    db.close()


def test_over_quota(tmp_path: Path) -> None:
    store, (before, after, mixed, later) = tmp_path / "store", [new_ulid() for _ in range(4)]
    with WriterProcess(store, "--seal-idle-s", "0.2", "--keep-s", "0.1", "--quota-bytes", "600000") as writer:
        with Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
            store_one(engine, before, finish=False)
            assert until(lambda: disk_bytes(store / "blocks") > 500_000)
            engine.frame([(before, 1, range(32, 44))], width=WIDTH)
            engine.wait()
            size = disk_bytes(store)
            for capture in (after, mixed):
                store_one(engine, capture)
                assert disk_bytes(store) - size < 300_000
            # What had begun before goes on, also where its rows share a frame with some that are not taken.
            args: dict[str, Any] = {"width": WIDTH}
            engine.open(later, prompt_len=2)
            engine.frame([(before, 1, range(44, 48)), (later, 1, range(2))], **args)
            engine.finish(before, end=48, output=44)
            engine.wait()
            with StoreReader(store) as reader:
                assert until(lambda: reader.capture(before).status == "complete")
                assert_rows(reader.slice(before, SITE, [0, 1, 2, 3]), 1, range(48))
                for capture, expected in ((after, 31), (later, 2)):
                    manifest = reader.manifest(capture)
                    assert_adds_up(manifest)
                    assert {missing.reason for row in manifest.rows for missing in row.missing} == {"quota"}
                    assert manifest.captured == 0 and manifest.expected in (expected * 4, (expected + 1) * 4)
                assert reader.capture(after).status == "incomplete"
            engine.delete(before)
            engine.wait()
            assert until(lambda: settled(store) and disk_bytes(store / "blocks") < 400_000)
            again = new_ulid()
            store_one(engine, again)
            with StoreReader(store) as reader:
                assert until(lambda: reader.capture(again).status == "complete")
                assert_rows(reader.slice(again, SITE, [2]), 1, range(32))
        out = writer.stop()
    assert "rows_over_quota=64" in out
    assert_consistent(store)


def test_over_quota_with_its_open_in_one_burst(tmp_path: Path) -> None:
    """The Open waits for a frame before it, and the rows behind it are not taken for those of a capture in time."""
    store, before, later = tmp_path / "store", new_ulid(), new_ulid()
    with WriterProcess(store, "--seal-idle-s", "0.2", "--keep-s", "0.1", "--quota-bytes", "400000") as writer:
        with Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
            store_one(engine, before, finish=False)
            assert until(lambda: disk_bytes(store / "blocks") > 500_000)
            writer.process.send_signal(signal.SIGSTOP)
            engine.frame([(before, 1, range(32, 34))], width=WIDTH)
            engine.open(later, prompt_len=2)
            engine.frame([(later, 1, range(2))], width=WIDTH)
            writer.process.send_signal(signal.SIGCONT)
            engine.wait()
        out = writer.stop()
    assert "rows_over_quota=2" in out
    assert_consistent(store)


def test_the_commands_with_a_writer_and_without(tmp_path: Path) -> None:
    store, (one, two) = tmp_path / "store", [new_ulid() for _ in range(2)]
    with WriterProcess(store, "--keep-s", "0.1") as writer:
        with Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
            store_one(engine, one)
            store_one(engine, two)
        assert tap("hold", one, "--store", store).stdout == f"{one}\n"
        assert "neither deleted nor expired" in tap("show", one, "--store", store).stdout
        refused = tap("rm", two, one, "--store", store)
        assert refused.returncode == 2 and "on hold" in refused.stderr
        with StoreReader(store) as reader:
            assert reader.capture(one).hold and msgspec.to_builtins(reader.manifest(one))["hold"]
        assert until(lambda: ids(store) == {one})
        writer.stop()
    assert tap("release", one, "--store", store).returncode == 0
    assert tap("rm", one, "--store", store).stdout == f"{one}\n"
    assert not list((store / "blocks").iterdir()) and settled(store)
    missing = tap("rm", one, "--store", store)
    assert missing.returncode == 2 and "no capture" in missing.stderr


def test_a_writer_that_does_not_listen_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the store, and what is said of where the writer listens is the word of the one before it."""
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store) as writer, Sender(writer.endpoint, role="api") as api:
        api.own(capture)
        api.wait()
        writer.stop()
    lock, _ = take_lock(store)
    threading.Timer(0.3, fs.close, [lock]).start()
    assert hold(store, capture, True) == capture
    lock, _ = take_lock(store)
    monkeypatch.setattr(store_control, "listens_s", 0.1)
    with pytest.raises(StoreError, match=r"does not listen yet, after 0\.1 s"):
        delete(store, [capture])
    fs.close(lock)


def test_a_writer_is_found_whatever_the_clock_did_while_it_started(tmp_path: Path) -> None:
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store) as writer, Sender(writer.endpoint, role="api") as api:
        api.own(capture)
        api.wait()
        later = time.time() + 3600
        os.utime(store / "writers/w0/LOCK", (later, later))  # taken before the clock was set back
        began = time.monotonic()
        assert hold(store, capture, True) == capture
        assert time.monotonic() - began < 10


def test_a_name_of_several_owners_is_refused(tmp_path: Path) -> None:
    """An X-Request-Id is its caller's own: the newest that has it may be another's capture."""
    store, (hers, his, her_second) = tmp_path / "store", [new_ulid() for _ in range(3)]
    with WriterProcess(store, "--keep-s", "0.1") as writer, Sender(writer.endpoint, role="api") as api:
        api.own(hers, owner="alice", aliases=["theirs", "hers"])
        api.own(his, owner="bob", aliases=["theirs"], count=2)
        api.own(her_second, owner="alice", aliases=["hers"])
        api.wait()
        for name in ("theirs", "theirs.1"):
            said = rf"{hers} \(of alice\), {his} \(of bob\)"
            with pytest.raises(NotFoundError, match=said):
                delete(store, [hers, name])
            with pytest.raises(NotFoundError, match=said):
                hold(store, name, True)
        assert delete(store, ["hers"]) == [her_second]  # the newest of one owner, as ever
        assert delete(store, [his]) == [his]
        with StoreReader(store) as reader:
            assert until(lambda: not list(reader.captures(owner="bob"))) and reader.captures(owner="alice")
        with pytest.raises(NotFoundError, match="no capture"):
            hold(store, "theirs", True)  # his was the newest of that name
        assert hold(store, hers, True) == hers
