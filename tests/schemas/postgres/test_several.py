"""Several stores whose catalogs are in one database: read as one, each answer is that of their snapshots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from schemas.errors import ArgumentError, NotFoundError
from tests.schemas.postgres.server import PASSWORD
from tests.support.store_helpers import SITE
from tests.vllm_tap.bucket.several.conftest import Nodes, filled, nodes
from tests.vllm_tap.bucket.several.test_divided import Hosts, hosts, sealed
from vllm_tap import open_store
from vllm_tap.bucket.push import push
from vllm_tap.loader.dataset import rows
from vllm_tap.store import Store

__all__ = ["filled", "hosts", "nodes"]


def answers(store: Store) -> list[object]:
    """What a reader says of all captures, by every name, and all rows."""
    reader, every = store.reader, [row.id for row in store.captures()]
    found: list[object] = [every, reader.capture("shared"), reader.owner_bytes("anna"), reader.samples("shared"),
                           reader.request_bytes("", every[:3]), reader.captures(owner="anna"), reader.engine()]
    before = None
    while True:
        page, before = reader.page(limit=4, before=before)
        found.append((page, before))
        if before is None:
            break
    for name in (*every, *(f"cmpl-{capture}" for capture in every)):
        found += [reader.target(name), reader.manifest(name)]
        found.append(reader.slice(name, SITE, [0, 1, 2, 3]).values().tobytes())
    return found


@pytest.mark.soak
def test_several_stores_in_one_database(nodes: Nodes, url: str, catalog: str, tmp_path: Path) -> None:
    urls = [f"{url}/node-{name}" for name in "bc"]
    for name, each in zip("bc", urls, strict=True):
        push(nodes.stores[name], each, catalog=catalog)
    with open_store(urls, tmp_path / "snapshots") as plain, open_store(urls, tmp_path / "other",
                                                                      catalog=catalog) as there:
        assert answers(plain) == answers(there)
        with pytest.raises(NotFoundError):
            there.reader.manifest("nobody's")
        assert PASSWORD not in str(there.path) + repr(there.reader)
        data = rows(there, SITE, 1, batch=16, window=32)
        assert sorted(capture for batch in data for capture in batch["capture"].tolist()) == sorted(
            number for number in range(14) for _ in range(8))
        assert not list((tmp_path / "other").rglob("*.sqlite"))
    with open_store(f"{url}/*", tmp_path / "other", catalog=catalog) as found:
        assert sorted(found.stores) == urls
    with pytest.raises(ArgumentError, match=r"catalog = .* is a folder"):
        open_store([urls[0], nodes.stores["a"]], catalog=catalog)


def test_divided_captures_in_one_database(hosts: Hosts, url: str, catalog: str, tmp_path: Path) -> None:
    made = [hosts.whole() for _ in range(3)]
    assert all(map(sealed, hosts.stores))
    urls = [f"{url}/node-{name}" for name in "ab"]
    for store, each in zip(hosts.stores, urls, strict=True):
        push(store, each, catalog=catalog)
    with open_store(urls, tmp_path / "a") as plain, open_store(urls, tmp_path / "b", catalog=catalog) as there:
        for status in (None, "complete", "incomplete"):
            assert list(there.captures(status=status)) == list(plain.captures(status=status))
        assert [row.id for row in there.captures(status="complete")] == made[::-1]
        for capture in made:
            assert there.manifest(capture) == plain.manifest(capture)
            assert np.array_equal(there.reader.slice(capture, SITE, [0, 3]).values(),
                                  np.stack([hosts.row(0), hosts.row(3)]))
