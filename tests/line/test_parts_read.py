"""Rows that several ranks send, as everybody reads them: HTTP slices, live rows, exports and training batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from schemas.read.reader import StoreReader
from tests.api.live.test_live import Listener, array
from tests.support.api_stack import Stack, running
from tests.support.ranks import COLUMNS, LAYERS, SITES, Ranks, values
from tests.support.store_helpers import until
from vllm_tap.export.command import export
from vllm_tap.loader.dataset import rows

RANKS, PROMPT, END = 3, 5, 9


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("parts")) as made:
        yield made


def test_live_rows_are_whole_and_come_once(stack: Stack) -> None:
    """Rank 2 is late; position 4 is computed twice before it says anything of the second time."""
    with Ranks(stack.endpoint, RANKS) as engine:
        engine.begin(PROMPT)
        early = engine.all[:2]
        engine.step(range(PROMPT), 1, who=early)
        engine.wait()
        listeners = {site: Listener(stack, f"/v1/captures/{engine.capture}/live?site={site}") for site in SITES}
        engine.step([4], 2, who=early, version=1, again=True)
        engine.step(range(PROMPT), 1, who=[engine.all[2]])
        engine.step([4], 2, who=[engine.all[2]], version=1, again=True)
        for position in range(PROMPT, END):
            engine.step([position], position, version=1)
        engine.wait()
        told = listeners["q"].wait("rows")  # before the end
        assert not listeners["q"].of("finish")
        engine.end(END, END + 1 - PROMPT)
        engine.wait()
        for site, listener in listeners.items():
            assert listener.wait("finish")[0]["status"] == "complete"
            wanted = values(RANKS, 1, site, range(END))
            wanted[:, 4:] = values(RANKS, 1, site, range(4, END), version=1)
            seen: set[tuple[int, int]] = set()
            for event in listener.of("rows"):
                places = {(layer, position) for layer in event["layers"] for position in event["positions"]}
                assert event["durable"] and not seen & places, "a row came twice"
                seen |= places
                np.testing.assert_array_equal(array(event), wanted[np.ix_(event["layers"], event["positions"])])
                assert event["token_ids"] == [position + 5000 for position in event["positions"]]
            assert seen == {(layer, position) for layer in LAYERS for position in range(END)}
        ids = [number for kind, _, number, _ in listeners["q"].events if kind == "rows"]
        again = Listener(stack, f"/v1/captures/{engine.capture}/live?site=q&after={ids[0]}")
        again.wait("finish")
        first = set(told[0]["positions"])
        assert {p for event in again.of("rows") for p in event["positions"]} | first == set(range(END))
        assert len(again.of("rows")) < len(ids) + 1


def test_slices_exports_and_batches_are_of_whole_rows(stack: Stack, tmp_path: Path) -> None:
    with Ranks(stack.endpoint, RANKS) as engine:
        engine.number = 2
        engine.begin(PROMPT)
        for position in range(END):
            engine.step([position], position)
        engine.end(END, END + 1 - PROMPT)
        engine.wait()
        capture, number = engine.capture, engine.number
    with StoreReader(stack.store) as reader:
        assert until(lambda: reader.capture(capture).status == "complete")
    wanted = {site: values(RANKS, number, site, range(END)) for site in SITES}
    answer = stack.http.get(f"/v1/captures/{capture}/activations", params={
        "site": SITES, "format": "safetensors", "start": 2, "stop": 7})
    assert answer.status_code == 200, answer.text
    got = load(answer.content)
    for site in SITES:
        for layer in LAYERS:
            np.testing.assert_array_equal(got[f"{site}.{layer}"], wanted[site][layer, 2:7])
    refused = stack.http.get(f"/v1/captures/{capture}/activations", params={"site": "q", "dtype": "codes"})
    assert refused.status_code == 400 and "ranks share out the columns of q" in refused.text
    codes = stack.http.get(f"/v1/captures/{capture}/activations", params={"site": "resid_post", "dtype": "codes"})
    assert codes.status_code == 200
    manifest = stack.http.get(f"/v1/captures/{capture}").json()
    assert [part["state"] for part in manifest["parts"]] == ["finished"] * RANKS
    assert {site["site"]: site["shared_out"] for site in manifest["sites"]} == {
        "resid_post": False, "q": True, "k": True}

    path, = export(stack.store, capture, out=tmp_path / "rows.npz")
    with np.load(path) as file:
        for site in SITES:
            np.testing.assert_array_equal(file[f"{site}.3"], wanted[site][3])

    data = rows(stack.store, ["q", "resid_post"], [1, 3], batch=4, where=lambda row: row.id == capture)
    assert data.names == ["q.1", "q.3", "resid_post.1", "resid_post.3"] and data.rows == END
    seen = 0
    for batch in data:
        seen += len(batch["position"])
        for name in data.names:
            site, layer = name.split(".")
            expected = torch.from_numpy(wanted[site][int(layer)])[batch["position"]]
            assert batch[name].shape[1] == (COLUMNS * RANKS if site == "q" else COLUMNS)
            assert torch.equal(batch[name], expected)
    assert seen == END
