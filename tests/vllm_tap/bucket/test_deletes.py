"""A capture that is deleted in the store leaves the bucket with the next push, and caches with the next opening."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import BucketError, NotFoundError
from schemas.ids import new_ulid
from schemas.objects.objects import Objects
from tests.support.buckets import FaultProxy
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import SITE
from tests.vllm_tap.bucket.conftest import Sample, erase, grow
from tests.vllm_tap.bucket.test_fencing import assert_equal, copy, head_of
from tests.vllm_tap.bucket.test_push import keys
from vllm_tap import open_store
from vllm_tap.bucket.check import check
from vllm_tap.bucket.push import push

VERSIONED = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
TO_S3 = {"Content-Type": "application/xml", "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/"
         "aws4_request, SignedHeaders=host, Signature=x"}


def test_its_bytes_leave_the_bucket_and_the_caches(sample: Sample, store: Path, tmp_path: Path, url: str) -> None:
    few, cache = sample.captures["few"], tmp_path / "cache"
    push(store, url)
    first = keys(url)
    opened = open_store(url, cache)
    token_rows = opened.reader.slice(few, SITE, [1]).values().tobytes()
    assert token_rows
    pages = {path for path in cache.rglob("*") if path.is_file()}
    erase(store, few)
    done = push(store, url)
    assert done.changed and done.erased.objects > 0 and done.erased.nbytes > 0 and not done.is_versioned
    now = keys(url)
    assert head_of(url).catalog_key in now and len([key for key in now if key.startswith("catalog/")]) == 1
    assert not check(url, deep=True).orphans and not check(url, deep=True).bad
    assert len(set(first) - set(now)) == done.erased.objects
    with open_store(url, cache) as later:
        assert few not in {row.id for row in later.captures()}
        with pytest.raises(NotFoundError):
            later.reader.slice(few, SITE, [1])
    left = {path for path in cache.rglob("*") if path.is_file()}
    assert pages - left and not [path for path in pages & left if path.suffix == ".sqlite"]
    assert opened.refresh() is True
    opened.close()
    assert_equal(url, store, cache, 6)
    again = push(store, url)
    assert not again.changed and not again.erased.objects


def test_what_a_push_that_was_cut_off_had_sent_leaves_too(sample: Sample, store: Path, tmp_path: Path) -> None:
    """Of a capture that no head ever named."""
    url = (tmp_path / "bucket").as_uri()
    with pytest.raises(ZeroDivisionError):
        push(store, url, lambda done, total: 1 // (total - done) and None)
    before = keys(url)
    erase(store, sample.captures["few"])
    assert push(store, url).erased.objects > 0
    assert set(before) - set(keys(url)) and not check(url).orphans


def test_a_reader_of_an_earlier_head_whose_rows_are_gone_is_told(sample: Sample, store: Path, tmp_path: Path) -> None:
    """It has the index in its hands, and asks for rows."""
    url, plain = (tmp_path / "bucket").as_uri(), sample.captures["plain"]
    push(store, url)
    with open_store(url, tmp_path / "cache") as opened:
        opened.reader.slice(plain, SITE, [1])
        erase(store, plain)
        push(store, url)
        for page in (tmp_path / "cache").glob("*/chunks/*"):
            page.unlink()
        with pytest.raises(BucketError, match=r"is not there \(.*refresh\(\) the store"):
            opened.reader.slice(plain, SITE, [1])
        assert opened.refresh() is True


def test_what_was_not_deleted_is_by_the_next_push(sample: Sample, store: Path, url: str,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    push(store, url)

    def fail(self: Objects, gone: list[str]) -> Any:
        raise BucketError("delete", gone[0], "no")

    erase(store, sample.captures["few"])
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "delete", fail)
        with pytest.raises(BucketError, match="delete"):
            push(store, url)
    assert check(url).orphans and head_of(url).generation == 2  # hidden all the same
    done = push(store, url)
    assert not done.changed and done.erased.objects > 0 and not check(url, deep=True).orphans


def test_a_retired_head_that_still_has_it_is_told(sample: Sample, store: Path, tmp_path: Path) -> None:
    url, few = (tmp_path / "bucket").as_uri(), sample.captures["few"]
    push(store, url)
    earlier = copy(store, "earlier")
    grow(store)
    push(store, url)
    retired = push(earlier, url, take_over=True).retired
    erase(earlier, few)
    done = push(earlier, url)
    assert done.erased.retired == [retired]
    assert not check(url, deep=True).bad
    assert_equal(f"{url}#{retired}", store, tmp_path / "cache", 8)


def test_a_bucket_that_keeps_versions_is_told(sample: Sample, store: Path, s3: FaultProxy) -> None:
    bucket = f"versions-{new_ulid().lower()}"
    for path, body in ((bucket, b""), (f"{bucket}?versioning", VERSIONED)):
        request = urllib.request.Request(f"http://127.0.0.1:{s3.upstream}/{path}", body, TO_S3, method="PUT")
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()
    url = f"s3://{bucket}/prefix"
    push(store, url)
    assert check(url).is_versioned
    erase(store, sample.captures["few"])
    done = push(store, url)
    assert done.is_versioned and done.erased.objects > 0
