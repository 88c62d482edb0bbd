"""Rows for training from a bucket: those of the folder that was pushed, in its order, also when the head moves on."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from schemas.errors import CorruptError, NotFoundError, StoreError
from schemas.objects.evicted import evicted_numbers
from tests.support.store_helpers import SITE
from tests.vllm_tap.bucket.conftest import Sample, erase, grow
from tests.vllm_tap.bucket.test_eviction import blocks_of
from vllm_tap.bucket.eviction import recall_all
from vllm_tap.bucket.push import push
from vllm_tap.loader.dataset import RowDataset, rows
from vllm_tap.store import open_store
from writer_service.tools.compaction import compact
from writer_service.upkeep.usage import Usage


def batches(data: RowDataset, **loader: Any) -> list[dict[str, torch.Tensor]]:
    """All of an epoch, kept."""
    return [{name: value.clone() for name, value in batch.items()}
            for batch in (DataLoader(data, batch_size=None, **loader) if loader else data)]


def assert_equal(got: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> None:
    assert len(got) == len(wanted) > 1
    for one, other in zip(got, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def assert_units(data: RowDataset) -> None:
    """Each is of one segment, and of the same 128 rows of a cold block, which are chunks of their own."""
    index = data.index
    segment, offset = index.frames[index.frame[0]].T
    assert data.units[0] == 0 and data.units[-1] == data.rows
    for begin, end in pairwise(data.units.tolist()):
        assert 0 < end - begin <= 128 and len({*segment[begin:end].tolist()}) == 1
        if index.segments[int(segment[begin])].cold:
            assert len({*((offset + index.row[0])[begin:end] // 128).tolist()}) == 1


def of(store: object, sample: Sample, **more: Any) -> RowDataset:
    """Two layers of the captures that are stored alike."""
    names = {sample.captures[name] for name in ("long", "other")}
    return rows(store, SITE, [2, 0], where=lambda row: row.id in names, batch=40, **more)


@pytest.mark.parametrize("how", ["sealed", "cold", "compressed"])
def test_an_epoch_is_that_of_the_folder(sample: Sample, store: Path, url: str, tmp_path: Path, how: str) -> None:
    if how != "sealed":
        compact(store, compress=how == "compressed")
    push(store, url)
    local = of(store, sample, verify=True)
    with open_store(url, tmp_path / "cache") as bucket:
        remote = of(bucket, sample)
    assert (remote.captures, remote.rows, remote.names) == (local.captures, local.rows, local.names)
    assert_equal(batches(remote), batches(local))
    assert_units(local)
    state = local.state_after(2, 1)
    for data in (local, remote):
        data.set_epoch(1)
        data.load_state_dict(state)
    assert_equal(batches(remote), batches(local))


@pytest.mark.parametrize("how", ["sealed", "cold", "compressed"])
def test_evicted_rows_are_those_that_were_on_the_disk(sample: Sample, store: Path, tmp_path: Path, how: str) -> None:
    """Some of them, then all, then none: the state of an epoch holds throughout."""
    url = (tmp_path / "bucket").as_uri()
    if how != "sealed":
        compact(store, compress=how == "compressed")
    with open_store(store, tmp_path / "cache", 1 << 24) as opened:
        data = of(opened, sample)
    wanted, state = batches(data), data.state_after(1, 1)
    data.set_epoch(1)
    other = batches(data)
    for step in range(3):
        if step < 2:
            push(store, url, local_bytes=0 if step else max(1, Usage(store).measure() - 1))
            gone = len(evicted_numbers(store))
            assert gone == blocks_of(store) if step else gone > 0
        else:
            recall_all(store)
        for one in (data, of(store, sample, verify=True)):
            one.set_epoch(0)
            assert_equal(batches(one), wanted)
            one.load_state_dict(state)
            assert_equal(batches(one), wanted[1:])
            one.set_epoch(1)
            assert_equal(batches(one), other)
    assert any((tmp_path / "cache").rglob("evicted/*"))


def test_rows_that_go_and_come_back_in_an_epoch(sample: Sample, store: Path, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two windows, block after block; and a capture that is deleted ends it by name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    data = rows(store, SITE, 1, codec="raw16", batch=8, window=8)
    wanted = batches(data)
    assert len(wanted) > 4
    got = []
    for number, batch in enumerate(data):
        got.append({name: value.clone() for name, value in batch.items()})
        if number % 4 == 0:
            push(store, url, local_bytes=Usage(store).measure() - 1)
        elif number % 4 == 2:
            recall_all(store)
    assert_equal(got, wanted)
    push(store, url, local_bytes=0)
    epoch = iter(data)
    next(epoch)
    gone = sample.captures["plain"]
    assert gone in data.captures
    erase(store, gone)
    with pytest.raises(NotFoundError, match=gone):
        list(epoch)


def test_workers_read_evicted_rows(sample: Sample, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                   ) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chosen = {"layer": [2], "codec": "raw16", "batch": 30}
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    wanted = batches(rows(store, SITE, **chosen), **spawned)
    push(store, (tmp_path / "bucket").as_uri(), local_bytes=0)
    assert_equal(batches(rows(store, SITE, **chosen), **spawned), wanted)


def test_evicted_rows_that_the_bucket_lost_or_damaged_are_told(sample: Sample, store: Path, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compact(store)
    push(store, (tmp_path / "bucket").as_uri(), local_bytes=0)
    data = of(store, sample)
    for path in (tmp_path / "bucket").rglob("c/0/0/0"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    with pytest.raises(CorruptError, match="does not match its checksum"):
        batches(data)
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "bucket" / "blocks")
    with pytest.raises(StoreError, match="evicted from this disk"):
        batches(data)


def test_workers_open_the_bucket_for_themselves(sample: Sample, store: Path, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    spawned = {"num_workers": 2, "multiprocessing_context": "spawn"}
    chosen = {"layer": [2], "codec": "raw16", "batch": 30}
    assert_equal(batches(rows(url, SITE, **chosen), **spawned), batches(rows(store, SITE, **chosen), **spawned))


def test_a_head_that_moves_on_moves_no_row(sample: Sample, store: Path, tmp_path: Path) -> None:
    """Blocks of other numbers, and others of the same ones: rows are looked up by capture and position."""
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    data = of(url, sample)
    wanted = batches(data)
    epoch = iter(data)
    first = {name: value.clone() for name, value in next(epoch).items()}
    grow(store)
    erase(store, sample.captures["few"])
    compact(store)
    push(store, url)
    assert_equal([first, *({name: value.clone() for name, value in one.items()} for one in epoch)], wanted)
    assert_equal(batches(data), wanted)  # of the head that there is now
    erase(store, sample.captures["other"])
    push(store, url)
    with pytest.raises(NotFoundError, match=f"{sample.captures['other']}"):
        batches(data)


def test_damaged_rows_are_told(sample: Sample, store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    compact(store)
    push(store, url)
    data = of(open_store(url, tmp_path / "cache"), sample)
    for path in (tmp_path / "bucket").rglob("c/0/0/0"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    with pytest.raises(CorruptError, match="does not match its checksum"):
        batches(data)
