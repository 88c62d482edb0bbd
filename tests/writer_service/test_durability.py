"""What each sync, order and check of the writer is there for: without it, one of these loses or makes up something.

``make mutants`` takes them out one at a time (tests/mutants).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from schemas.catalog.records import connect_write
from schemas.errors import CorruptError, StoreError
from schemas.ids import new_ulid
from schemas.read.journal_tail import FrameAt, JournalTail
from schemas.read.reader import StoreReader, read_store_uuid
from schemas.store.paths import journal_folder, open_name
from schemas.store.segment import FrameHeader, parse_frame, walk
from schemas.wire.messages import Ack
from schemas.wire.records import Own
from schemas.wire.row_table import RowTable
from tests.schemas.store.test_segment import STREAM, UUID, build, segment_of
from tests.support.consistency import dump
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import PROGRAMS, SITE, Sender, WriterProcess, assert_rows, engine_info, until
from tests.support.writers.power import Certain
from tests.writer_service.recover.test_recovery import running_store
from tests.writer_service.upkeep.test_erasing import Killed
from writer_service import fs
from writer_service.catalog import catalog
from writer_service.catalog.changes import Indexed, SegmentMade, SegmentSealed
from writer_service.catalog.entries import note_streams
from writer_service.control_log import ControlLog, LogEntry, log_numbers, log_path, read_log
from writer_service.journal import group_commit, parallel_append
from writer_service.journal.group_commit import Batch
from writer_service.journal.open_segments import OpenSegment, SegmentSet
from writer_service.journal.parallel_append import ParallelAppend, PendingAppend, ReceivedFrame
from writer_service.recover import recovery
from writer_service.seal import sealing
from writer_service.sender_state import SenderState, map_ring
from writer_service.tools.fsck import fsck
from writer_service.upkeep import block_removal
from writer_service.upkeep.scrubbing import scrub_log


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Certain]:
    """A folder on a disk whose power can be lost."""
    (tmp_path / "store").mkdir()
    found = Certain(tmp_path / "store", tmp_path / "certain")
    with found.watching():
        yield found


# ── what a sync is for ──────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_not_synced_is_lost(disk: Certain) -> None:
    """Else the tests below show nothing."""
    path = disk.store / "a"
    fs.write_new(path, b"old")
    disk.lose()
    assert not path.exists()
    fs.write_durable(path, b"old")
    fd = fs.open_existing(path)
    fs.write_at(fd, [b"newer"], 0)
    fs.close(fd)
    path.rename(disk.store / "b")
    disk.lose()
    assert path.read_bytes() == b"old" and not (disk.store / "b").exists()


@pytest.mark.parametrize("to", ["here", "there"])
def test_a_file_that_was_renamed_has_its_new_name_and_no_other(disk: Certain, to: str) -> None:
    for name in ("here", "there"):
        fs.make_dirs(disk.store / name)
    fs.write_durable(disk.store / "here" / "x", b"bytes")
    fs.rename(disk.store / "here" / "x", disk.store / to / "y")
    disk.lose()
    found = {path.relative_to(disk.store).as_posix(): path.read_bytes() for path in disk.store.rglob("?")}
    assert found == {f"{to}/y": b"bytes"}


def test_a_file_that_is_replaced_is_the_old_one_or_the_new_one(disk: Certain) -> None:
    for data in (b"one", b"another, longer"):
        fs.write_durable(disk.store / "x", data)
        disk.lose()
        assert (disk.store / "x").read_bytes() == data


def test_a_file_that_was_removed_does_not_come_back(disk: Certain) -> None:
    fs.write_durable(disk.store / "x", b"bytes")
    fs.remove(disk.store / "x")
    disk.lose()
    assert not (disk.store / "x").exists()


def test_a_new_folder_keeps_its_name(disk: Certain) -> None:
    fs.make_dirs(disk.store / "a" / "b")
    fs.write_durable(disk.store / "a" / "b" / "x", b"bytes")
    disk.lose()
    assert (disk.store / "a" / "b" / "x").read_bytes() == b"bytes"


def test_a_new_log_keeps_its_name_and_its_head(disk: Certain) -> None:
    log = ControlLog.create(disk.store, 1, UUID)
    disk.lose()
    assert list(read_log(log.path, UUID)) == [] and log.path.stat().st_size == log.tail


def test_a_new_segment_keeps_its_name(disk: Certain) -> None:
    fs.make_dirs(disk.store / journal_folder())
    frame, table, buffers, _ = build(1, [3], [0, 1])
    segment, made = SegmentSet(disk.store, 1, 1 << 20, 1).for_frame(frame)
    assert made
    segment.append(UUID, FrameHeader(STREAM, 5, 0, frame), table, buffers)
    fs.datasync(segment.fd)
    disk.lose()
    assert parse_frame(memoryview(segment.path.read_bytes()), 0, UUID, 1, segment.path).rows == 3


def test_a_sync_is_asked_of_the_system() -> None:
    """And what it cannot sync is an error: a pipe, a folder that is on no disk."""
    read, write = os.pipe()
    with pytest.raises(OSError):
        fs.datasync(write)
    os.close(read)
    os.close(write)
    with pytest.raises(OSError):
        fs.sync_dir(Path("/proc/self/fd"))


def test_many_small_pieces_are_written_whole(tmp_path: Path) -> None:
    """However many there are, the system takes 1,024 at once."""
    fd = fs.open_new(tmp_path / "x")
    pieces = [number.to_bytes(4, "little") for number in range(3000)]
    assert fs.write_at(fd, pieces, 100) == 100 + 4 * 3000
    fs.close(fd)
    assert (tmp_path / "x").read_bytes() == bytes(100) + b"".join(pieces)


def test_a_tree_is_removed_without_what_its_links_lead_to(tmp_path: Path) -> None:
    (tmp_path / "tree" / "a").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").touch()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "outside")
    with contextlib.suppress(OSError):
        fs.remove_tree(tmp_path / "tree")
    assert (tmp_path / "outside" / "x").exists() and not (tmp_path / "tree").exists()


def test_a_seal_that_was_killed_is_synced_before_it_is_ended(tmp_path: Path) -> None:
    """The journal file has moved into the block, and nobody has made that certain."""
    store, capture, engine, _ = running_store(tmp_path)
    engine.close()
    disk = Certain(store, tmp_path / "certain")
    with disk.watching():
        state = recovery.recover(store)
        fs.close(state.lock)
        fd = fs.open_existing(store / open_name(1))
        with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
            patch.setattr(fs, "rename", killed_after_the_rename)
            sealing.seal(store, state.uuid, 1, fd, state.epoch, {})
        fs.close(fd)
        assert sealing.finish_cut(store, 1)
    disk.lose()
    with WriterProcess(store) as writer:
        writer.stop()
    assert [path.name for path in (store / "blocks").iterdir()] == ["w0-00000001.zarr"] and fsck(store).bad == []
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 9), 1, range(9))


def killed_after_the_rename(source: Path, target: Path) -> None:
    source.rename(target)
    raise Killed


# ── what a check is for ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_bit_in_a_record_ends_the_log_there(tmp_path: Path) -> None:
    """Also one that leaves a record which can be read: it would say what nobody said."""
    log = ControlLog.create(tmp_path, 1, UUID)
    entries = [LogEntry(STREAM, 5, 0, 1, Own(seq, new_ulid(), 1, "owner", [], {"said": "secret"}, 7))
               for seq in (1, 2, 3)]
    ends = []
    for entry in entries:
        log.append(entry)
        ends.append(log.tail)
    fs.close(log.fd)
    data = bytearray(log.path.read_bytes())
    data[data.index(b"secret", ends[0])] ^= 1
    log.path.write_bytes(data)
    assert list(read_log(log.path, UUID)) == [(ends[0], entries[0])]


def test_a_log_of_another_store_is_refused(tmp_path: Path) -> None:
    log = ControlLog.create(tmp_path, 1, UUID)
    fs.close(log.fd)
    with pytest.raises(StoreError, match="not a control log of this store"):
        list(read_log(log.path, bytes(16)))


def test_a_segment_that_is_not_on_the_disk_is_not_sealed(tmp_path: Path) -> None:
    fs.make_dirs(tmp_path / journal_folder())
    frame, table, buffers, _ = build(1, [3], [0, 1])
    segments = SegmentSet(tmp_path, 1, 1 << 20, 1)
    segment, _ = segments.for_frame(frame)
    segment.append(UUID, FrameHeader(STREAM, 5, 0, frame), table, buffers)
    segments.retire(float("inf"), 0.0)
    segment.tail = segment.end
    assert segments.take_sealable() == []
    segment.good = segment.tail
    assert segments.take_sealable() == [1]


def test_a_segment_is_not_sealed_while_its_lane_is_about_to_write(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is on the disk, it is full and idle; but a lane has a frame for it, which it still hashes."""
    fs.make_dirs(tmp_path / journal_folder())
    frame, table, buffers, _ = build(1, [3], [0, 1])
    segments, held, right = SegmentSet(tmp_path, 1, 1, 1), threading.Event(), parallel_append.check_payload
    monkeypatch.setattr(parallel_append, "check_payload", lambda *args: (held.wait(10), right(*args))[1])
    segment, _ = segments.for_frame(frame)
    arrival = ReceivedFrame(SenderState(STREAM, 5, "engine"), frame, table, RowTable.from_bytes(table, 3), buffers)
    appender = ParallelAppend(UUID, 2)
    appender.give(PendingAppend(arrival, segment, FrameHeader(STREAM, 5, 0, frame), keep=False))
    segments.retire(float("inf"), 0.0)
    assert segments.take_sealable() == []
    held.set()
    appender.take()
    assert segments.take_sealable() == []  # not on the disk
    segment.good = segment.tail
    assert segments.take_sealable() == [1]
    appender.close()


def test_a_damaged_frame_at_the_end_is_not_cut_off(tmp_path: Path) -> None:
    """It was acknowledged: fsck names it, and a good copy of the file brings it back."""
    store, _, engine, _ = running_store(tmp_path)
    engine.close()
    fs.close(recovery.recover(store).lock)
    path = store / open_name(1)
    data = bytearray(path.read_bytes())
    data[-4000] ^= 1
    path.write_bytes(data)
    fs.close(recovery.recover(store).lock)
    assert path.read_bytes() == data


def test_a_wrong_byte_of_an_open_segment_is_not_served(tmp_path: Path) -> None:
    store, capture, width = tmp_path / "store", new_ulid(), 256
    with WriterProcess(store, "--seal-idle-s", "60") as writer, \
            Sender(writer.endpoint, engine=engine_info(width)) as engine, StoreReader(store) as reader:
        engine.open(capture, prompt_len=4)
        engine.frame([(capture, 1, range(4))], width=width)
        engine.wait()
        assert until(lambda: reader.capture(capture).total_len == 4 and dump(store)["frames"])
        path = store / open_name(1)
        data = bytearray(path.read_bytes())
        data[-4096 + 10] ^= 1  # of the first row in the first layer: the main stream comes last
        path.write_bytes(data)
        with pytest.raises(StoreError, match="checksum"):
            reader.slice(capture, SITE, [0], 0, 1)


def test_a_torn_tail_is_cut_off(tmp_path: Path) -> None:
    """A log that ends in the midst of a record could never be scrubbed of what was deleted since."""
    store, capture, engine, _ = running_store(tmp_path)
    engine.close()
    files = [*(store / journal_folder()).glob("*.open"), *(store / journal_folder()).glob("control-*.log")]
    sizes = [path.stat().st_size for path in files]
    for path in files:
        with path.open("ab") as file:
            file.write(b"\x40\0\0\0\0\0\0\0torn")
    fs.close(recovery.recover(store).lock)
    assert [path.stat().st_size for path in files] == sizes and len(files) == 2
    scrub_log(store, read_store_uuid(store), log_numbers(store / journal_folder())[0], {capture})


def test_a_wrong_number_of_what_was_covered_is_not_believed(tmp_path: Path) -> None:
    """Rows that were never stored would be taken for duplicates."""
    state = recovery.recover(tmp_path)
    fs.close(state.lock)
    with contextlib.closing(connect_write(tmp_path / "catalog.sqlite")) as db:
        note_streams(db, [(STREAM, 5, "engine", 1234)])
        block_removal.remember_streams(tmp_path, db)
    path = tmp_path / journal_folder() / block_removal.COVERED
    assert block_removal.read_covered(tmp_path)["streams"] == [[STREAM, 5, "engine", 1234]]
    path.write_text(path.read_text().replace("1234", "9234"))
    with pytest.raises(StoreError, match="checksum"):
        recovery.recover(tmp_path)


def test_a_block_with_a_frame_that_its_stream_is_not_covered_to_stays(tmp_path: Path) -> None:
    """It is all that says that the frame came: its engine would be asked for it again, for ever."""
    state = recovery.recover(tmp_path)
    fs.close(state.lock)
    frame, table, _, _ = build(3, [3], [0, 1])
    with contextlib.closing(connect_write(tmp_path / "catalog.sqlite")) as db:
        with catalog.transaction(db):
            note_streams(db, [(STREAM, 5, "engine", 1)])
            made = SegmentMade(1, frame.site, frame.codec, frame.dtype, frame.width, frame.fingerprint)
            indexed = Indexed(STREAM, 5, 1, 1, 0, 100, frame, RowTable.from_bytes(table, 3))
            catalog.apply(db, [made, indexed, SegmentSealed(1)])
        assert not block_removal.removable(db, 1)
        note_streams(db, [(STREAM, 5, "engine", 3)])
        assert block_removal.removable(db, 1)


def test_a_block_that_is_gone_is_still_known_of(tmp_path: Path) -> None:
    """Nothing but covered.json says how far its engine had come, and which number it had."""
    state = recovery.recover(tmp_path)
    fs.close(state.lock)
    with contextlib.closing(connect_write(tmp_path / "catalog.sqlite")) as db:
        note_streams(db, [(STREAM, 5, "engine", 1234)])
        catalog.apply(db, [SegmentMade(7, SITE, "raw", "float32", 64, "f"), SegmentSealed(7)])
        block_removal.remember_streams(tmp_path, db)
    for path in tmp_path.glob("catalog.sqlite*"):
        path.unlink()
    state = recovery.recover(tmp_path)
    fs.close(state.lock)
    assert (state.streams[STREAM].covered, state.next_segment) == (1234, 8)


def test_a_commit_is_in_the_catalog_whole_or_not_at_all(tmp_path: Path) -> None:
    """How far the log was read goes with what was read there."""
    fs.close(recovery.recover(tmp_path).lock)
    own = LogEntry(STREAM, 5, 0, 1, Own(1, new_ulid(), 1, "", [], {}, 7))
    frame, table, _, _ = build(3, [3], [0, 1])
    odd = msgspec.structs.replace(frame, codec="nothing")  # as where SQLite has no room in the midst of it
    batch = Batch(1, [own, Indexed(STREAM, 5, 1, 1, 0, 100, odd, RowTable.from_bytes(table, 3))], log_position=(1, 99))
    with contextlib.closing(connect_write(tmp_path / "catalog.sqlite")) as db:
        before = catalog.get_meta(db, "log")
        with pytest.raises(StoreError):
            group_commit._apply(db, batch)
        assert catalog.get_meta(db, "log") == before
        assert db.execute("SELECT count(*) FROM captures").fetchone()[0] == 0


# ── who follows a capture while it is made ──────────────────────────────────────────────────────────────────────


def followed(tmp_path: Path) -> tuple[JournalTail, Path, FrameAt]:
    """An open segment with a frame, as somebody sees it who follows its first capture."""
    path = tmp_path / open_name(1)
    path.parent.mkdir(parents=True)
    frame = build(5, [3, 200], [0, 1])
    segment_of(path, [frame], 1)
    tail = JournalTail(tmp_path, UUID, lambda _: 0)
    assert tail.look() == set(frame[0].captures)
    (at,) = tail.frames(frame[0].captures[0], frame[0].site)
    assert tail.read(at).frame.seq == 5
    return tail, path, at


def test_who_follows_is_not_given_what_took_a_frames_place(tmp_path: Path) -> None:
    tail, path, at = followed(tmp_path)
    path.unlink()
    segment_of(path, [build(6, [3, 200], [0, 1])], 1)
    with pytest.raises(CorruptError, match="another took its place"):
        tail.read(at)


def test_who_follows_is_given_whole_rows(tmp_path: Path) -> None:
    tail, path, at = followed(tmp_path)
    data = bytearray(path.read_bytes())
    data[-4096 + 10] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="does not match its checksum"):
        tail.read(at)


def test_who_follows_sees_what_came_after_a_cut(tmp_path: Path) -> None:
    """The frame was given up, and a smaller one came in its place."""
    tail, path, _ = followed(tmp_path)
    before = path.stat().st_size
    path.unlink()
    frames = [build(6, [1], [0], width=16)]
    segment_of(path, frames, 1)
    assert path.stat().st_size < before
    assert tail.look() == set(frames[0][0].captures)


# ── what a check is for, in who sends ───────────────────────────────────────────────────────────────────────────


def test_the_memory_of_another_user_is_no_ring(tmp_path: Path) -> None:
    path = Path("/etc/passwd")  # root's
    if os.geteuid() == 0:
        path = tmp_path / "ring"
        path.write_bytes(bytes(8192))
        own = map_ring(str(path), 100)
        assert own is not None
        own.close()
        os.chown(path, 65534, -1)
    assert path.stat().st_size > 100 and os.access(path, os.R_OK) and map_ring(str(path), 100) is None


# ── what an order is for ────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_stored_past_a_gap_is_not_stored_again(tmp_path: Path) -> None:
    """A power loss took a frame and left what came behind it: a frame in another segment, and a record."""
    store, capture, sites = tmp_path / "store", new_ulid(), (SITE, "mlp_out")
    with WriterProcess(store, "--seal-idle-s", "60") as writer:
        engine = Sender(writer.endpoint, engine=engine_info(sites=sites))
        engine.hello()
        engine.open(capture, prompt_len=3, layers={site: [0, 1] for site in sites})
        for site in sites:
            engine.frame([(capture, 1, range(3))], site=site, layers=[0, 1])
        engine.finish(capture, end=3)
        said = dict(engine.kept)
        engine.wait()
        writer.kill()
        (store / open_name(1)).write_bytes(b"")
        for path in store.glob("catalog.sqlite*"):
            path.unlink()
        writer.start()
        engine.close()  # an Ack of before may still lie in it
        engine.connect()
        engine.durable, engine.kept = 0, said
        assert engine.hello().durable == 1
        engine.wait()
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(capture).status == "complete")
            for site in sites:
                assert reader.slice(capture, site, [0, 1]).positions.tolist() == [0, 1, 2]
        writer.stop()
        engine.close()
    assert numbers(store, engine.stream) == [1, 2, 3, 4]


def numbers(store: Path, stream: str) -> list[int]:
    """Of all that the store holds of a stream, frames and records."""
    uuid, found = read_store_uuid(store), list[int]()
    for block in (store / "blocks").glob("w0-*.zarr"):
        number = int(block.stem.rsplit("-", 1)[1])
        data = memoryview((block / "q/c/0/0/0").read_bytes())
        found += [view.frame.seq for view in walk(data, uuid, number, block, None)]
    for number in log_numbers(store / journal_folder()):
        found += [entry.seq for _, entry in read_log(log_path(store / journal_folder(), number), uuid) if entry.seq]
    return sorted(found)


def test_a_failed_sync_waits_for_the_catalog_of_the_commits_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                  ) -> None:
    """What the rules know is then read from it: a capture that it has not heard of yet would be unknown to its engine's
    next word."""
    failing, fired = tmp_path / "failing", tmp_path / "fired"
    monkeypatch.setenv("FAULT", "datasync:control-:1:1:EIO")
    monkeypatch.setenv("FAULT_WHILE", str(failing))
    monkeypatch.setenv("FAULT_FIRED", str(fired))
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store, script=PROGRAMS / "faulty_writer.py") as writer, Sender(writer.endpoint) as engine:
        with contextlib.closing(sqlite3.connect(store / "catalog.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # the catalog falls behind
            engine.open(capture, prompt_len=3)
            engine.frame([(capture, 1, range(3))])
            engine.wait()
            failing.touch()
            engine.finish(capture, end=3)
            assert until(fired.exists)
            failing.unlink()
            until(lambda: engine.receive(0.1) and engine.refusals, 1.5)  # what waits does not say anything yet
            if engine.refusals:
                engine.hello()
                engine.sync()
            other.execute("ROLLBACK")
        engine.wait()
        assert not engine.refused
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(capture).status == "complete")
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3]), 1, range(3))


@pytest.mark.parametrize(("role", "os_is_enough", "told"), [
    ("engine", False, 4), ("engine", True, 9), ("api", False, 2), ("api", True, 2)])
def test_an_ack_covers_what_is_on_the_disk(role: str, os_is_enough: bool, told: int) -> None:
    """However many messages lie between a frame's arrival, its sync and the catalog."""
    state = SenderState(STREAM, 5, role, received=9, durable=4, settled=2)
    assert state.ack(os_is_enough) == Ack(told, 9, [])


def test_an_api_hears_of_what_readers_see(tmp_path: Path) -> None:
    """Who asks next must find it: an Ack waits for the catalog."""
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store) as writer, Sender(writer.endpoint) as engine, \
            Sender(writer.endpoint, role="api") as api:
        with contextlib.closing(sqlite3.connect(store / "catalog.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            api.own(capture)
            assert until(lambda: api.sync().visible == 1)
            engine.open(new_ulid())
            engine.wait()  # what came before it is on the disk as well
            api.sync()
            while api.receive(0.2) is not None:
                pass
            assert api.durable == 0
            other.execute("ROLLBACK")
        api.wait()
        with StoreReader(store) as reader:
            assert reader.capture(capture).status == "pending"


@pytest.mark.parametrize("beside", [True, False])
def test_a_frame_that_finds_no_room_leaves_nothing_and_what_was_given_behind_it_neither(beside: bool, tmp_path: Path
                                                                                        ) -> None:
    """All of it comes again: what was written of it would be stored twice. What was taken note of before it stays."""
    placed, files = [], ((1, os.O_RDWR), (2, os.O_RDONLY), (1, os.O_RDWR))  # the second takes nothing
    segments = dict[int, OpenSegment]()
    for seq, (number, flags) in enumerate(files, 1):
        frame, table, buffers, _ = build(seq, [3], [0, 1])
        made = SegmentMade(number, frame.site, frame.codec, frame.dtype, frame.width, frame.fingerprint)
        if number not in segments:
            path = tmp_path / str(number)
            segments[number] = OpenSegment(made, path, os.open(path, flags | os.O_CREAT, 0o600), lane=number - 1)
        arrival = ReceivedFrame(SenderState(STREAM, 5, "engine"), frame, table, RowTable.from_bytes(table, 3), buffers)
        placed.append(PendingAppend(arrival, segments[number], FrameHeader(STREAM, 5, 0, frame), keep=False))
    appender = ParallelAppend(UUID, 2)
    first, full, behind = placed
    if beside:
        for item in placed:
            appender.give(item)
        assert appender.take() is first
        with pytest.raises(OSError):
            appender.take()
    else:
        appender.write(first)
        with pytest.raises(OSError):
            appender.write(full)
    assert not appender and appender.nbytes == 0 and (behind.nbytes > 0) is (beside and behind.over > 0)
    appender.close()
    one, two = segments.values()
    assert first.nbytes == one.tail == one.end == one.path.stat().st_size > 0
    assert two.tail == two.end == two.path.stat().st_size == 0
    assert not one.given and not two.given and not one.given_bytes and not two.given_bytes
    for segment in segments.values():
        fs.close(segment.fd)


def test_lanes_do_not_wait_for_one_another_and_are_taken_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    """A lane that stands still holds up what comes behind its frame, and not what other lanes write meanwhile."""
    held, right = threading.Event(), parallel_append.check_payload
    monkeypatch.setattr(parallel_append, "check_payload", lambda frame, *args: (
        held.wait(PATIENCE_S) if frame.seq == 1 else None, right(frame, *args))[1])
    fs.make_dirs(tmp_path / journal_folder())
    segments, appender, given = SegmentSet(tmp_path, 1, 1 << 30, 2), ParallelAppend(UUID, 2), []
    for seq in range(1, 6):
        frame, table, buffers, _ = build(seq, [3], [0, 1])
        arrival = ReceivedFrame(SenderState(STREAM, 5, "engine"), frame, table, RowTable.from_bytes(table, 3), buffers)
        segment, _ = segments.for_frame(frame)
        given.append(PendingAppend(arrival, segment, FrameHeader(STREAM, 5, 0, frame), keep=False))
        appender.give(given[-1])
        if seq == 1:  # as if it were large: those that follow go to the other lane
            segment.given_bytes += 1 << 30
    assert [item.segment.lane for item in given] == [0, 1, 1, 1, 1]
    assert until(lambda: all(item.over for item in given[1:])) and not appender.done
    assert given[1].segment.tail == 0 < given[1].segment.end  # written, and not taken note of
    held.set()
    given[0].segment.given_bytes -= 1 << 30
    assert [appender.take() for _ in given] == given and not appender
    assert all(segment.tail == segment.end == segment.path.stat().st_size for segment in segments.all())
    appender.close()


def test_what_lanes_write_is_taken_back_when_it_is_given_up(tmp_path: Path) -> None:
    """A commit failed while they wrote: their segment ends where it ended before, whatever they had come to."""
    frame, table, buffers, _ = build(1, [3], [0, 1])
    made = SegmentMade(1, frame.site, frame.codec, frame.dtype, frame.width, frame.fingerprint)
    segment = OpenSegment(made, path := tmp_path / "1", os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    arrival = ReceivedFrame(SenderState(STREAM, 5, "engine"), frame, table, RowTable.from_bytes(table, 3), buffers)
    appender = ParallelAppend(UUID, 2)
    for finished in (True, False):
        item = PendingAppend(arrival, segment, FrameHeader(STREAM, 5, 0, frame), keep=False)
        appender.give(item)
        assert until(lambda item=item: item.over)  # type: ignore[misc]
        if finished:
            appender.take()
            before = segment.tail
            assert before == path.stat().st_size > 0
    assert path.stat().st_size > before
    appender.give_up()
    assert before == segment.tail == segment.end == path.stat().st_size
    appender.close()
    fs.close(segment.fd)


def test_nothing_is_taken_of_who_was_told_to_greet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Hello was lost with the sync that failed: without another the log would not say who it is."""
    failing = tmp_path / "failing"
    monkeypatch.setenv("FAULT", "datasync:control-:1:1:EIO")
    monkeypatch.setenv("FAULT_WHILE", str(failing))
    with WriterProcess(tmp_path / "store", script=PROGRAMS / "faulty_writer.py") as writer, \
            Sender(writer.endpoint) as engine:
        capture = new_ulid()
        engine.open(capture)
        engine.wait()
        failing.touch()
        engine.finish(capture, end=0)
        assert until(lambda: engine.receive(0.1) and engine.refusals)
        failing.unlink()
        said, engine.kept = engine.kept, {}
        engine.socket.send_multipart(said[2])
        engine.hello()
        assert engine.sync().visible == 1
        engine.kept = said
        engine.resend()
        engine.wait()


def test_rows_count_of_the_engine_that_opened_the_capture_and_up_to_its_end(tmp_path: Path) -> None:
    store, capture, own = tmp_path / "store", new_ulid(), new_ulid()
    with WriterProcess(store) as writer, Sender(writer.endpoint) as engine, Sender(writer.endpoint) as other:
        engine.open(capture, prompt_len=4)
        engine.frame([(capture, 1, range(4))])
        engine.wait()
        other.open(own, prompt_len=4)
        for _ in range(3):
            other.frame([(own, 2, range(4)), (capture, 1, range(4))], version=2)
        other.wait()
        engine.finish(capture, end=4)
        engine.frame([(capture, 1, range(4))], version=3)
        engine.wait()
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(capture).status == "complete" and len(dump(store)["frames"]) == 5)
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3]), 1, range(4))
