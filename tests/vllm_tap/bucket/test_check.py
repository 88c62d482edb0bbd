"""What fsck says of a bucket, and what it removes while others push."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from schemas.errors import ArgumentError, BucketError, OutrunError, TapError
from schemas.ids import new_ulid
from schemas.objects.layout import HEAD, INDEX
from schemas.objects.objects import Objects
from tests.support.buckets import FaultProxy
from tests.support.forked import tap
from tests.support.store_helpers import WriterProcess
from tests.vllm_tap.bucket.conftest import Sample, grow
from tests.vllm_tap.bucket.test_fencing import assert_equal, copy, head_of
from tests.vllm_tap.bucket.test_push import keys
from vllm_tap.bucket import removal
from vllm_tap.bucket.check import check
from vllm_tap.bucket.push import push
from vllm_tap.bucket.removal import forget, remove_orphans
from vllm_tap.store_control import hold
from writer_service.tools.compaction import compact


def test_a_whole_bucket(store: Path, url: str) -> None:
    done = push(store, url)
    told: list[tuple[int, int]] = []
    for deep in (False, True):
        report = check(url, deep, lambda now, total: told.append((now, total)))
        assert not report.bad and not report.lost and not report.orphans and not report.strangers
        assert (report.captures, report.blocks, report.objects) == (done.captures, done.blocks, len(keys(url)) + (
            1 if url.startswith("file") else 0))  # the lock
    assert told == sorted(told[:done.blocks]) + sorted(told[done.blocks:])


@pytest.mark.parametrize("damage", ["rows gone", "rows cut", "rows flipped", "index gone", "index flipped",
                                    "snapshot gone", "snapshot flipped"])
def test_what_is_not_whole_is_said_with_its_captures(damage: str, store: Path, tmp_path: Path) -> None:
    url, bucket = (tmp_path / "bucket").as_uri(), tmp_path / "bucket"
    push(store, url)
    block = max((bucket / "blocks").iterdir())
    number = int(block.name.split("-")[1])
    what, _, how = damage.partition(" ")
    file = {"rows": max((path for path in block.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size),
            "index": block / INDEX, "snapshot": next((bucket / "catalog").iterdir())}[what]
    if how == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data if how == "flipped" else data[:-1])
    quick = check(url)
    report = check(url, deep=True)
    assert bool(quick.bad) == (damage != "rows flipped")
    assert [bad.key for bad in report.bad] == [file.relative_to(bucket).as_posix()]
    if what == "snapshot":
        assert "which captures this head has cannot be said" in report.bad[0].what
        with pytest.raises(BucketError, match=r"catalog/.*push again"):
            remove_orphans(url, 0)
        return
    with closing(sqlite3.connect(store / "catalog.sqlite")) as db:
        expected = {capture for capture, in db.execute(
            "SELECT DISTINCT capture FROM extents JOIN captures ON id = capture WHERE segment = ? AND status IN ("
            "'complete', 'incomplete', 'failed')", (number,))}
    assert {lost.capture for lost in report.lost} == expected and expected and report.lost_captures == len(expected)
    assert all(lost.tokens > 0 and lost.blocks == 1 and lost.head is None for lost in report.lost)
    push(store, url, verify=True)  # sends it again
    assert not check(url, deep=True).bad


def test_orphans_are_counted_and_removed_when_they_are_old(store: Path, tmp_path: Path, url: str) -> None:
    push(store, url)
    compact(store)
    push(store, url)
    Objects(url).put("blocks/notes.txt", b"mine")
    Objects(url).put("catalog/mine.sqlite.gz", b"mine")
    before = keys(url)
    report = check(url)
    assert report.orphans > 10 and report.orphan_bytes > 0 and not report.bad
    assert report.first_strangers == ["blocks/notes.txt", "catalog/mine.sqlite.gz"]
    assert keys(url) == before  # it reads
    young = remove_orphans(url, 86_400)
    assert young.removed == 0 and young.head.epoch == 1
    assert {key: data for key, data in keys(url).items() if key != HEAD} == {
        key: data for key, data in before.items() if key != HEAD}
    done = remove_orphans(url, 0)
    assert (done.removed, done.removed_bytes, done.head.epoch) == (report.orphans, report.orphan_bytes, 2)
    assert set(before) - set(keys(url)) and not check(url, deep=True).orphans
    assert {"blocks/notes.txt", "catalog/mine.sqlite.gz"} <= keys(url).keys()
    assert_equal(url, store, tmp_path / "cache", 7)
    assert push(store, url).changed is False  # the folder knows its head still
    grow(store)
    assert push(store, url).generation == 3 and head_of(url).epoch == 2
    assert_equal(url, store, tmp_path / "cache", 8)


def test_a_removal_that_comes_while_a_push_sends(store: Path, tmp_path: Path, url: str) -> None:
    """What it has sent is no orphan that it can show: it ends, and sends again."""
    push(store, url)
    compact(store)
    removed: list[int] = []

    def meanwhile(done: int, total: int) -> None:
        if done == total and not removed:
            removed.append(remove_orphans(url, 0).removed)

    with pytest.raises(OutrunError, match=r"removed meanwhile \(push again"):
        push(store, url, meanwhile)
    assert removed[0] > 0
    done = push(store, url)
    assert done.changed and done.new_blocks > 0 and not check(url, deep=True).bad
    assert_equal(url, store, tmp_path / "cache", 7)


def test_a_push_that_comes_while_orphans_are_removed(store: Path, tmp_path: Path, url: str,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """It wants blocks that are about to be deleted; the deletion comes after its head."""
    push(store, url)
    earlier = copy(store, "earlier")
    compact(store)
    push(store, url)
    real, pushed = Objects.delete, list[int]()

    def delete(self: Objects, gone: list[str]) -> None:
        if not pushed:
            done = push(earlier, url, take_over=True)
            pushed.append(done.generation)
            assert done.new_blocks == done.blocks  # nothing of the orphans was taken for its own
        real(self, gone)

    monkeypatch.setattr(Objects, "delete", delete)
    assert remove_orphans(url, 0).removed > 0 and pushed == [3]
    report = check(url, deep=True)
    assert not report.bad and report.retired
    assert_equal(url, earlier, tmp_path / "cache", 7)
    assert_equal(f"{url}#{report.retired[0]}", store, tmp_path / "cache", 7)


def test_a_retired_head_is_kept_until_it_is_given_up(sample: Sample, store: Path, tmp_path: Path, url: str) -> None:
    push(store, url)
    earlier = copy(store, "earlier")
    late = grow(store)
    with WriterProcess(store, "--keep-s", "1000") as writer:
        hold(store, late, True)
        writer.stop()
    push(store, url)
    retired = push(earlier, url, take_over=True).retired
    assert retired is not None
    remove_orphans(url, 0)
    assert_equal(f"{url}#{retired}", store, tmp_path / "cache", 8)
    with pytest.raises(ArgumentError, match=rf"1 captures on hold are in it alone, {late} first"):
        forget(url, retired)
    for wrong, says in (("../head", "32 hex digits"), ("0" * 32, "no such retired head")):
        with pytest.raises(ArgumentError, match=says):
            forget(url, wrong)
    with WriterProcess(store, "--keep-s", "1000") as writer:
        hold(store, late, False)
        writer.stop()
    push(store, url, take_over=True)  # retires what the earlier folder pushed
    other = next(push for push in check(url).retired if push != retired)
    assert forget(url, other) == 0 and forget(url, retired) == 0
    done = remove_orphans(url, 0)
    assert not done.retired and not check(url, deep=True).bad
    assert_equal(url, store, tmp_path / "cache", 8)


def test_a_retired_head_that_cannot_be_read_is_said_and_nothing_removed(store: Path, tmp_path: Path) -> None:
    url, bucket = (tmp_path / "bucket").as_uri(), tmp_path / "bucket"
    push(store, url)
    earlier = copy(store, "earlier")
    compact(store)
    push(store, url)
    retired = push(earlier, url, take_over=True).retired
    head = bucket / "retired" / f"{retired}.json"
    head.write_bytes(head.read_bytes()[:-3])
    before = keys(url)
    report = check(url)
    assert [(bad.key, bad.head) for bad in report.bad] == [(f"retired/{retired}.json", retired)]
    with pytest.raises(BucketError, match=r"retired/.*--forget"):
        remove_orphans(url, 0)
    assert before.keys() == keys(url).keys()


def test_without_a_head_nothing_is_removed(store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    (tmp_path / "bucket" / HEAD).unlink()
    for run in (lambda: check(url), lambda: remove_orphans(url, 0)):
        with pytest.raises(BucketError, match="nothing says what is in use"):
            run()


def test_the_command(store: Path, tmp_path: Path) -> None:
    run = partial(tap, "fsck")
    url, bucket = (tmp_path / "bucket").as_uri(), tmp_path / "bucket"
    push(store, url)
    compact(store)
    push(store, url)
    done = run("--bucket", url)
    assert done.returncode == 0 and "nothing is wrong (generation 2, epoch 0, 7 captures" in done.stdout, done.stderr
    assert "objects" in done.stdout and "that no head names" in done.stdout
    assert " 0 removed" not in run("--bucket", url, "--remove-orphans").stdout
    said = json.loads(run("--bucket", url, "--remove-orphans", "--older-than", "0s", "--json").stdout)
    assert said["ok"] is True and said["removed"] == said["orphans"] > 0
    for wrong, says in ((("--bucket", url, "--remove-orphans", "--older-than", "soon"), "30s, 5m, 12h, 1d"),
                        (("--deep",), "--bucket URL"), (("--bucket", url, "--forget", "x"), "32 hex digits")):
        refused = run(*wrong)
        assert refused.returncode == 2 and says in refused.stderr
    max((bucket / "blocks").rglob(INDEX)).unlink()
    bad = run("--bucket", url)
    assert bad.returncode == 1 and "index.zip: it is not there" in bad.stdout and "capture " in bad.stdout


# ── over S3 ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_credentials_that_read_suffice(store: Path, s3: FaultProxy) -> None:
    url = f"s3://bucket/{new_ulid()}"
    push(store, url)
    s3.seen.clear()
    assert not check(url, deep=True).bad
    assert {method for method, _ in s3.seen} <= {"GET", "HEAD"}


def test_a_server_that_heeds_no_conditions_removes_nothing(store: Path, s3: FaultProxy) -> None:
    url = f"s3://bucket/{new_ulid()}"
    push(store, url)
    compact(store)
    push(store, url)
    before = keys(url)
    s3.fault = lambda method, path: "heedless"
    with pytest.raises(TapError, match="although the condition"):
        remove_orphans(url, 0)
    s3.fault = lambda method, path: None
    assert keys(url) == before


def test_the_end_of_an_epoch_whose_answer_is_lost(store: Path, s3: FaultProxy) -> None:
    url, lost = f"s3://bucket/{new_ulid()}", list[str]()
    push(store, url)
    compact(store)
    push(store, url)

    def fault(method: str, path: str) -> str | None:
        if method == "PUT" and HEAD in path and not lost:
            lost.append(path)
            return "lost"
        return None

    s3.fault = fault
    done = removal.remove_orphans(url, 0)
    assert lost and done.head.epoch == 1 and done.removed > 0
