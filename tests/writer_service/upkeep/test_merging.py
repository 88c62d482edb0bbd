"""Control logs that erasing leaves become few, whatever is cut short on the way, and nothing that they say is lost."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.ids import new_ulid
from schemas.read.journal_tail import JournalTail
from schemas.read.reader import StoreReader, read_store_uuid
from schemas.store.paths import journal_folder
from tests.support.consistency import assert_consistent, assert_rebuilt_equal, dump
from tests.support.store_helpers import SITE, Sender, WriterProcess, assert_rows, is_erased, until
from tests.writer_service.upkeep.test_erasing import (
    FIRST,
    Killed,
    Sample,
    assert_erased,
    cut_short,
    fill,
    look_after,
    traces,
)
from writer_service import fs
from writer_service.catalog.changes import Erased
from writer_service.control_log import LogEntry, log_numbers, log_path, read_log, scrubbed_log
from writer_service.journal.group_commit import Waker
from writer_service.recover.recovery import recover
from writer_service.tools.fsck import fsck
from writer_service.tools.rebuild import rebuild
from writer_service.upkeep import log_merging
from writer_service.upkeep.upkeep import Upkeep

NEVER = ("--seal-idle-s", "0.05", "--keep-s", "600")  # erases nothing while it runs


def logs(store: Path) -> list[int]:
    return log_numbers(store / journal_folder())


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """A store of nine logs, in which captures are owned, one is deleted and nothing erased or merged."""
    store = tmp_path_factory.mktemp("many") / "store"
    gone, kept = new_ulid(), new_ulid()
    with WriterProcess(store, *NEVER) as writer:
        with Sender(writer.endpoint) as engine, Sender(writer.endpoint, role="api") as api:
            engine.hello()
            api.hello()
            fill(engine, gone, kept)
            for turn in range(7):
                capture = new_ulid()
                api.own(capture, owner=f"owner {turn}")
                api.wait()
                engine.open(capture, prompt_len=4)
                engine.frame([(capture, turn, range(4))])
                engine.finish(capture, end=4)
                engine.wait()
            api.delete(gone)
            api.wait()
        writer.stop()
    read = [entry for _, entry in entries(store, 1)]
    for number in range(9):
        part = scrubbed_log(read_store_uuid(store), read[number * len(read) // 9 : (number + 1) * len(read) // 9], 0)
        path = log_path(store / journal_folder(), number + 1)
        path.write_bytes(part[:12] + bytes(4) + part[16:])  # as they were appended, a round after the other
    fs.close(rebuild(store).state.lock)
    return Sample(store, gone, kept)


def entries(store: Path, number: int) -> list[tuple[int, LogEntry]]:
    return list(read_log(log_path(store / journal_folder(), number), read_store_uuid(store)))


@pytest.fixture
def copied(many: Sample, tmp_path: Path) -> Iterator[Sample]:
    shutil.copytree(many.store, tmp_path / "store")
    yield Sample(tmp_path / "store", many.gone, many.kept)


def test_starts_that_wrote_nothing_leave_few_logs(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for turn in range(12):
        with WriterProcess(store, *NEVER) as writer:
            writer.kill()
        if turn % 2:  # killed before the head was there
            log_path(store / journal_folder(), logs(store)[-1]).write_bytes(b"TAPLOG01"[:turn])
    with WriterProcess(store, "--seal-idle-s", "0.05", "--keep-s", "0.05") as writer:
        assert until(lambda: len(logs(store)) <= 8, 10.0)
        writer.stop()
    assert_consistent(store)


def test_rounds_of_erasing_leave_few_logs(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store", "--seal-idle-s", "0.05", "--keep-s", "0.05") as writer:
        with Sender(writer.endpoint) as engine, Sender(writer.endpoint, role="api") as api:
            engine.hello()
            api.hello()
            seen = 0
            for turn in range(25):
                capture = new_ulid()
                engine.own(capture, owner="somebody")
                engine.open(capture, prompt_len=3)
                engine.frame([(capture, turn, range(3))])
                engine.finish(capture, end=3)
                engine.wait()
                if turn % 5:
                    api.delete(capture)
                    api.wait()
                    with StoreReader(writer.store) as reader:
                        assert until(lambda reader=reader, capture=capture: is_erased(reader, capture))  # type: ignore[misc]
                seen = max(seen, logs(writer.store)[-1])
            assert seen > 15, "each round began a log"
            assert until(lambda: len(logs(writer.store)) <= 8, 10.0)
        writer.stop()
    with StoreReader(tmp_path / "store") as reader:
        assert len(list(reader.captures(status="deleted"))) == 20 and len(list(reader.captures(status="complete"))) == 5
    assert_consistent(tmp_path / "store")


def test_merged_they_say_what_they_said(copied: Sample) -> None:
    before, there = dump(copied.store), logs(copied.store)
    assert len(there) == 9
    said = [entry for number in there for _, entry in entries(copied.store, number)]
    look_after(copied.store)
    assert logs(copied.store) == there[-2:]  # all before the one that was written last
    assert [entry.stream for number in logs(copied.store) for _, entry in entries(copied.store, number)] == [
        entry.stream for entry in said]
    assert_erased(copied.store, copied)
    assert_rebuilt_equal(copied.store)
    after = dump(copied.store)
    for table in ("captures", "aliases", "owners", "streams"):
        assert after[table] == before[table]
    with WriterProcess(copied.store, *NEVER) as writer:
        writer.stop()


def test_cut_at_every_change_of_the_disk(many: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uuid, at, finished = read_store_uuid(many.store), 0, False
    numbers = logs(many.store)
    while not finished:
        at += 1
        store = tmp_path / "cut"
        shutil.copytree(many.store, store)
        with monkeypatch.context() as patch:
            calls = cut_short(patch, at, at % 2 == 0)
            try:
                log_merging.merge(store, uuid, numbers[:-1])
                finished = True
            except Killed:
                pass
            assert finished or calls() == at
        if at == 4:  # one stands for the others, which are there as well
            assert any("a later log" in bad.what for bad in fsck(store).bad)
        look_after(store)
        assert traces(store) == [] and log_merging.superseded(store / journal_folder(), uuid) == []
        assert len(logs(store)) <= 3
        with StoreReader(store) as reader:
            assert_rows(reader.slice(many.kept, SITE, [1, 3], 8, 12), 2, range(8, 12))
        assert_consistent(store)
        shutil.rmtree(store)
    assert at > 4 and FIRST


def test_some_removed_and_some_not(copied: Sample) -> None:
    """A crash in the midst of removing what was merged: the next start ends it, and a rebuild counts nothing twice."""
    journal = copied.store / journal_folder()
    numbers = logs(copied.store)
    kept = {number: log_path(journal, number).read_bytes() for number in numbers[:-1]}
    log_merging.merge(copied.store, read_store_uuid(copied.store), numbers[:-1])
    for number in numbers[1:4]:
        log_path(journal, number).write_bytes(kept[number])
    assert_rebuilt_equal(copied.store)
    assert logs(copied.store) == numbers[-2:]
    look_after(copied.store)
    assert_erased(copied.store, copied)


def test_logs_stay_that_cannot_be_read_from_the_later_one(copied: Sample) -> None:
    """A crash left them, and a record of the log that stands for them is damaged since."""
    journal, uuid = copied.store / journal_folder(), read_store_uuid(copied.store)
    numbers = logs(copied.store)
    kept = {number: log_path(journal, number).read_bytes() for number in numbers[:-2]}
    log_merging.merge(copied.store, uuid, numbers[:-1])
    path, data = log_path(journal, numbers[-2]), bytearray(log_path(journal, numbers[-2]).read_bytes())
    for number, said in kept.items():
        log_path(journal, number).write_bytes(said)
    assert len(log_merging.superseded(journal, uuid)) == len(kept) and log_merging.damaged_heads(journal, uuid) == []
    data[len(kept[1]) + 20] ^= 1  # in the first record of the second
    path.write_bytes(data)
    assert log_merging.superseded(journal, uuid) == [] and log_merging.damaged_heads(journal, uuid) == [path]
    log_merging.finish_merges(copied.store, uuid)
    assert logs(copied.store) == numbers


def test_a_catalog_of_before_reads_merged_logs(copied: Sample) -> None:
    """Power was lost before the catalog was synced: what it lacks lies in a log that others were merged into."""
    db = sqlite3.connect(copied.store / "catalog.sqlite")
    after = dump(copied.store)
    db.execute("UPDATE meta SET value = ? WHERE key = 'log'", (f"{logs(copied.store)[3]}:32",))
    db.commit()
    db.close()
    numbers = logs(copied.store)
    log_merging.merge(copied.store, read_store_uuid(copied.store), numbers[:-1])
    fs.close(recover(copied.store).lock)
    assert dump(copied.store) == after
    assert_rebuilt_equal(copied.store)


def test_a_damaged_log_stays_where_it_is(copied: Sample) -> None:
    journal = copied.store / journal_folder()
    path = log_path(journal, logs(copied.store)[3])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    upkeep = Upkeep(copied.store, read_store_uuid(copied.store), Waker())
    for _ in range(2):
        upkeep.round()
    upkeep.close()
    assert path.read_bytes() == data and len(logs(copied.store)) < 9
    assert [bad.file for bad in fsck(copied.store).bad if "damaged record" in bad.what] == [
        f"{journal_folder()}/{path.name}"]


def test_what_was_erased_is_told_though_the_logs_cannot_be_looked_at(many: Sample, copied: Sample) -> None:
    log_path(copied.store / journal_folder(), 0).symlink_to("nowhere")
    upkeep = Upkeep(copied.store, read_store_uuid(copied.store), Waker())
    done = upkeep.round()
    upkeep.close()
    assert done.failures == upkeep.failures == 2 and done.erased_rows  # scrubbing and merging
    assert any(isinstance(change, Erased) for change in done.changes) and done.used_bytes
    assert logs(copied.store)[1:] == logs(many.store)


def test_logs_that_are_much_larger_are_left_alone(tmp_path: Path) -> None:
    journal = tmp_path / journal_folder()
    journal.mkdir(parents=True)
    small, large = 1000, log_merging.merged_bytes_max // 2

    def sizes(*nbytes: int) -> list[int]:
        for path in journal.iterdir():
            path.unlink()
        for number, size in enumerate(nbytes, 1):
            with log_path(journal, number).open("wb") as file:
                file.truncate(size)
        return log_merging.mergeable(tmp_path, len(nbytes))

    assert sizes(small, small, small, small) == []  # the last is being written
    assert sizes(small, small, small, small, small) == [1, 2, 3, 4]
    assert sizes(large, small, small, small, small, small) == [2, 3, 4, 5]
    assert sizes(small, small, small, small, large, small, small) == [1, 2, 3, 4, 5]
    assert sizes(large, large, large, large, small) == []
    assert [log_merging.log_of([3, 7], number) for number in (2, 4, 8)] == [3, 7, None]


def test_a_look_at_the_tail_opens_no_log(tmp_path: Path) -> None:
    journal = tmp_path / journal_folder()
    assert JournalTail(tmp_path, bytes(16), lambda number: 0).look() == set()  # of blocks alone, as in a copy
    journal.mkdir(parents=True)
    for name in ("control-00000001.log", "x.open", ".1.open", "erase-00000001.redo"):
        (journal / name).touch()
    assert JournalTail(tmp_path, bytes(16), lambda number: 0).look() == set()
