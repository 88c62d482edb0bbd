"""The Python client and the local store: one reading interface, compared number by number with what was sent."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import vllm_tap
from schemas import limits
from schemas.edits.vectors import digest_of
from schemas.errors import ConflictError, NotFoundError, SpecError, TapError
from schemas.ids import new_ulid
from schemas.manifest import Missing
from schemas.spec import CaptureSpec
from tests.support.api_stack import ROOT, Stack, running
from tests.support.engines.engine_player import WIDTH, decoded, rows
from vllm_tap import (
    AsyncClient,
    AsyncGeneration,
    BadRequest,
    Client,
    Conflict,
    Generation,
    MissingRows,
    NotComplete,
    NotFound,
    ServiceError,
    Store,
    Unavailable,
    open_store,
)
from vllm_tap.client.listing import Filters

PROMPT = "inside out"
END = len(PROMPT) + 4 - 1
ALL = list(range(END))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("client"), "float32") as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, wait_s=5, retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def store(stack: Stack, client: Client) -> Iterator[Store]:
    with open_store(stack.store) as store:
        yield store


def test_generate_and_read(client: Client, store: Store) -> None:
    generation = client.generate(PROMPT, max_tokens=4, seed=1, capture={"sites": ["resid_post"], "codec": "raw"})
    want = rows(0, "resid_post", 2, ALL, "float32")
    assert generation.text == "abcd" and generation.id == f"cmpl-{generation.capture_id}"
    for found in (generation, client.capture(generation.id), store[generation.capture_id], store[generation.id]):
        for key in (("resid_post", 2), "blocks.2.hook_resid_post", "resid_post.2", "blocks.2.hook_out"):
            got = found[key]
            assert got.dtype == np.float32 and got.shape == (END, WIDTH) and got.tobytes() == want.tobytes()
        both = found["resid_post", [3, 1]]
        assert both.shape == (2, END, WIDTH)
        assert both[1].tobytes() == rows(0, "resid_post", 1, ALL, "float32").tobytes()
        part = found.slice("resid_post", 0, 2, 5)
        assert part.positions.tolist() == [2, 3, 4] and (part.start, part.stop, part.clipped) == (2, 5, False)
        assert bytes(part.token_ids.astype(np.uint8)) == PROMPT[2:5].encode() and part.missing == []
        assert found.slice("resid_post", 0, 2, 500).clipped
        manifest = found.manifest()
        assert manifest.status == "complete" and manifest.captured == manifest.expected == 4 * END
        assert bytes(manifest.output_token_ids) == b"abcd"
    assert client.capture(generation.id).sites == {"resid_post": [0, 1, 2, 3]}
    assert client.capture(generation.id).status == "complete"


def test_the_default_codec_over_both_ways(client: Client, store: Store) -> None:
    generation = client.generate([{"role": "user", "content": PROMPT}], max_tokens=4,
                                 capture=CaptureSpec(sites=["attn_out"]))
    want = decoded("int8b64", 0, "attn_out", 1, ALL, "float32").tobytes()
    assert generation["attn_out", 1].tobytes() == store[generation.id]["attn_out", 1].tobytes() == want
    assert generation.id.startswith("chatcmpl-") and generation.text == "abcd"


def test_vectors_are_put_listed_and_deleted(client: Client, stack: Stack) -> None:
    vector = np.arange(3, dtype=np.float32) / 7
    for each in (vector, vector.astype(np.float64), torch.tensor(vector, requires_grad=True), vector.tolist(),
                 np.repeat(vector, 2)[::2]):
        assert client.put_vector("third", each) == digest_of(vector)
    assert client.put_vector("half", torch.ones(2, dtype=torch.bfloat16)) == digest_of(np.ones(2, np.float32))
    assert client.vectors() == {"half": digest_of(np.ones(2, np.float32)), "third": digest_of(vector)}
    with pytest.raises(Conflict, match="stored with other numbers"):
        client.put_vector("third", vector + 1)
    for wrong in ("x", [], [[1.0]], None, ["a"], np.zeros((2, 2))):
        with pytest.raises(SpecError, match="vector = "):
            client.put_vector("third", wrong)
    with pytest.raises(BadRequest, match=re.escape("vector.base64[1] = inf")):
        client.put_vector("inf", [1.0, 1e300])
    for name in ("", "..", "a/b", "é"):
        with pytest.raises(SpecError, match="name = "):
            client.delete_vector(name)

    async def awaited() -> None:
        async with AsyncClient(stack.url) as other:
            assert await other.put_vector("half", [1, 1]) == (await other.vectors())["half"]
            await other.delete_vector("half")
            with pytest.raises(NotFound, match="no vector 'half'"):
                await other.delete_vector("half")

    asyncio.run(awaited())
    client.delete_vector("third")
    assert client.vectors() == {}


def test_rows_of_an_edit_may_be_an_array(stack: Stack, client: Client) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    client.generate(PROMPT, edit=[{"site": "resid_post.1", "op": "set", "positions": [1, 2], "rows": rows}])
    sent: Any = stack.seen()[-1]["body"]
    assert json.loads(sent["vllm_xargs"]["edit"])[0]["rows"] == {"base64": base64.b64encode(rows.tobytes()).decode()}


def test_edits_are_sent_with_arrays_in_base64(stack: Stack, client: Client) -> None:
    vector = np.arange(4, dtype=np.float32) / 3
    edit = [{"site": "resid_post.1", "op": "add", "vector": vector, "scale": np.float32(2)}]
    one = client.generate(PROMPT, edit=edit)
    two, three = client.generate_all([PROMPT] * 2, capture={"sites": ["resid_post"]}, edit=edit)
    for generation, rows_of in ((one, 0), (two, 4), (three, 4)):
        assert len(generation.manifest().rows) == rows_of
    for seen in stack.seen()[-3:]:
        sent: Any = seen["body"]
        assert json.loads(sent["vllm_xargs"]["edit"]) == [
            {**edit[0], "vector": {"base64": base64.b64encode(vector.tobytes()).decode()}, "scale": 2.0}]
    assert client.generate(PROMPT, edit=[]).captures == []
    for wrong in ("resid_post", [7]):
        with pytest.raises(SpecError, match="edit = "):
            client.generate(PROMPT, edit=wrong)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=re.escape("edit[0].op = 'turn'")):
        client.generate(PROMPT, edit=[{"site": "resid_post", "op": "turn"}])

    async def awaited() -> None:
        async with AsyncClient(stack.url, wait_s=5) as other:
            made, = await other.generate_all([PROMPT], edit=edit)
            assert (await made.capture.status()) == "empty"

    asyncio.run(awaited())


def test_several_samples(client: Client) -> None:
    generation = client.generate(["one", "three"], n=2, max_tokens=3, capture={"codec": "raw"})
    assert generation.texts == ["abc"] * 4 and len(generation.captures) == 4
    for i, capture in enumerate(generation.captures):
        length = len(("one", "three")[i // 2]) + 2
        assert capture["resid_post", 1].tobytes() == rows(i, "resid_post", 1, list(range(length)), "float32").tobytes()
    with pytest.raises(TapError, match="4 captures"):
        generation["resid_post", 1]
    with pytest.raises(TapError, match="several captures"):
        client.capture(generation.id).manifest()
    with pytest.raises(TapError, match="names 4 captures"):
        client.capture(generation.id)["resid_post", 1]


def test_without_a_capture(client: Client) -> None:
    generation = client.generate("x", max_tokens=2)
    assert generation.text == "ab" and generation.captures == []
    with pytest.raises(TapError, match="without a capture"):
        generation["resid_post", 0]


@pytest.mark.parametrize("way", ["client", "store"])
def test_nothing_is_counted_from_the_end(client: Client, store: Store, way: str) -> None:
    """Not by NumPy's rule in one place and by none in the other."""
    generation = client.generate(PROMPT, max_tokens=4, capture={"sites": ["resid_post"], "codec": "raw"})
    capture = client.capture(generation.id) if way == "client" else store[generation.id]
    for layer in (-1, [0, -1]):
        with pytest.raises(TapError, match=r"layer = .*counted from 0"):
            capture["resid_post", layer]
    for name, cut in (("start", {"start": -3}), ("stop", {"stop": -1})):
        with pytest.raises(TapError, match=rf"{name} = .*-[13].*valid: .*position"):
            capture.slice("resid_post", 1, **cut)


@pytest.mark.parametrize("way", ["client", "store"])
def test_missing_rows_raise_and_name_themselves(client: Client, store: Store, way: str) -> None:
    generation = client.generate(PROMPT, max_tokens=4, capture={"sites": ["resid_post"], "codec": "raw"},
                                 play={"drop": ["resid_post", [2], 3, 6]})
    capture = client.capture(generation.id) if way == "client" else store[generation.id]
    with pytest.raises(MissingRows, match=r"\[3, 6\) dropped") as raised:
        capture["resid_post", 2]
    assert raised.value.missing == [Missing(3, 6, "dropped")]
    assert capture["resid_post", 1].shape == (END, WIDTH)
    assert capture.slice("resid_post", 2, 0, 3).missing == []
    there = capture.slice("resid_post", 2, allow_missing=True)
    assert there.missing == [Missing(3, 6, "dropped")]
    assert there.positions.tolist() == [p for p in ALL if p not in (3, 4, 5)]
    assert there.values[0].tobytes() == rows(0, "resid_post", 2, there.positions.tolist(), "float32").tobytes()


@pytest.mark.parametrize("way", ["client", "store"])
def test_a_running_capture(client: Client, store: Store, way: str) -> None:
    generation = client.generate(PROMPT, capture={"codec": "raw"}, play={"unfinished": True})
    capture = client.capture(generation.id) if way == "client" else store[generation.id]
    capture.wait_s = 0.3
    with pytest.raises(NotComplete, match="running"):
        capture["resid_post", 0]
    assert capture.slice("resid_post", 0, allow_missing=True).values.shape == (1, len(PROMPT), WIDTH)


def test_a_wait_may_be_longer_than_the_service_waits(stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
                                                     ) -> None:
    """It answers after two minutes at most; whoever waits longer asks it again."""
    monkeypatch.setattr(limits, "wait_timeout_s_max", 0.2)
    capture = client.generate(PROMPT, capture={"codec": "raw"}, play={"unfinished": True}).capture
    capture.wait_s = 1.0

    async def awaited() -> None:
        async with AsyncClient(stack.url, wait_s=1.0, retries=0) as other:
            began = time.monotonic()
            assert (await other.capture(capture.id).manifest()).status == "running" and time.monotonic() - began > 0.9
            with pytest.raises(NotComplete, match="running"):
                await other.capture(capture.id).get("resid_post", 0)
            assert time.monotonic() - began > 1.9

    began = time.monotonic()
    assert capture.manifest().status == "running" and time.monotonic() - began > 0.9
    with pytest.raises(NotComplete, match="running"):
        capture["resid_post", 0]
    assert time.monotonic() - began > 1.9
    asyncio.run(awaited())


@pytest.mark.parametrize("way", ["client", "store"])
def test_what_is_not_there(client: Client, store: Store, way: str) -> None:
    generation = client.generate("x", capture={"sites": ["resid_post"], "layers": [0, 1]})
    capture = client.capture(generation.id) if way == "client" else store[generation.id]
    with pytest.raises(NotFoundError, match="attn_out"):
        capture["attn_out", 0]
    with pytest.raises(NotFoundError, match="3"):
        capture["resid_post", 3]
    with pytest.raises(SpecError, match="unknown site"):
        capture["resid", 3]
    with pytest.raises(SpecError, match="name a layer"):
        capture["resid_post"]
    with pytest.raises(SpecError, match="fixes"):
        capture["blocks.1.hook_resid_post", 0]
    with pytest.raises(NotFoundError):
        (client.capture("nothing") if way == "client" else store["nothing"]).manifest()


def test_lists_deletes_and_capabilities(client: Client, store: Store) -> None:
    ids = [client.generate("x", capture={}).capture_id for _ in range(3)]
    for source in (client, store):
        assert [row.id for row in source.captures(limit=2)] == ids[:0:-1]
        assert [row.id for row in source.captures(limit=1, before=ids[1])] == [ids[0]]
    assert [capture.id for capture in store][:3] == ids[::-1]
    client.delete(ids[0])
    for gone in (lambda: client.capture(ids[0]).manifest(), lambda: store[ids[0]], lambda: client.delete(ids[0])):
        with pytest.raises(NotFoundError):
            gone()
    assert client.capabilities()["armed"]["resid_post"]["layers"] == [0, 1, 2, 3]
    assert store.engine().model == "played"


def test_lists_can_be_filtered(client: Client, store: Store) -> None:
    before = datetime.now()
    tags = {"run": "sift", "by": "Émile"}
    tagged = [client.generate("x", capture={"sites": [site], "tags": {**tags, "n": str(n)}}).capture_id
              for n, site in enumerate(("resid_post", "attn_out", "resid_post"))]
    for source in (client, store):
        assert [row.id for row in source.captures(tags={"run": "sift"})] == tagged[::-1]
        assert [row.id for row in source.captures(tags={"run": "sift", "n": "1"})] == [tagged[1]]
        assert [row.id for row in source.captures(tags={"run": "sift", "n": None}, model="played")] == tagged[::-1]
        assert [row.id for row in source.captures(text=tagged[1][-9:].lower())] == [tagged[1]]
        for text in ("Émile", "ÉMILE", "mile"):
            assert [row.id for row in source.captures(text=text)] == tagged[::-1], text
        assert list(source.captures(model="other")) == list(source.captures(tags={"n": None, "none": None})) == []
        assert [row.id for row in source.captures("complete", site="blocks.1.hook_attn_out", since=before)
                ] == [tagged[1]]
        assert list(source.captures(tags={"run": "sift"}, until=before)) == []
        assert [row.id for row in source.captures(tags={"run": "sift"}, limit=1)] == [tagged[2]]
        assert len([row for row in source.captures(since=before)]) == 3
        with pytest.raises(SpecError, match="status"):
            next(source.captures("done"))
    # More than one page, and nothing twice where the pages meet.
    every = [row.id for row in store.captures()]
    by_two = Filters().pages(lambda count, after: store.reader.page(None, None, 2, after), None, None)
    assert [row.id for row in by_two] == every and len(set(every)) == len(every) > 3


def test_many_prompts_at_once(client: Client, store: Store) -> None:
    told: list[tuple[int, int]] = []
    generations = client.generate_all([f"{n}" * (n + 1) for n in range(6)], 3, {"codec": "raw"}, at_once=3,
                                      progress=lambda done, total: told.append((done, total)))
    assert told == [(n, 6) for n in range(1, 7)]
    for source in (client, store):
        manifests = source.wait([generation.capture_id for generation in generations], progress=True)
        assert [manifest.prompt_len for manifest in manifests] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ServiceError, match="mlp_out"):
        client.generate_all(["x"] * 4, capture={"sites": ["mlp_out"]})
    wrong: Any = ["x", "y", 5, "z"]
    with pytest.raises(ValueError, match="prompt = 5") as refused:
        client.generate_all(wrong)
    assert refused.value.__notes__ == ["of prompts[2]"]
    first, second, third = client.generate_all(["x", *wrong[2:]], return_exceptions=True)
    assert isinstance(second, ValueError) and second.__notes__ == ["of prompts[1]"]
    assert isinstance(first, Generation) and isinstance(third, Generation) and first.text
    running = client.generate("x", capture={}, play={"unfinished": True})
    for found in (client, store):
        with pytest.raises(NotComplete, match="running"):
            found.wait([running.capture_id], timeout_s=0.2)


# ── as other libraries have it ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", ["client", "store"])
def test_layers_as_other_libraries_have_them(client: Client, store: Store, way: str) -> None:
    torch = pytest.importorskip("torch")
    generation = client.generate(PROMPT, max_tokens=4, capture={"sites": ["resid_post"], "codec": "raw"})
    capture = generation.capture if way == "client" else store[generation.id]
    one, two = capture["resid_post", 2], capture["resid_post", [2, 3]]
    assert one.shape == (END, WIDTH) and two.shape == (2, END, WIDTH)
    for layer in (np.int64(2), np.array(2), torch.tensor(2)):
        assert capture["resid_post", layer].tobytes() == one.tobytes()
    for layers in (np.array([2, 3]), torch.tensor([2, 3]), range(2, 4)):
        assert capture["resid_post", layers].tobytes() == two.tobytes()
        assert set(capture.to_numpy(layer=layers)) == {"resid_post.2", "resid_post.3"}
    assert capture["resid_post", torch.tensor([2])].shape == (1, END, WIDTH)
    assert set(capture.to_numpy(layer=np.int64(2))) == {"resid_post.2"}
    for bad in (True, "2", slice(0, 2), torch.tensor([True, False])):
        with pytest.raises(SpecError, match=r"^layer = "):
            capture["resid_post", bad]
        with pytest.raises(SpecError, match=r"^layer = "):
            capture.to_numpy(layer=bad)


@pytest.mark.parametrize("way", ["client", "store"])
def test_rows_as_other_libraries_have_them(client: Client, store: Store, way: str) -> None:
    torch = pytest.importorskip("torch")
    generation = client.generate(PROMPT, max_tokens=4, capture={"codec": "raw"})
    capture = generation.capture if way == "client" else store[generation.id]
    want = {(site, layer): rows(0, site, layer, ALL, "float32") for site in ("resid_post", "attn_out")
            for layer in range(4)}
    arrays = capture.to_numpy()
    assert set(arrays) == {f"{site}.{layer}" for site, layer in want}
    assert all(arrays[f"{site}.{layer}"].tobytes() == want[site, layer].tobytes() for site, layer in want)
    assert set(capture.to_numpy("blocks.2.hook_attn_out")) == {"attn_out.2"}
    assert set(capture.to_numpy(layer=[0, 3])) == {f"{site}.{n}" for site in ("resid_post", "attn_out") for n in (0, 3)}
    cache = capture.to_torch("resid_post", [1, 2])
    assert set(cache) == {"blocks.1.hook_resid_post", "blocks.2.hook_resid_post"}
    assert torch.equal(cache["blocks.2.hook_resid_post"], torch.from_numpy(want["resid_post", 2]))
    part = capture.slice("resid_post", [0, 2], 1, 4)
    assert part.to_numpy() is part.values and part.to_torch().shape == (2, 3, WIDTH)


@pytest.mark.parametrize("way", ["client", "store"])
def test_rows_as_xarray(client: Client, store: Store, way: str) -> None:
    xarray = pytest.importorskip("xarray")
    generation = client.generate(PROMPT, max_tokens=4, capture={"codec": "raw", "layers": [1, 3]},
                                 play={"drop": ["resid_post", [3], 3, 6]})
    capture = generation.capture if way == "client" else store[generation.id]
    array = capture.slice("attn_out", [1, 3]).to_xarray()
    assert array.dims == ("token", "layer", "hidden") and array.sizes == {"token": END, "layer": 2, "hidden": WIDTH}
    assert array.position.values.tolist() == ALL
    assert bytes(array.token_id.values[:len(PROMPT)].astype(np.uint8)) == PROMPT.encode()
    assert array.sel(layer=3).values.tobytes() == rows(0, "attn_out", 3, ALL, "float32").tobytes()
    with pytest.raises(MissingRows):
        capture.to_xarray()
    both = capture.to_xarray(layer=1)
    assert isinstance(both, xarray.Dataset) and set(both.data_vars) == {"resid_post", "attn_out"}
    assert both.attrs["capture"] == generation.capture_id
    found = both["resid_post"].isel(layer=0).values
    assert found.tobytes() == rows(0, "resid_post", 1, ALL, "float32").tobytes()


def test_rows_as_a_hugging_face_dataset(client: Client, store: Store) -> None:
    pytest.importorskip("datasets")
    generation = client.generate(PROMPT, max_tokens=4, capture={"codec": "raw"})
    for capture in (generation.capture, store[generation.id]):
        found = capture.to_dataset("resid_post", [0, 2]).with_format("numpy")
        assert found.column_names == ["capture", "position", "token_id", "resid_post.0", "resid_post.2"]
        assert found["position"][:].tolist() == ALL and set(found["capture"][:]) == {generation.capture_id}
        assert found["resid_post.2"][:].tobytes() == rows(0, "resid_post", 2, ALL, "float32").tobytes()


# ── asyncio ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_asynchronous_client(stack: Stack) -> None:
    async def run() -> None:
        async with AsyncClient(stack.url, wait_s=5, retries=0) as client:
            generation = await client.generate(PROMPT, max_tokens=4, capture={"sites": ["resid_post"], "codec": "raw"})
            want = rows(0, "resid_post", 2, ALL, "float32").tobytes()
            for capture in (generation.capture, client.capture(generation.id)):
                assert (await capture.get("resid_post", 2)).tobytes() == want
                assert (await capture.get("blocks.2.hook_resid_post")).tobytes() == want
                assert (await capture.slice("resid_post", [0, 2], 1, 4)).values.shape == (2, 3, WIDTH)
                assert (await capture.get("resid_post", np.array([2, 0]))).shape == (2, END, WIDTH)
                assert (await capture.manifest()).captured == 4 * END and await capture.status() == "complete"
            with pytest.raises(SpecError, match="name a layer"):
                await generation.capture.get("resid_post")
            with pytest.raises(NotFoundError, match="mlp_out"):
                await generation.capture.get("mlp_out")
            tags = {"run": "async"}
            many = await client.generate_all(["x"] * 5, 2, {"tags": tags, "sites": ["attn_out"], "layers": [1]})
            assert {row.id async for row in client.captures(tags=tags, site="attn_out")} == {
                generation.capture_id for generation in many}
            assert {m.status for m in await client.wait([one.id for one in many])} == {"complete"}
            with pytest.raises(BadRequest, match="mlp_out"):
                await client.generate_all(["x"] * 3, capture={"sites": ["mlp_out"]})
            wrong: Any = ["x", 5]
            with pytest.raises(ValueError, match="prompt = 5") as refused:
                await client.generate_all(wrong)
            assert refused.value.__notes__ == ["of prompts[1]"]
            kept = await client.generate_all([*wrong, "y"], return_exceptions=True)
            assert [type(made) for made in kept] == [AsyncGeneration, ValueError, AsyncGeneration]
            holed = await client.generate(PROMPT, capture={"layers": [2]},
                                          play={"drop": ["resid_post", [2], 3, 6]})
            with pytest.raises(MissingRows, match="dropped"):
                await holed.capture.get("resid_post", 2)
            with pytest.raises(SpecError, match=r"^at_once = 0: at least 1"):
                await client.generate_all(["x"], at_once=0)
            await client.delete(holed.id)
            with pytest.raises(NotFoundError):
                await holed.capture.manifest()
            assert (await client.capabilities())["armed"]["resid_post"]["layers"] == [0, 1, 2, 3]

    asyncio.run(run())


def test_errors_carry_the_services_words(client: Client) -> None:
    with pytest.raises(ServiceError, match="armed: resid_post, attn_out") as refused:
        client.generate("x", capture={"sites": ["mlp_out"]})
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "not_armed", "capture.sites")
    assert isinstance(refused.value, ValueError)
    taken = new_ulid()
    client.generate("x", capture={"id": taken})
    with pytest.raises(ConflictError, match=taken):
        client.generate("x", capture={"id": taken})
    with pytest.raises(Unavailable, match="as asked"):
        client.generate("x", play={"status": 503})
    with pytest.raises(ValueError, match="openai"):
        client.generate("x", stream=True)
    with pytest.raises(ValueError, match=r"^prompt = 5: valid: text"):
        client.generate(5)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="is the service running"), Client("http://127.0.0.1:9", retries=0) as nobody:
        nobody.capabilities()
    for ref in ("../../healthz", "..", ".", ""):
        with pytest.raises(NotFoundError, match="no capture"):
            client.capture(ref).manifest()
        with pytest.raises(NotFoundError, match="no capture"):
            client.delete(ref)
    with pytest.raises(SpecError, match=r"^at_once = 0: at least 1"):
        client.generate_all(["x"], at_once=0)
    with pytest.raises(SpecError, match=r"^prompts = 'a text': valid: a list"):
        client.generate_all("a text")
    for bad in ("resid_post", True, ["resid_post"]):
        with pytest.raises(SpecError, match=r"^capture = .*a mapping such as"):
            client.generate("x", capture=bad)  # type: ignore[arg-type]
    assert list(client.captures(since="2999-01-31T12:00:00Z")) == []
    for filters, word in (({"since": "yesterday"}, "since"), ({"until": 5.5}, "until"), ({"tags": "a"}, "tags")):
        with pytest.raises(SpecError, match=f"^{word} = "):
            client.captures(**filters)  # type: ignore[arg-type]


def test_a_url_may_end_in_v1_as_other_clients_want_it(stack: Stack) -> None:
    with Client(f"{stack.url}/v1/", retries=0) as client:
        assert client.generate("x").text and "armed" in client.capabilities()


def test_a_closed_client_says_so(stack: Stack) -> None:
    with Client(stack.url, retries=0) as client:
        assert client.model()
    for ask in (client.model, client.capabilities):
        with pytest.raises(TapError, match="this client was closed"):
            ask()

    async def run() -> None:
        async with AsyncClient(stack.url) as client:
            assert await client.model()
        for ask in (client.model, client.capabilities):
            with pytest.raises(TapError, match="this client was closed"):
                await ask()

    asyncio.run(run())


def test_something_else_than_the_service_is_an_error(stack: Stack) -> None:
    with Client(stack.upstream_url) as wrong:
        with pytest.raises(NotFoundError, match="404"):
            wrong.capabilities()
        with pytest.raises(TapError, match=r"/v1/completions answered without a capture, though one was asked for"):
            wrong.generate("x", capture={})
        assert wrong.generate("x").text
    with pytest.raises(ValueError, match=r"^base_url = '127.0.0.1:8100': valid: a URL such as http"):
        Client("127.0.0.1:8100")


def test_a_store_that_is_none(tmp_path: object) -> None:
    with pytest.raises(TapError, match=r"store\.json"):
        open_store(str(tmp_path))


def test_a_store_that_was_closed(client: Client, stack: Stack) -> None:
    made = client.generate("x", max_tokens=1, capture={"sites": ["resid_post"]}).capture_id
    with open_store(stack.store) as store:
        capture = store[made]
    for read in (lambda: capture["resid_post", 0], lambda: store[made]):
        with pytest.raises(TapError, match="this reader was closed"):
            read()


def test_the_public_names_are_sorted_and_there() -> None:
    assert vllm_tap.__all__ == sorted(vllm_tap.__all__)
    public = {name for names in vllm_tap._MODULES.values() for name in names}
    assert public == set(vllm_tap.__all__) and all(getattr(vllm_tap, name) is not None for name in public)
    # A module of the same name would take its place once it is imported.
    assert not any(isinstance(getattr(vllm_tap, name), types.ModuleType) for name in public)
    with pytest.raises(AttributeError, match="nothing"):
        _ = vllm_tap.nothing


def test_importing_costs_nothing_heavy() -> None:
    code = ("import sys, vllm_tap; heavy = {'numpy', 'httpx', 'torch', 'vllm', 'pydantic'} & set(sys.modules); "
            "assert not heavy, heavy; from vllm_tap import Client, open_store; "
            "heavy = {'torch', 'vllm', 'fastapi', 'zarr'} & set(sys.modules); assert not heavy, heavy")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_readers_do_not_need_the_service(stack: Stack, client: Client, store: Store) -> None:
    """Last in this module: the whole service ends, and the store still gives the same numbers."""
    generation = client.generate(PROMPT, max_tokens=4, capture={"codec": "raw"})
    served = generation["resid_post", 3]
    for name in ("api", "writer"):
        assert stack.processes[name].stop() == 0, stack.processes[name].log.read_text()[-2000:]
    with pytest.raises((Unavailable, httpx.HTTPError)):
        client.capabilities()
    assert store[generation.id]["resid_post", 3].tobytes() == served.tobytes()
    with open_store(stack.store) as fresh:
        assert fresh[generation.id]["resid_post", 3].tobytes() == served.tobytes()
