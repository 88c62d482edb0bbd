"""A capture that is deleted in the bucket, without the store's folder: no reader finds it, and the folder follows."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from api.bucket.deletes import Deletes
from schemas.bucket import reader as bucket_reader
from schemas.bucket.snapshots import fetch_snapshot
from schemas.errors import ArgumentError, BucketError, FencedError, NotFoundError, OutrunError, TapError
from schemas.ids import new_ulid
from schemas.objects.objects import Objects
from schemas.read.reader import StoreReader
from tests.support.buckets import FaultProxy
from tests.support.store_helpers import SITE, WriterProcess
from tests.vllm_tap.bucket.conftest import Sample, erase, grow
from tests.vllm_tap.bucket.test_fencing import assert_equal, copy, head_of
from tests.vllm_tap.bucket.test_push import keys
from vllm_tap import open_store
from vllm_tap.bucket import deletion
from vllm_tap.bucket.check import check
from vllm_tap.bucket.deletion import hide
from vllm_tap.bucket.push import push
from vllm_tap.bucket.removal import remove_orphans
from vllm_tap.store_control import delete, hold


def deleted(store: Path) -> set[str]:
    with StoreReader(store) as reader, reader._catalog.moment() as now:
        return {row["id"] for row in now.db.execute("SELECT id FROM captures WHERE deleted <> 0")}


def test_no_reader_finds_it_and_the_next_push_deletes_it_in_the_folder(sample: Sample, store: Path, tmp_path: Path,
                                                                       url: str) -> None:
    few, cache = sample.captures["few"], tmp_path / "cache"
    push(store, url)
    first, opened = head_of(url), open_store(url, cache)
    before = {row.id for row in opened.captures()}
    assert opened.reader.slice(few, SITE, [1]).values().size and few not in deleted(store)
    done = hide(url, [few])
    head = head_of(url)
    assert done.captures == [few] and head.version == 3 and head.origin == first.push and head.generation == 2
    assert first.catalog_key not in keys(url) and done.erased.objects == 1  # it tells what the capture said
    with open_store(url, tmp_path / "fresh") as later:
        assert {row.id for row in later.captures()} == before - {few}
        with pytest.raises(NotFoundError):
            later.reader.slice(few, SITE, [1])
    assert opened.refresh() is True and {row.id for row in opened.captures()} == before - {few}
    opened.close()
    assert not check(url, deep=True).bad
    assert few not in deleted(store)  # nobody told the folder yet
    blocks = {key for key in keys(url) if key.startswith("blocks/")}
    again = push(store, url)
    assert again.changed and again.followed == 1 and again.erased.objects and few in deleted(store)
    assert head_of(url).origin == "" and head_of(url).version == 2
    left = check(url, deep=True)
    assert blocks - set(keys(url)) and not left.bad and left.orphans == 1  # the snapshot between tells nothing of it
    assert_equal(url, store, cache, 6)
    assert not push(store, url).changed


def test_the_new_snapshot_holds_nothing_of_it(store: Path, tmp_path: Path) -> None:
    """Not in free pages either: what the prompt was is searched for in the bytes."""
    url, secret = (tmp_path / "bucket").as_uri(), new_ulid()
    gone = grow(store, tags={"secret": secret})
    push(store, url)

    def said() -> bytes:
        return gzip.decompress((tmp_path / "bucket" / head_of(url).catalog_key).read_bytes())

    assert secret.encode() in said()
    hide(url, [gone])
    assert secret.encode() not in said() and gone.encode() in said()


def test_all_samples_of_a_request_or_one(store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    every, some = grow(store, 2), grow(store, 2)
    push(store, url)
    assert hide(url, [every]).captures == [f"{every}.0", f"{every}.1"]
    assert hide(url, [f"{some}.1"]).captures == [f"{some}.1"]
    push(store, url)
    assert {f"{every}.0", f"{every}.1", f"{some}.1"} <= deleted(store) and f"{some}.0" not in deleted(store)


def test_several_follow_each_other_and_new_captures_come_beside(sample: Sample, store: Path, tmp_path: Path) -> None:
    url, few, plain = (tmp_path / "bucket").as_uri(), sample.captures["few"], sample.captures["plain"]
    push(store, url)
    first = head_of(url).push
    hide(url, [few])
    hide(url, [plain])
    assert head_of(url).origin == first
    with pytest.raises(NotFoundError):
        hide(url, [few])
    grown = grow(store)
    assert push(store, url).followed == 2 and {few, plain} <= deleted(store)
    with open_store(url, tmp_path / "cache") as opened:
        assert grown in {row.id for row in opened.captures()}
    hide(url, [grown])  # after a push that followed a deletion
    push(store, url)
    assert grown in deleted(store)


def test_what_the_folder_deleted_meanwhile_is_deleted_once(sample: Sample, store: Path, tmp_path: Path) -> None:
    url, few = (tmp_path / "bucket").as_uri(), sample.captures["few"]
    push(store, url)
    hide(url, [few])
    erase(store, few)
    done = push(store, url)
    assert done.changed and not done.followed and head_of(url).origin == ""


def test_none_goes_where_one_is_not_there_or_on_hold(sample: Sample, store: Path, tmp_path: Path) -> None:
    url, few, plain = (tmp_path / "bucket").as_uri(), sample.captures["few"], sample.captures["plain"]
    hold(store, plain, True)
    push(store, url)
    for refs, kind, says in (([few, "nobody"], NotFoundError, "nobody"), ([few, plain], TapError, "on hold")):
        with pytest.raises(kind, match=says):
            hide(url, refs)
    assert head_of(url).generation == 1 and len(keys(url)) == len(set(keys(url)))
    with open_store(url, tmp_path / "cache") as opened:
        assert opened.reader.slice(few, SITE, [1]).values().size


def test_a_hold_that_came_meanwhile_stops_the_push(sample: Sample, store: Path, tmp_path: Path) -> None:
    url, few = (tmp_path / "bucket").as_uri(), sample.captures["few"]
    push(store, url)
    hide(url, [few])
    hold(store, few, True)
    with pytest.raises(FencedError, match=r"on hold.*vllm-tap release"):
        push(store, url)
    hold(store, few, False)
    assert push(store, url).changed and few in deleted(store)


def test_a_push_and_a_deletion_at_once(sample: Sample, store: Path, tmp_path: Path) -> None:
    """Whoever writes the head second is told, and nothing of the first is lost."""
    url, few = (tmp_path / "bucket").as_uri(), sample.captures["few"]
    push(store, url)
    grown, during = grow(store), []

    def meanwhile(done: int, total: int) -> None:
        if not during:
            during.append(hide(url, [few]))

    with pytest.raises(OutrunError, match="push again"):
        push(store, url, meanwhile)
    assert head_of(url).origin
    push(store, url)
    with open_store(url, tmp_path / "cache") as opened:
        found = {row.id for row in opened.captures()}
    assert grown in found and few not in found and few in deleted(store)


def test_a_deletion_that_a_push_outran(sample: Sample, store: Path, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    url, few = (tmp_path / "bucket").as_uri(), sample.captures["few"]
    push(store, url)
    grow(store)
    swap = Objects.swap

    def outrun(self: Objects, key: str, data: bytes, seen: dict[str, str]) -> None:
        monkeypatch.setattr(Objects, "swap", swap)
        push(store, url)
        swap(self, key, data, seen)

    monkeypatch.setattr(Objects, "swap", outrun)
    with pytest.raises(OutrunError, match="another deletion was first"):
        hide(url, [few])
    assert hide(url, [few]).captures == [few]


@pytest.mark.parametrize("call", [1, 2])
def test_a_deletion_that_another_outran_says_so(sample: Sample, store: Path, tmp_path: Path, call: int,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """The other takes away the snapshot that this one is about to read: first the head's, then its own again."""
    url, few, plain = (tmp_path / "bucket").as_uri(), sample.captures["few"], sample.captures["plain"]
    push(store, url)
    others, calls = [sample.captures[name] for name in ("again", "other")], []

    def after_others(*args: Any) -> None:
        calls.append(args)
        if len(calls) == call:
            monkeypatch.undo()
            for other in others:  # two, so that what this one wrote is of an epoch that is over
                hide(url, [other])
        fetch_snapshot(*args)

    monkeypatch.setattr(deletion, "fetch_snapshot", after_others)
    with pytest.raises(OutrunError, match="another deletion was first"):
        hide(url, [few])
    assert len(calls) == call
    calls.clear()
    others = [plain]
    monkeypatch.setattr(deletion, "fetch_snapshot", after_others)
    Deletes("").delete(url, [few])  # the service tries again
    assert len(calls) == call
    with open_store(url, tmp_path / "fresh") as left:
        assert not {row.id for row in left.captures()} & {few, plain, sample.captures["again"]}


def test_a_reader_that_opens_or_looks_while_a_deletion_is_first(sample: Sample, store: Path, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the head, the deletion takes away that head's snapshot: the reader sees the next one."""
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    due = [sample.captures[name] for name in ("few", "plain", "again")]

    def after_another(*args: Any) -> None:
        if due and len(due) != 2:
            hide(url, [due.pop(0)])
        fetch_snapshot(*args)

    monkeypatch.setattr(bucket_reader, "fetch_snapshot", after_another)
    with open_store(url, tmp_path / "cache") as left:
        assert sample.captures["few"] not in {row.id for row in left.captures()}
        hide(url, [due.pop(0)])  # "plain"; "again" goes when the reader looks for it
        assert left.refresh()
        assert not due and not {row.id for row in left.captures()} & {sample.captures[name] for name in (
            "few", "plain", "again")}
    monkeypatch.setattr(bucket_reader, "fetch_snapshot", fetch_snapshot)
    Objects(url).delete([head_of(url).catalog_key])
    with pytest.raises(BucketError, match="the head names it: was it removed"):
        open_store(url, tmp_path / "other cache")


def test_an_answer_that_is_lost(sample: Sample, store: Path, s3: FaultProxy) -> None:
    url, few = "s3://bucket/lost-answer", sample.captures["few"]
    push(store, url)
    lost: list[str] = []

    def fault(method: str, path: str) -> str | None:
        if method == "PUT" and path.endswith("head.json") and not lost:
            lost.append(path)
            return "lost"
        return None

    s3.fault = fault
    assert hide(url, [few]).captures == [few] and lost
    assert head_of(url).origin


def test_a_folder_that_was_put_back_and_another_folder_do_not_bring_it_back(sample: Sample, store: Path,
                                                                           tmp_path: Path) -> None:
    url, few = (tmp_path / "bucket").as_uri(), sample.captures["few"]
    earlier = copy(store, "earlier")
    push(store, url)
    hide(url, [few])
    with pytest.raises(FencedError):
        push(earlier, url)
    with pytest.raises(FencedError, match="deleted"):
        push(earlier, url, take_over=True)
    delete(earlier, [few])
    push(earlier, url, take_over=True)
    with pytest.raises(FencedError):
        push(store, url)


def test_a_catalog_that_is_lost_does_not_bring_it_back(sample: Sample, store: Path, tmp_path: Path) -> None:
    url, few = (tmp_path / "bucket").as_uri(), sample.captures["few"]
    push(store, url)
    hide(url, [few])
    (tmp_path / "bucket" / head_of(url).catalog_key).unlink()
    with pytest.raises(FencedError, match=r"names them, is lost.*take-over"):
        push(store, url)
    assert few not in deleted(store)


def test_orphans_are_removed_beside_it(sample: Sample, store: Path, tmp_path: Path) -> None:
    url, few = (tmp_path / "bucket").as_uri(), sample.captures["few"]
    push(store, url)
    hide(url, [few])
    head = head_of(url)
    remove_orphans(url, 0)
    assert head_of(url).origin == head.origin and head_of(url).version == 3
    assert push(store, url).changed and few in deleted(store)


def test_rows_of_evicted_blocks_leave_too(sample: Sample, store: Path, tmp_path: Path) -> None:
    """The block stays until the folder has made another of what is left."""
    url, few = (tmp_path / "bucket").as_uri(), sample.captures["few"]
    push(store, url, local_bytes=0)
    hide(url, [few])
    push(store, url)
    assert few in deleted(store) and not check(url, deep=True).bad and check(url).orphans == 1
    assert_equal(url, store, tmp_path / "cache", 6)


def test_beside_a_writer(sample: Sample, store: Path, tmp_path: Path) -> None:
    url, few = (tmp_path / "bucket").as_uri(), sample.captures["few"]
    push(store, url)
    hide(url, [few])
    with WriterProcess(store, "--keep-s", "0.1") as writer:
        assert push(store, url).changed and few in deleted(store)
        writer.stop()


def test_places_that_have_none_or_stay_as_they_are(sample: Sample, store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    with pytest.raises(BucketError):
        hide(url, [sample.captures["few"]])
    push(store, url)
    with pytest.raises(ArgumentError, match="taken over"):
        hide(f"{url}#{head_of(url).push}", [sample.captures["few"]])
