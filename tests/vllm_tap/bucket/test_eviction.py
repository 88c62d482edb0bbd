"""Rows that leave the disk for the bucket: read as before from there, whatever is cut short, deleted or lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import zarr

from schemas.bucket.snapshots import fetch_snapshot, read_blocks
from schemas.catalog.records import connect_read
from schemas.errors import BucketError, NotFoundError, OutrunError, StoreError
from schemas.objects import objects
from schemas.objects.evicted import evicted_numbers, read_away
from schemas.objects.layout import HEAD, read_head
from schemas.objects.objects import Objects
from schemas.read.reader import StoreReader
from schemas.store.paths import block_name, evicted_name, redo_name
from tests.support.buckets import FaultProxy
from tests.support.forked import tap
from tests.support.store_helpers import ROOT, SITE, Sender, WriterProcess, until
from tests.vllm_tap.bucket.conftest import Sample, _is_erased, erase, grow
from tests.vllm_tap.bucket.serving.test_api import beside
from tests.writer_service.upkeep.test_erasing import Killed, cut_short
from vllm_tap import open_store
from vllm_tap.bucket.check import check
from vllm_tap.bucket.eviction import evict, recall_all
from vllm_tap.bucket.push import Pushed, push
from vllm_tap.bucket.snapshot import BlockAt
from writer_service import fs
from writer_service.catalog.changes import Erased, SegmentGone
from writer_service.journal.group_commit import Waker
from writer_service.tools.compaction import compact
from writer_service.tools.fsck import fsck
from writer_service.tools.rebuild import rebuild
from writer_service.upkeep import evicted_blocks
from writer_service.upkeep.upkeep import Upkeep
from writer_service.upkeep.usage import Usage

Answers = dict[tuple[str, int], bytes]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def folder_of(url: str) -> Path:
    return Path(urlsplit(url).path)


def answers(store: Path) -> Answers:
    """Every slice of every capture in the catalog, by layer."""
    found: Answers = {}
    with StoreReader(store) as reader:
        for row in reader.captures():
            for layer in sorted({one.layer for one in reader.manifest(row.id).rows if one.captured}):
                piece = reader.slice(row.id, SITE, [layer])
                found[row.id, layer] = piece.values().tobytes() + piece.token_ids.tobytes() + piece.flags.tobytes()
    assert found
    return found


def away(store: Path) -> set[int]:
    return {number for number in evicted_numbers(store) if read_away(store, number) is not None}


def blocks_of(store: Path) -> int:
    return len(list((store / "blocks").glob("*.zarr")))


@pytest.mark.parametrize("kind", ["sealed", "cold"])
def test_a_store_larger_than_its_disk_serves_every_slice(
    kind: str, sample: Sample, request: pytest.FixtureRequest, tmp_path: Path, url: str
) -> None:
    store = request.getfixturevalue("cold" if kind == "cold" else "store")
    before, whole = answers(store), Usage(store).measure()
    wide = StoreReader(store)  # of before: its maps keep what was there, until it looks anew
    wide.slice(sample.captures["long"], SITE, [1])
    done = push(store, url, local_bytes=whole // 5)
    assert done.room is not None and done.room.blocks and done.room.nbytes > 0
    assert done.room.local_bytes == Usage(store).measure() < whole
    assert away(store) and answers(store) == before
    for (capture, layer), wanted in before.items():
        piece = wide.slice(capture, SITE, [layer])
        assert piece.values().tobytes() + piece.token_ids.tobytes() + piece.flags.tobytes() == wanted
    wide.tidy()
    assert wide.slice(sample.captures["long"], SITE, [1]).values().tobytes()
    wide.close()
    everything = push(store, url, local_bytes=0)
    assert not everything.changed and len(away(store)) == blocks_of(store) >= 2
    assert answers(store) == before and not fsck(store).bad and not check(url, deep=True).bad
    with open_store(store) as opened:
        long = sample.captures["long"]
        assert opened.rows_at([(long, 3), (long, 1)], SITE, 1).shape[0] == 2
        assert opened[long].manifest().captured > 0
    again = push(store, url, verify=True)
    assert not again.changed and again.new_bytes == 0
    blocks, nbytes = recall_all(store)
    assert blocks == blocks_of(store) and nbytes > 0 and not evicted_numbers(store)
    assert Usage(store).measure() >= whole and answers(store) == before and not fsck(store).bad
    assert recall_all(store) == (0, 0)


def test_readers_beside_it_see_every_row(sample: Sample, store: Path, tmp_path: Path) -> None:
    """While rows go and come back, in threads of one reader that lets go of maps, as the API's does."""
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    before, ended = answers(store), threading.Event()
    wrong: list[object] = []
    rounds = Counter[int]()
    reader = StoreReader(store)

    def read(number: int) -> None:
        try:
            while not ended.is_set():
                for (capture, layer), wanted in before.items():
                    piece = reader.slice(capture, SITE, [layer])
                    if piece.values().tobytes() + piece.token_ids.tobytes() + piece.flags.tobytes() != wanted:
                        wrong.append((capture, layer))
                if number == 0:
                    reader.tidy()
                rounds[number] += 1
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        seen = rounds.total()
        evict_all(store, url)
        assert until(lambda least=seen + 6: rounds.total() > least or wrong)
        recall_all(store)
    ended.set()
    for thread in threads:
        thread.join()
    reader.close()
    assert not wrong and not evicted_numbers(store)


def test_the_api_beside_the_store_serves_them(sample: Sample, store: Path, tmp_path: Path) -> None:
    at = f"/v1/captures/{sample.captures['long']}"
    paths = [at, f"{at}/activations?site={SITE}&layer=0,1", f"{at}/zarr/{SITE}.1/c/0/0", f"{at}/map?site={SITE}",
             f"{at}/activations?site={SITE}&layer=1&rows=rejected"]
    with beside(tmp_path / "a", store) as client:
        before = [client.get(path).content for path in paths]
        push(store, (tmp_path / "bucket").as_uri(), local_bytes=0)
        assert [client.get(path).content for path in paths] == before
    with beside(tmp_path / "a", store) as client:
        assert [client.get(path).content for path in paths] == before
        shutil.rmtree(tmp_path / "bucket" / "blocks")
        shutil.rmtree(tmp_path / "caches")
    with beside(tmp_path / "a", store) as client:
        lost = client.get(paths[1])
        assert lost.status_code == 503 and "evicted from this disk" in lost.text
        assert client.get(at).content == before[0]


def test_the_least_recently_read_go_first(store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    numbers = sorted(int(path.stem.split("-")[1]) for path in (store / "blocks").glob("*.zarr"))
    kept = numbers[0]  # the oldest
    for number in numbers:
        for path in (store / block_name(number)).rglob("c/**/*"):
            if path.is_file():
                os.utime(path, ns=((2 if number == kept else 1) * 10**18, 10**18))
    push(store, url)  # it reads files of all of them
    for gone in range(1, len(numbers)):
        room = push(store, url, local_bytes=Usage(store).measure() - 1).room
        assert room is not None and room.blocks == 1 and len(away(store)) == gone
    assert away(store) == set(numbers) - {kept}


def test_nothing_goes_that_the_head_does_not_name_or_has_lost(sample: Sample, store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    before = answers(store)
    newer = grow(store)  # its block is not there
    number = max(int(path.stem.split("-")[1]) for path in (store / "blocks").glob("*.zarr"))
    lost = max((folder_of(url) / "blocks").iterdir())
    shutil.rmtree(lost)
    with pytest.raises(BucketError, match="it has lost what its head names"):
        evict_all(store, url)
    assert int(lost.name.split("-")[1]) not in away(store) and number not in away(store)
    now = answers(store)
    assert {key: value for key, value in now.items() if key[0] != newer} == before and now.keys() > before.keys()


def evict_all(store: Path, url: str, only: int | None = None) -> object:
    """As a push does, of what the head names now, or of one block of that."""
    objects, snapshot = Objects(url), store.parent / "named.sqlite"
    fetch_snapshot(objects, read_head(objects.get(HEAD, 1 << 16)[0], url), snapshot)
    named = {number: BlockAt(*at) for number, at in read_blocks(snapshot).items() if only in (None, number)}
    try:
        return evict(store, objects, named, 0)
    finally:
        objects.close()


@pytest.mark.parametrize("step", ["evict", "recall"])
def test_cut_at_every_change_of_the_disk(step: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                         ) -> None:
    """A block's rows are read whole from one of the two places, and what was begun is ended by the next try."""
    url = (tmp_path / "bucket").as_uri()
    push(store, url, local_bytes=0 if step == "recall" else None)
    number, before, cuts, finished = max(one_of(store)), answers(store), 0, False
    record = read_away(store, number)
    for other in sorted(away(store) - {number}):
        evicted_blocks.recall(store, other)
    while not finished:
        cuts += 1
        cut = Path(shutil.copytree(store, tmp_path / "cut"))
        with monkeypatch.context() as patched:
            cut_short(patched, cuts, cuts % 2 == 0)
            try:
                if step == "evict":
                    evict_all(cut, url, number)
                else:
                    evicted_blocks.recall(cut, number)
                finished = True
            except Killed:
                pass
        assert answers(cut) == before, cuts
        evicted_blocks.forget_gone(cut)  # as a start of the writer
        if step == "evict":
            evict_all(cut, url, number)
            assert away(cut) == {number}, cuts
        else:
            evicted_blocks.recall(cut, number)
            assert not evicted_numbers(cut), cuts
        assert answers(cut) == before and not fsck(cut).bad, cuts
        shutil.rmtree(cut)
    assert cuts > 4 and (record is None) == (step == "evict")


def one_of(store: Path) -> list[int]:
    return [int(path.stem.split("-")[1]) for path in (store / "blocks").glob("*.zarr")]


@pytest.mark.parametrize("call", ["write_durable", "drop", "write_new"])
def test_killed_in_the_middle(call: str, store: Path, tmp_path: Path) -> None:
    """By SIGKILL, before and after what is named."""
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    before = answers(store)
    where = "writer_service.upkeep.evicted_blocks" if call == "drop" else "writer_service.fs"
    for after in (False, True):
        code = f"""
import os, signal, sys
from pathlib import Path
import {where} as module
real = module.{call}
def killed(*args, **named):
    if {after}:
        real(*args, **named)
    os.kill(os.getpid(), signal.SIGKILL)
module.{call} = killed
from vllm_tap.bucket.push import push
push(Path(sys.argv[1]), sys.argv[2], local_bytes=0)
"""
        ended = subprocess.run([sys.executable, "-c", code, str(store), url], cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert answers(store) == before
    push(store, url, local_bytes=0)
    assert away(store) == set(one_of(store)) and answers(store) == before and not fsck(store).bad


@pytest.mark.parametrize("kind", ["sealed", "cold"])
def test_a_deleted_capture_leaves_the_disk_and_the_bucket(
    kind: str, sample: Sample, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = request.getfixturevalue("cold" if kind == "cold" else "store")
    url, few, other = (tmp_path / "bucket").as_uri(), sample.captures["few"], sample.captures["other"]
    push(store, url, local_bytes=0)
    before = answers(store)
    erase(store, other)  # a real writer: its rows come back, and those of this one go
    left = {key: value for key, value in before.items() if key[0] != other}
    assert answers(store) == left
    with StoreReader(store) as reader, pytest.raises(NotFoundError):
        reader.slice(other, SITE, [1])
    done = push(store, url, local_bytes=0)
    assert done.erased.objects > 0 and answers(store) == left
    assert not fsck(store).bad and not check(url, deep=True).bad and not check(url).orphans
    with open_store(url, tmp_path / "cache") as opened:
        assert other not in {row.id for row in opened.captures()} and few in {row.id for row in opened.captures()}


def test_what_is_deleted_waits_for_the_bucket_and_says_so(sample: Sample, store: Path, tmp_path: Path) -> None:
    """Hidden at once; nothing is half erased where rows cannot come back."""
    url, other = (tmp_path / "bucket").as_uri(), sample.captures["other"]
    push(store, url, local_bytes=0)
    before = answers(store)
    bucket = folder_of(url)
    bucket.rename(bucket.with_name("elsewhere"))
    with WriterProcess(store, "--keep-s", "1000") as writer, Sender(writer.endpoint) as engine:
        engine.delete(other)
        engine.wait()
        writer.stop()
    with StoreReader(store) as reader:
        upkeep = Upkeep(store, reader.uuid, Waker())
    done = upkeep.round()
    upkeep.close()
    assert done.failures and not done.erased_rows and not any(isinstance(one, Erased) for one in done.changes)
    assert len(away(store)) == blocks_of(store)
    bucket.with_name("elsewhere").rename(bucket)
    with StoreReader(store) as reader, pytest.raises(NotFoundError):
        reader.slice(other, SITE, [1])
    with WriterProcess(store, "--keep-s", "0.1") as writer:
        assert until(lambda: _is_erased(store, other))
        writer.stop()
    assert answers(store) == {key: value for key, value in before.items() if key[0] != other}
    assert not fsck(store).bad


def test_a_bucket_that_does_not_answer_is_asked_once_a_round(sample: Sample, store: Path, s3: FaultProxy,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block would hold up the writer for minutes; those that the disk has are erased from meanwhile."""
    monkeypatch.setattr(objects, "_RETRIES", 0)
    at_hand = grow(store)
    url, other = "s3://bucket/silent", sample.captures["other"]
    push(store, url, local_bytes=0)
    with StoreReader(store) as reader:
        uuid = reader.uuid
        lies = {int(number) for number in np.unique(reader.places(other, SITE, [1])[0].segment)}
        near, = {int(number) for number in np.unique(reader.places(at_hand, SITE, [1])[0].segment)}
    evicted_blocks.recall(store, near)
    assert len(lies) > 1 and near not in lies
    with WriterProcess(store, "--keep-s", "1000") as writer, Sender(writer.endpoint) as engine:
        s3.fault = lambda method, path: "503"
        engine.delete(other)
        engine.delete(at_hand)
        engine.wait()
        writer.stop()
    with closing(connect_read(store / "catalog.sqlite")) as db:  # the writer may have had a round of its own by then
        waits = db.execute("SELECT 1 FROM doomed WHERE segment = ?", (near,)).fetchone()
    upkeep = Upkeep(store, uuid, Waker())
    s3.seen.clear()
    done = upkeep.round()
    assert done.failures == 1 and done.put_off and (SegmentGone(near) in done.changes) is (waits is not None)
    assert len({path.split("/")[4] for _, path in s3.seen}) == 1, s3.seen
    s3.fault = lambda method, path: None
    again = upkeep.round()
    upkeep.close()
    assert not again.failures and {change.segment for change in again.changes if isinstance(change, Erased)} == lies


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["sealed", "cold"])
def test_deletes_beside_pushes_that_evict(kind: str, sample: Sample, request: pytest.FixtureRequest, tmp_path: Path
                                          ) -> None:
    """A real writer erases while two pushes send and evict, and readers see what is kept, bit for bit, throughout."""
    store = request.getfixturevalue("cold" if kind == "cold" else "store")
    url, doomed = (tmp_path / "bucket").as_uri(), [sample.captures[name] for name in ("few", "other", "again", "plain")]
    push(store, url, local_bytes=0)
    kept = {key: value for key, value in answers(store).items() if key[0] not in doomed}
    ended, wrong, rounds = threading.Event(), list[object](), Counter[str]()

    def over_and_over(name: str, once: Callable[[], object]) -> None:
        while not ended.is_set():
            try:
                once()
                rounds[name] += 1
            except OutrunError:  # by the other
                pass
            except BaseException as error:
                wrong.append((name, error))
                return

    def read() -> None:
        with StoreReader(store) as reader:
            for (capture, layer), wanted in kept.items():
                piece = reader.slice(capture, SITE, [layer])
                assert piece.values().tobytes() + piece.token_ids.tobytes() + piece.flags.tobytes() == wanted

    threads = [threading.Thread(target=over_and_over, args=(name, once)) for name, once in (
        ("a", lambda: push(store, url, local_bytes=0)), ("b", lambda: push(store, url, local_bytes=0)), ("read", read))]
    with WriterProcess(store, "--keep-s", "0.1") as writer, Sender(writer.endpoint) as engine:
        for thread in threads:
            thread.start()
        for capture in doomed:
            engine.delete(capture)
            engine.wait()
            assert until(lambda capture=capture: wrong or _is_erased(store, capture))
            seen = rounds["read"]
            assert until(lambda seen=seen: wrong or rounds["read"] > seen)
        ended.set()
        for thread in threads:
            thread.join()
        assert not wrong and rounds["a"] + rounds["b"] > 0
        push(store, url, local_bytes=0)
        writer.stop()
    assert answers(store) == kept and not fsck(store).bad and not check(url, deep=True).bad
    with open_store(url, tmp_path / "cache") as opened:
        assert not {row.id for row in opened.captures()} & set(doomed)
    assert not check(url).orphans


def test_a_bucket_that_lost_them_is_told_and_never_filled(sample: Sample, store: Path, tmp_path: Path) -> None:
    url, long = (tmp_path / "bucket").as_uri(), sample.captures["long"]
    push(store, url, local_bytes=0)
    shutil.rmtree(folder_of(url) / "blocks")
    with StoreReader(store) as reader, pytest.raises(StoreError, match=r"is not there .*evicted from this disk"):
        reader.slice(long, SITE, [1])
    found = fsck(store).bad
    assert {one.capture for one in found} > {long} and "has lost them" in found[0].what
    with pytest.raises(StoreError, match=r"has lost them: .*fsck"):
        push(store, url)
    with pytest.raises(StoreError, match="has lost them"):
        recall_all(store)
    assert len(away(store)) == blocks_of(store)


def test_a_bucket_that_is_away_is_told(sample: Sample, store: Path, s3: FaultProxy) -> None:
    url, long = "s3://bucket/away", sample.captures["long"]
    push(store, url, local_bytes=0)
    s3.fault = lambda method, path: "503"
    with StoreReader(store, answer_s=5) as reader:
        with pytest.raises(BucketError) as told:
            reader.slice(long, SITE, [1])
        assert told.value.passing
        s3.fault = lambda method, path: None
        assert reader.slice(long, SITE, [1]).values().shape[1] > 0


def test_what_a_reader_needs_for_them_is_named(sample: Sample, store: Path, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    push(store, (tmp_path / "bucket").as_uri(), local_bytes=0)
    with StoreReader(store, cache="/proc/none") as reader, pytest.raises(StoreError, match="name another one"):
        reader.slice(sample.captures["long"], SITE, [1])
    monkeypatch.setitem(sys.modules, "obstore", None)
    with StoreReader(store) as reader, pytest.raises(StoreError, match="needs obstore: pip install"):
        reader.slice(sample.captures["long"], SITE, [1])
    assert any("needs obstore" in one.what for one in fsck(store).bad)
    with pytest.raises(StoreError, match="needs obstore"):
        recall_all(store)


def test_other_tools_know_of_it(sample: Sample, store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    before = answers(store)
    push(store, url, local_bytes=0)
    # A catalog that is made anew is the same, and nothing stays on the disk for it.
    done = rebuild(store)
    fs.close(done.state.lock)
    assert done.compared and not done.differences and not done.state.skipped
    assert len(away(store)) == blocks_of(store) and answers(store) == before
    # Compaction leaves them alone.
    assert compact(store).blocks == 0 and answers(store) == before
    # A stranger's reader of the block fails; it is told no fill values.
    for number in away(store):
        block = zarr.open_group(store / block_name(number), mode="r")
        record = read_away(store, number)
        assert record is not None
        for name, _ in record.files:
            with pytest.raises(ValueError, match=r"."):
                _ = block[name.split("/")[0]][:]
    # Another bucket does not get what is not here.
    with pytest.raises(StoreError, match="push there, or vllm-tap recall"):
        push(store, (tmp_path / "another").as_uri())
    # Retention by bytes deletes nothing: what is deleted comes back first, which takes room for which more would go.
    with StoreReader(store) as reader:
        upkeep = Upkeep(store, reader.uuid, Waker(), retain_bytes=1)
    done = upkeep.round()
    upkeep.close()
    assert (done.used_bytes or 0) > 1 and not done.expired and not done.failures


def test_while_another_push_runs_nothing_is_evicted(store: Path, tmp_path: Path) -> None:
    """It may be about to send the files in whose place stubs would come."""
    url, before, beside = (tmp_path / "bucket").as_uri(), answers(store), list[Pushed]()

    def tell(done: int, total: int) -> None:
        if not beside:
            beside.append(push(store, url, local_bytes=0))

    with suppress(OutrunError):
        push(store, url, tell, verify=True)
    assert beside[0].room is None and not away(store)
    room = push(store, url, local_bytes=0).room
    assert room is not None and room.blocks == len(away(store)) == blocks_of(store) and answers(store) == before
    assert not fsck(store).bad


def test_rows_come_back_only_where_there_is_room(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(store, (tmp_path / "bucket").as_uri(), local_bytes=0)
    monkeypatch.setattr(evicted_blocks, "room_kept", 1 << 60)
    with pytest.raises(StoreError, match=r"are free, of which .* must stay free"):
        recall_all(store)
    assert len(away(store)) == blocks_of(store)


def test_a_block_that_was_changed_since_stays(sample: Sample, store: Path, tmp_path: Path) -> None:
    """By a writer, between the push and the eviction."""
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    erase(store, sample.captures["other"])
    before = answers(store)
    evict_all(store, url)
    changed = set(one_of(store)) - away(store)
    assert changed and answers(store) == before
    push(store, url, local_bytes=0)
    assert away(store) == set(one_of(store)) and answers(store) == before


def test_what_an_erasure_left_half_done_stays(store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    number = max(one_of(store))
    (store / redo_name(number)).write_bytes(b"cut")
    evict_all(store, url)
    assert away(store) == set(one_of(store)) - {number}


def test_a_record_that_cannot_be_read_is_named(store: Path, sample: Sample, tmp_path: Path) -> None:
    push(store, (tmp_path / "bucket").as_uri(), local_bytes=0)
    number = max(away(store))
    (store / evicted_name(number)).write_bytes(b"{}")
    with pytest.raises(StoreError, match="where evicted rows lie"):
        answers(store)
    assert any("where evicted rows lie" in one.what for one in fsck(store).bad)


def test_the_commands(sample: Sample, store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()

    done = tap("push", store, url, "--local-bytes", "1KB")
    assert done.returncode == 0 and "blocks evicted" in done.stdout, done
    assert away(store)
    wrong = tap("push", store, url, "--local-bytes", "few")
    assert wrong.returncode == 2 and "--local-bytes" in wrong.stderr
    assert tap("fsck", "--store", store).returncode == 0
    back = tap("recall", "--store", store)
    assert back.returncode == 0 and "are on the disk again" in back.stdout and not away(store)
