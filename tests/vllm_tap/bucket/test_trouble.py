"""Buckets that lost something, services that heed no conditions, snapshots that others made, processes that fork."""

from __future__ import annotations

import gzip
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from schemas.errors import BucketError, TapError
from schemas.ids import new_ulid
from schemas.objects.layout import HEAD, INDEX, Head, Stored, digest
from tests.support.buckets import Fault, FaultProxy
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import ROOT, SITE
from tests.vllm_tap.bucket.conftest import Sample
from vllm_tap import open_store
from vllm_tap.bucket.push import push


def bucket_of(store: Path, tmp_path: Path) -> tuple[str, Path]:
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    return url, tmp_path / "bucket"


@pytest.mark.parametrize("lost", ["a block", "an index", "rows", "the snapshot"])
def test_what_was_lost_is_sent_again(lost: str, sample: Sample, store: Path, tmp_path: Path) -> None:
    url, bucket = bucket_of(store, tmp_path)
    block = max((bucket / "blocks").iterdir())
    snapshot, = (bucket / "catalog").iterdir()
    before = {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file() and path.name != HEAD}
    match lost:
        case "a block":
            shutil.rmtree(block)
        case "an index":
            (block / INDEX).unlink()
        case "rows":
            max((path for path in block.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size).unlink()
        case "the snapshot":
            snapshot.unlink()
    push(store, url)
    assert {path: path.read_bytes() for path in before} == before
    with open_store(url, cache=tmp_path / "cache") as opened:
        assert opened.reader.slice(sample.captures["long"], SITE, [0]).values().shape[1] > 0


def test_damaged_rows_are_found_and_sent_again_where_that_is_asked_for(store: Path, tmp_path: Path) -> None:
    url, bucket = bucket_of(store, tmp_path)
    files = [path for path in (bucket / "blocks").rglob("*") if path.is_file()]
    large = max(files, key=lambda path: path.stat().st_size)
    right = large.read_bytes()
    large.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    push(store, url, verify=True)
    assert large.read_bytes() == right


def test_a_list_that_was_cut_is_asked_for_again(store: Path, s3: FaultProxy) -> None:
    url, lists = f"s3://bucket/{new_ulid()}", 0

    def fault(method: str, path: str) -> Fault:
        nonlocal lists
        lists += "list-type" in path
        return "cut" if "list-type" in path and lists % 2 else None

    s3.fault = fault
    assert push(store, url).changed and lists > 4


def test_a_service_that_heeds_no_conditions_is_refused(store: Path, s3: FaultProxy) -> None:
    url, faulty = f"s3://bucket/{new_ulid()}", s3
    faulty.fault = lambda method, path: "heedless"
    with pytest.raises(TapError, match="although the condition of the write is not met"):
        push(store, url)
    faulty.fault = lambda method, path: None
    with pytest.raises(BucketError, match=f"no {HEAD} in it"):
        open_store(url)
    assert push(store, url).changed


@pytest.mark.parametrize(("change", "says"), [
    ("CREATE VIEW endless AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x FROM n) SELECT x FROM n",
     "has a view"),
    ("DROP TABLE blocks", "lacks the tables blocks"),
])
def test_a_snapshot_that_is_no_catalog_of_ours_is_refused(change: str, says: str, store: Path, tmp_path: Path) -> None:
    url, bucket = bucket_of(store, tmp_path)
    head = msgspec.json.decode((bucket / HEAD).read_bytes(), type=Head)
    made = tmp_path / "made.sqlite"
    made.write_bytes(gzip.decompress((bucket / head.catalog_key).read_bytes()))
    with closing(sqlite3.connect(made)) as db:
        db.execute(change)
        db.commit()
    data = made.read_bytes()
    packed = gzip.compress(data)
    head = msgspec.structs.replace(head, catalog=Stored(len(data), digest(data)), packed_bytes=len(packed))
    (bucket / head.catalog_key).write_bytes(packed)
    (bucket / HEAD).write_bytes(msgspec.json.encode(head))
    with pytest.raises(BucketError, match=says):
        open_store(url, cache=tmp_path / "cache")


def test_bytes_behind_a_snapshot_are_not_taken(store: Path, tmp_path: Path) -> None:
    url, bucket = bucket_of(store, tmp_path)
    head = msgspec.json.decode((bucket / HEAD).read_bytes(), type=Head)
    snapshot = bucket / head.catalog_key
    for more in (1000, head.catalog.nbytes + (1 << 20)):
        snapshot.write_bytes(snapshot.read_bytes() + bytes(more))
        (bucket / HEAD).write_bytes(msgspec.json.encode(msgspec.structs.replace(
            head, packed_bytes=snapshot.stat().st_size)))
        with pytest.raises(BucketError, match=r"bytes behind its end|a catalog of .* packed"):
            open_store(url, cache=tmp_path / "cache")


def test_a_cache_is_its_owners_alone(store: Path, tmp_path: Path) -> None:
    url, _ = bucket_of(store, tmp_path)
    with open_store(url, cache=tmp_path / "cache"):
        pass
    place, = (tmp_path / "cache").iterdir()
    for folder in (place, place / "chunks", place / "catalogs"):
        folder.chmod(0o777)
    with open_store(url, cache=tmp_path / "cache"):
        pass
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (place, place / "chunks", place / "catalogs")} == {0o700}
    shutil.rmtree(place / "chunks")
    (place / "chunks").symlink_to(tmp_path)
    with pytest.raises(TapError, match="another user's, or no folder"):
        open_store(url, cache=tmp_path / "cache")


def test_a_forked_process_is_told_instead_of_waiting_for_ever(store: Path, tmp_path: Path) -> None:
    url, _ = bucket_of(store, tmp_path)
    program = (f"import os, vllm_tap\nopened = vllm_tap.open_store({url!r}, cache={str(tmp_path / 'cache')!r})\n"
               "if not os.fork():\n    try:\n        opened.refresh()\n    except Exception as error:\n"
               "        print(error, flush=True)\n    os._exit(0)\nos.wait()\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert "used before this process was forked" in done.stdout
    assert urlsplit(url).scheme == "file"
