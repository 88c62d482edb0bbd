"""What survives: kills, torn tails, failed syncs, full disks, a lost catalog, seals cut in half."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import sqlite3
import struct
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from schemas.catalog.records import connect_read
from schemas.errors import NotFoundError, StartError, StoreError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader, read_store_uuid
from schemas.wire.messages import encode
from tests.support.consistency import dump
from tests.support.processes import PATIENCE_S
from tests.support.ranks import LAYERS, Ranks
from tests.support.ranks import SITES as RANK_SITES
from tests.support.store_helpers import PROGRAMS, SITE, Sender, WriterProcess, assert_adds_up, assert_rows, until
from writer_service import fs
from writer_service.catalog import catalog_file
from writer_service.control_log import read_log
from writer_service.recover import recovery, store_lock
from writer_service.recover.logs import replay_logs
from writer_service.recover.sequences import Recovered
from writer_service.tools.fsck import fsck
from writer_service.tools.rebuild import rebuild
from writer_service.upkeep.erasing import erase

FAULTY = PROGRAMS / "faulty_writer.py"


def status_is(store: Path, capture: str, status: str) -> bool:
    def check() -> bool:
        with StoreReader(store) as reader:
            return reader.capture(capture).status == status

    return until(check)


def rebuilt(store: Path) -> None:
    """Make the catalog again from the rest, in this process."""
    fs.close(rebuild(store).state.lock)


@pytest.mark.parametrize("seed", range(4))
def test_kill_9_in_mid_stream(tmp_path: Path, seed: int) -> None:
    """Killed at any moment, several times: what was acknowledged is there, the rest comes again, nothing is double."""
    rng = random.Random(seed)
    store = tmp_path / "store"
    capture = new_ulid()
    position = 0
    with WriterProcess(store, "--segment-bytes", "200000", "--seal-idle-s", "0.3") as writer:
        engine = Sender(writer.endpoint)
        engine.hello()
        engine.open(capture, prompt_len=1)
        for _ in range(3):
            for _ in range(rng.randrange(5, 40)):
                size = rng.choice([1, 1, 1, 7, 60])
                engine.frame([(capture, 1, range(position, position + size))])
                position += size
                if rng.random() < 0.3:
                    engine.receive(rng.random() * 0.03)
            acknowledged = engine.durable
            writer.kill()
            found = rebuilt_copy(store, tmp_path / f"copy-{writer.process.pid}")
            assert found >= acknowledged
            writer.start()
            welcome = engine.hello()
            assert acknowledged <= welcome.durable
        engine.finish(capture, end=position, output=position)
        engine.wait()
        assert status_is(store, capture, "complete")
        with StoreReader(store) as reader:
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, position), 1, range(position))
            manifest = reader.manifest(capture)
            assert_adds_up(manifest)
            assert sum(extent.rows for extent in manifest.sites[0].extents) == position  # nothing twice
        writer.stop()
        engine.close()
    before = dump(store)
    rebuilt(store)
    assert dump(store) == before


def rebuilt_copy(store: Path, copy: Path) -> int:
    """The last number of the stream that a copy of the dead store gives, from its files alone."""
    shutil.copytree(store, copy)
    state = rebuild(copy).state
    fs.close(state.lock)
    return max(sequence.covered for sequence in state.streams.values())


def running_store(tmp_path: Path) -> tuple[Path, str, Sender, WriterProcess]:
    """A killed writer's store with three frames in an open segment."""
    store, capture = tmp_path / "store", new_ulid()
    writer = WriterProcess(store, "--seal-idle-s", "60")
    engine = Sender(writer.endpoint)
    engine.hello()
    engine.open(capture, prompt_len=9)
    for start in (0, 3, 6):
        engine.frame([(capture, 1, range(start, start + 3))])
    engine.wait()
    writer.kill()
    return store, capture, engine, writer


def chop(nbytes: int) -> Any:
    return lambda data: data[:-nbytes]


def flip(at: int) -> Any:
    def edit(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

    return edit


TAILS: dict[str, tuple[str, Any, int, int]] = {
    # which file, edit, positions that survive, the last number that the writer then still has
    "garbage_after": ("open", lambda data: data + b"TAPFRM01" + b"\xff" * 900, 9, 4),
    "zeros_after": ("open", lambda data: data + bytes(1 << 20), 9, 4),
    "last_frame_torn": ("open", chop(100), 6, 3),
    "two_frames_torn": ("open", lambda data: data[: len(data) // 2], 3, 2),
    "payload_bit": ("open", flip(-4000), 6, 3),
    "everything_gone": ("open", lambda data: b"", 0, 1),
    "log_garbage_after": ("log", lambda data: data + b"\x40\0\0\0\0\0\0\0junkjunk", 9, 4),
    "log_torn_behind_open": ("log", lambda data: data + data[32:70], 9, 4),
}


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("catalog", ["kept", "lost"])
def test_torn_tails(tmp_path: Path, name: str, catalog: str) -> None:
    which, edit, survives, durable = TAILS[name]
    store, capture, engine, writer = running_store(tmp_path)
    (path,) = (store / "writers/w0/journal").glob("*.open" if which == "open" else "control-*.log")
    path.write_bytes(edit(path.read_bytes()))
    if catalog == "lost":
        for file in store.glob("catalog.sqlite*"):
            file.unlink()
    with writer:
        writer.start()
        with StoreReader(store) as reader:
            assert reader.capture(capture).status == "running"
            assert_rows(reader.slice(capture, SITE, [0, 3], 0, 9), 1, range(survives))
            manifest = reader.manifest(capture)
            assert_adds_up(manifest)
        welcome = engine.hello()
        if catalog == "lost":
            assert welcome.durable == durable
        # A fourth frame after it: the store goes on wherever it stands.
        assert writer.process.poll() is None
    engine.close()


@pytest.mark.parametrize("where", ["head", "payload"])
@pytest.mark.parametrize("sealed", ["at_the_start", "while_it_runs"])
def test_a_damaged_frame_costs_no_other(tmp_path: Path, where: str, sealed: str) -> None:
    """What was acknowledged behind it stays, and is read; fsck names the one; its bytes go with its captures."""
    store, (capture, other) = tmp_path / "store", (new_ulid(), new_ulid())
    writer = WriterProcess(store, "--seal-idle-s", "60", "--keep-s", "0.05")
    with writer:
        engine = Sender(writer.endpoint)
        engine.hello()
        for name in (capture, other):
            engine.open(name, prompt_len=9)
        for start in (0, 3, 6):
            engine.frame([(capture, 1, range(start, start + 3)), (other, 2, range(start, start + 3))])
        engine.wait()
        assert until(lambda: len(dump(store)["frames"]) == 3)
        offset = sorted(row[4] for row in dump(store)["frames"])[1]
        (path,) = (store / "writers/w0/journal").glob("*.open")
        size = path.stat().st_size
        with open(path, "r+b") as file:
            at = offset + (20 if where == "head" else 8192 + 100)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        assert [bad.offset for bad in fsck(store).bad if not bad.capture or where == "payload"][:1] == [offset]
        if sealed == "at_the_start":
            writer.kill()
            writer.start()
        writer.stop()
        (block,) = (store / "blocks").glob("w0-*.zarr")
        assert (block / "q/c/0/0/0").stat().st_size > size
        assert {bad.offset for bad in fsck(store).bad} == {offset}
        with StoreReader(store) as reader:
            for name, content in ((capture, 1), (other, 2)):
                for positions in (range(3), range(6, 9)):
                    got = reader.slice(name, SITE, [0, 1, 2, 3], positions.start, positions.stop)
                    assert_rows(got, content, positions)
            if sealed == "at_the_start":
                assert list(reader.slice(capture, SITE, [0], 0, 9).positions) == [0, 1, 2, 6, 7, 8]
            else:
                with pytest.raises(StoreError):
                    reader.slice(capture, SITE, [0], 0, 9)
        engine.close()
    rebuilt(store)
    with StoreReader(store) as reader:
        assert_rows(reader.slice(other, SITE, [0, 3], 0, 9), 2, [0, 1, 2, 6, 7, 8])
    assert fsck(store).bad == []
    erase(store, read_store_uuid(store), 1, [capture])
    after = int.from_bytes((block / "frame/c/0").read_bytes()[8:16], "little")
    assert not any((block / "q/c/0/0/0").read_bytes()[offset:after])


def test_a_damaged_catalog_is_rebuilt(tmp_path: Path) -> None:
    store, capture, engine, writer = running_store(tmp_path)
    before = StoreReader(store)
    for file in store.glob("catalog.sqlite-*"):
        file.unlink()
    data = bytearray((store / "catalog.sqlite").read_bytes())
    data[: len(data)] = b"\xa5" * len(data)
    (store / "catalog.sqlite").write_bytes(data)
    with writer:
        writer.start()
        with StoreReader(store) as reader:
            assert_rows(reader.slice(capture, SITE, [0], 0, 9), 1, range(9))
        assert not list(store.glob("catalog.damaged*"))  # it may tell what was deleted
        # A reader that was open all the time sees the new one.
        assert_rows(before.slice(capture, SITE, [0], 0, 9), 1, range(9))
        assert before.capture(capture).status == "running"
        before.close()
    engine.close()


def make_stale(store: Path, index: str, change: str) -> None:
    """Change rows without an index that has them, as where SQLite's log lost what was in the file already."""
    path, of_index = store / "catalog.sqlite", "FROM sqlite_master WHERE type = 'index' AND name = ?"
    db = sqlite3.connect(path)
    kept = db.execute(f"SELECT type, name, tbl_name, rootpage, sql {of_index}", (index,)).fetchone()
    for work, args in ((f"DELETE {of_index}", (index,)), (change, ()),
                       ("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", kept)):
        db.execute("PRAGMA writable_schema=ON")
        assert db.execute(work, args).rowcount == 1
        db.commit()
        db.close()
        db = sqlite3.connect(path)
    assert db.execute("PRAGMA quick_check").fetchall() == [("ok",)]
    assert db.execute("PRAGMA integrity_check").fetchall() != [("ok",)]
    db.close()


@pytest.mark.parametrize("at_start", [True, False])
def test_a_catalog_whose_index_does_not_match_is_rebuilt(tmp_path: Path, at_start: bool) -> None:
    """At the start that meets it, or at the next one where it is met in between."""
    store, capture, engine, writer = running_store(tmp_path)
    writer.start()
    writer.stop()  # now the catalog has what the journal has
    path = store / "catalog.sqlite"
    whole = path.read_bytes()
    make_stale(store, "captures_created", "UPDATE captures SET created_ms = created_ms + 5")
    assert any("catalog" in bad.what for bad in fsck(store).bad)
    stale = path.read_bytes()
    if at_start:  # what it has to do was told to a whole one
        path.write_bytes(whole)
    writer.start()
    with writer, Sender(writer.endpoint, role="api") as api:
        api.delete(capture)
        if at_start:
            api.wait()
            writer.kill()
            for file in store.glob("catalog.sqlite-*"):
                file.unlink()
            path.write_bytes(stale)
        else:
            assert writer.process.wait(PATIENCE_S) == 1
            writer.kill()  # it has ended
            assert not path.exists() and list(store.glob("catalog.damaged*"))
        writer.start()
        api.hello()
        api.wait()
        with StoreReader(store) as reader, pytest.raises(NotFoundError):
            reader.capture(capture)
        assert until(lambda: fsck(store).bad == [])
        assert not list(store.glob("catalog.damaged*"))
    engine.close()


def test_rebuild_equals_with_owners_aliases_and_tombstones(tmp_path: Path) -> None:
    from schemas.wire.records import Abandon, Hold

    store = tmp_path / "store"
    ulids = [new_ulid() for _ in range(5)]
    with WriterProcess(store, "--seal-idle-s", "0.2") as writer, Sender(writer.endpoint) as engine:
        with Sender(writer.endpoint, role="api") as api:
            for number, ulid in enumerate(ulids):
                api.own(
                    ulid, count=1 + (number == 3), owner=f"o{number}", aliases=[f"r{number}", "same"], tags={"n": "1"}
                )
            api.send(Abandon(api.next(), ulids[4], "refused"))
            api.wait()
            for capture in (*ulids[:3], f"{ulids[3]}.1"):
                engine.open(capture)
                engine.frame([(capture, 1, range(8))])
                engine.dropped(capture, 3, 4)
            engine.finish(ulids[0], end=8)
            engine.finish(ulids[1], end=8)
            engine.wait()
            until(lambda: any((store / "blocks").glob("w0-*.zarr")))
            engine.frame([(ulids[2], 1, range(8, 12))])
            engine.wait()
            api.delete(ulids[1])
            api.client_finish(ulids[0], "stop")
            api.send(Hold(api.next(), ulids[0], True))
            api.own(ulids[0], owner="thief")
            api.wait()
            engine.bye()
            assert status_is(store, ulids[2], "incomplete")
        writer.stop()
    before = dump(store)
    assert {row[4] for row in before["captures"]} == {"incomplete", "deleted", "pending", "failed"}
    rebuilt(store)
    assert dump(store) == before
    with StoreReader(store) as reader:
        assert reader.capture("r0", "o0").id == ulids[0]
        with pytest.raises(NotFoundError):
            reader.capture(ulids[1])
        assert reader.capture("same").id == ulids[4]


def test_engines_that_do_not_come_back_are_lost(tmp_path: Path) -> None:
    store, capture, engine, writer = running_store(tmp_path)
    writer.flags = ("--engine-lost-s", "0.5")
    with writer:
        writer.start()
        assert status_is(store, capture, "incomplete")
        writer.stop()
    engine.close()


def fault(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv("FAULT", what)


@pytest.mark.parametrize("where", [".open", "control-"])
def test_a_failed_sync_is_never_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The file is given up, the stream told to send again, and everything arrives in another file."""
    fault(monkeypatch, f"datasync:{where}:3:1:EIO")
    store, captures = tmp_path / "store", [new_ulid() for _ in range(2)]
    with WriterProcess(store, "--seal-idle-s", "60", script=FAULTY) as writer, Sender(writer.endpoint) as engine:
        for capture in captures:
            engine.open(capture, prompt_len=6)
            for position in range(6):
                engine.frame([(capture, 1, [position])])
                engine.wait()
            engine.finish(capture, end=6)
            engine.wait()
        if where == ".open":
            assert until((store / "blocks" / "w0-00000001.zarr").exists), "what can be erased is sealed"
        # On a busy machine a message that was on its way meanwhile is refused once more.
        assert {refusal.code for refusal in engine.refusals} == {"resend"}
        for capture in captures:
            assert status_is(store, capture, "complete")
            with StoreReader(store) as reader:
                assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 6), 1, range(6))
        writer.kill()
        monkeypatch.delenv("FAULT")
        writer.script = None
        writer.start()
        writer.stop()
    before = dump(store)
    rebuilt(store)
    assert dump(store) == before
    with StoreReader(store) as reader:
        assert_rows(reader.slice(captures[0], SITE, [0, 1, 2, 3], 0, 6), 1, range(6))


def test_a_failed_sync_forgets_what_the_record_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Own and a Delete that did not reach the disk are taken again, not refused as already done."""
    fault(monkeypatch, "datasync:control-:3:2:EIO")
    store, ulid = tmp_path / "store", new_ulid()
    with WriterProcess(store, script=FAULTY) as writer, Sender(writer.endpoint, role="api") as api:
        api.own(ulid, owner="a")
        api.wait()
        api.delete(ulid)
        api.wait()
        assert api.refusals and not api.refused
        with StoreReader(store) as reader:
            assert [row.id for row in reader.captures(status="deleted")] == [ulid]


def test_a_failed_sync_forgets_a_greeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who said nothing else is told so too, and it is written down again: what the engine is, and the epoch that keeps
    earlier ones of the stream out.
    """
    fault(monkeypatch, "datasync:control-:1:1:EIO")
    failing, fired = tmp_path / "failing", tmp_path / "fired"
    monkeypatch.setenv("FAULT_WHILE", str(failing))
    monkeypatch.setenv("FAULT_FIRED", str(fired))
    store = tmp_path / "store"
    with WriterProcess(store, script=FAULTY) as writer, Sender(writer.endpoint, epoch=5) as old:
        old.open(new_ulid())
        old.wait()
        failing.touch()
        with Sender(writer.endpoint, stream=old.stream, epoch=6) as again:
            assert until(fired.exists)
            failing.unlink()
            while not any(refusal.code == "resend" for refusal in again.refusals):
                assert again.receive() is not None, "it was not told"
            again.hello()
            assert until(lambda: epochs(store) == [6, 6])
            writer.stop()
    for _ in range(2):
        assert epochs(store) == [6, 6]
        rebuilt(store)


def epochs(store: Path) -> list[int]:
    """Of the stream, and of what its engine said of itself."""
    db = sqlite3.connect(store / "catalog.sqlite")
    try:
        return [row[0] for table in ("streams", "engines") for row in db.execute(f"SELECT epoch FROM {table}")]
    finally:
        db.close()


@pytest.mark.parametrize("where", [".open", "control-", "journal"])
def test_a_full_disk_and_space_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """No Ack while nothing can be written; reads live on; everything goes on when there is space."""
    full = tmp_path / "full"
    fault(monkeypatch, f"{'open_new' if where == 'journal' else 'write_at'}:{where}:1:1:ENOSPC")
    monkeypatch.setenv("FAULT_WHILE", str(full))
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store, script=FAULTY) as writer, Sender(writer.endpoint) as engine:
        engine.open(capture, prompt_len=6)
        if where != "journal":
            engine.frame([(capture, 1, [0, 1])])
        engine.wait()
        full.touch()
        acknowledged = engine.durable
        for position in range(0 if where == "journal" else 2, 6):
            engine.frame([(capture, 1, [position])])
        engine.finish(capture, end=6)
        for _ in range(5):
            engine.sync()
        if where != "control-":
            assert engine.durable == acknowledged
        assert engine.durable < engine.seq
        with StoreReader(store) as reader:
            until(lambda: reader.captures())
            assert reader.capture(capture).status == "running"
        full.unlink()
        engine.wait()
        assert status_is(store, capture, "complete")
        with StoreReader(store) as reader:
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 6), 1, range(6))


SEAL_CUTS = {
    "before_arrays": "write_new:building:1:1:die",
    "between_arrays": "write_new:building:9:1:die",
    "before_footer": "truncate:.open:1:1:die",
    "after_footer": "rename:.open:1:1:die",
    "before_last_rename": "rename:.building:1:1:die",
    "failing_arrays": "write_new:building:3:1:EIO",
    "failing_rename": "rename:.open:1:1:EIO",
    "failing_last_rename": "rename:.building:1:1:EIO",
}


@pytest.mark.parametrize("name", SEAL_CUTS)
def test_a_seal_cut_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault(monkeypatch, SEAL_CUTS[name])
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store, script=FAULTY) as writer, Sender(writer.endpoint) as engine:
        engine.open(capture, prompt_len=9)
        engine.frame([(capture, 1, range(9))])
        engine.finish(capture, end=9)
        engine.wait()
        assert status_is(store, capture, "complete")
        writer.process.terminate()
        writer.process.communicate(timeout=PATIENCE_S)
        assert writer.process.returncode == (-9 if SEAL_CUTS[name].endswith("die") else 0)
        with StoreReader(store) as reader:  # wherever the file is now
            assert_rows(reader.slice(capture, SITE, [0, 1], 0, 9), 1, range(9))
        monkeypatch.delenv("FAULT")
        writer.script = None
        writer.start()
        writer.stop()
        assert [path.name for path in (store / "blocks").iterdir()] == ["w0-00000001.zarr"]
        assert not list((store / "writers/w0/journal").glob("*.open"))
        with StoreReader(store) as reader:
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 9), 1, range(9))


def test_a_reader_needs_no_writer(tmp_path: Path) -> None:
    store, capture, engine, writer = running_store(tmp_path)
    with writer:
        writer.start()
        writer.stop()
    engine.close()
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    for file in copy.glob("catalog.sqlite-*"):
        file.unlink()
    with StoreReader(copy) as reader:
        assert_rows(reader.slice(capture, SITE, [0], 0, 9), 1, range(9))


def test_a_reader_where_nothing_can_be_written_sees_what_comes(tmp_path: Path) -> None:
    """The store is left clean, and a writer comes: its reader looked at a file that nobody wrote to."""
    store, capture, engine, writer = running_store(tmp_path)
    with writer:
        writer.start()
        writer.stop()
        shared = store / "catalog.sqlite-shm"
        shared.unlink(missing_ok=True)
        shared.symlink_to(tmp_path / "nowhere" / "shm")  # as on a read-only mount: what SQLite needs cannot be made
        with StoreReader(store) as reader:
            assert reader.capture(capture).status == "running"
            version = reader.version()
            shared.unlink()
            writer.start()
            engine.hello()
            engine.finish(capture, end=9)
            engine.wait()
            assert until(lambda: reader.capture(capture).status == "complete")
            assert reader.version() != version
        writer.stop()
    engine.close()


@pytest.mark.parametrize("owner", [None, "o"])
def test_lists_do_not_walk_tombstones(tmp_path: Path, owner: str | None) -> None:
    state = recovery.recover(tmp_path)
    fs.close(state.lock)
    with sqlite3.connect(tmp_path / "catalog.sqlite") as db:
        insert = ("INSERT INTO captures (id, ulid, sample, owner, status, created_ms, deleted) "
                  "VALUES (?, ?, 0, 'o', ?, ?, ?)")
        kept = [new_ulid() for _ in range(3)]
        db.executemany(insert, [(name, name, "complete", number, 0) for number, name in enumerate(kept)])
        db.executemany(insert, [(str(n), str(n), "deleted", 100 + n, 1) for n in range(20_000)])
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1000
        return 0

    with StoreReader(tmp_path) as reader:
        reader._catalog.db.set_progress_handler(step, 1000)
        assert [row.id for row in reader.captures(owner)] == kept[::-1]
        assert [row.id for row in reader.captures(owner, before=kept[1])] == kept[:1]
        assert len(reader.captures(owner, status="deleted", limit=5)) == 5
    assert steps < 20_000


def test_a_power_loss_that_keeps_rows_but_not_their_open(tmp_path: Path) -> None:
    """Segment and log are synced side by side: rows whose Open was lost are taken again, and then found."""
    assert any(lost_with_its_open(tmp_path / str(number)) for number in range(8)), "no commit had both"


def lost_with_its_open(folder: Path) -> bool:
    """False where the writer made two commits of them, so that one could not be lost without the other."""
    store, capture = folder / "store", new_ulid()
    with WriterProcess(store, "--seal-idle-s", "60") as writer:
        engine = Sender(writer.endpoint)
        engine.hello()
        engine.sync()
        assert until(lambda: dump(store)["streams"])
        (log,) = (store / "writers" / "w0" / "journal").glob("control-*.log")
        before = log.stat().st_size
        saved = shutil.copytree(store, folder / "saved", ignore=shutil.ignore_patterns("LOCK"))
        writer.process.send_signal(signal.SIGSTOP)  # both come in one commit
        engine.open(capture, prompt_len=6)
        engine.frame([(capture, 1, range(6))])
        kept, row = dict(engine.kept), engine.kept[engine.seq][2][:64]
        writer.process.send_signal(signal.SIGCONT)
        engine.wait()
        if until(lambda: dump(store)["frames"])[0][-1] != 0:
            engine.close()
            return False
        writer.kill()
        lose_since(saved, store, log, before)
        writer.start()
        engine.close()  # an Ack of before may still lie in it
        engine.connect()
        engine.durable, engine.kept = 0, kept
        assert engine.hello().durable == 0
        engine.finish(capture, end=6)
        engine.wait()
        assert status_is(store, capture, "complete")
        with StoreReader(store) as reader:
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 6), 1, range(6))
        writer.stop()
        engine.close()
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 6), 1, range(6))
    rebuilt(store)
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 6), 1, range(6))
    assert len(holding(store, row)) == 2
    with WriterProcess(store, "--seal-idle-s", "0.1", "--keep-s", "0.1") as writer, \
         Sender(writer.endpoint, "api") as api:
        api.delete(capture)
        api.wait()
        assert until(lambda: not holding(store, row)), holding(store, row)
    return True


def test_a_power_loss_that_keeps_rows_but_not_their_join(tmp_path: Path) -> None:
    """The same of a rank: that its leader has opened the capture does not make its rows found."""
    assert any(lost_with_its_join(tmp_path / str(number)) for number in range(8)), "no commit had both"


def lost_with_its_join(folder: Path) -> bool:
    """False where the writer made two commits of them."""
    store = folder / "store"
    with WriterProcess(store, "--seal-idle-s", "60") as writer, Ranks(writer.endpoint, 2) as ranks:
        leader, rank = ranks.all
        leader.open(ranks.capture, 6, dict.fromkeys(RANK_SITES, LAYERS))
        ranks.wait()
        rank.sync()
        assert until(lambda: len(dump(store)["streams"]) == 2)
        (log,) = (store / "writers" / "w0" / "journal").glob("control-*.log")
        before = log.stat().st_size
        saved = shutil.copytree(store, folder / "saved", ignore=shutil.ignore_patterns("LOCK"))
        writer.process.send_signal(signal.SIGSTOP)  # both come in one commit
        rank.join(ranks.capture)
        ranks.step(range(6), 1, [rank])
        kept = dict(rank.kept)
        writer.process.send_signal(signal.SIGCONT)
        rank.wait()
        if until(lambda: dump(store)["frames"])[0][-1] != 0:
            return False
        writer.kill()
        lose_since(saved, store, log, before)
        writer.start()
        for each in ranks.all:  # an Ack of before may still lie in the connection
            each.close()
            each.connect()
        rank.durable, rank.kept = 0, kept
        leader.hello()
        assert rank.hello().durable == 0
        ranks.step(range(6), 1, [leader])
        ranks.end(6, 0)
        ranks.wait()
        assert status_is(store, ranks.capture, "complete")
        writer.stop()
    rebuilt(store)
    return status_is(store, ranks.capture, "complete")


def lose_since(saved: Path, store: Path, log: Path, size: int) -> None:
    """The power goes: of catalog and log, what has come since they were saved and had that size is lost."""
    for file in store.glob("catalog.sqlite*"):
        file.unlink()
    for file in saved.glob("catalog.sqlite*"):
        shutil.copy(file, store / file.name)
    with open(log, "r+b") as end:
        end.truncate(size)


def holding(store: Path, text: bytes) -> list[Path]:
    """The files of a store that have these bytes."""
    found = []
    for folder, _, names in os.walk(store):  # of which some are taken away meanwhile
        for path in map(Path(folder).joinpath, names):
            with contextlib.suppress(OSError):
                if text in path.read_bytes():
                    found.append(path)
    return found


def test_a_malformed_frame_behind_one_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its refusal acknowledges nothing before it."""
    full = tmp_path / "full"
    fault(monkeypatch, "write_at:.open:1:1:ENOSPC")
    monkeypatch.setenv("FAULT_WHILE", str(full))
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store, script=FAULTY) as writer, Sender(writer.endpoint) as engine:
        engine.open(capture, prompt_len=2)
        engine.wait()
        full.touch()
        writer.process.send_signal(signal.SIGSTOP)  # both come at once
        engine.frame([(capture, 1, [0])])
        frame, parts = engine.frame([(capture, 1, [1])], send=False)
        engine.send(msgspec.structs.replace(frame, table_xxh3=1), *parts)
        writer.process.send_signal(signal.SIGCONT)
        for _ in range(5):
            engine.sync()
        assert engine.durable == 1 and not engine.refused
        full.unlink()
        engine.wait()
        assert engine.refused[3][0] == "malformed"
        with StoreReader(store) as reader:
            assert until(lambda: len(reader.slice(capture, SITE, [0]).positions))
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 1), 1, [0])


def test_frames_behind_a_record_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is acknowledged: both come again, and the rows are stored once."""
    full = tmp_path / "full"
    fault(monkeypatch, "write_at:control-:1:1:ENOSPC")
    monkeypatch.setenv("FAULT_WHILE", str(full))
    store, capture, other = tmp_path / "store", new_ulid(), new_ulid()
    with WriterProcess(store, script=FAULTY) as writer, Sender(writer.endpoint) as engine:
        engine.open(capture, prompt_len=6)
        engine.wait()
        full.touch()
        writer.process.send_signal(signal.SIGSTOP)  # all come at once
        engine.frame([(capture, 1, [0, 1])])
        engine.open(other, prompt_len=1)
        for positions in ([2, 3], [4, 5]):
            engine.frame([(capture, 1, positions)])
        writer.process.send_signal(signal.SIGCONT)
        assert until(lambda: engine.sync() and engine.durable == 2)  # the frame before it
        for _ in range(5):
            engine.sync()
        assert engine.durable == 2
        full.unlink()
        engine.finish(capture, end=6)
        engine.wait()
        assert status_is(store, capture, "complete")
        with StoreReader(store) as reader:
            assert reader.capture(other).status == "running"
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 6), 1, range(6))
        assert len(dump(store)["frames"]) == 3


def test_a_failed_sync_forgets_a_refusal_and_keeps_a_file_that_has_nothing_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was made for a frame that was malformed; what comes next goes into it, under the same number."""
    failing, fired = tmp_path / "failing", tmp_path / "fired"
    fault(monkeypatch, "datasync:control-:1:1:EIO")
    monkeypatch.setenv("FAULT_WHILE", str(failing))
    monkeypatch.setenv("FAULT_FIRED", str(fired))
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store, script=FAULTY) as writer, Sender(writer.endpoint) as engine:
        engine.open(capture, prompt_len=2)
        engine.wait()
        failing.touch()
        frame, parts = engine.frame([(capture, 1, [0, 1])], send=False)
        engine.socket.send_multipart([encode(frame), parts[0], *(bytes(len(part)) for part in parts[1:])])
        assert until(fired.exists)
        failing.unlink()
        while not any(refusal.code == "resend" for refusal in engine.refusals):
            assert engine.receive() is not None, "it was not told"
        engine.refused.clear()  # an Ack that answers a Ping of before may have told of it
        engine.hello()
        engine.send(frame, *parts)
        engine.finish(capture, end=2)
        engine.wait()
        assert not engine.refused and status_is(store, capture, "complete")
        with StoreReader(store) as reader:
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 2), 1, range(2))


def test_records_past_a_gap_are_known_at_every_start(tmp_path: Path) -> None:
    """A power loss kept a record and not the frame before it: the record is not asked for again, however often the
    writer dies before the engine has sent the frame."""
    store, capture = tmp_path / "store", new_ulid()
    writer = WriterProcess(store, "--seal-idle-s", "60")
    with Sender(writer.endpoint) as engine:
        engine.open(capture, prompt_len=3)
        engine.frame([(capture, 1, range(3))])
        engine.finish(capture, end=3)
        engine.wait()
        writer.kill()
        (store / "writers/w0/journal/00000001.open").write_bytes(b"")
        for path in store.glob("catalog.sqlite*"):
            path.unlink()
        for _ in range(3):
            state = recovery.recover(store)
            fs.close(state.lock)
            assert (state.streams[engine.stream].covered, state.streams[engine.stream].seqs) == (1, {3})


def test_what_a_killed_writer_left_is_synced_before_senders_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been killed before it synced; what is told to be safe must stand a power loss."""
    store, _, engine, _ = running_store(tmp_path)
    engine.close()
    synced: dict[str, int] = {}
    real = fs.datasync

    def noting(fd: int) -> None:
        real(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        synced[path.name] = path.stat().st_size

    monkeypatch.setattr(fs, "datasync", noting)
    fs.close(recovery.recover(store).lock)
    for path in (store / "writers/w0/journal").iterdir():
        assert synced.get(path.name) == path.stat().st_size, path.name


def test_what_a_newer_version_wrote_is_not_cut_off(tmp_path: Path) -> None:
    store, _, engine, _ = running_store(tmp_path)
    engine.close()
    (segment,) = (store / "writers" / "w0" / "journal").glob("*.open")
    data = bytearray(segment.read_bytes())
    data[8] = 2
    segment.write_bytes(data)
    with pytest.raises(StoreError, match="newer version"):
        recovery.recover(store)
    assert segment.read_bytes() == data


def test_a_record_of_a_newer_version_is_not_cut_off(tmp_path: Path) -> None:
    """Nor taken for a torn one: what stands behind it would go with it."""
    store, _, engine, _ = running_store(tmp_path)
    engine.close()
    *_, log = sorted((store / "writers" / "w0" / "journal").glob("control-*"))
    body = b"\x82\xa4type\xa9some_newer\xa3seq\x01"
    head = struct.pack("<II", len(body), 0)
    *_, (end, _) = read_log(log, read_store_uuid(store))
    data = log.read_bytes()[:end] + head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + body)) + body
    log.write_bytes(data)
    with pytest.raises(StoreError, match=r"byte .* is unknown to this version .*a newer version wrote it"):
        recovery.recover(store)
    assert log.read_bytes() == data


def test_a_full_disk_leaves_no_descriptors_and_files_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that cannot be begun is tried again with every record, for as long as the disk is full."""
    fault(monkeypatch, "datasync:control-:3:1:EIO,write_at:control-:4:40:ENOSPC")
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store, script=FAULTY) as writer, Sender(writer.endpoint, role="api") as api:
        descriptors, journal = Path(f"/proc/{writer.process.pid}/fd"), store / "writers" / "w0" / "journal"
        before = len(list(descriptors.iterdir()))
        assert until(lambda: dump(store)["streams"])  # the Hello is on the disk: the third sync is the first record's
        api.own(capture)
        assert until(lambda: api.receive(0.1) and api.refusals)
        api.hello()
        for _ in range(45):
            api.resend()
            api.sync()
        api.wait()
        assert len(list(descriptors.iterdir())) <= before + 4 and len(list(journal.iterdir())) < 10


def test_a_catalog_that_cannot_be_written_now_is_not_taken_for_damaged(tmp_path: Path) -> None:
    """On a full disk SQLite cannot even make the files beside it; the catalog stays for when there is space."""
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store) as writer, Sender(writer.endpoint, role="api") as api:
        api.own(capture)
        api.wait()
        writer.stop()
    before = (store / "catalog.sqlite").read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(sqlite3.OperationalError):
            catalog_file.open_catalog(store, read_store_uuid(store))
        (store / "catalog.sqlite-shm").unlink()
        with pytest.raises(StoreError, match="the disk is full"):
            connect_read(store / "catalog.sqlite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (store / "catalog.sqlite").read_bytes() == before and not list(store.glob("catalog.damaged*"))
    with WriterProcess(store) as writer, StoreReader(store) as reader:
        assert [row.id for row in reader.captures()] == [capture]
        writer.stop()


def test_two_first_starts_at_once_make_one_store(tmp_path: Path) -> None:
    """The one that does not get the lock has not given the store another name."""
    store = tmp_path / "store"
    lock, _ = store_lock.take_lock(store)
    with pytest.raises(StartError, match="another writer"):
        recovery.recover(store)
    assert not (store / "store.json").exists()
    fs.close(lock)


def test_who_looks_whether_a_store_is_free_keeps_no_writer_from_it(tmp_path: Path) -> None:
    path = tmp_path / "store" / "writers" / "w0" / "LOCK"
    assert store_lock.is_free(tmp_path / "store")
    path.parent.mkdir(parents=True)
    path.touch()
    looking = fs.lock(path, shared=True)
    assert looking is not None and store_lock.is_free(tmp_path / "store"), "who looks takes another one for a writer"
    threading.Timer(0.03, fs.close, [looking]).start()
    lock, _ = store_lock.take_lock(tmp_path / "store")
    assert not store_lock.is_free(tmp_path / "store")
    fs.close(lock)


def test_a_start_that_is_killed_while_it_reads_the_log_forgets_no_number(tmp_path: Path) -> None:
    """What a stream was promised is counted from the log: it must be read again until the count is in the catalog."""
    store = tmp_path / "store"
    with WriterProcess(store) as writer, Sender(writer.endpoint, role="api") as api:
        for _ in range(5):
            api.own(new_ulid())
        api.wait()
        writer.kill()
    for file in store.glob("catalog.sqlite*"):
        file.unlink()
    db, _ = catalog_file.open_catalog(store, read_store_uuid(store))
    cut_short = Recovered(read_store_uuid(store), 1, -1, 1, 1, {}, [])
    replay_logs(db, store, cut_short)
    db.close()
    state = recovery.recover(store)
    fs.close(state.lock)
    assert state.streams[api.stream].covered == 5
