"""The HTTP service of several stores: answers are those of each store's own service, lists are of all."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from api.__main__ import main
from api.auth.keys import make_key
from schemas.ids import new_ulid
from tests.support.buckets import FaultProxy
from tests.support.store_helpers import SITE, until
from tests.vllm_tap.bucket.conftest import erase
from tests.vllm_tap.bucket.serving.test_api import OFTEN, asked, beside, code, serving
from tests.vllm_tap.bucket.several.conftest import BEGAN_MS, Nodes, fill
from vllm_tap.bucket.push import push


def more(folder: Path, *urls: str) -> list[str]:
    return ["--cache", str(folder / "cache"), *(flag for url in urls for flag in ("--store", url))]


def listed(client: httpx.Client, query: str = "") -> list[str]:
    """Captures by pages of five."""
    found, before = list[str](), ""
    while True:
        answer = client.get(f"/v1/captures?limit=5{query}{before}")
        assert answer.status_code == 200, answer.text
        found += [row["id"] for row in answer.json()["data"]]
        if (following := answer.json()["next"]) is None:
            return found
        before = f"&before={following}"


def test_every_answer_is_that_of_the_api_beside_its_store(nodes: Nodes, pushed: list[str], url: str, tmp_path: Path
                                                          ) -> None:
    direction = tmp_path / "direction.npy"
    np.save(direction, np.ones(64, np.float32))
    nobodys = [capture for name in nodes.stores for turn, capture in enumerate(nodes.captures[name]) if turn % 3 != 2]
    good, tags = 0, set[str]()
    with serving(tmp_path / "all", f"{url}/*", *more(tmp_path)) as together:
        assert listed(together) == [capture for capture in nodes.every if capture in nobodys]
        assert listed(together, "&tag=node=c") == [each for each in nodes.captures["c"][::-1] if each in nobodys]
        for name, store in nodes.stores.items():
            with beside(tmp_path / name, store) as alone:
                for capture in nodes.captures[name][:3]:
                    for method, path, body in asked(capture, "0,1,2", direction.read_bytes()):
                        answers = [each.request(method, path, content=body) for each in (alone, together)]
                        mine, its = ((each.status_code, each.content, each.headers.get("etag"),
                                      each.headers.get("x-tap-missing")) for each in answers)
                        assert mine == its, path
                        good += answers[1].status_code == 200
                    assert alone.get(f"/v1/captures/cmpl-{capture}").content == together.get(
                        f"/v1/captures/cmpl-{capture}").content
                    assert (capture in nobodys) == (alone.get(f"/v1/captures/{capture}").status_code == 200)
            path = f"/v1/captures/{nodes.captures[name][0]}/activations?site={SITE}&layer=1"
            tags.add(tag := together.get(path).headers["etag"])
            assert together.get(path, headers={"If-None-Match": tag}).status_code == 304
        assert good > 3 * 2 * 11 and len(tags) == 3, "a tag is never that of another store's capture"
        assert together.get("/v1/captures/shared").json()["id"] == nodes.captures["b"][1]
        told = together.get("/v1/capabilities").json()["bucket"]
        assert told["url"] == f"{url}/*" and told["failed"] is None and told["generation"] is None
        assert [(each["url"], each["generation"], each["failed"]) for each in told["stores"]] == [
            (place, 1, None) for place in pushed]
        metrics = together.get("/metrics").text
        assert "vllm_tap_api_bucket_stores 3.0" in metrics and "vllm_tap_api_bucket_generation 3.0" in metrics
        at = f"/v1/captures/{nodes.captures['b'][0]}"
        for method, path in (("DELETE", at), ("PUT", f"{at}/hold"), ("GET", f"{at}/events"),
                             ("POST", "/v1/completions")):
            answer = together.request(method, path)
            assert code(answer) == (403, "read_only") and f"{url}/*" in answer.json()["error"]["message"]


def test_keys_are_for_the_captures_of_their_names_in_every_store(nodes: Nodes, pushed: list[str], tmp_path: Path
                                                                 ) -> None:
    keys = tmp_path / "keys.json"
    anna, ben = make_key(keys, "anna"), make_key(keys, "ben")
    hers = [capture for capture in nodes.every if any(nodes.captures[name].index(capture) % 3 == 2
                                                      for name in nodes.stores if capture in nodes.captures[name])]
    with serving(tmp_path / "all", pushed[0], *more(tmp_path, *pushed[1:]), "--keys", str(keys), key=anna) as client:
        assert listed(client) == hers and len(hers) == 6
        assert client.get("/v1/captures/shared").json()["id"] == nodes.captures["c"][2]
        client.headers["x-api-key"] = ben
        assert listed(client) == [] and client.get(f"/v1/captures/{hers[0]}").status_code == 404


def test_heads_and_new_stores_are_followed(nodes: Nodes, pushed: list[str], url: str, tmp_path: Path) -> None:
    with serving(tmp_path / "all", url, *more(tmp_path), *OFTEN) as client:
        before = listed(client)
        late, other, gone = new_ulid(), new_ulid(), nodes.captures["b"][6]
        fill(nodes.stores["b"], [late], 900, began_ms=BEGAN_MS + 1000)
        erase(nodes.stores["b"], gone)
        push(nodes.stores["b"], pushed[1])
        fill(tmp_path / "d", [other], 950, began_ms=BEGAN_MS + 2000)
        push(tmp_path / "d", f"{url}/node-d")
        wanted = [other, late, *(capture for capture in before if capture != gone)]

        def shows(captures: list[str]) -> bool:
            """What is listed, once no look was in the middle of a first push, which is said."""
            answer = client.get("/v1/captures?limit=100")
            if answer.status_code == 200:
                return [row["id"] for row in answer.json()["data"]] == captures
            assert code(answer) == (503, "bucket_unavailable") and "its first push is ending" in answer.text
            return False

        assert until(lambda: shows(wanted))
        assert listed(client) == wanted
        for capture in (late, other, nodes.captures["a"][0]):
            assert client.get(f"/v1/captures/{capture}/activations?site={SITE}&layer=1").status_code == 200
        assert client.get(f"/v1/captures/{gone}").status_code == 404
        twin = nodes.captures["c"][3]
        fill(tmp_path / "e", [twin], 970, began_ms=BEGAN_MS + 3000)
        push(tmp_path / "e", f"{url}/node-e")
        path = f"/v1/captures/{twin}/activations?site={SITE}&layer=1"
        assert until(lambda: client.get(path).status_code == 409)
        message = client.get(path).json()["error"]["message"]
        assert "node-c and" in message and "node-e" in message and code(client.get("/v1/captures")) == (409, "conflict")
        assert client.get(f"/v1/captures/{late}").status_code == 200


def test_a_tag_is_never_that_of_a_capture_of_the_same_id_elsewhere(nodes: Nodes, tmp_path: Path) -> None:
    """As of an offline job that was run again: the same id and as many rows, but other ones."""
    url, twin = (tmp_path / "bucket").as_uri(), nodes.captures["c"][3]
    fill(tmp_path / "d", [twin], 970, "c", BEGAN_MS + 3000)
    for name, store in (*nodes.stores.items(), ("d", tmp_path / "d")):
        push(store, f"{url}/node-{name}")
    at = f"/v1/captures/{twin}"
    paths = [f"{at}/activations?site={SITE}&layer=1", f"{at}/zarr/{SITE}/rows/c/0/0/0"]
    with serving(tmp_path / "one", f"{url}/node-a", *more(tmp_path, f"{url}/node-c")) as client:
        before = [client.get(path) for path in paths]
    with serving(tmp_path / "two", f"{url}/node-a", *more(tmp_path, f"{url}/node-d")) as client:
        for path, answer in zip(paths, before, strict=True):
            again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (answer.status_code, again.status_code) == (200, 200) and again.content != answer.content, path


def test_a_store_that_cannot_be_read_is_503_by_name(nodes: Nodes, s3: FaultProxy, tmp_path: Path) -> None:
    url = f"s3://bucket/{new_ulid()}"
    for name in "ab":
        push(nodes.stores[name], f"{url}/node-{name}")
    s3.fault = lambda method, path: "503" if "/node-b/" in path else None
    here, there = nodes.captures["a"][0], nodes.captures["b"][0]
    with serving(tmp_path / "all", f"{url}/*", *more(tmp_path), "--bucket-answer-s", "1", *OFTEN) as client:
        for path in ("/v1/captures", f"/v1/captures/{there}", f"/v1/captures/{new_ulid()}", "/v1/captures/shared",
                     f"/v1/captures/{there}/activations?site={SITE}&layer=1"):
            answer = client.get(path)
            assert code(answer) == (503, "bucket_unavailable") and answer.headers["retry-after"] == "1", path
            assert f"{url}/node-b" in answer.json()["error"]["message"]
        assert client.get(f"/v1/captures/{here}/activations?site={SITE}&layer=1").status_code == 200
        assert f"{url}/node-b" in client.get("/readyz").json()["checks"]["bucket"]
        stores = client.get("/v1/capabilities").json()["bucket"]["stores"]
        assert [each["failed"] is None for each in stores] == [True, False] and stores[1]["url"] == f"{url}/node-b"
        s3.fault = lambda method, path: None
        assert until(lambda: client.get("/readyz").status_code == 200)
        whole = listed(client)
        assert here in whole and there in whole
        s3.fault = lambda method, path: "503" if "/node-b/" in path else None
        assert until(lambda: client.get("/readyz").status_code == 503)
        assert listed(client) == whole, "what is known of it is still served"
        assert code(client.get(f"/v1/captures/{there}/activations?site={SITE}&layer=1")) == (503, "bucket_unavailable")
        assert client.get(f"/v1/captures/{here}/activations?site={SITE}&layer=1").status_code == 200
        s3.fault = lambda method, path: "503"
        assert until(lambda: f"list {url}" in client.get("/readyz").json()["checks"]["bucket"])
        assert listed(client) == whole and client.get("/v1/captures/shared").status_code == 200, "nor can the prefix be"
        s3.fault = lambda method, path: None
        assert until(lambda: client.get("/readyz").status_code == 200)
    assert "Traceback" not in (tmp_path / "all" / "api.log").read_text()


@pytest.mark.parametrize(("flags", "told"), [
    (["--store", "captures", "--store", "s3://b/p"], "a folder is read alone"),
    (["--store", "a", "--store", "b", "--endpoint", "ipc:///x"], "a folder is read alone"),
    (["--store", "s3://b/p", "--store", "s3://b/p"], "it is named twice"),
    (["--store", "s3://b/p", "--store", "s3://b/q", "--endpoint", "ipc:///x"], "has no writer and no engine"),
    (["--store", "s3://b/p", "--store", "none://b/*"], "none://b"),
    (["--store", "s3://b/*", "--host", "0.0.0.0"], "with keys alone"),
])
def test_what_cannot_be_served_together_is_refused(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
                                                   ) -> None:
    assert main(flags) == 2
    assert told in capsys.readouterr().err
