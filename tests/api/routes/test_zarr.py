"""Captures as Zarr over HTTP: real clients of Zarr get what the reader gets, bit for bit, and never a made-up row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import httpx
import numpy as np
import numpy.typing as npt
import obstore.store
import pytest
import tensorstore
import xarray
import zarr
from zarr.storage import FsspecStore, ObjectStore

from api.auth.keys import make_key
from schemas import limits
from schemas.ids import new_ulid
from schemas.store.paths import KEYS_FILE
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import WIDTH
from vllm_tap import Client, NotFound, open_store

PROMPT = "What is inside?"
P, G = len(PROMPT), 6
END = P + G - 1
SPEC = {"sites": ["resid_post", "attn_out"], "codec": {"resid_post": "raw", "attn_out": "int8b64"}, "probe": ["tone"]}
F32 = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("zarr"), owner="me") as stack:
        yield stack


@pytest.fixture(scope="module")
def holed(stack: Stack) -> str:
    """A capture with rows that were dropped and rows that came from the prefix cache."""
    body = stack.complete(PROMPT, max_tokens=G, capture=SPEC,
                          play={"drop": ["resid_post", [1, 2], 8, 11], "cached": 4}).json()
    assert body["capture"]["status"] == "incomplete", body
    return str(body["capture"]["id"])


def want(stack: Stack, capture: str, site: str) -> F32:
    """What the store's reader has, as the view should have it: float32 ``[token, layer, width]``."""
    with open_store(stack.store) as store:
        layers = store[capture].sites[site]
        parts = [store[capture].slice(site, layer, allow_missing=True) for layer in layers]
    found = np.full((END, len(layers), parts[0].values.shape[-1]), np.nan, np.float32)
    for number, part in enumerate(parts):
        found[part.positions, number] = part.values[0]
    return found


def same(found: Any, wanted: F32) -> None:
    assert np.asarray(found).dtype == np.float32
    assert np.array_equal(np.asarray(found).view(np.uint32), wanted.view(np.uint32))


def root(stack: Stack, capture: str) -> str:
    return f"{stack.url}/v1/captures/{capture}/zarr"


def get(stack: Stack, capture: str, key: str, **headers: str) -> httpx.Response:
    return stack.http.get(f"/v1/captures/{capture}/zarr/{key}", headers=headers)


# ── real clients ────────────────────────────────────────────────────────────────────────────────────────────────


def by_zarr_fsspec(stack: Stack, capture: str) -> Callable[[str], Any]:
    options = {"client_kwargs": {"headers": {"Authorization": f"Bearer {stack.key}"}}}
    group = zarr.open_group(FsspecStore.from_url(root(stack, capture), storage_options=options, read_only=True),
                            mode="r")
    return lambda site: group[f"{site}/rows"][:]


def by_zarr_obstore(stack: Stack, capture: str) -> Callable[[str], Any]:
    http = obstore.store.HTTPStore.from_url(root(stack, capture), client_options={
        "allow_http": True, "default_headers": {"Authorization": f"Bearer {stack.key}"}})
    group = zarr.open_group(ObjectStore(http, read_only=True), mode="r")
    return lambda site: group[f"{site}/rows"][:]


def by_xarray(stack: Stack, capture: str) -> Callable[[str], Any]:
    options = {"client_kwargs": {"headers": {"Authorization": f"Bearer {stack.key}"}}}
    return lambda site: xarray.open_zarr(root(stack, capture), group=site, storage_options=options,
                                         chunks=None)["rows"].values


def by_dask(stack: Stack, capture: str) -> Callable[[str], Any]:
    options = {"client_kwargs": {"headers": {"Authorization": f"Bearer {stack.key}"}}}

    def read(site: str) -> Any:
        lazy = xarray.open_zarr(root(stack, capture), group=site, storage_options=options, chunks={})["rows"]
        assert dask.is_dask_collection(lazy) and lazy.data.numblocks[1] == lazy.sizes["layer"]
        return lazy.compute().values

    return read


def by_tensorstore(stack: Stack, capture: str) -> Callable[[str], Any]:
    def read(site: str) -> Any:
        return tensorstore.open({"driver": "zarr3", "kvstore": {
            "driver": "http", "base_url": f"{root(stack, capture)}/{site}/rows/",
            "headers": [f"Authorization: Bearer {stack.key}"]}}, open=True).result().read().result()

    return read


def by_zarrs(stack: Stack, capture: str) -> Callable[[str], Any]:
    """Rust's zarrs, as the codec pipeline of zarr-python: it reads what it decodes by itself, over HTTP too."""
    def read(site: str) -> Any:
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            return by_zarr_obstore(stack, capture)(site)

    return read


def by_our_client(stack: Stack, capture: str) -> Callable[[str], Any]:
    def read(site: str) -> Any:
        with Client(stack.url, api_key=stack.key) as client:
            return xarray.open_zarr(client.capture(capture).zarr(), group=site, chunks=None)["rows"].values

    return read


def by_our_store(stack: Stack, capture: str) -> Callable[[str], Any]:
    def read(site: str) -> Any:
        with open_store(stack.store) as store:
            return zarr.open_array(store[capture].zarr(), path=f"{site}/rows", mode="r")[:]

    return read


CLIENTS = [by_zarr_fsspec, by_zarr_obstore, by_xarray, by_dask, by_tensorstore, by_zarrs, by_our_client, by_our_store]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reads_what_the_reader_reads(stack: Stack, holed: str, client: Callable[..., Any]) -> None:
    read = client(stack, holed)
    for site in ("resid_post", "attn_out", "probe.tone"):
        wanted = want(stack, holed, site)
        assert np.isnan(wanted[:4]).all() and not np.isnan(wanted[4:8]).any()
        same(read(site), wanted)


@pytest.mark.parametrize("codec", ["topk:k=12", "topk8:k=12", "rp8:k=16", "raw16"])
def test_rows_are_what_their_codec_decodes_to(stack: Stack, codec: str) -> None:
    capture = stack.complete(PROMPT, max_tokens=G, capture={"sites": ["resid_post"], "codec": codec}
                             ).json()["capture"]["id"]
    found = by_zarr_obstore(stack, capture)("resid_post")
    assert found.shape == (END, 4, 16 if codec.startswith("rp8") else WIDTH)
    same(found, want(stack, capture, "resid_post"))


def test_axes_have_their_coordinates(stack: Stack, holed: str) -> None:
    with Client(stack.url, api_key=stack.key) as client:
        rows = client.capture(holed).slice("resid_post", 0, allow_missing=True)
        tree = xarray.open_datatree(client.capture(holed).zarr(), engine="zarr", chunks=None).load()
        manifest = client.capture(holed).manifest()
    assert set(tree.children) == {"resid_post", "attn_out", "probe.tone"}
    site = tree["resid_post"].to_dataset()
    assert site["rows"].dims == ("token", "layer", "width") and set(site.coords) == {"position", "token_id", "layer"}
    assert site["position"].values.tolist() == list(range(END)) and site["layer"].values.tolist() == [0, 1, 2, 3]
    assert site["token_id"].dtype == np.int64
    assert site["token_id"].values[rows.positions].tolist() == rows.token_ids.tolist()
    assert np.array_equal(site["present"].values, ~np.isnan(site["rows"].values[:, :, 0]))
    same(site["rows"].sel(layer=0).isel(token=rows.positions), rows.values[0])
    assert tree["prompt_token_ids"].values.tolist() == manifest.prompt_token_ids
    assert tree["output_token_ids"].values.tolist() == manifest.output_token_ids
    told = tree.attrs["manifest"]
    assert (told["id"], told["status"], told["captured"]) == (holed, "incomplete", manifest.captured)
    assert [row["missing"] for row in told["rows"]][1] == [
        {"start": gap.start, "stop": gap.stop, "reason": gap.reason} for gap in manifest.rows[1].missing]


# ── HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["zarr.json", "resid_post/zarr.json", "resid_post/rows/zarr.json",
                                 "resid_post/rows/c/0/1/0", "resid_post/token_id/c/0"])
def test_conditions_ranges_and_heads(stack: Stack, holed: str, key: str) -> None:
    whole = get(stack, holed, key)
    tag, size = whole.headers["etag"], len(whole.content)
    assert whole.status_code == 200 and whole.headers["accept-ranges"] == "bytes"
    head = stack.http.head(f"/v1/captures/{holed}/zarr/{key}")
    assert (head.status_code, head.headers["etag"], head.headers["content-length"]) == (200, tag, str(size))
    known = get(stack, holed, key, **{"if-none-match": f'"other", W/{tag}'})
    assert (known.status_code, known.content, known.headers["etag"]) == (304, b"", tag)
    assert get(stack, holed, key, **{"if-match": f'"other", {tag}'}).content == whole.content
    changed = get(stack, holed, key, **{"if-match": '"other"'})
    assert (changed.status_code, changed.json()["error"]["code"]) == (412, "changed")
    for asked, part in (("0-0", slice(0, 1)), (f"0-{size - 1}", slice(None)), ("7-", slice(7, None)),
                        ("-4", slice(size - 4, None)), (f"-{size + 9}", slice(None)), ("5-99999999", slice(5, None))):
        answer = get(stack, holed, key, range=f"bytes={asked}")
        start, stop, _ = part.indices(size)
        assert (answer.status_code, answer.content) == (206, whole.content[part])
        assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
    assert get(stack, holed, key, range="bytes=0-3", **{"if-range": '"other"'}).content == whole.content
    beyond = get(stack, holed, key, range=f"bytes={size}-")
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{size}")


@pytest.mark.parametrize("key", [
    "", "c", "zarr.json/", "/zarr.json", ".zgroup", "resid_post", "resid_post/", "resid_post/rows", "rows/c/0/0/0",
    "resid_post/rows/c", "resid_post/rows/c/0", "resid_post/rows/c/0/0", "resid_post/rows/c/0/0/0/0",
    "resid_post/rows/c/0/0/1", "resid_post/rows/c/0/4/0", "resid_post/rows/c/1/0/0", "resid_post/rows/c/00/0/0",
    "resid_post/rows/c/-1/0/0", "resid_post/rows/c/+0/0/0", "resid_post/rows/c/٠/0/0",
    "resid_post/rows/c/18446744073709551616/0/0", f"resid_post/rows/c/{'9' * 400}/0/0", "resid_post/rows/c/1e0/0/0",
    "..%2F..%2Fstore.json", "resid_post/%2E%2E/zarr.json", "%2Fetc%2Fpasswd", "resid_post%00/zarr.json",
    "mlp_out/rows/c/0/0/0", "resid_post/rows.0/c/0", "RESID_POST/zarr.json",
])
def test_what_is_no_key_is_not_found(stack: Stack, holed: str, key: str) -> None:
    for method in ("GET", "HEAD"):
        answer = stack.http.request(method, f"/v1/captures/{holed}/zarr/{key}")
        assert answer.status_code == 404, answer.text
    assert key == "" or get(stack, holed, key).json()["error"]["code"] in ("no_such_key", "not_found")


def test_what_is_anothers_is_as_if_it_were_not_there(stack: Stack, holed: str) -> None:
    other = httpx.Client(base_url=stack.url, headers={"x-api-key": make_key(stack.store / KEYS_FILE, "other")})
    never = new_ulid()
    for key, status in (("zarr.json", 404), ("resid_post/rows/zarr.json", 404), ("resid_post/rows/c/0/0/0", 410),
                        ("nothing", 404), ("nothing/c/0", 410)):
        answers = [other.get(f"/v1/captures/{ref}/zarr/{key}") for ref in (holed, never)]
        assert [answer.status_code for answer in answers] == [status, status]
        texts = [answer.text.replace(ref, "ID") for answer, ref in zip(answers, (holed, never), strict=True)]
        assert texts[0] == texts[1]
    assert httpx.get(f"{root(stack, holed)}/resid_post/rows/c/0/0/0").status_code == 401
    other.close()


def test_a_capture_that_runs_is_refused_by_name(stack: Stack) -> None:
    answer = stack.complete(PROMPT, max_tokens=G, capture=SPEC, play={"unfinished": True}).json()
    capture = answer["capture"]["id"]
    for key in ("zarr.json", "resid_post/rows/c/0/0/0"):
        refused = get(stack, capture, key)
        assert refused.status_code == 409 and "is running" in refused.json()["error"]["message"], refused.text
    with pytest.raises(Exception, match="409"):
        by_zarr_fsspec(stack, capture)


def test_samples_are_named_one_by_one(stack: Stack) -> None:
    made = stack.complete(PROMPT, max_tokens=G, n=2, capture=SPEC).json()["capture"]
    refused = get(stack, made["id"], "zarr.json")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "several_captures")
    for capture in made["ids"]:
        same(by_zarr_fsspec(stack, capture)("resid_post"), want(stack, capture, "resid_post"))


def opened(stack: Stack, client: Client, capture: str) -> list[Callable[[], Any]]:
    """Readers with metadata of the capture read and none of its rows."""
    arrays = [zarr.open_array(client.capture(capture).zarr(), path="resid_post/rows", mode="r")]
    options = {"client_kwargs": {"headers": {"Authorization": f"Bearer {stack.key}"}}}
    arrays.append(zarr.open_array(FsspecStore.from_url(root(stack, capture), storage_options=options, read_only=True),
                                  path="resid_post/rows", mode="r"))
    http = obstore.store.HTTPStore.from_url(root(stack, capture), client_options={
        "allow_http": True, "default_headers": {"Authorization": f"Bearer {stack.key}"}})
    arrays.append(zarr.open_array(ObjectStore(http, read_only=True), path="resid_post/rows", mode="r"))
    arrays.append(zarr.open_array(open_store(stack.store)[capture].zarr(), path="resid_post/rows", mode="r"))
    other = tensorstore.open({"driver": "zarr3", "kvstore": {
        "driver": "http", "base_url": f"{root(stack, capture)}/resid_post/rows/",
        "headers": [f"Authorization: Bearer {stack.key}"]}}, open=True).result()
    return [*(lambda array=array: array[:] for array in arrays), lambda: other.read().result()]


def test_a_capture_deleted_while_it_is_read_is_an_error_and_no_rows(stack: Stack) -> None:
    """404 would be a chunk of fill values to every one of them."""
    capture = stack.complete(PROMPT, max_tokens=G, capture=SPEC).json()["capture"]["id"]
    with Client(stack.url, api_key=stack.key) as client:
        readers = opened(stack, client, capture)
        assert stack.http.delete(f"/v1/captures/{capture}").status_code == 204
        for read in readers:
            with pytest.raises(Exception, match=r"410|no capture"):
                read()
    gone = get(stack, capture, "resid_post/rows/c/0/0/0")
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "gone")
    assert get(stack, capture, "zarr.json").status_code == 404
    with Client(stack.url, api_key=stack.key) as client, pytest.raises(NotFound):
        client.zarr_value(capture, "resid_post/rows/c/0/0/0", slice(None))


def test_many_read_at_once_and_none_holds_more_than_a_chunk(stack: Stack) -> None:
    """A row is 96 float32: all of a capture lies in one chunk of a layer, far below the bound."""
    capture = stack.complete("x" * 400, max_tokens=8, capture=SPEC).json()["capture"]["id"]
    document = json.loads(get(stack, capture, "resid_post/rows/zarr.json").content)
    chunk = document["chunk_grid"]["configuration"]["chunk_shape"]
    assert chunk == [407, 1, WIDTH] and 4 * np.prod(chunk) <= limits.zarr_chunk_bytes_target
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: get(stack, capture, f"resid_post/rows/c/0/{n % 4}/0"), range(64)))
    assert {answer.status_code for answer in answers} <= {200, 429}
    assert len({answer.content for answer in answers if answer.status_code == 200}) == 4
