"""Stores of several writers read as one: every list, manifest and row is that of the store it is in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ArgumentError, BucketError, ConflictError, NotFoundError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.support.buckets import FaultProxy
from tests.support.store_helpers import SITE, Sender, WriterProcess, assert_rows, engine_info, until
from tests.vllm_tap.bucket.conftest import erase
from tests.vllm_tap.bucket.several.conftest import BEGAN_MS, CAPTURES, NODES, Nodes, fill
from vllm_tap.bucket.push import push
from vllm_tap.client.listing import Filters
from vllm_tap.errors import NotComplete
from vllm_tap.store import Store, open_store


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def ids(store: Store, **filters: Any) -> list[str]:
    return [row.id for row in store.captures(**filters)]


def by_pages(store: Store, size: int) -> list[str]:
    """All ids, page by page; only the last may have fewer."""
    found, before = list[str](), None
    while True:
        rows, following = store.reader.page(limit=size, before=before)
        found += [row.id for row in rows]
        if following is None:
            return found
        assert len(rows) == size
        before = following


def test_lists_are_of_all_newest_first_by_every_page_size(nodes: Nodes, places: list[str], cache: Path) -> None:
    with open_store(places) as store:
        assert ids(store) == nodes.every and len(nodes.every) == 3 * CAPTURES
        for size in (*range(1, 24), 1000):
            assert by_pages(store, size) == nodes.every, size
        assert ids(store, limit=5, before=nodes.every[3]) == nodes.every[4:9]


def test_lists_where_one_store_has_all_the_newest(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                  ) -> None:
    """Few lines are taken from each store at a time: more come from those alone that have not shown enough."""
    newest, oldest = [new_ulid() for _ in range(13)], [new_ulid() for _ in range(3)]
    fill(tmp_path / "d", newest, 500, began_ms=BEGAN_MS + 100)
    fill(tmp_path / "e", oldest, 600, began_ms=BEGAN_MS - 100)
    every = [*newest[::-1], *nodes.every, *oldest[::-1]]
    with open_store([*nodes.stores.values(), tmp_path / "d", tmp_path / "e"]) as store:
        for few in (1, 3, 16):
            monkeypatch.setattr("schemas.bucket.several._ROWS_MIN", few)
            for size in (1, 2, 5, 9, 14, 20, 36, 37, 100):
                assert by_pages(store, size) == every, (few, size)


@pytest.mark.parametrize("filters", [
    {"status": "complete"}, {"status": "failed"}, {"tags": {"node": "b"}}, {"tags": {"turn": "3"}}, {"site": SITE},
    {"model": "tiny"}, {"text": "cmpl-"}, {"since": str(BEGAN_MS + 4)}, {"until": str(BEGAN_MS + 2)},
])
def test_filters_choose_what_they_choose_in_each_store(filters: dict[str, Any], nodes: Nodes, places: list[str],
                                                       cache: Path) -> None:
    alone = set[str]()
    for place in nodes.stores.values():
        with open_store(place) as one:
            alone.update(ids(one, **filters))
    with open_store(places) as store:
        wanted = [capture for capture in nodes.every if capture in alone]
        assert ids(store, **filters) == wanted
        for size in (1, 2, 5):
            assert ids(store, limit=size, **filters) == wanted[:size]
        named = ids(store, tags={"turn": "6"}, before=nodes.every[0])
        assert named == nodes.every[1:3]


def test_a_page_with_few_goes_on_where_every_store_was_looked_through(
    nodes: Nodes, places: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six captures are examined for a page: those of no store are passed over."""
    monkeypatch.setattr("schemas.limits.captures_scan_max", 6)
    with open_store(places) as store:
        for status, tags in (("complete", {}), ("complete", {"turn": "0"}), (None, {"node": "c"})):
            found, before, pages = [], None, 0
            while True:
                rows, before = store.reader.page(None, status, 3, before, Filters(tags=tags).capture_filter())
                found += [row.id for row in rows]
                pages += 1
                if before is None:
                    break
            assert pages > 2
            with_all = [row.id for row in Filters(status, tags).of(store.reader)]
            assert found == with_all == [capture for capture in nodes.every if (
                "turn" not in tags or capture in [nodes.captures[name][0] for name in NODES]) and (
                "node" not in tags or capture in nodes.captures["c"])]


def test_every_capture_is_read_as_from_its_own_store(nodes: Nodes, places: list[str], cache: Path) -> None:
    own = {capture: StoreReader(nodes.stores[name]) for name in NODES for capture in nodes.captures[name]}
    with open_store(places) as store:
        for capture, reader in own.items():
            for ref in (capture, f"cmpl-{capture}"):
                assert store.manifest(ref) == reader.manifest(capture)
                assert store.reader.capture(ref) == reader.capture(capture)
                assert store.samples(ref) == [capture] and store.reader.sole(ref) == reader.sole(capture)
                assert store.reader.progress(ref) == reader.progress(capture)
                assert store.reader.target(ref, None) == reader.target(capture)
                assert store.reader.engine_name(ref) == reader.engine_name(capture)
                assert store.reader.probes(ref) == reader.probes(capture) == {}
            got, wanted = store.reader.slice(capture, SITE, [2, 0], 1, 7), reader.slice(capture, SITE, [2, 0], 1, 7)
            assert_rows(got, nodes.number[capture], range(1, 7))
            assert all(np.array_equal(got.pieces[name], wanted.pieces[name]) for name in wanted.pieces)
            key = f"{SITE}/rows/c/0/0/0"
            assert store.zarr_value(capture, key, slice(None)) == open_store(reader.path).zarr_value(capture, key,
                                                                                                     slice(None))
        assert store.store_of(nodes.captures["b"][0]) == places[1] and store.stores == places
        kind, args = store.__reduce__()  # as a worker of dask has it
        again = kind(*args)
        assert ids(again) == nodes.every
        again.close()
    for reader in own.values():
        reader.close()


def test_rows_of_captures_of_all_stores_come_in_the_order_asked_for(nodes: Nodes, places: list[str], cache: Path
                                                                   ) -> None:
    asked = [(capture, position) for position in (7, 0, 3) for capture in nodes.every]
    with open_store(places) as store:
        got = store.reader.rows_at(asked, SITE, [1, 3])
        for at, (capture, position) in enumerate(asked):
            one = store.reader.slice(capture, SITE, [1, 3], position, position + 1)
            assert got.token_ids[at] == one.token_ids[0]
            assert all(np.array_equal(got.pieces[name][:, at], one.pieces[name][:, 0]) for name in one.pieces)
        assert np.array_equal(store.rows_at(asked, SITE, [1, 3]), got.values())
        assert store.rows_at([(f"cmpl-{nodes.every[0]}", 1)], SITE, 1).shape == (1, 64)
        with pytest.raises(NotFoundError, match="no capture 'none'"):
            store.rows_at([*asked, ("none", 1)], SITE, 1)
        with pytest.raises(NotFoundError, match="position 99"):
            store.rows_at([*asked, (nodes.every[5], 99)], SITE, 1)


def test_an_alias_that_several_know_follows_the_newest(nodes: Nodes, places: list[str], cache: Path) -> None:
    with open_store(places) as store:
        assert store.reader.capture("shared").id == nodes.captures["c"][2]
        assert store.reader.capture("shared", "anna").id == nodes.captures["c"][2]
        assert store.reader.capture("shared", "").id == nodes.captures["b"][1]
        with pytest.raises(NotFoundError, match="several owners"):
            store.reader.target("shared")
        assert store.reader.target("shared", "")[0] == nodes.captures["b"][1]
        with pytest.raises(NotFoundError):
            store.reader.capture(nodes.captures["b"][1], "anna")
        assert store.reader.owner_bytes("anna") == sum(
            each.owner_bytes("anna") for each in store.reader.stores.values()) > 0
    erase(nodes.stores["c"], nodes.captures["c"][2])
    push(nodes.stores["c"], places[2])
    with open_store(places) as store, pytest.raises(NotFoundError):
        store.reader.capture("shared")  # as in one store: the newest was deleted
    with open_store(nodes.stores["c"]) as store, pytest.raises(NotFoundError):
        store.reader.capture("shared")


def test_what_is_pushed_while_it_is_read_is_seen_after_a_refresh(nodes: Nodes, places: list[str], url: str, cache: Path
                                                                 ) -> None:
    with open_store([places[0], f"{url}/*"]) as store:
        first, _ = store.reader.page(limit=4)
        late, other = new_ulid(), new_ulid()
        fill(nodes.stores["b"], [late], 900, began_ms=BEGAN_MS + 1000)
        erase(nodes.stores["b"], nodes.captures["b"][6])
        push(nodes.stores["b"], places[1])
        fill(nodes.stores["a"].with_name("d"), [other], 950, began_ms=BEGAN_MS + 2000)
        push(nodes.stores["a"].with_name("d"), f"{url}/node-d")
        assert ids(store) == nodes.every
        assert store.refresh() and not store.refresh()
        left = [capture for capture in nodes.every if capture != nodes.captures["b"][6]]
        assert ids(store) == [other, late, *left]
        assert_rows(store.reader.slice(other, SITE, [1]), 950, range(8))
        assert_rows(store.reader.slice(late, SITE, [1]), 900, range(8))
        assert_rows(store.reader.slice(nodes.captures["b"][0], SITE, [1]), 100, range(8))
        rest, following = store.reader.page(limit=1000, before=first[-1].id)
        assert [row.id for row in first + rest] == nodes.every and following is None, "pages go on past a push"
        assert store.reader.is_deleted(nodes.captures["b"][6]) and not store.reader.is_deleted(late)


def test_a_capture_that_is_being_made_in_a_folder_is_waited_for(nodes: Nodes, places: list[str], cache: Path) -> None:
    capture, other = new_ulid(), new_ulid()
    with WriterProcess(nodes.stores["a"]) as writer, Sender(writer.endpoint, engine=engine_info()) as engine:
        engine.open(capture, prompt_len=8)
        engine.frame([(capture, 700, range(8))])
        engine.wait()
        with open_store(places[::-1]) as store:
            assert until(lambda: store.manifest(capture).status == "running")
            with pytest.raises(NotComplete):
                store.wait([capture], timeout_s=0.2)
            with ThreadPoolExecutor(2) as pool:
                waiting = [pool.submit(store.manifest, each, 60.0) for each in (capture, other)]
                engine.finish(capture, end=8)
                engine.open(other, prompt_len=8)
                engine.frame([(other, 701, range(8))])
                engine.finish(other, end=8)
                engine.wait()
                assert [each.result().status for each in waiting] == ["complete"] * 2
            assert_rows(store.reader.slice(other, SITE, [1]), 701, range(8))
            assert store.store_of(other) == places[0] and {capture, other} == set(ids(store, limit=2))
        writer.stop()


@pytest.mark.soak
def test_one_store_that_is_gone_is_named_and_never_a_shorter_list(nodes: Nodes, cache: Path, s3: FaultProxy) -> None:
    push(nodes.stores["b"], "s3://bucket/gone/node-b")
    push(nodes.stores["c"], "s3://bucket/gone/node-c")
    named = ["s3://bucket/gone/node-b", "s3://bucket/gone/node-c", str(nodes.stores["a"])]
    with open_store(named) as store:
        s3.fault = lambda method, path: "cut" if "/node-b/" in path else None
        assert ids(store) == nodes.every, "what is known of it is there"
        assert_rows(store.reader.slice(nodes.captures["c"][0], SITE, [1]), 200, range(8))
        with pytest.raises(BucketError, match="s3://bucket/gone/node-b"):
            store.reader.slice(nodes.captures["b"][0], SITE, [1])
        with pytest.raises(BucketError, match="s3://bucket/gone/node-b"):
            store.refresh()
        for place in (named, "s3://bucket/gone/*", "s3://bucket/gone"):
            with pytest.raises(BucketError, match="s3://bucket/gone/node-b"):
                open_store(place)
        s3.fault = lambda method, path: None
        assert not store.refresh()
        assert_rows(store.reader.slice(nodes.captures["b"][0], SITE, [1]), 100, range(8))
    with pytest.raises(Exception, match="no such folder"):
        open_store([*named, str(nodes.stores["a"]) + "-gone"])


def test_twins_are_refused_by_name(nodes: Nodes, places: list[str], tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ConflictError, match=f"{nodes.stores['b']} and {places[1]} are one store"):
        open_store([*places, nodes.stores["b"]])
    with pytest.raises(ArgumentError, match="named twice"):
        open_store([places[0], *places])
    with pytest.raises(ArgumentError, match="a folder or the URL"):
        open_store([])
    twin, mine = nodes.captures["c"][3], new_ulid()
    fill(tmp_path / "d", [mine, twin], 500, began_ms=BEGAN_MS - 100)
    with open_store([*places, tmp_path / "d"]) as store:
        both = rf"capture {twin} is in several stores, .*node-c and {tmp_path / 'd'}"
        for read in (lambda: store.manifest(twin), lambda: store.reader.slice(twin, SITE, [1]), lambda: ids(store),
                     lambda: store.rows_at([(mine, 0), (twin, 0)], SITE, 1), lambda: store[f"cmpl-{twin}"]):
            with pytest.raises(ConflictError, match=both):
                read()
        assert ids(store, limit=3) == nodes.every[:3], "a page without it"
        assert_rows(store.reader.slice(mine, SITE, [1]), 500, range(8))
    erase(tmp_path / "d", twin)
    with open_store([*places, tmp_path / "d"]) as store:
        assert ids(store) == [*nodes.every, mine]
        assert_rows(store.reader.slice(twin, SITE, [1]), nodes.number[twin], range(8))
