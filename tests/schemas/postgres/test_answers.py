"""Every answer of a reader is the same from SQLite's snapshot and from Postgres."""

from __future__ import annotations

from pathlib import Path

from schemas.bucket.reader import BucketReader
from schemas.read.reader import StoreReader
from tests.vllm_tap.bucket.conftest import Sample
from tests.vllm_tap.bucket.test_open import answers
from vllm_tap.bucket.push import push


def test_rows_are_those_of_the_local_store(sample: Sample, store: Path, url: str, tmp_path: Path, catalog: str) -> None:
    done = push(store, url, catalog=catalog)
    assert done.catalog is not None and done.catalog.whole
    with StoreReader(store) as local, BucketReader(url, tmp_path / "a", catalog=catalog) as reader:
        assert answers(reader) == answers(local)
        assert not list((tmp_path / "a").rglob("*.sqlite"))
