"""The HTTP service of a bucket: reads as beside the store, refuses what a bucket cannot do, and follows its heads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from api.__main__ import main
from api.auth.keys import make_key
from schemas.objects.layout import HEAD
from tests.support.api_stack import Process
from tests.support.buckets import Fault, FaultProxy
from tests.support.store_helpers import SITE, until
from tests.vllm_tap.bucket.conftest import Sample, erase, grow
from vllm_tap.bucket.push import push

OFTEN = ("--bucket-look-s", "0.1")
NEVER = ("--bucket-look-s", "3600")


@contextmanager
def serving(folder: Path, store: str, *more: str, key: str = "") -> Iterator[httpx.Client]:
    """The service as a process; it must end by itself."""
    folder.mkdir(exist_ok=True)
    process = Process(["api", "--store", store, "--port", "0", *more], folder / "api.log")
    try:
        with httpx.Client(base_url=process.wait_ready(), headers={"x-api-key": key} if key else None) as client:
            yield client
        assert process.stop() == 0
    finally:
        if process.child.poll() is None:
            process.kill()


def bucket(folder: Path, url: str, *more: str, key: str = "") -> AbstractContextManager[httpx.Client]:
    return serving(folder, url, "--cache", str(folder / "cache"), *more, key=key)


def beside(folder: Path, store: Path) -> AbstractContextManager[httpx.Client]:
    """The same, of the folder; its writer and its engine are away."""
    return serving(folder, str(store), "--endpoint", f"ipc://{folder}/none", "--upstream", "http://127.0.0.1:9")


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def generation(client: httpx.Client) -> int:
    found: int = client.get("/v1/capabilities").json()["bucket"]["generation"]
    return found


def asked(capture: str, layers: str, direction: bytes) -> list[tuple[str, str, bytes]]:
    """Requests that read of one capture, with the body of those that have one."""
    at = f"/v1/captures/{capture}"
    return [*(("GET", path, b"") for path in (
        at, f"{at}?wait=complete", f"{at}/activations?site={SITE}&layer={layers}",
        f"{at}/activations?site={SITE}&layer=1&start=1&stop=5&format=json",
        f"{at}/activations?site={SITE}&layer=1&format=npy&dtype=float16",
        f"{at}/activations?site={SITE}&layer=1&dtype=codes", f"{at}/activations?site={SITE}&layer=1&rows=rejected",
        f"{at}/activations?site={SITE}&layer=99", f"{at}/activations?start=100000", f"{at}/map?site={SITE}",
        f"{at}/tokens", f"{at}/zarr/zarr.json", f"{at}/zarr/{SITE}.1/zarr.json", f"{at}/zarr/{SITE}.1/c/0/0",
        f"{at}/zarr/{SITE}/zarr.json", f"{at}/zarr/{SITE}/c/0/0/0")),
        ("POST", f"{at}/map?site={SITE}", direction)]


@pytest.mark.parametrize("compacted", [False, True])
def test_every_answer_is_that_of_the_api_beside_the_store(
    compacted: bool, sample: Sample, request: pytest.FixtureRequest, tmp_path: Path, url: str
) -> None:
    store = request.getfixturevalue("cold" if compacted else "store")
    push(store, url)
    direction = tmp_path / "direction.npy"
    np.save(direction, np.ones(192, np.float32))
    names = {name: capture for name, capture in sample.captures.items() if name != "late"}  # it never ended
    good = 0
    with beside(tmp_path / "a", store) as local, bucket(tmp_path / "b", url) as remote:
        listed = "/v1/captures?status=complete"
        for path in ("/", "/page/app.js", listed, f"{listed}&limit=2&site={SITE}", "/healthz"):
            assert remote.get(path).content == local.get(path).content, path
        for name, capture in names.items():
            for method, path, body in asked(capture, "1,3" if name == "few" else "0,1,2", direction.read_bytes()):
                answers = [each.request(method, path, content=body) for each in (local, remote)]
                mine, its = ((each.status_code, each.content, each.headers.get("etag"),
                              each.headers.get("x-tap-missing")) for each in answers)
                assert mine == its, path
                good += answers[1].status_code == 200
        assert good > 8 * len(names) - 8 * 2
        tag = remote.get(f"/v1/captures/{names['long']}/activations?site={SITE}&layer=1").headers["etag"]
        again = remote.get(f"/v1/captures/{names['long']}/activations?site={SITE}&layer=1",
                           headers={"If-None-Match": tag})
        assert again.status_code == 304


def test_what_a_bucket_cannot_do_is_refused_by_name(sample: Sample, store: Path, tmp_path: Path, url: str) -> None:
    push(store, url)
    at = f"/v1/captures/{sample.captures['long']}"
    with bucket(tmp_path / "b", url) as client:
        for method, path in [
            ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"),
            ("POST", "/v1/messages"), ("GET", "/v1/models"), ("GET", "/version"), ("POST", "/tokenize"),
            ("DELETE", at), ("PUT", f"{at}/hold"), ("DELETE", f"{at}/hold"), ("PATCH", at), ("GET", f"{at}/events"),
            ("GET", f"{at}/live?site={SITE}"), ("GET", "/v1/vectors"), ("PUT", "/v1/vectors/a"),
            ("DELETE", "/v1/vectors/a"),
        ]:
            answer = client.request(method, path)
            assert code(answer) == (403, "read_only"), (method, path, answer.text)
            assert f"this API reads a bucket, {url}" in answer.json()["error"]["message"]
        said = client.get("/v1/capabilities").json()
        assert said["engine"] is None and said["armed"] == {} and said["limits"]["slice_bytes_max"] > 0
        assert said["bucket"]["url"] == url and said["bucket"]["generation"] == 1 and said["bucket"]["failed"] is None
        assert client.get("/readyz").json() == {"status": "ready", "checks": {"bucket": "ok"}}
        metrics = client.get("/metrics").text
        assert "vllm_tap_api_bucket_up 1.0" in metrics and "vllm_tap_api_bucket_generation 1.0" in metrics
        assert "vllm_tap_api_bucket_pushed_seconds 1." in metrics and "writer_alive" not in metrics
        assert "vllm_tap_api_bucket_requests_total" in metrics
        assert client.get("/v1/captures/none").status_code == 404


def test_newer_heads_are_followed(sample: Sample, store: Path, tmp_path: Path, url: str) -> None:
    push(store, url)
    few = sample.captures["few"]
    with bucket(tmp_path / "b", url, *OFTEN) as client:
        chunk = f"/v1/captures/{few}/zarr/{json.loads(first_chunk(client, few))}"
        assert client.get(chunk).status_code == 200
        later = grow(store)
        assert client.get(f"/v1/captures/{later}").status_code == 404
        push(store, url)
        assert until(lambda: client.get(f"/v1/captures/{later}").status_code == 200)
        assert client.get(f"/v1/captures/{later}/activations?site={SITE}&layer=1").status_code == 200
        erase(store, few)
        push(store, url)
        assert until(lambda: client.get(f"/v1/captures/{few}").status_code == 404)
        assert client.get(chunk).status_code == 410
        assert few not in client.get("/v1/captures").text
    with bucket(tmp_path / "b", url) as client:  # the cache is there already
        assert client.get(f"/v1/captures/{later}").status_code == 200


def first_chunk(client: httpx.Client, capture: str) -> str:
    """The key of a capture's first chunk, as JSON text."""
    consolidated = client.get(f"/v1/captures/{capture}/zarr/zarr.json").json()["consolidated_metadata"]["metadata"]
    name = next(name for name, each in consolidated.items() if each["node_type"] == "array"
                and len(each["shape"]) >= 2)
    return json.dumps(f"{name}/c" + "/0" * len(consolidated[name]["shape"]))


def test_a_read_of_what_a_push_has_removed_looks_for_the_head_itself(
    sample: Sample, store: Path, tmp_path: Path
) -> None:
    """The head is looked at once an hour: a reader is not sent away with "refresh()", which it cannot do."""
    url, long = (tmp_path / "bucket").as_uri(), sample.captures["long"]
    push(store, url)
    with beside(tmp_path / "a", store) as local:
        wanted = local.get(f"/v1/captures/{long}/activations?site={SITE}&layer=1").content
    with bucket(tmp_path / "b", url, *NEVER) as client:
        assert generation(client) == 1
        erase(store, sample.captures["other"])  # rows beside: the block of both lies elsewhere then
        push(store, url)
        found = client.get(f"/v1/captures/{long}/activations?site={SITE}&layer=1")
        assert (found.status_code, found.content) == (200, wanted) and generation(client) == 2
        assert client.get(f"/v1/captures/{sample.captures['other']}").status_code == 404


@pytest.mark.parametrize("fault", ["503", "cut", "slow", "lost"])
def test_a_bucket_in_trouble_is_503_and_never_half_a_slice(
    fault: Fault, sample: Sample, store: Path, tmp_path: Path, s3: FaultProxy
) -> None:
    url = f"s3://bucket/{fault}"
    push(store, url)
    path = f"/v1/captures/{sample.captures['long']}/activations?site={SITE}&layer=0,1"
    with bucket(tmp_path / "b", url, "--bucket-answer-s", "1", *OFTEN) as client:
        s3.let_go.clear()
        s3.fault = lambda method, path: fault if "/blocks/" in path else None
        for _ in range(2):
            refused = client.get(path)
            assert code(refused) == (503, "bucket_unavailable") and refused.headers["retry-after"] == "1"
            assert "activations" not in refused.headers.get("content-type", "")
        assert client.get("/readyz").status_code == 200
        listed = client.get("/v1/captures")
        s3.fault = lambda method, path: fault
        assert until(lambda: client.get("/readyz").status_code == 503)
        assert client.get("/v1/capabilities").json()["bucket"]["failed"]
        assert client.get("/v1/captures").content == listed.content, "what is known of the store is still served"
        s3.fault = lambda method, path: None
        s3.let_go.set()
        assert until(lambda: client.get("/readyz").status_code == 200)
        found = client.get(path)
        with beside(tmp_path / "a", store) as local:
            assert (found.status_code, found.content) == (200, local.get(path).content)
    assert "Traceback" not in (tmp_path / "b" / "api.log").read_text()


def test_it_starts_before_the_bucket_is_there(sample: Sample, store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    (tmp_path / "bucket").mkdir()
    with bucket(tmp_path / "b", url, *OFTEN) as client:
        refused = client.get("/v1/captures")
        assert code(refused) == (503, "bucket_unavailable") and f"no {HEAD} in it" in refused.text
        assert refused.headers["retry-after"] and client.get("/healthz").status_code == 200
        ready = client.get("/readyz")
        assert ready.status_code == 503 and f"no {HEAD} in it" in ready.text
        assert client.get("/v1/capabilities").json()["bucket"]["generation"] is None
        push(store, url)
        assert until(lambda: client.get("/readyz").status_code == 200)
        assert client.get(f"/v1/captures/{sample.captures['long']}").status_code == 200


def test_what_a_bucket_lost_is_named_and_never_filled(sample: Sample, store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    for block in (Path(urlsplit(url).path) / "blocks").iterdir():
        shutil.rmtree(block)
    with bucket(tmp_path / "b", url) as client:
        refused = client.get(f"/v1/captures/{sample.captures['long']}/activations?site={SITE}&layer=1")
        assert code(refused) == (503, "bucket_unavailable") and "is not there" in refused.text


def test_keys_are_owners_as_beside_the_store(sample: Sample, store: Path, tmp_path: Path) -> None:
    url, keys = (tmp_path / "bucket").as_uri(), tmp_path / "keys.json"
    push(store, url)
    other = make_key(keys, "other")
    with bucket(tmp_path / "b", url, "--keys", str(keys), key=other) as client:
        assert client.get("/v1/captures").json()["data"] == []
        assert client.get(f"/v1/captures/{sample.captures['long']}").status_code == 404
        assert client.get("/v1/captures", headers={"x-api-key": "tap_wrong"}).status_code == 401
        assert client.delete("/v1/captures/x", headers={"x-api-key": "tap_wrong"}).status_code == 401


@pytest.mark.parametrize(("given", "says"), [
    (["--store", "s3://b/p", "--endpoint", "ipc:///x"], "endpoint = 'ipc:///x': an API that reads a bucket"),
    (["--store", "s3://b/p", "--upstream", "http://x"], "upstream = ['http://x']: an API that reads a bucket"),
    (["--store", "s3://b/p", "--capture-all", "{}"], "capture_all = '{}': an API that reads a bucket"),
    (["--store", "s3://b/p", "--cache-bytes", "1"], "cache_bytes = 1: at least"),
    (["--store", "s3://b/p", "--bucket-look-s", "0"], "bucket_look_s = 0"),
    (["--store", "s3://b/p", "--host", "0.0.0.0"], "keys = None: beyond loopback"),
    (["--store", "nothing://b/p"], "store = 'nothing://b/p'"),
    (["--store", "folder"], "endpoint: missing"),
    (["--store", "folder", "--endpoint", "ipc:///x", "--bucket-look-s", "1"], "bucket_look_s = 1.0: taken with"),
    (["--store", "folder", "--endpoint", "ipc:///x", "--deletes"], "deletes: taken with a bucket's URL"),
])
def test_what_does_not_belong_together_does_not_start(given: list[str], says: str,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*given, "--port", "0"]) == 2
    assert says in capsys.readouterr().err
