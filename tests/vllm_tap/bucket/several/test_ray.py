"""Captures of several stores, in folders and in a bucket, through Ray Data on two workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ArgumentError
from tests.support.store_helpers import SITE
from tests.vllm_tap.bucket.conftest import erase
from tests.vllm_tap.bucket.several.conftest import Nodes
from tests.vllm_tap.ray.conftest import cluster  # noqa: F401
from vllm_tap.bucket.push import push
from vllm_tap.store import open_store


@pytest.fixture
def pushed(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    url = (tmp_path / "a bucket").as_uri()
    for name in "bc":
        push(nodes.stores[name], f"{url}/node-{name}")
    return url


def test_a_dataset_is_every_row_once(cluster: Any, nodes: Nodes, pushed: str, tmp_path: Path) -> None:  # noqa: F811
    from vllm_tap.ray import read_captures

    with open_store([nodes.stores["a"], f"{pushed}/*"], tmp_path / "cache") as store:
        asked: dict[str, Any] = {"sites": SITE, "layers": [2], "task_bytes": 4096}
        for named in (store, [nodes.stores["a"], f"{pushed}/*"], [*nodes.stores.values()]):
            data = read_captures(named, **asked)
            rows = data.take_all()
            assert sorted((row["capture"], row["position"]) for row in rows) == sorted(
                (capture, position) for capture in nodes.every for position in range(8))
            for row in rows[::9]:
                one = store.rows_at([(row["capture"], int(row["position"]))], SITE, 2)[0]
                assert np.array_equal(row[f"{SITE}.2"], one) and row["token_id"] == row["position"] + 5000
    few = read_captures(f"{pushed}/node-b", sites=SITE, layers=[2], where={"turn": "3"}, verify=True).take_all()
    assert [row["position"] for row in few] == list(range(8))
    with pytest.raises(ArgumentError, match="each once"):
        read_captures([pushed, f"{pushed}/node-b"], sites=SITE, layers=[2])


def test_rows_that_a_push_has_moved_are_found(cluster: Any, nodes: Nodes, pushed: str) -> None:  # noqa: F811
    from vllm_tap.ray import read_captures

    gone, left = nodes.captures["b"][0], nodes.captures["b"][1]
    data = read_captures(f"{pushed}/*", sites=SITE, layers=[2], where=lambda row: row.id == left)
    ended = read_captures(f"{pushed}/*", sites=SITE, layers=[2])
    erase(nodes.stores["b"], gone)
    push(nodes.stores["b"], f"{pushed}/node-b")
    assert [row["position"] for row in data.take_all()] == list(range(8))
    with pytest.raises(Exception, match=gone):
        ended.take_all()
