"""Slices over HTTP: in every format and dtype exactly what was sent, and every wrong question gets its reason."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from safetensors.numpy import load as load_safetensors
from safetensors.torch import load as load_torch

from api.config import Config
from api.slices.query import SliceQuery
from api.slices.reading import encoded, slice_bytes
from schemas import codecs
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import WIDTH, decoded, encode_rows, rows, to_bits
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import Sender
from vllm_tap import Client, open_store

PROMPT = "What is inside?"
P, G = len(PROMPT), 6
END = P + G - 1  # the last sampled token was never computed
ALL = list(range(END))
SPEC = {"sites": ["resid_post", "attn_out"], "codec": {"resid_post": "raw", "attn_out": "int8b64"}}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("slices")) as stack:
        yield stack


def ended(body: dict[str, Any], status: str) -> str:
    """The id of an answer's capture, which ended so."""
    assert body.get("capture", {}).get("status") == status, body
    return str(body["capture"]["id"])


@pytest.fixture(scope="module")
def capture(stack: Stack) -> str:
    body = stack.complete(PROMPT, max_tokens=G, capture=SPEC).json()
    return ended(body, "complete")


@pytest.fixture(scope="module")
def holed(stack: Stack) -> str:
    """A capture with rows that were dropped and rows that came from the prefix cache."""
    body = stack.complete(PROMPT, max_tokens=G, play={"drop": ["resid_post", [1, 2], 8, 11], "cached": 4},
                          capture={"sites": ["resid_post"], "codec": "raw", "prefix_cache": "allow"}).json()
    return ended(body, "incomplete")


def get(stack: Stack, capture: str, query: str, **headers: str) -> httpx.Response:
    return stack.http.get(f"/v1/captures/{capture}/activations?{query}", headers=headers)


@pytest.fixture(scope="module")
def reduced(stack: Stack) -> str:
    """A capture of a projection and of the largest entries alone."""
    body = stack.complete(PROMPT, max_tokens=G, capture={**SPEC, "codec": {
        "resid_post": "rp8:k=16", "attn_out": "topk:k=12"}}).json()
    return ended(body, "complete")


@pytest.mark.parametrize("format_", ["safetensors", "npy", "npz", "arrow", "json"])
def test_what_is_not_the_row_itself_says_so(stack: Stack, reduced: str, format_: str) -> None:
    want = decoded("rp8:k=16,seed=0", 0, "resid_post", 1, ALL, "bfloat16")
    answer = get(stack, reduced, f"site=resid_post&layer=1&format={format_}")
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.headers["X-Tap-Codecs"]) == {"resid_post": "rp8:k=16,seed=0"}
    assert "cannot be undone" in json.loads(answer.headers["X-Tap-Decoded"])["resid_post"]
    assert json.loads(answer.headers["X-Tap-Widths"]) == {"resid_post": WIDTH}
    found = {
        "safetensors": lambda: load_safetensors(answer.content)["resid_post.1"],
        "npy": lambda: np.load(io.BytesIO(answer.content)),
        "npz": lambda: np.load(io.BytesIO(answer.content))["resid_post.1"],
        "arrow": lambda: np.stack(pa.ipc.open_file(answer.content).read_all()["resid_post.1"].to_numpy()),
        "json": lambda: np.array(answer.json()["arrays"]["resid_post.1"], np.float32),
    }[format_]()
    assert found.shape == (END, 16) and np.array_equal(found, want)


def test_the_largest_entries_say_how_much_they_are(stack: Stack, reduced: str) -> None:
    answer = get(stack, reduced, "site=attn_out&layer=1")
    rows_ = load_safetensors(answer.content)["attn_out.1"]
    x = rows(0, "attn_out", 1, ALL, "bfloat16")
    assert rows_.shape == (END, WIDTH) and ((rows_ != 0).sum(-1) == 12).all()
    share = ((rows_**2).sum(-1) / (x**2).sum(-1)).mean()
    assert abs(json.loads(answer.headers["X-Tap-Kept-Energy"])["attn_out"] - share) < 0.01
    codes = load_safetensors(get(stack, reduced, "site=attn_out&layer=1&dtype=codes").content)
    assert codes["attn_out.1.index"].dtype == np.uint16 and codes["attn_out.1.kept"].shape == (END, 1)
    manifest = stack.http.get(f"/v1/captures/{reduced}").json()
    projected, kept = (next(info for info in manifest["sites"] if info["site"] == site)
                       for site in ("resid_post", "attn_out"))
    assert projected["parameters"] == {"k": 16, "seed": 0} and projected["family"] == "rp8"
    assert (projected["decoded_width"], projected["width"]) == (16, WIDTH) and "cannot" in projected["decoded"]
    assert kept["parameters"] == {"k": 12} and "share of" in kept["error_bound"] and kept["formula"]


@pytest.mark.parametrize(("site", "codec"), [("resid_post", "raw"), ("attn_out", "int8b64")])
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("format_", ["safetensors", "npy", "npz", "arrow", "json"])
def test_each_format_is_bit_exact(stack: Stack, capture: str, site: str, codec: str, layer: int, format_: str) -> None:
    answer = get(stack, capture, f"site={site}&layer={layer}&format={format_}")
    assert answer.status_code == 200, answer.text
    want = decoded(codec, 0, site, layer, ALL, "bfloat16")
    name, positions = f"{site}.{layer}", ALL
    if format_ == "safetensors":
        arrays = load_safetensors(answer.content)
        got, positions = arrays[name], arrays["positions"].tolist()
        assert bytes(arrays["token_ids"].astype(np.uint8)) == PROMPT.encode() + b"abcde"
    elif format_ == "npy":
        got = np.load(io.BytesIO(answer.content), allow_pickle=False)
    elif format_ == "npz":
        with np.load(io.BytesIO(answer.content), allow_pickle=False) as arrays:
            got, positions = arrays[name], arrays["positions"].tolist()
    elif format_ == "arrow":
        table = pa.ipc.open_file(answer.content).read_all()
        got = np.stack(table[name].combine_chunks().to_numpy(zero_copy_only=False))
        positions = table["positions"].to_pylist()
    else:
        body = json.loads(answer.content)
        got, positions = np.array(body["arrays"][name], np.float32), body["positions"]
    assert got.dtype == np.float32 and got.shape == (END, WIDTH)
    assert positions == ALL
    assert got.tobytes() == want.tobytes()
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_several_sites_and_layers_in_one_file(stack: Stack, capture: str) -> None:
    answer = get(stack, capture, "site=blocks.2.hook_resid_post&site=attn_out.1&start=3&stop=9")
    together = get(stack, capture, "site=blocks.2.hook_resid_post,attn_out.1&start=3&stop=9")
    assert together.content == answer.content
    arrays = load_safetensors(answer.content)
    assert set(arrays) == {"resid_post.2", "attn_out.1", "positions", "token_ids"}
    assert arrays["resid_post.2"].tobytes() == rows(0, "resid_post", 2, ALL[3:9], "bfloat16").tobytes()
    assert arrays["attn_out.1"].tobytes() == decoded("int8b64", 0, "attn_out", 1, ALL[3:9], "bfloat16").tobytes()
    assert answer.headers["x-tap-start"] == "3" and answer.headers["x-tap-stop"] == "9"


def test_without_parameters_it_is_everything(stack: Stack, capture: str) -> None:
    arrays = load_safetensors(get(stack, capture, "").content)
    names = {f"{site}.{layer}" for site in ("resid_post", "attn_out") for layer in range(4)}
    assert set(arrays) == names | {"positions", "token_ids"}


@pytest.mark.parametrize(("query", "layers"), [
    ("layer=all", [0, 1, 2, 3]), ("layer=0,2", [0, 2]), ("layer=0&layer=3", [0, 3]), ("layer=1:3", [1, 2]),
    ("layer=::2", [0, 2]), ("layer=-1:", [3]), ("layer=2:100", [2, 3]),
])
def test_layer_expressions(stack: Stack, capture: str, query: str, layers: list[int]) -> None:
    arrays = load_safetensors(get(stack, capture, f"site=resid_post&{query}").content)
    assert sorted(arrays) == sorted([f"resid_post.{layer}" for layer in layers] + ["positions", "token_ids"])


def test_dtypes(stack: Stack, capture: str) -> None:
    want = rows(0, "resid_post", 1, ALL, "bfloat16")
    half = load_safetensors(get(stack, capture, "site=resid_post&layer=1&dtype=float16").content)["resid_post.1"]
    assert half.tobytes() == want.astype(np.float16).tobytes()
    bits = load_torch(get(stack, capture, "site=resid_post&layer=1&dtype=bfloat16").content)["resid_post.1"]
    assert str(bits.dtype) == "torch.bfloat16" and bits.float().numpy().tobytes() == want.tobytes()


def test_codes_are_the_stored_streams(stack: Stack, capture: str) -> None:
    arrays = load_safetensors(get(stack, capture, "site=attn_out&layer=2&dtype=codes").content)
    stored = encode_rows("int8b64", rows(0, "attn_out", 2, ALL, "bfloat16"), "bfloat16")
    for name, array in stored.items():
        assert arrays[f"attn_out.2.{name}"].tobytes() == array.tobytes(), name
    again = {name: arrays[f"attn_out.2.{name}"] for name in stored}
    assert codecs.decode("int8b64", again, WIDTH, "bfloat16").shape == (END, WIDTH)
    one = np.load(io.BytesIO(get(stack, capture, "site=resid_post&layer=0&dtype=codes&format=npy").content))
    assert one.tobytes() == to_bits(rows(0, "resid_post", 0, ALL, "bfloat16")).tobytes()


@pytest.mark.parametrize(("accept", "media_type"), [
    ("application/x-npy", "application/x-npy"), ("application/json, */*;q=0.1", "application/json"),
    ("*/*", "application/vnd.safetensors"), ("application/vnd.apache.arrow.file", "application/vnd.apache.arrow.file"),
    ("text/html;q=0.9, application/x-npz;q=0.3, application/x-npy;q=0", "application/x-npz"),
    ("application/vnd.safetensors;q=0, */*", "application/x-npy"),
])
def test_accept_header(stack: Stack, capture: str, accept: str, media_type: str) -> None:
    answer = get(stack, capture, "site=resid_post&layer=0", accept=accept)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(media_type)


def test_a_range_past_the_end_is_clipped_and_says_so(stack: Stack, capture: str) -> None:
    answer = get(stack, capture, f"site=resid_post&layer=0&start={END - 2}&stop=5000")
    assert load_safetensors(answer.content)["positions"].tolist() == ALL[-2:]
    assert answer.headers["x-tap-clipped"] == "true" and answer.headers["x-tap-stop"] == str(END)
    inside = get(stack, capture, f"site=resid_post&layer=0&stop={END}")
    assert inside.headers["x-tap-clipped"] == "false"


def test_missing_rows_are_named_and_not_filled(stack: Stack, holed: str) -> None:
    answer = get(stack, holed, "site=resid_post&layer=1")
    assert json.loads(answer.headers["x-tap-missing"]) == [
        {"start": 0, "stop": 4, "reason": "prefix_cached"}, {"start": 8, "stop": 11, "reason": "dropped"}]
    assert answer.headers["x-tap-missing-rows"] == "7" and answer.headers["x-tap-status"] == "incomplete"
    there = [p for p in ALL if p >= 4 and p not in (8, 9, 10)]
    arrays = load_safetensors(answer.content)
    assert arrays["positions"].tolist() == there
    assert arrays["resid_post.1"].tobytes() == rows(0, "resid_post", 1, there, "bfloat16").tobytes()
    other = get(stack, holed, "site=resid_post&layer=0")
    assert json.loads(other.headers["x-tap-missing"]) == [{"start": 0, "stop": 4, "reason": "prefix_cached"}]


def test_by_every_name(stack: Stack) -> None:
    answer = stack.http.post("/v1/completions", headers={"X-Request-Id": "my-request.7"}, json={
        "model": "played", "prompt": PROMPT, "capture": {"sites": ["resid_post"]}}).json()
    assert answer["id"] == f"cmpl-{answer['capture']['id']}"
    contents = {get(stack, name, "layer=0").content for name in (answer["capture"]["id"], answer["id"], "my-request.7",
                                                                  answer["capture"]["id"] + ".0")}
    assert len(contents) == 1


@pytest.mark.parametrize(("query", "param", "says"), [
    ("site=resid_pst", "site", "resid_post"),
    ("site=blocks.9.hook_nothing", "site", "unknown site"),
    ("site=../../etc/passwd", "site", "unknown site"),
    ("layer=x", "layer", "valid"),
    ("layer=-1", "layer", "-1:"),
    ("layer=1:2:0", "layer", "valid"),
    ("layer=", "layer", "valid"),
    ("layer=1,,2", "layer", "valid"),
    ("layer=٣", "layer", "valid"),
    ("site=blocks.2.hook_resid_post&layer=1", "layer", "fixes"),
    ("start=-1", "start", "valid"),
    ("start=1e3", "start", "valid"),
    ("start=99999999999", "start", "valid"),
    ("start=5&stop=5", "stop", "greater"),
    ("start=5&stop=2", "stop", "greater"),
    ("stop=0", "stop", "greater"),
    ("start=1&start=2", "start", "more than once"),
    ("wait=complete&wait=rows", "wait", "more than once"),
    ("format=hdf5", "format", "safetensors"),
    ("format=npy", "format", "one array"),
    ("format=npy&site=attn_out&layer=0&dtype=codes", "dtype", "one array"),
    ("format=json&dtype=codes", "dtype", "numbers"),
    ("format=npz&dtype=bfloat16", "dtype", "safetensors"),
    ("dtype=float64", "dtype", "float32"),
    ("wait=forever", "wait", "complete"),
    ("timeout=soon", "timeout", "seconds"),
    ("timeout=nan", "timeout", "seconds"),
    ("timeout=1e9", "timeout", "seconds"),
    ("layers=1", "layers", "valid: site, layer"),
])
def test_bad_parameters_name_field_value_and_what_is_valid(
    stack: Stack, capture: str, query: str, param: str, says: str
) -> None:
    answer = get(stack, capture, query)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert param in error["message"] and says in error["message"]


@pytest.mark.parametrize(("query", "status"), [
    ("site=mlp_out", 404), ("site=resid_post&layer=9", 404), ("site=blocks.7.hook_resid_post", 404),
    ("layer=9:", 404), (f"start={END}", 416), ("start=4000000", 416), ("positions=4000", 416),
])
def test_what_the_capture_does_not_have(stack: Stack, capture: str, query: str, status: int) -> None:
    answer = get(stack, capture, query)
    assert answer.status_code == status and answer.json()["error"]["message"]
    if status == 416:
        assert answer.json()["error"]["param"] == query.partition("=")[0]
        assert answer.headers["content-range"] == f"positions */{END}"
    else:
        assert answer.json()["error"]["param"] == query.rpartition("&")[2].partition("=")[0]
        assert "[" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("spec", [{"sites": []}, {"layers": []}])
@pytest.mark.parametrize("query", ["", "format=npz", "format=npy", "dtype=codes"])
def test_a_capture_of_nothing_has_no_slice(stack: Stack, spec: dict[str, object], query: str) -> None:
    ulid = stack.complete("x", capture=spec).json()["capture"]["id"]
    answer = get(stack, ulid, query)
    assert answer.status_code == 404 and "nothing" in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("format_", ["safetensors", "npz", "npy", "arrow", "json"])
@pytest.mark.parametrize("codec", ["raw", "int8b64"])
def test_a_range_without_rows_is_an_empty_answer(stack: Stack, codec: str, format_: str) -> None:
    ulid = stack.complete("x", capture={**SPEC, "codec": codec, "positions": [[90, 99]]}).json()["capture"]["id"]
    for more in ("", "&dtype=codes") if codec == "raw" and format_ != "json" else ("",):
        answer = get(stack, ulid, f"site=resid_post&layer=0&format={format_}{more}")
        assert answer.status_code == 200 and answer.headers["x-tap-rows"] == "0", answer.text
    if format_ == "arrow":
        table = pa.ipc.open_file(io.BytesIO(answer.content)).read_all()
        assert table.num_rows == 0 and "positions" in table.column_names


def test_sites_read_at_different_moments_end_where_the_first_one_does(stack: Stack, capture: str) -> None:
    """While a capture runs, the second site may have rows that the first had not yet: they are not claimed."""
    with StoreReader(stack.store) as reader:
        manifest = reader.manifest(capture)
        pieces = [reader.slice(capture, "resid_post", [0], 0, 5), reader.slice(capture, "attn_out", [0], 0, 8)]
    answer = encoded(manifest, pieces, SliceQuery())
    assert (answer.start, answer.stop, answer.rows) == (0, 5, 5)


def test_not_acceptable(stack: Stack, capture: str) -> None:
    answer = get(stack, capture, "", accept="image/png")
    assert answer.status_code == 406 and "safetensors" in answer.json()["error"]["message"]


@pytest.mark.parametrize("query", ["site=resid_post&layer=1", "layer=2&dtype=codes", "site=no_such", "format=png"])
def test_head_is_get_without_the_body(stack: Stack, capture: str, query: str) -> None:
    def told(answer: httpx.Response) -> dict[str, str]:
        return {name: value for name, value in answer.headers.items() if name != "date"}

    url = f"/v1/captures/{capture}/activations?{query}"
    with httpx.Client(base_url=stack.url) as client:  # one connection: a body would be taken for the next answer
        got = client.get(url)
        for headers in ({}, {"range": "bytes=8-15"}):  # which is for GET alone
            head = client.head(url, headers=headers)
            assert (head.status_code, head.content, told(head)) == (got.status_code, b"", told(got))
        if got.status_code == 200:
            assert int(head.headers["content-length"]) == len(got.content)
            assert client.head(url, headers={"if-none-match": head.headers["etag"]}).status_code == 304
    assert "vllm_tap_api_slices_in_flight_bytes 0.0" in stack.http.get("/metrics").text


def test_a_safetensors_header_is_well_formed(stack: Stack, capture: str) -> None:
    content = get(stack, capture, "site=resid_post&layer=0").content
    size, = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + size])
    assert (8 + size) % 8 == 0
    assert header["__metadata__"]["capture"] == capture
    assert max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__") == \
        len(content) - 8 - size


@pytest.mark.parametrize("codec", ["raw", "int8b64"])
@pytest.mark.parametrize(("format_", "dtype"), [
    ("safetensors", "float32"), ("safetensors", "bfloat16"), ("safetensors", "codes"), ("npz", "float32"),
    ("npz", "float16"), ("arrow", "float32"), ("json", "float32"),
])
def test_a_slice_is_counted_with_all_the_memory_that_making_it_takes(
    stack: Stack, codec: str, format_: str, dtype: str
) -> None:
    ulid = stack.complete("x" * 1500, max_tokens=1, capture={"codec": codec}).json()["capture"]["id"]
    query = SliceQuery.model_validate({"stop": 300 if format_ == "json" else None, "format": format_, "dtype": dtype})
    chosen = {"resid_post": [0, 1, 2, 3], "attn_out": [0, 1, 2, 3]}
    with StoreReader(stack.store) as reader:
        manifest = reader.manifest(ulid)
        row = query.model_copy(update={"stop": 1})
        encoded(manifest, [reader.slice(ulid, "resid_post", [0], 0, 1)], row)  # what is imported for it stays
        tracemalloc.start()
        try:
            pieces = [reader.slice(ulid, site, layers, 0, query.stop) for site, layers in chosen.items()]
            answer = encoded(manifest, pieces, query)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert answer.size < peak < slice_bytes(Config(stack.store, stack.endpoint), manifest, chosen, query)


def sockets(stack: Stack) -> int:
    """That the service has open."""
    folder = Path(f"/proc/{stack.processes['api'].child.pid}/fd")
    return sum(str(fd.readlink()).startswith("socket:") for fd in folder.iterdir() if fd.is_symlink())


def test_a_caller_who_takes_nothing_is_cut_off(tmp_path: Path) -> None:
    """One who went to sleep would hold the memory of all slices for ever."""
    with running(tmp_path) as stack:
        stack.processes["api"].stop()
        stack.start_api(None, "--slice-stall-s", "3")
        stack.wait_ready()
        ulid = stack.complete("x" * 4000, max_tokens=1, capture={"codec": "raw"}).json()["capture"]["id"]
        whole = f"/v1/captures/{ulid}/activations"
        stack.http.get("/metrics")
        before = sockets(stack)
        with httpx.Client(base_url=stack.url) as asleep, asleep.stream("GET", whole) as got:
            assert got.status_code == 200
            held = "vllm_tap_api_slices_in_flight_bytes 0.0"
            assert held not in stack.http.get("/metrics").text
            end_s = time.monotonic() + PATIENCE_S
            while held not in stack.http.get("/metrics").text:
                assert time.monotonic() < end_s
                time.sleep(0.1)
            while sockets(stack) > before:
                assert time.monotonic() < end_s, "the connection is still there, with what was sent through it"
                time.sleep(0.1)
            with pytest.raises(httpx.RemoteProtocolError):
                got.read()
        with socket.create_connection(("127.0.0.1", int(stack.url.rpartition(":")[2]))) as slow:  # but not cut off
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            slow.sendall(f"GET {whole} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            taken, began_s = b"", time.monotonic()
            while some := slow.recv(1 << 17):
                taken += some
                time.sleep(0.05)
            head, _, body = taken.partition(b"\r\n\r\n")
            assert f"content-length: {len(body)}\r\n".encode() in head.lower() and time.monotonic() > began_s + 3.5
        assert "Traceback" not in (stack.store.parent / "api.log").read_text()


def test_too_much_at_once(tmp_path: Path) -> None:
    """Limits made small: a slice over the limit is refused whole; one that is still being sent counts."""
    with running(tmp_path) as stack:
        stack.processes["api"].stop()
        stack.start_api(None, "--slice-bytes-max", "7000000", "--slices-in-flight-bytes-max", "8000000",
                        "--slice-stall-s", str(10 * PATIENCE_S))  # so that nothing but leaving frees a caller's bytes
        stack.wait_ready()
        ulid = stack.complete("x" * 4000, max_tokens=1, capture={"codec": "raw"}).json()["capture"]["id"]
        for query, says in (("", "bytes of the slice"), ("format=json&site=resid_post", "numbers in a json slice")):
            refused = get(stack, ulid, query)
            assert refused.status_code == 413 and refused.json()["error"]["code"] == "too_large"
            assert says in refused.json()["error"]["message"]
        whole = f"/v1/captures/{ulid}/activations?site=resid_post"
        with httpx.Client(base_url=stack.url) as slow, slow.stream("GET", whole) as answer:
            assert answer.status_code == 200 and int(answer.headers["content-length"]) > 6_000_000
            busy = get(stack, ulid, "site=attn_out")
            assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
        end_s = time.monotonic() + PATIENCE_S
        while (again := get(stack, ulid, "site=attn_out")).status_code == 429:
            assert time.monotonic() < end_s, "memory of an answer whose caller left still counts"
            time.sleep(0.05)
        assert again.status_code == 200
        assert "vllm_tap_api_slices_in_flight_bytes 0.0" in stack.http.get("/metrics").text


def test_rejected_drafts_are_had_by_asking_for_them(stack: Stack) -> None:
    ulid = new_ulid()
    with Sender(stack.endpoint) as engine:
        engine.open(ulid)
        engine.frame([(ulid, 1, range(8))])
        engine.frame([(ulid, 1, [8, 9, 10])], drafts={9: 7, 10: 1002})  # 9 is wrong, so 10 had a wrong context
        engine.frame([(ulid, 1, [9, 10, 11])], drafts={10: 1002, 11: 5}, version=1)
        engine.frame([(ulid, 1, [11])], version=2)
        engine.finish(ulid, end=12, output=5)
        engine.wait()
    manifest = stack.http.get(f"/v1/captures/{ulid}?wait=complete").json()
    assert (manifest["status"], manifest["captured"]) == ("complete", 48)
    assert [row["rejected"] for row in manifest["rows"]] == [3, 3, 3, 3]
    with Client(stack.url) as client, open_store(stack.store) as store:
        for source in (client.capture(ulid), store[ulid]):
            rejected = source.rejected("resid_post", [0, 2])
            assert rejected.positions.tolist() == [9, 10, 11] and rejected.token_ids.tolist() == [7, 1002, 5]
            assert not rejected.missing
            accepted = source.slice("resid_post", [0, 2], 9, 12)
            assert accepted.positions.tolist() == [9, 10, 11]
            assert not np.isclose(accepted.values, rejected.values).all(axis=-1).any()
            assert source.rejected("resid_post", 0, 10, 11).positions.tolist() == [10]
    assert get(stack, ulid, "rows=rejected&start=100&format=json").json()["positions"] == []
    answer = get(stack, ulid, "rows=guessed")
    assert answer.status_code == 400 and "accepted, rejected" in answer.text


def test_rejected_drafts_of_several_sites_are_not_mixed(stack: Stack, capture: str) -> None:
    answer = get(stack, capture, "rows=rejected")
    assert answer.status_code == 400 and "one site at a time" in answer.text
    assert get(stack, capture, "rows=rejected&site=resid_post").headers["X-Tap-Rows"] == "0"


# ── ranges, tags and checksums of the answer ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("positions", "want"), [
    ("0,2,4:6", [0, 2, 4, 5]), ("4:6,0:2", [0, 1, 4, 5]), ("0:3,2:5", [0, 1, 2, 3, 4]), ("3", [3]), ("18:99", [18, 19]),
])
def test_several_ranges_at_once(stack: Stack, capture: str, positions: str, want: list[int]) -> None:
    answer = get(stack, capture, f"positions={positions}&site=resid_post&site=attn_out&layer=0,1")
    arrays, whole = load_safetensors(answer.content), load_safetensors(get(stack, capture, "layer=0,1").content)
    assert arrays["positions"].tolist() == want and answer.headers["x-tap-rows"] == str(len(want))
    for name in ("resid_post.0", "resid_post.1", "attn_out.0", "attn_out.1", "token_ids"):
        assert np.array_equal(arrays[name], whole[name][want])
    assert answer.headers["x-tap-clipped"] == str("99" in positions).lower()


@pytest.mark.parametrize("positions", ["", "x", "1:1", "3:2", "1-2", "-1", "1:", ",".join(["1"] * 300), "0&start=1",
                                       "0,4294967296:2", "0&positions=1", "1:2:3"])
def test_bad_ranges(stack: Stack, capture: str, positions: str) -> None:
    answer = get(stack, capture, f"positions={positions}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "positions")


def test_a_final_slice_has_a_tag(stack: Stack, capture: str) -> None:
    first = get(stack, capture, "layer=0")
    tag = first.headers["etag"]
    assert get(stack, capture, "layer=0").headers["etag"] == tag
    url = f"/v1/captures/{capture}/activations?layer=0"
    same = stack.http.get(url, headers={"if-none-match": f'"other", {tag}'})
    assert same.status_code == 304 and not same.content and same.headers["etag"] == tag
    for known in (f"W/{tag}", "*"):  # as who compresses on the way makes of it
        assert stack.http.get(url, headers={"if-none-match": known}).status_code == 304
    assert stack.http.get(url, headers={"if-none-match": '"other"'}).content == first.content
    others = {get(stack, capture, query).headers["etag"] for query in (
        "layer=1", "layer=0&dtype=float16", "layer=0&format=npz", "layer=0&stop=2", "layer=0&positions=0:2,3")}
    assert len(others | {tag}) == 6
    running = stack.complete("wait", play={"unfinished": True}, capture={}).json()["capture"]["id"]
    assert "etag" not in get(stack, running, "layer=0").headers


def test_parts_of_a_slice(stack: Stack, capture: str) -> None:
    url = f"/v1/captures/{capture}/activations?layer=0"
    whole = stack.http.get(url)
    size = len(whole.content)
    assert whole.headers["accept-ranges"] == "bytes" and int(whole.headers["content-length"]) == size
    for text, part in (("0-9", slice(0, 10)), ("100-", slice(100, size)), ("-7", slice(size - 7, size)),
                       (f"{size - 1}-{size + 50}", slice(size - 1, size)), ("37-420", slice(37, 421))):
        answer = stack.http.get(url, headers={"range": f"bytes={text}", "if-range": whole.headers["etag"]})
        assert answer.status_code == 206 and answer.content == whole.content[part]
        assert answer.headers["content-range"] == f"bytes {part.start}-{part.stop - 1}/{size}"
        assert answer.headers["x-tap-xxh3"] == whole.headers["x-tap-xxh3"]
    for headers in ({"range": "bytes=5-2"}, {"range": "lines=1-2"}, {"range": "bytes=0-1,4-5"}, {"range": "bytes=-"},
                    {"range": "bytes=0-1", "if-range": '"other"'}):
        answer = stack.http.get(url, headers=headers)
        assert answer.status_code == 200 and answer.content == whole.content
    past = stack.http.get(url, headers={"range": f"bytes={size}-"})
    assert past.status_code == 416 and past.headers["content-range"] == f"bytes */{size}"


@pytest.mark.parametrize("form", ["safetensors", "npz", "arrow", "json"])
def test_checksums(stack: Stack, capture: str, form: str) -> None:
    url = f"/v1/captures/{capture}/activations?layer=0&format={form}"
    answer = stack.http.get(url, headers={"want-repr-digest": "sha-256=5"})
    assert answer.headers["x-tap-xxh3"] == xxhash.xxh3_64_hexdigest(answer.content)
    assert answer.headers["repr-digest"] == (
        f"sha-256=:{base64.b64encode(hashlib.sha256(answer.content).digest()).decode()}:")
    assert "repr-digest" not in stack.http.get(url).headers
