"""A capture as Zarr from a store: every key against the reader, and what no shape or size may break."""

from __future__ import annotations

import asyncio
import copy
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import dask
import numpy as np
import pytest
import xarray
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from schemas import codecs, limits
from schemas.errors import NotFoundError
from schemas.ids import new_ulid
from schemas.manifest import FINAL, Missing
from schemas.read.reader import StoreReader
from schemas.zarr_view.arrays import chunk_of
from schemas.zarr_view.token_axis import TokenAxis, inside
from schemas.zarr_view.view import CaptureView, NotFinalError
from tests.support.golden_store import GOLDEN
from tests.support.store_helpers import SITE, Sender, WriterProcess, until
from vllm_tap import Store, open_store


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sender, Store]]:
    """An engine that sends, and the store that it sends to."""
    with WriterProcess(tmp_path_factory.mktemp("view") / "store") as writer:
        with Sender(writer.endpoint) as engine, open_store(writer.store) as store:
            yield engine, store
        writer.stop()


def final(store: Store, capture: str) -> str:
    assert until(lambda: store[capture].status in FINAL)
    return capture


def check(store: Store, capture: str) -> None:
    """Every site of the view against slices of the reader, a layer at a time."""
    view, tree = store[capture], xarray.open_datatree(store[capture].zarr(), engine="zarr", chunks=None)
    manifest = view.manifest()
    assert set(tree.children) == set(view.sites)
    for site, layers in view.sites.items():
        found = tree[site].load()
        positions = found["position"].values
        assert found["layer"].values.tolist() == layers
        for number, layer in enumerate(layers):
            rows, told = view.slice(site, layer, allow_missing=True), next(
                row for row in manifest.rows if (row.site, row.layer) == (site, layer))
            assert told.expected == len(positions)
            there = found["present"].values[:, number]
            assert positions[there].tolist() == rows.positions.tolist()
            assert np.array_equal(~there, inside(positions, told.missing))
            values = found["rows"].values[:, number]
            assert np.array_equal(values[there].view(np.uint32), rows.values[0].view(np.uint32))
            assert np.isnan(values[~there]).all()
            told_ids = manifest.prompt_token_ids + manifest.output_token_ids  # the played engine's rows have others
            assert found["token_id"].values[there].tolist() == [
                told_ids[position] if position < len(told_ids) else token
                for position, token in zip(rows.positions.tolist(), rows.token_ids.tolist(), strict=True)]


@pytest.mark.parametrize("codec", ["raw", "raw16", "int8b64", "fp8row", "nf4b64", "full8", "rp8:k=32,seed=7"])
def test_every_codec_reads_as_the_reader_decodes_it(line: tuple[Sender, Store], codec: str) -> None:
    engine, store = line
    capture, identity = new_ulid(), codecs.parse_codec(codec).identity
    engine.open(capture, prompt_len=8, codec=identity)
    engine.frame([(capture, 0, range(8))], codec=identity)
    engine.finish(capture, end=8)
    engine.wait()
    check(store, final(store, capture))


def test_layers_that_lack_other_rows_each(line: tuple[Sender, Store]) -> None:
    engine, store = line
    capture = new_ulid()
    engine.open(capture, prompt_len=8)
    engine.frame([(capture, 0, range(5))])
    engine.frame([(capture, 0, range(5, 8))], layers=[1, 3])
    engine.dropped(capture, 2, 4, layers=[3])
    engine.finish(capture, end=10, output=3)
    engine.wait()
    check(store, final(store, capture))
    present = xarray.open_zarr(store[capture].zarr(), group=SITE, chunks=None)["present"].values
    assert present.sum(0).tolist() == [5, 8, 5, 6]


def test_only_what_was_asked_for_is_on_the_axis(line: tuple[Sender, Store]) -> None:
    engine, store = line
    capture = new_ulid()
    engine.open(capture, prompt_len=8, positions=[(1, 3), (6, 7), (9, 30)], layers={SITE: [0, 2]})
    engine.frame([(capture, 0, [1, 2, 6])], layers=[0, 2])
    engine.frame([(capture, 0, [9, 10])], layers=[0, 2])
    engine.finish(capture, end=11, output=4)
    engine.wait()
    check(store, final(store, capture))
    found = xarray.open_zarr(store[capture].zarr(), group=SITE, chunks=None)
    assert found["position"].values.tolist() == [1, 2, 6, 9, 10]
    assert found["token_id"].values.tolist() == [1, 2, 6, 1001, 1002]


def test_a_capture_without_any_row(line: tuple[Sender, Store]) -> None:
    engine, store = line
    capture = new_ulid()
    engine.open(capture, prompt_len=8, positions=[(20, 30)])
    engine.finish(capture, end=8)
    engine.wait()
    group = zarr.open_group(store[final(store, capture)].zarr(), mode="r")
    assert group[f"{SITE}/rows"].shape == (0, 4, 64) and group[f"{SITE}/rows"][:].size == 0
    check(store, capture)


def test_token_ids_of_an_engine_that_was_lost_are_those_of_its_rows(tmp_path: Path) -> None:
    capture = new_ulid()
    with WriterProcess(tmp_path / "store") as writer:
        with Sender(writer.endpoint) as engine:
            engine.open(capture, prompt_len=8)
            engine.frame([(capture, 0, range(8))])
            engine.frame([(capture, 0, [8, 9])], layers=[1])
            engine.frame([(capture, 0, [11])], layers=[3])
            engine.wait()
            engine.bye()
            with open_store(writer.store) as store:
                check(store, final(store, capture))
                found = xarray.open_zarr(store[capture].zarr(), group=SITE, chunks=None)["token_id"].values.tolist()
                assert found == [*range(8), 5008, 5009, -1, 5011]
        writer.stop()


def test_a_capture_that_claims_billions_of_tokens_takes_no_more_than_a_chunk(line: tuple[Sender, Store]) -> None:
    engine, store = line
    capture, end = new_ulid(), 2_000_000_000
    engine.open(capture, prompt_len=8)
    engine.frame([(capture, 0, range(8))])
    engine.finish(capture, end=end)
    engine.wait()
    final(store, capture)
    tracemalloc.start()
    group = zarr.open_group(store[capture].zarr(), mode="r")
    rows, present = group[f"{SITE}/rows"], group[f"{SITE}/present"]
    assert rows.shape == (end, 4, 64) and rows.nchunks == 4 * -(-end // rows.chunks[0])
    assert np.isnan(rows[end - 1, 3]).all() and not np.isnan(rows[7, 3]).any()
    assert not present[end - 1].any() and group[f"{SITE}/position"][end - 1] == end - 1
    assert group[f"{SITE}/token_id"][end - 1] == -1
    assert tracemalloc.get_traced_memory()[1] < 8 * limits.zarr_chunk_bytes_target
    tracemalloc.stop()


def test_no_chunk_is_larger_than_its_bound(line: tuple[Sender, Store]) -> None:
    """Of a capture of as many layers as there may be, too."""
    engine, store = line
    capture, layers = new_ulid(), list(range(limits.layers_max))
    engine.open(capture, prompt_len=8, layers={SITE: layers})
    engine.finish(capture, end=10**6)
    engine.wait()
    group = zarr.open_group(store[final(store, capture)].zarr(), mode="r")
    for name, array in group[SITE].arrays():
        assert np.prod(array.chunks) * array.dtype.itemsize <= limits.zarr_chunk_bytes_target, name
    present = group[f"{SITE}/present"]
    assert present.shape == (10**6, limits.layers_max) and not present[5000:5002].any()


def test_what_is_not_final_has_no_view(line: tuple[Sender, Store]) -> None:
    engine, store = line
    capture = new_ulid()
    engine.open(capture, prompt_len=8)
    engine.wait()
    assert until(lambda: store[capture].status == "running")
    with pytest.raises(NotFinalError, match="is running"):
        CaptureView(store.reader, capture)
    with pytest.raises(NotFoundError):
        CaptureView(store.reader, new_ulid())
    engine.finish(capture, end=0)
    engine.wait()


def test_a_capture_of_several_ranks(tmp_path: Path) -> None:
    """Rows whose columns lie in several streams are whole; from stores of before this view was."""
    seen = 0
    for packed in sorted(GOLDEN.glob("*.zip")):
        with zipfile.ZipFile(packed) as archive:
            archive.extractall(tmp_path / packed.stem)
        place = next((tmp_path / packed.stem).rglob("store.json")).parent
        with WriterProcess(place) as writer:
            writer.stop()
        with open_store(place) as store:
            for row in store.captures():
                if row.status in FINAL:
                    check(store, row.id)
                    seen += any(info.shared_out for info in store[row.id].manifest().sites)
    assert seen


# ── the store of zarr-python ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def capture(line: tuple[Sender, Store]) -> str:
    engine, store = line
    made = new_ulid()
    engine.open(made, prompt_len=8)
    engine.frame([(made, 0, range(8))])
    engine.finish(made, end=8)
    engine.wait()
    return final(store, made)


def test_lists_and_ranges_are_those_of_a_store_that_was_copied(line: tuple[Sender, Store], capture: str) -> None:
    store = line[1][capture].zarr()

    async def compare() -> None:
        copied, proto = MemoryStore(), default_buffer_prototype()
        async for key in store.list():
            value = await store.get(key, proto)
            assert value is not None, key
            await copied.set(key, value)
        names = sorted([key async for key in copied.list()])
        assert len(names) == len(set(names)) == 18
        prefixes = {"", "nothing", SITE, f"{SITE}/", f"{SITE}/rows", f"{SITE}/rows/c", f"{SITE}/rows/c/0",
                    f"{SITE}/rows/c/0/3", f"{SITE}/rows/c/7", f"{SITE}/row", f"{SITE}/rows/c/0/0/0", "zarr.json"}
        for prefix in prefixes:
            assert sorted([name async for name in store.list_dir(prefix)]) == sorted(
                [name async for name in copied.list_dir(prefix)]), prefix
            assert sorted([name async for name in store.list_prefix(prefix)]) == sorted(
                [name async for name in copied.list_prefix(prefix)]), prefix
        for key in names:
            assert await store.exists(key) and await store.getsize(key) == await copied.getsize(key)
            for span in (RangeByteRequest(1, 9), OffsetByteRequest(3), SuffixByteRequest(5), RangeByteRequest(2, 2)):
                mine, other = await store.get(key, proto, span), await copied.get(key, proto, span)
                assert mine is not None and other is not None and mine.to_bytes() == other.to_bytes()
        assert not await store.exists("nothing") and await store.get("nothing", proto) is None

    asyncio.run(compare())


def test_it_is_only_read_and_compares_by_what_it_is_of(line: tuple[Sender, Store], capture: str) -> None:
    store = line[1][capture].zarr()
    assert store == line[1][capture].zarr() and store != line[1].path
    for mode in ("w", "r+", "a"):
        with pytest.raises((ValueError, NotImplementedError)):
            zarr.open_group(store, mode=mode).create_array("x", shape=(1,), dtype="i4")
    with pytest.raises(NotImplementedError, match="only read"):
        asyncio.run(store.delete("zarr.json"))


def test_processes_of_dask_open_the_store_anew(line: tuple[Sender, Store], capture: str) -> None:
    again = copy.deepcopy(line[1][capture].zarr())  # by what a pickle is made of
    assert again.source is not line[1]
    wanted = line[1][capture][SITE, 3]
    assert np.array_equal(zarr.open_array(again, path=f"{SITE}/rows", mode="r")[:, 3], wanted)
    lazy = xarray.open_zarr(line[1][capture].zarr(), group=SITE, chunks={})["rows"]
    with dask.config.set(scheduler="threads"):
        assert np.array_equal(lazy.sel(layer=3).values, wanted)


def test_of_some_sites_and_layers(line: tuple[Sender, Store], capture: str) -> None:
    with StoreReader(line[1].path) as reader:
        view = CaptureView(reader, capture, chosen={SITE: [3, 1]})
        keys = list(view.every_key())
        values = {key: view.value(key) for key in keys}
    assert f"{SITE}/rows/c/0/1/0" in keys and f"{SITE}/rows/c/0/2/0" not in keys and keys[-1] == "zarr.json"
    chunk = values[f"{SITE}/layer/c/0"]
    assert chunk is not None and np.frombuffer(chunk.read(), "<i8").tolist() == [1, 3]


# ── the parts ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_axis_counts_positions_of_ranges() -> None:
    ranges = [(3, 5), (5, 5), (9, 10), (20, 2**31 - 1)]
    axis, counted = TokenAxis(ranges), [3, 4, 9, *range(20, 40)]
    assert len(axis) == 3 + 2**31 - 21 and len(TokenAxis([])) == 0 and TokenAxis([]).positions(0, 4).tolist() == []
    for first in range(8):
        for last in range(first, 20):
            assert axis.positions(first, last).tolist() == counted[first:last]
    assert axis.positions(len(axis) - 1, len(axis) + 5).tolist() == [2**31 - 2]
    gaps = [Missing(4, 5, "dropped"), Missing(20, 22, "pending"), Missing(22, 23, "quota")]
    assert inside(np.arange(18, 26), gaps).tolist() == [False, False, True, True, True, False, False, False]
    assert not inside(np.arange(5), []).any()


def test_keys_of_chunks() -> None:
    assert chunk_of("a.b/rows/c/0/12/3") == ("a.b/rows", (0, 12, 3))
    for key in ("a/c", "a/c/", "a/c/01", "a/c/-1", "a/c/1/2/3/4", "/c/0", "a/c/1\n", "a/c/1234567890123", "a/c/²"):
        assert chunk_of(key) is None
