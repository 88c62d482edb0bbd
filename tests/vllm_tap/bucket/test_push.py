"""Pushing: all is seen at once or nothing, of whoever is first; what was cut short goes on; nothing is deleted."""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
import pytest
import zarr
from obstore.store import from_url
from zarr.storage import ObjectStore

from schemas.errors import BucketError, OutrunError, StoreError, TapError
from schemas.ids import new_ulid
from schemas.objects.layout import HEAD, INDEX
from schemas.objects.objects import Objects, Version
from schemas.read.reader import StoreReader
from tests.support.buckets import FaultProxy
from tests.support.forked import tap
from tests.support.store_helpers import SITE, Sender, WriterProcess, is_erased, until
from tests.vllm_tap.bucket.conftest import Sample, grow
from tests.writer_service.tools.test_fsck import edit, flip
from vllm_tap import open_store
from vllm_tap.bucket import push as push_module
from vllm_tap.bucket.push import push
from writer_service.tools.compaction import compact


def keys(url: str) -> dict[str, bytes]:
    bucket = from_url(url)
    return {entry["path"]: bytes(obstore.get(bucket, entry["path"]).bytes())
            for page in obstore.list(bucket) for entry in page if entry["path"] != ".head.lock"}


def test_blocks_go_up_as_they_are_and_twice_is_once(sample: Sample, store: Path, url: str) -> None:
    told: list[tuple[int, int]] = []
    first = push(store, url, lambda done, total: told.append((done, total)))
    assert (first.generation, first.changed, first.left_out, first.superseded) == (1, True, 1, 0)
    assert first.captures == len(sample.captures) - 2  # all but the deleted one and the one that never ended
    assert first.blocks == first.new_blocks == len(list((store / "blocks").glob("*.zarr")))
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] > 0 and told == sorted(told)
    there = keys(url)
    for block in (store / "blocks").glob("*.zarr"):
        folder, = {key.rpartition("/")[0] for key in there if key.endswith(f"/{INDEX}") and block.stem in key}
        files = {path.relative_to(block).as_posix(): path.read_bytes() for path in block.rglob("*") if path.is_file()}
        assert files == {key.removeprefix(f"{folder}/"): data for key, data in there.items()
                         if key.startswith(f"{folder}/") and not key.endswith(INDEX)}
        opened = zarr.open_group(ObjectStore(from_url(f"{url}/{folder}"), read_only=True), mode="r")
        assert opened.attrs["site"] == SITE and opened["position"].shape[0] > 0
    again = push(store, url)
    assert (again.generation, again.changed, again.new_blocks, again.new_bytes) == (1, False, 0, 0)
    assert keys(url) == there


def test_what_is_left_out_leaves_no_trace(sample: Sample, store: Path, tmp_path: Path) -> None:
    push(store, (tmp_path / "bucket").as_uri())
    catalog, = (tmp_path / "bucket" / "catalog").iterdir()
    said = gzip.decompress(catalog.read_bytes())
    assert sample.captures["long"].encode() in said
    assert sample.captures["late"].encode() not in said and b"nonce " not in said


def test_a_compacted_store_takes_the_place_and_nothing_is_deleted(store: Path, url: str) -> None:
    first = push(store, url)
    before = keys(url)
    compact(store)
    second = push(store, url)
    assert (second.generation, second.changed, second.superseded) == (2, True, first.blocks)
    after = keys(url)
    assert {key: after.get(key) for key in before if key != HEAD} == {
        key: data for key, data in before.items() if key != HEAD}
    assert after[HEAD] != before[HEAD]


def test_of_two_pushes_of_a_folder_one_loses_and_shows_nothing(store: Path, url: str) -> None:
    for generation in (1, 2):
        grow(store)
        heads: list[bytes] = []

        def meanwhile(done: int, total: int, heads: list[bytes] = heads) -> None:
            if done == total and not heads:
                heads.append(b"")
                grow(store)
                push(store, url)
                heads[0] = keys(url)[HEAD]

        with pytest.raises(OutrunError, match=rf"another push was first, generation {generation} \(push again"):
            push(store, url, meanwhile)
        assert keys(url)[HEAD] == heads[0]
        assert push(store, url).changed is False


def test_of_two_pushes_that_say_the_same_both_are_done(store: Path, url: str) -> None:
    done: list[bool] = []

    def meanwhile(now: int, total: int) -> None:
        if not done:
            done.append(True)
            done.append(push(store, url).changed)

    assert push(store, url, meanwhile).changed is False
    assert done == [True, True]


def test_a_push_that_ends_anywhere_shows_nothing_and_is_taken_up(cold: Path, url: str,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Every put is the last one once."""
    class EndedError(Exception):
        pass

    left, real_put, real_swap = 0, Objects.put, Objects.swap
    sent: list[str] = []

    def spend(key: str) -> None:
        nonlocal left
        if left == 0:
            raise EndedError
        left -= 1
        sent.append(key)

    def put(self: Objects, key: str, data: Any) -> None:
        spend(key)
        real_put(self, key, data)

    def swap(self: Objects, key: str, data: bytes, seen: Version | None) -> None:
        spend(key)
        real_swap(self, key, data, seen)

    monkeypatch.setattr(Objects, "put", put)
    monkeypatch.setattr(Objects, "swap", swap)
    ended = 0
    while True:
        left = 3
        try:
            done = push(cold, url)
            break
        except EndedError:
            assert HEAD not in keys(url)
            ended += 1
    assert ended > 5 and done.changed and done.generation == 1
    assert len(sent) == len(set(sent))  # nothing was sent twice
    assert HEAD in keys(url)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["compacted", "deleted"])
def test_a_store_that_changes_meanwhile_is_taken_at_a_later_moment(sample: Sample, store: Path, tmp_path: Path,
                                                                  what: str, when: str) -> None:
    """Before or after its blocks went up: what is shown is whole, and names no capture that was deleted by then."""
    url, few, done = (tmp_path / "bucket").as_uri(), sample.captures["few"], list[int]()

    def meanwhile(now: int, total: int) -> None:
        if done or (now == total) != (when == "after"):
            return
        done.append(now)
        if what == "compacted":
            compact(store)
            return
        with WriterProcess(store, "--keep-s", "0.1") as writer, Sender(writer.endpoint) as engine:
            engine.delete(few)
            engine.wait()
            with StoreReader(store) as reader:
                assert until(lambda: is_erased(reader, few))
            writer.stop()

    push(store, url, meanwhile)
    assert done
    with open_store(url, tmp_path / "cache") as opened, StoreReader(store) as local:
        listed = {row.id for row in opened.captures()}
        assert (few in listed) == (what == "compacted") and len(listed) == 7 - (what == "deleted")
        for capture in listed:
            layers = sorted({one.layer for one in local.manifest(capture).rows})
            assert opened.reader.slice(capture, SITE, layers).values().tobytes() == local.slice(
                capture, SITE, layers).values().tobytes()


def test_what_is_in_the_way_is_named(sample: Sample, store: Path, tmp_path: Path, url: str) -> None:
    bucket = Objects(url, make=True)
    bucket.put("notes.txt", b"mine")
    with pytest.raises(TapError, match=r"something else, 'notes\.txt' first; name another prefix"):
        push(store, url)
    with WriterProcess(tmp_path / "fresh") as writer:
        writer.stop()
    assert push(tmp_path / "fresh", f"{url}/fresh").captures == 0
    with pytest.raises(TapError, match="holds the store"):
        push(store, f"{url}/fresh")
    Objects(f"{url}/later", make=True).put(HEAD, b'{"format": "vllm-tap bucket", "version": 7}')
    with pytest.raises(BucketError, match="version 7, this program knows 1"):
        push(store, f"{url}/later")
    with pytest.raises(StoreError, match="no such folder"):
        push(tmp_path / "nothing", f"{url}/x")
    with pytest.raises(BucketError, match="nosuch"):
        push(store, "nosuch://bucket/prefix")


def test_rows_that_wait_to_be_erased_are_waited_for(store: Path, tmp_path: Path, sample: Sample,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    with WriterProcess(store, "--keep-s", "1000") as writer, Sender(writer.endpoint) as engine:
        engine.delete(sample.captures["few"])
        engine.wait()
        writer.stop()
    monkeypatch.setattr(push_module, "erasing_s_max", 0.5)
    with pytest.raises(StoreError, match="still to be erased"):
        push(store, (tmp_path / "bucket").as_uri())


def test_the_index_is_held_against_the_block(cold: Path, tmp_path: Path) -> None:
    """An index that somebody changed, of a push that was cut off."""
    url = (tmp_path / "bucket").as_uri()
    push(cold, url)
    (tmp_path / "bucket" / HEAD).unlink()
    index = next((tmp_path / "bucket").rglob(INDEX))
    edit(index, flip(60))
    with pytest.raises(BucketError, match=r"index\.zip"):
        push(cold, url)


def test_the_command(store: Path, tmp_path: Path) -> None:
    run = partial(tap, "push")
    url = (tmp_path / "bucket").as_uri()
    done = run(str(store), url)
    assert done.returncode == 0 and "generation 1; 7 captures in" in done.stdout, done.stderr
    assert "1 captures are not final" in done.stderr
    assert '"changed":false' in run(str(store), url, "--json").stdout
    assert '"changed":false' in run(url, "--store", str(store), "--json").stdout
    for wrong in ((str(store),), (str(store), str(store)), (url, str(store)), (str(store), "x", url)):
        assert "name a store and a URL" in run(*wrong).stderr
    bad = run(str(store), "nosuch://x/y")
    assert bad.returncode == 2 and "nosuch" in bad.stderr and bad.stderr.count("\n") == 1


# ── a real S3 server, and a network that fails ──────────────────────────────────────────────────────────────────────


def test_a_server_that_is_busy_and_answers_that_are_cut_or_lost(store: Path, s3: FaultProxy) -> None:
    """Every third request is refused, of the others every fifth answer of a read is cut, and of puts lost."""
    url, count = f"s3://bucket/{new_ulid()}", 0

    def fault(method: str, path: str) -> str | None:
        nonlocal count
        count += 1
        if count % 3 == 0:
            return "503"
        if count % 5 == 0:
            return "lost" if method == "PUT" else "cut" if method == "GET" and "list-type" not in path else None
        return None

    s3.fault = fault
    done = push(store, url)
    assert (done.generation, done.changed) == (1, True)
    s3.fault = lambda method, path: None
    assert push(store, url).changed is False


@pytest.mark.parametrize("generation", [1, 2])
def test_a_head_whose_answer_is_lost_is_known_again(store: Path, s3: FaultProxy, generation: int) -> None:
    url, lost = f"s3://bucket/{new_ulid()}", list[str]()
    if generation == 2:
        push(store, url)
        compact(store)

    def fault(method: str, path: str) -> str | None:
        if method == "PUT" and urlsplit(path).path.endswith(HEAD) and not lost:
            lost.append(path)
            return "lost"
        return None

    s3.fault = fault
    done = push(store, url)
    assert lost and (done.generation, done.changed) == (generation, True)


@pytest.mark.parametrize("what", [INDEX, ".gz"])
def test_what_arrives_otherwise_than_it_was_sent_is_never_shown(store: Path, s3: FaultProxy, what: str) -> None:
    """Of rows S3 itself holds the body against its SHA-256, which this server does not."""
    url = f"s3://bucket/{new_ulid()}"
    s3.fault = lambda method, path: "flip" if method == "PUT" and urlsplit(path).path.endswith(what) else None
    with pytest.raises(BucketError, match=r"does not|malformed|other bytes"):
        push(store, url)
    s3.fault = lambda method, path: None
    assert HEAD not in keys(url)


def test_rows_are_read_back_where_that_is_asked_for(cold: Path, s3: FaultProxy, tmp_path: Path) -> None:
    """One that arrives otherwise is sent again, and one of a push before it that nobody looked at."""
    url, other, flipped = f"s3://bucket/{new_ulid()}", f"s3://bucket/{new_ulid()}", list[str]()

    def fault(method: str, path: str) -> str | None:
        if method == "PUT" and (key := urlsplit(path).path).endswith("/c/0/0/0") and key not in flipped:
            flipped.append(key)
            return "flip"
        return None

    s3.fault = fault
    with pytest.raises(ZeroDivisionError):
        push(cold, url, lambda done, total: 1 // (total - done) and None)  # ends when all blocks are there
    assert len(flipped) > 3
    bucket = from_url(url)
    for key in [key for key in keys(url) if key.endswith(INDEX)]:
        obstore.delete(bucket, [key])  # as if it had ended before
    for place in (url, other):
        push(cold, place, verify=True)
        with open_store(place, tmp_path / place[-26:]) as opened, StoreReader(cold) as local:
            for row in opened.captures():
                layers = sorted({one.layer for one in local.manifest(row.id).rows})
                assert opened.reader.slice(row.id, SITE, layers).values().tobytes() == local.slice(
                    row.id, SITE, layers).values().tobytes()


def test_bodies_carry_their_sha256(store: Path, s3: FaultProxy) -> None:
    push(store, f"s3://bucket/{new_ulid()}")
    assert s3.unsigned == []


def test_a_server_that_is_away_and_credentials_that_are_wrong(store: Path, s3: FaultProxy) -> None:
    s3.fault = lambda method, path: "503"
    with pytest.raises(BucketError, match=r"read s3://bucket/x/head\.json: .*503"):
        push(store, "s3://bucket/x")
    s3.fault = lambda method, path: None
    with pytest.raises(BucketError, match="nosuchbucket"):
        push(store, "s3://nosuchbucket/x")


def test_a_first_push_that_another_outran_by_a_moment(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                      ) -> None:
    """It finds no head, and then one among the objects: that is no stranger's."""
    url, fetch_head = (tmp_path / "bucket").as_uri(), push_module.fetch_head

    def a_moment_before(objects: Objects) -> Any:
        monkeypatch.setattr(push_module, "fetch_head", fetch_head)
        try:
            return fetch_head(objects)
        finally:
            push(store, url)

    monkeypatch.setattr(push_module, "fetch_head", a_moment_before)
    assert push(store, url).generation == 1
