"""An epoch over several stores: the rows of all of them, each once, in one order wherever the stores lie."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import ArgumentError, ConflictError, NotFoundError
from schemas.ids import new_ulid
from schemas.limits import bucket_cache_bytes_min
from tests.support.store_helpers import ROOT, SITE
from tests.vllm_tap.bucket.conftest import erase
from tests.vllm_tap.bucket.several.conftest import BEGAN_MS, Nodes, fill
from tests.vllm_tap.bucket.test_loader import assert_equal, batches
from vllm_tap.bucket.push import push
from vllm_tap.loader.dataset import RowDataset, activations, rows
from vllm_tap.store import open_store
from writer_service.tools.compaction import compact


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def named(data: RowDataset, got: list[dict[str, torch.Tensor]]) -> list[tuple[str, int]]:
    """The captures and positions of rows as they came."""
    return [(data.captures[number], position) for batch in got
            for number, position in zip(batch["capture"].tolist(), batch["position"].tolist(), strict=True)]


def every_row(nodes: Nodes) -> list[tuple[str, int]]:
    return sorted((capture, position) for capture in nodes.every for position in range(8))


def values(nodes: Nodes, layers: list[int]) -> dict[tuple[str, int], torch.Tensor]:
    found = {}
    for name, store in nodes.stores.items():
        with open_store(store) as opened:
            for capture in nodes.captures[name]:
                got = opened[capture].slice(SITE, layers).values
                found |= {(capture, at): torch.from_numpy(got[:, at].copy()) for at in range(8)}
    return found


def test_an_epoch_is_every_row_once(nodes: Nodes, places: list[str]) -> None:
    data = rows(places, SITE, [2, 0], batch=10)
    own, got = values(nodes, [2, 0]), batches(data)
    came = named(data, got)
    assert sorted(came) == every_row(nodes) and data.rows == len(came) and data.batches() == len(got)
    home = [next(name for name in nodes.stores if capture in nodes.captures[name]) for capture, _ in came]
    assert sum(one != other for one, other in pairwise(home)) > 20, "shuffled over all stores"
    for at, layer in enumerate((2, 0)):
        assert torch.equal(torch.cat([batch[f"{SITE}.{layer}"] for batch in got]),
                           torch.stack([own[row][at] for row in came]))
    token_ids = torch.cat([batch["token_id"] for batch in got]).tolist()
    assert token_ids == [position + 5000 for _, position in came]


def test_the_order_is_that_of_the_folders_however_they_are_named(nodes: Nodes, places: list[str], url: str) -> None:
    folders = list(map(str, nodes.stores.values()))
    wanted = batches(rows(folders, SITE, 1, batch=10, window=40))
    with open_store([places[0], f"{url}/*"], None, 64 << 20) as store:
        for stores in (folders[::-1], places, places[::-1], [f"{url}/*", places[0]], store):
            data = rows(stores, SITE, 1, batch=10, window=40, verify=True)
            assert_equal(batches(data), wanted)
            assert len({index.uuid for index in data.index.parts}) == 3
        assert {index.bucket.cache_bytes for index in data.index.parts if index.bucket} == {(64 << 20) // 3}
    assert batches(rows(url, SITE, 1, batch=10))[0].keys() == wanted[0].keys()
    assert rows(url, SITE, 1).rows == 2 * 7 * 8 and bucket_cache_bytes_min < (64 << 20) // 3
    one = rows([places[1]], SITE, 1, batch=10)
    assert_equal(batches(one), batches(rows(nodes.stores["b"], SITE, 1, batch=10)))


def test_it_goes_on_where_it_was_left_also_from_elsewhere(nodes: Nodes, places: list[str]) -> None:
    chosen: dict[str, Any] = {"batch": 10, "window": 40}
    data = rows(places, SITE, 1, **chosen)
    data.set_epoch(3)
    wanted, epoch = batches(data), iter(data)
    for _ in range(7):
        next(epoch)
    state = data.state_dict()
    for stores in (places, list(nodes.stores.values())):
        other = rows(stores, SITE, 1, **chosen)
        other.load_state_dict(state)
        assert_equal(batches(other), wanted[7:])
    with pytest.raises(ArgumentError, match="rows"):
        rows(places[:2], SITE, 1, **chosen).load_state_dict(state)
    compact(nodes.stores["a"])
    assert sorted(named(data, batches(data))) == every_row(nodes), "moved while it is read: the same rows, once"
    steps = activations(places, f"{SITE}.1", batch=50)
    assert [next(steps).shape for _ in range(5)] == [(50, 64)] * 5


def test_workers_and_ranks_share_them_out(nodes: Nodes, places: list[str]) -> None:
    spawned = {"num_workers": 2, "multiprocessing_context": "spawn"}
    data = rows(places, SITE, 1, batch=10)
    assert sorted(named(data, batches(data, **spawned))) == every_row(nodes)
    both = [rows(places, SITE, 1, batch=10, rank=rank, world=2) for rank in range(2)]
    assert sorted(row for each in both for row in named(each, batches(each))) == every_row(nodes)


def test_a_push_in_an_epoch(nodes: Nodes, places: list[str]) -> None:
    """Rows are found again where they lie by then; a capture that was deleted ends it by name."""
    data = rows(places, SITE, 1, batch=8, window=8)
    wanted, got, epoch = batches(data), [], iter(data)
    for number, batch in enumerate(epoch):
        got.append({name: value.clone() for name, value in batch.items()})
        if number == 2:
            compact(nodes.stores["b"])
            fill(nodes.stores["b"], [new_ulid()], 900, began_ms=BEGAN_MS + 1000)
            push(nodes.stores["b"], places[1])
    assert_equal(got, wanted)
    assert rows(places, SITE, 1).rows == data.rows + 8
    gone = nodes.captures["b"][3]
    epoch = iter(data)
    next(epoch)
    erase(nodes.stores["b"], gone)
    push(nodes.stores["b"], places[1])
    with pytest.raises(NotFoundError, match=gone):
        list(epoch)


def test_the_how_to_runs(nodes: Nodes, url: str) -> None:
    for name in "bc":
        push(nodes.stores[name], f"{url}/node-{name}")
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/howto/several-writers.md").read_text(), re.DOTALL)
    named = block.replace("s3://bucket/captures", url).replace("node-a", "node-b")
    names: dict[str, Any] = {}
    exec(compile(named.replace("/disk/captures", str(nodes.stores["a"])), "several-writers.md", "exec"), names)  # noqa: S102
    assert len(names["store"].stores) == 2 == len(names["some"].stores) and names["data"].rows == 2 * 7 * 8
    names["store"].close()
    names["some"].close()


def test_what_does_not_go_together_is_named(nodes: Nodes, places: list[str], tmp_path: Path) -> None:
    twin = nodes.captures["b"][3]
    fill(tmp_path / "d", [new_ulid(), twin], 500)
    stores = [*places, str(tmp_path / "d")]
    with pytest.raises(ConflictError, match=f"capture {twin} is in several stores, .*node-b"):
        rows(stores, SITE, 1)
    data = rows(stores, SITE, 1, where=lambda row: row.id != twin)
    assert data.rows == 8 * 21
    assert rows(stores, SITE, 1, where={"node": "c"}).rows == 8 * 7, "in one of them alone"
    with pytest.raises(NotFoundError, match="none of 4 stores has such rows"):
        rows(stores, SITE, 1, where={"node": "none"})
    with pytest.raises(ConflictError, match="are one store"):
        rows([*places, nodes.stores["b"]], SITE, 1)
