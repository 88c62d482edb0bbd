"""A store read from a bucket: the rows of the local store bit for bit, few requests, none for what the cache has."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from schemas import limits
from schemas.bucket.reader import BucketReader
from schemas.errors import ArgumentError, BucketError, CorruptError, NotFoundError, StoreError, TapError
from schemas.ids import new_ulid
from schemas.manifest import FINAL
from schemas.objects import block_objects
from schemas.objects.layout import HEAD
from schemas.objects.objects import Objects
from schemas.read.reader import StoreReader
from schemas.read.row_reader import RowReader
from tests.support.buckets import FaultProxy
from tests.support.pages.readme import blocks
from tests.support.store_helpers import SITE, Sender, WriterProcess, engine_info, is_erased, until
from tests.vllm_tap.bucket.conftest import Sample
from tests.writer_service.tools.test_compaction import WIDTH
from tests.writer_service.tools.test_fsck import edit, flip
from vllm_tap import open_store
from vllm_tap.bucket.push import push
from vllm_tap.store import folder_of
from writer_service.config import Config
from writer_service.tools.compaction import compact

LAYERS = [0, 1, 2, 3]


def answers(reader: RowReader) -> dict[str, Any]:
    """All that can be asked of captures that are final."""
    found: dict[str, Any] = {"rows": [msgspec.to_builtins(row) for row in reader.captures() if row.status in FINAL],
                             "engine": reader.engine()}
    for row in reader.captures():
        if row.status not in FINAL:
            continue
        manifest = reader.manifest(row.id)
        layers = sorted({one.layer for one in manifest.rows})
        found[row.id] = (manifest, reader.progress(row.id), reader.samples(row.id), reader.probes(row.id),
                         reader.owner_bytes(""), reader.drops(row.id, SITE, -1))
        for rejected in (False, True):
            for start, stop in ((0, None), (3, 70), (64, 65)):
                got = reader.slice(row.id, SITE, layers, start, stop, rejected=rejected)
                found[f"{row.id} {rejected} {start}"] = (
                    got.positions.tolist(), got.token_ids.tolist(), got.flags.tolist(), got.missing, got.clipped,
                    {name: array.tobytes() for name, array in got.pieces.items()}, got.values().tobytes())
    return found


def fill(store: Path, captures: list[str], rows: int, codec: str) -> None:
    """A block of captures of 1,024 numbers a row, sealed."""
    with WriterProcess(store, "--seal-idle-s", "0.1") as writer:
        with Sender(writer.endpoint, engine=engine_info(1024)) as engine:
            for capture in captures:
                engine.open(capture, prompt_len=rows, codec=codec)
                engine.frame([(capture, 1, range(rows))], width=1024, codec=codec)
                engine.finish(capture, end=rows)
            engine.wait()
            assert until(lambda: list((store / "blocks").glob("w0-*.zarr")))
        writer.stop()


def cache_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("*/chunks/*"))


@pytest.mark.parametrize("how", ["sealed", "cold", "compressed"])
def test_rows_are_those_of_the_local_store(sample: Sample, store: Path, url: str, tmp_path: Path, how: str) -> None:
    if how != "sealed":
        compact(store, compress=how == "compressed")
    push(store, url)
    with StoreReader(store) as local, open_store(url, tmp_path / "cache") as bucket:
        assert answers(bucket.reader) == answers(local)
        some = [(sample.captures[name], position) for position in (60, 3, 17, 3) for name in ("long", "other")]
        assert np.array_equal(bucket.rows_at(some, SITE, [2, 0]), local.rows_at(some, SITE, [2, 0]).values())
        with pytest.raises(NotFoundError):
            bucket["01JZZZZZZZZZZZZZZZZZZZZZZ9"]
        with pytest.raises(NotFoundError):
            bucket[sample.captures["late"]]
        assert bucket.reader.is_deleted(sample.captures["gone"])
        assert np.array_equal(bucket[sample.captures["long"]][SITE, 2], local.slice(
            sample.captures["long"], SITE, [2]).values()[0])
        asked = bucket.reader.requests
        make, arguments = bucket.__reduce__()  # as a worker of dask gets it
        again = make(*arguments)
        assert np.array_equal(again[sample.captures["long"]][SITE, 2], bucket[sample.captures["long"]][SITE, 2])
        assert again.reader.requests == 1 and bucket.reader.requests == asked  # the head; the rest is in the cache
        again.close()


@pytest.mark.parametrize("how", ["sealed", "cold"])
def test_many_small_requests_give_the_same_rows(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
                                                ) -> None:
    """Side arrays by ranges, pieces that lie in two chunks, a few chunks at a time."""
    monkeypatch.setattr(limits, "bucket_index_sides_bytes", 0)
    monkeypatch.setattr(limits, "bucket_batch_bytes", 3000)
    monkeypatch.setattr(limits, "bucket_request_bytes_max", 2000)
    monkeypatch.setattr(block_objects, "CHUNK", 1000)
    if how == "cold":
        compact(store)
    push(store, (tmp_path / "bucket").as_uri())
    with StoreReader(store) as local, open_store((tmp_path / "bucket").as_uri(), tmp_path / "cache") as bucket:
        assert answers(bucket.reader) == answers(local)


@pytest.mark.parametrize("codec", ["int8b64", "raw16"])
def test_a_cold_slice_takes_few_requests_and_a_warm_one_none(tmp_path: Path, s3: FaultProxy, codec: str) -> None:
    """512 tokens of one layer of a compacted block: at most 4 requests, as the server counts them."""
    store, captures, url = tmp_path / "store", [new_ulid() for _ in range(3)], f"s3://bucket/{new_ulid()}"
    fill(store, captures, 700, codec)
    assert compact(store).cold == 1
    push(store, url)
    with StoreReader(store) as local:
        wanted = local.slice(captures[1], SITE, [2], 100, 612).values()
    with open_store(url, tmp_path / "cache") as bucket:
        s3.seen.clear()
        before = bucket.reader.requests
        bucket[captures[1]].manifest()
        assert not s3.seen
        found = bucket.reader.slice(captures[1], SITE, [2], 100, 612).values()
        assert found.tobytes() == wanted.tobytes()
        assert 0 < s3.reads() == bucket.reader.requests - before <= 4
        s3.seen.clear()
        assert bucket.reader.slice(captures[1], SITE, [2], 100, 612).values().tobytes() == wanted.tobytes()
        assert not s3.seen
    with open_store(url, tmp_path / "cache") as bucket:
        s3.seen.clear()
        assert bucket.reader.slice(captures[1], SITE, [2], 100, 612).values().tobytes() == wanted.tobytes()
        assert not s3.seen


def test_the_cache_is_bounded_and_never_believed(cold: Path, sample: Sample, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "bucket_cache_bytes_min", 0)
    monkeypatch.setattr(block_objects, "CHUNK", 4096)
    url, cache = (tmp_path / "bucket").as_uri(), tmp_path / "cache"
    push(cold, url)
    with StoreReader(cold) as local:
        wanted = answers(local)
    with BucketReader(url, cache, 150_000) as reader:
        assert answers(reader) == wanted
        assert 0 < cache_bytes(cache) <= 150_000
        assert (cache / reader.head.store).stat().st_mode & 0o777 == 0o700
    with BucketReader(url, cache, 10_000_000) as reader:
        assert answers(reader) == wanted
        kept = list(cache.glob("*/chunks/*"))
        assert len(kept) > 20
        for number, path in enumerate(kept):  # every file of it damaged, cut, or gone
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data if number % 3 == 0 else data[:-1] if number % 3 == 1 else b"")
        assert answers(reader) == wanted
    for path in cache.glob("*/catalogs/*.sqlite"):
        edit(path, flip(5000))
    with BucketReader(url, cache, 10_000_000) as reader:
        assert answers(reader) == wanted
    with BucketReader(url, tmp_path / "none", 0) as reader:
        assert answers(reader) == wanted
        assert cache_bytes(tmp_path / "none") == 0


def test_what_is_damaged_in_the_bucket_is_named(cold: Path, sample: Sample, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    push(cold, bucket.as_uri())
    rows = max(bucket.rglob("c/0/0/0"), key=lambda path: path.stat().st_size)
    whole = rows.read_bytes()
    rows.write_bytes(bytes(byte ^ 1 for byte in whole))
    long = sample.captures["long"]
    with open_store(bucket.as_uri(), tmp_path / "a") as store, pytest.raises(CorruptError, match=r"does not match"):
        store.reader.slice(long, SITE, LAYERS)
    rows.write_bytes(whole[:100])
    with open_store(bucket.as_uri(), tmp_path / "b") as store, pytest.raises(TapError, match=r"were expected|bytes"):
        store.reader.slice(long, SITE, LAYERS)
    rows.write_bytes(whole)
    for name in ("index.zip", "*.gz"):
        for path in bucket.rglob(name):
            edit(path, flip(path.stat().st_size // 2))
        with pytest.raises(BucketError, match="does not match its checksum"):
            open_store(bucket.as_uri(), tmp_path / name[0]).reader.slice(long, SITE, LAYERS)
    (bucket / HEAD).write_text('{"format": "else", "version": 1}')
    with pytest.raises(BucketError, match="no head of ours"):
        open_store(bucket.as_uri(), tmp_path / "c")
    (bucket / HEAD).unlink()
    with pytest.raises(BucketError, match=r"no head\.json in it \(vllm-tap push STORE URL"):
        open_store(bucket.as_uri(), tmp_path / "c")


def test_a_newer_head_is_seen_on_request(store: Path, sample: Sample, url: str, tmp_path: Path) -> None:
    push(store, url)
    with open_store(url, tmp_path / "cache") as bucket, open_store(url, tmp_path / "cache") as other:
        before = answers(bucket.reader)
        assert bucket.refresh() is False
        compact(store)
        capture = new_ulid()
        with WriterProcess(store, "--seal-idle-s", "0.1", "--keep-s", "0.1") as writer:
            with Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
                engine.delete(sample.captures["few"])
                engine.open(capture, prompt_len=8)
                engine.frame([(capture, 11, range(8))], width=WIDTH)
                engine.finish(capture, end=8)
                engine.wait()
                with StoreReader(store) as reader:
                    assert until(lambda: is_erased(reader, sample.captures["few"])
                                 and not list(store.rglob("[0-9]*.open")))
            writer.stop()
        push(store, url)
        assert answers(bucket.reader) == before  # until it is asked for
        assert bucket.refresh() is True
        with StoreReader(store) as local:
            after = answers(local)
        assert answers(bucket.reader) == after and capture in after and sample.captures["few"] not in after
        with pytest.raises(BucketError, match=r"is not there \(.*refresh\(\) the store"):  # its rows were deleted
            answers(other.reader)
        assert other.refresh() is True and answers(other.reader) == after
        assert len(list((tmp_path / "cache").glob("*/catalogs/*.sqlite"))) == 1


def test_threads_read_while_another_looks_for_a_newer_head(store: Path, sample: Sample, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    long, wrong = sample.captures["long"], list[object]()
    with open_store(url, tmp_path / "cache") as bucket:
        wanted = bucket.reader.slice(long, SITE, LAYERS).values()
        compact(store)
        push(store, url)
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                try:
                    if not np.array_equal(bucket.reader.slice(long, SITE, LAYERS).values(), wanted):
                        wrong.append("rows")
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert bucket.refresh() is True
        assert np.array_equal(bucket.reader.slice(long, SITE, LAYERS).values(), wanted)
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_network_that_fails_gives_the_same_rows(cold: Path, s3: FaultProxy, tmp_path: Path) -> None:
    url, count = f"s3://bucket/{new_ulid()}", 0
    push(cold, url)

    def fault(method: str, path: str) -> str | None:
        nonlocal count
        count += 1
        return "503" if count % 4 == 0 else "cut" if count % 7 == 0 else None

    s3.fault = fault
    with StoreReader(cold) as local, open_store(url, tmp_path / "cache") as bucket:
        assert answers(bucket.reader) == answers(local)
    s3.fault = lambda method, path: "503"
    with pytest.raises(BucketError, match="503"):
        open_store(url, tmp_path / "cache")


def test_what_cannot_be_done_is_refused_by_name(cold: Path, sample: Sample, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(cold, url)
    with open_store(url, tmp_path / "cache") as bucket:
        for refused in (bucket.reader.appended, lambda: bucket.reader.frames("x", SITE, 0)):
            with pytest.raises(TapError, match="following captures that are being made is not supported from a bucket"):
                refused()
    with pytest.raises(StoreError, match=r"open store file://.*with a folder, not with a bucket"):
        folder_of(url)
    with pytest.raises(TapError, match="--store = 's3://b/p': this is done with a folder"):
        Config(Path("s3://b/p"), "ipc:///tmp/x")
    with pytest.raises(StoreError, match="open store s3://b/p: this is done with a folder"):
        StoreReader(Path("s3://b/p"))
    with pytest.raises(ArgumentError, match="cache_bytes = 5: at least"):
        open_store(url, cache_bytes=5)
    with pytest.raises(ArgumentError, match="cache_bytes = 5: at least"):
        open_store(cold, cache_bytes=5)
    with pytest.raises(BucketError, match="nosuch"):
        open_store("nosuch://bucket/prefix")
    with pytest.raises(TapError, match="cache = "):
        open_store(url, "/proc/nothing")


def test_the_page_about_buckets(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks of Python as they stand, but for the URL."""
    store = tmp_path / "store"
    fill(store, [new_ulid()], 8, "int8b64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    push(store, url)
    space: dict[str, Any] = {}
    for block in blocks("python", "docs/howto/buckets.md"):
        exec(compile(block.replace("s3://bucket/prefix", url), "page", "exec"), space)  # noqa: S102
    space["store"].close()
    assert space["found"].values.shape[0] == 1 and space["some"].shape == (2, 1024)
    assert list((tmp_path / "caches" / "vllm-tap").iterdir())


def test_ranges_are_coalesced_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = limits.bucket_chunk_bytes
    runs = list(block_objects._runs([0, 1, 2, 5, 9, *range(100, 140)], block_objects._GAP_CHUNKS))
    assert runs == [(0, 5), (9, 9), (100, 131), (132, 139)]
    assert all((last - first + 1) * chunk <= limits.bucket_request_bytes_max for first, last in runs)
    assert list(block_objects._runs([], 0)) == [] and list(block_objects._runs([1, 3, 4], 0)) == [(1, 1), (3, 4)]


def test_without_obstore_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TapError, match=r"needs obstore: pip install 'vllm-tap\[buckets\]'"):
        Objects("s3://bucket/prefix")
