"""What a shuffled epoch fetches of rows that are larger than the cache, counted where the server answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from schemas.ids import new_ulid
from tests.support.buckets import FaultProxy
from tests.support.store_helpers import SITE, Sender, WriterProcess, engine_info, until
from tests.vllm_tap.bucket.test_eviction import blocks_of
from tests.vllm_tap.bucket.test_loader import assert_equal, batches
from vllm_tap.bucket.push import push
from vllm_tap.loader.dataset import rows
from vllm_tap.store import open_store
from writer_service.tools.compaction import compact

WIDTH, CAPTURES, TOKENS = 1024, 48, 500
USED = CAPTURES * TOKENS * (WIDTH + 64)  # int8b64
CACHE_BYTES = 16 << 20


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 25 MB in blocks of 20; prompts of which none ends with a chunk."""
    store = tmp_path_factory.mktemp("wide") / "store"
    with WriterProcess(store, "--seal-idle-s", "0.3", "--segment-bytes", "20000000") as writer:
        with Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
            for number in range(CAPTURES):
                capture = new_ulid()
                engine.open(capture, TOKENS, {SITE: [0]})
                engine.frame([(capture, number, range(TOKENS))], layers=[0], width=WIDTH)
                engine.finish(capture, end=TOKENS)
                engine.wait()
            assert until(lambda: not list((store / "journal").glob("*")) or blocks_of(store) >= 2)
        writer.stop()
    return store


@pytest.mark.parametrize("how", ["cold", *(pytest.param(how, marks=pytest.mark.soak) for how in ("sealed", "evicted"))])
def test_an_epoch_fetches_hardly_more_than_its_rows(how: str, wide: Path, tmp_path: Path, s3: FaultProxy) -> None:
    store = Path(shutil.copytree(wide, tmp_path / "store"))
    if how == "cold":
        compact(store)
    url = f"s3://bucket/{new_ulid()}"
    chosen = {"layer": 0, "batch": 512, "window": 2048}
    local = rows(store, SITE, **chosen)
    wanted = [batches(local)]
    local.set_epoch(1)
    wanted.append(batches(local))
    push(store, url, local_bytes=0 if how == "evicted" else None)
    assert USED > 1.4 * CACHE_BYTES
    with open_store(store if how == "evicted" else url, tmp_path / "cache", CACHE_BYTES) as opened:
        data = rows(opened, SITE, **chosen)
    for epoch in range(2):
        before = s3.got
        data.set_epoch(epoch)
        assert_equal(batches(data), wanted[epoch])
        assert s3.got - before <= 1.1 * USED, (epoch, (s3.got - before) / USED)
    held = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*-*"))
    assert CACHE_BYTES // 2 < held <= CACHE_BYTES


def test_what_the_cache_holds_is_fetched_once(wide: Path, tmp_path: Path, s3: FaultProxy) -> None:
    url, store = f"s3://bucket/{new_ulid()}", Path(shutil.copytree(wide, tmp_path / "store"))
    compact(store)
    push(store, url)
    with open_store(url, tmp_path / "cache") as opened:
        data = rows(opened, SITE, 0, batch=512, window=2048)
    before = s3.got
    first = batches(data)
    assert s3.got - before <= 1.1 * USED
    before = s3.got
    assert_equal(batches(data), first)
    assert s3.got - before < 1 << 16  # the head
