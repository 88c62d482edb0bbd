"""Prefixes that hold something else than stores, or too many; names with odd characters; heads that are lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from schemas import limits
from schemas.bucket.places import folders_below
from schemas.errors import BucketError, ConflictError, LimitError, NoHeadError, OutrunError, TapError
from schemas.ids import new_ulid
from schemas.objects.layout import HEAD
from schemas.objects.objects import Objects
from tests.support.buckets import FaultProxy
from tests.support.store_helpers import SITE, assert_rows
from tests.vllm_tap.bucket.several.conftest import Nodes
from vllm_tap.bucket import push as push_module
from vllm_tap.bucket.push import push
from vllm_tap.store import open_store


def listed(place: Any, cache: Path) -> list[str]:
    with open_store(place, cache) as store:
        return [row.id for row in store.captures()]


def test_what_is_no_store_is_passed_over(nodes: Nodes, places: list[str], url: str, tmp_path: Path) -> None:
    objects = Objects(url)
    for key in ("readme.txt", "exports/a.zarr/zarr.json", "blocks-of-mine/x", "team/node-d/head.json",
                "node-e/blocks/w0-00000001-0123456789abcdef0123456789abcdef.zarr/zarr.json"):
        objects.put(key, b"{}")
    objects.close()
    wanted = [capture for capture in nodes.every if capture not in nodes.captures["a"]]
    with open_store(f"{url}/*", tmp_path / "cache") as store:
        assert store.stores == places[1:]
    for place in (f"{url}/*", url, f"{url}/", [f"{url}/*"]):
        assert listed(place, tmp_path / "cache") == wanted
    assert listed([places[0], f"{url}/*"], tmp_path / "cache") == nodes.every


def test_a_store_that_lost_its_head_is_named(nodes: Nodes, places: list[str], url: str, tmp_path: Path) -> None:
    with open_store(f"{url}/*", tmp_path / "cache") as store:
        objects = Objects(url)
        objects.delete([f"node-c/{HEAD}"])
        objects.close()
        for read in (store.refresh, lambda: open_store(f"{url}/*", tmp_path / "cache"),
                     lambda: open_store(url, tmp_path / "cache"), lambda: open_store(places, tmp_path / "cache")):
            with pytest.raises(NoHeadError, match="node-c"):
                read()
        assert_rows(store.reader.slice(nodes.captures["c"][0], SITE, [1]), 200, range(8))
    assert listed(places[:2], tmp_path / "cache") == [
        capture for capture in nodes.every if capture not in nodes.captures["c"]]


def test_a_prefix_that_is_a_store_itself_is_read_as_it_is_named(nodes: Nodes, url: str, tmp_path: Path) -> None:
    push(nodes.stores["a"], url)
    push(nodes.stores["b"], f"{url}/node-b")
    assert listed(url, tmp_path / "cache") == nodes.captures["a"][::-1]
    assert len(listed([url, f"{url}/node-b"], tmp_path / "cache")) == 14
    with pytest.raises(BucketError, match="it holds a store itself, and stores below that"):
        open_store(f"{url}/*", tmp_path / "cache")
    objects = Objects(url)
    objects.delete([HEAD])
    objects.close()
    for place in (f"{url}/*", url):
        with pytest.raises(NoHeadError):
            open_store(place, tmp_path / "cache")


def test_no_store_below_and_no_such_bucket_are_named(url: str, tmp_path: Path) -> None:
    objects = Objects(url, make=True)
    with pytest.raises(NoHeadError, match="no store is one level below it"):
        open_store(f"{url}/*", tmp_path / "cache")
    objects.put("a/b", b"")
    objects.close()
    with pytest.raises(NoHeadError, match=f"no {HEAD} in it"):
        open_store(url, tmp_path / "cache")


@pytest.mark.parametrize("names", [["node a", "n#b", "n%20c"], ["ü?x&y=1", "*", "a+b"], ["..a", "w:0", "~[x]"]])
def test_names_with_odd_characters(names: list[str], nodes: Nodes, url: str, tmp_path: Path) -> None:
    for name, node in zip(names, nodes.stores, strict=True):
        push(nodes.stores[node], f"{url}/{quote(name, safe='')}")
    with open_store(f"{url}/*", tmp_path / "cache") as store:
        assert [row.id for row in store.captures()] == nodes.every
        assert sorted(store.stores) == sorted(f"{url}/{quote(name, safe='')}" for name in names)
        for capture in nodes.every[:3]:
            assert_rows(store.reader.slice(capture, SITE, [1]), nodes.number[capture], range(8))
            assert listed(store.store_of(capture), tmp_path / "cache")[0] in nodes.every


def test_folders_are_bounded(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bucket"
    for number in range(100):
        (folder / f"other-{number}").mkdir(parents=True)
    url = folder.as_uri()
    for name in nodes.stores:
        push(nodes.stores[name], f"{url}/node-{name}")
    assert listed(f"{url}/*", tmp_path / "cache") == nodes.every
    for number in range(100, limits.stores_max):
        (folder / f"other-{number}").mkdir()
    with pytest.raises(LimitError, match=r"folders below .*: 131 asked, limit 128"):
        folders_below(url)
    with pytest.raises(LimitError, match="name the stores"):
        open_store(f"{url}/*", tmp_path / "cache")
    with pytest.raises(LimitError, match="stores that are read as one: 129 asked, limit 128"):
        open_store([f"{url}/node-{number}" for number in range(129)], tmp_path / "cache")
    assert listed([f"{url}/node-{name}" for name in nodes.stores], tmp_path / "cache") == nodes.every


def test_a_hundred_stores(nodes: Nodes, tmp_path: Path) -> None:
    """Copies with other uuids, so that each capture is in all of them: what is in several is refused, and all open."""
    url = (tmp_path / "bucket").as_uri()
    push(nodes.stores["a"], f"{url}/node-0")
    head = (tmp_path / "bucket" / "node-0" / HEAD).read_text()
    with open_store(f"{url}/node-0", tmp_path / "cache") as store:
        uuid = store.reader.uuid.hex()
    for number in range(1, 100):
        shutil.copytree(tmp_path / "bucket" / "node-0", tmp_path / "bucket" / f"node-{number}")
        (tmp_path / "bucket" / f"node-{number}" / HEAD).write_text(head.replace(uuid, f"{number:032x}"))
    with open_store(f"{url}/*", tmp_path / "cache") as store:
        assert len(store.stores) == 100
        with pytest.raises(ConflictError, match="is in several stores"):
            list(store.captures())
    with pytest.raises(ConflictError, match="are one store"):
        (tmp_path / "bucket" / "node-7" / HEAD).write_text(head)
        open_store(f"{url}/*", tmp_path / "cache")


def test_one_cache_of_all_is_shared_out(nodes: Nodes, places: list[str], tmp_path: Path) -> None:
    with open_store(places[1:], tmp_path / "cache", 64 << 20) as store:
        rooms = [each._chunks.room for each in store.reader.stores.values()]
        assert len(rooms) == 2 and all(24 << 20 < room <= 32 << 20 for room in rooms)
    with pytest.raises(TapError, match="cache_bytes = 1: at least"):
        open_store(places, tmp_path / "cache", 1)


def test_two_writers_may_not_push_to_one_prefix(nodes: Nodes, places: list[str], s3: FaultProxy,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    told = "a prefix of its own, .* are read together"
    with pytest.raises(TapError, match=told):
        push(nodes.stores["a"], places[1])
    url = f"s3://bucket/{new_ulid()}"  # both at once, each the first
    bring = push_module._bring

    def overtaken(*args: Any) -> Any:
        monkeypatch.setattr(push_module, "_bring", bring)
        push(nodes.stores["b"], url)
        return bring(*args)

    monkeypatch.setattr(push_module, "_bring", overtaken)
    with pytest.raises(OutrunError, match=told):
        push(nodes.stores["a"], url)
    with pytest.raises(TapError, match=told):
        push(nodes.stores["a"], url, take_over=True)
