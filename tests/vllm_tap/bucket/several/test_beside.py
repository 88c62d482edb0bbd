"""A service beside its writer's store that also reads those of other nodes, in a bucket (``--also``)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import numpy as np
import pytest

from api.__main__ import main
from api.auth.keys import make_key
from schemas.ids import new_ulid
from tests.support.buckets import FaultProxy
from tests.support.store_helpers import SITE, WriterProcess, until
from tests.vllm_tap.bucket.conftest import erase
from tests.vllm_tap.bucket.serving.test_api import NEVER, OFTEN, asked, beside, code, serving
from tests.vllm_tap.bucket.several.conftest import BEGAN_MS, Nodes, fill
from tests.vllm_tap.bucket.several.test_serving import listed
from vllm_tap.bucket.push import push


def also(folder: Path, store: Path, *more: str, key: str = "", writer: WriterProcess | None = None
         ) -> AbstractContextManager[httpx.Client]:
    """The service of a node; its engine is away, and its writer where none is given."""
    endpoint = f"ipc://{folder}/none" if writer is None else writer.endpoint
    return serving(folder, str(store), "--endpoint", endpoint, "--upstream", "http://127.0.0.1:9",
                   "--cache", str(folder / "cache"), *more, key=key)


def test_every_answer_is_that_of_the_api_of_the_capture_s_own_node(nodes: Nodes, pushed: list[str], url: str,
                                                                   tmp_path: Path) -> None:
    direction = tmp_path / "direction.npy"
    np.save(direction, np.ones(64, np.float32))
    nobodys = [capture for name in nodes.stores for turn, capture in enumerate(nodes.captures[name]) if turn % 3 != 2]
    good = 0
    with also(tmp_path / "all", nodes.stores["a"], "--also", f"{url}/*") as together:
        assert listed(together) == [capture for capture in nodes.every if capture in nobodys]
        assert listed(together, "&tag=node=c") == [each for each in nodes.captures["c"][::-1] if each in nobodys]
        for name, store in nodes.stores.items():
            with beside(tmp_path / name, store) as alone:
                for capture in nodes.captures[name][:3]:
                    for method, path, body in [*asked(capture, "0,1,2", direction.read_bytes()),
                                               ("GET", f"/v1/captures/cmpl-{capture}?wait=complete&timeout=100", b"")]:
                        answers = [each.request(method, path, content=body) for each in (alone, together)]
                        mine, its = ((each.status_code, each.content, each.headers.get("etag"),
                                      each.headers.get("x-tap-missing")) for each in answers)
                        assert mine == its, path
                        good += answers[1].status_code == 200
        assert good > 3 * 2 * 12
        told = together.get("/v1/capabilities").json()
        assert told["bucket"] is None and told["also"]["url"] == f"{url}/*" and len(told["also"]["stores"]) == 3
        assert "vllm_tap_api_bucket_stores 3.0" in together.get("/metrics").text
        theirs, mine = (f"/v1/captures/{nodes.captures[name][0]}" for name in "ba")
        for method, path in (("DELETE", theirs), ("PUT", f"{theirs}/hold"), ("DELETE", f"{theirs}/hold")):
            assert code(together.request(method, path)) == (403, "read_only"), path
        assert code(together.delete(mine)) == (503, "store_unavailable")  # its writer is away
        assert code(together.get("/v1/captures/none")) == (404, "not_found")


def test_what_this_node_deleted_does_not_come_back_from_its_own_pushes(nodes: Nodes, pushed: list[str], url: str,
                                                                       tmp_path: Path) -> None:
    gone = nodes.captures["a"][0]
    erase(nodes.stores["a"], gone)
    with also(tmp_path / "all", nodes.stores["a"], "--also", f"{url}/*", *NEVER) as client:
        for path in ("", f"/activations?site={SITE}&layer=1", "?wait=complete&timeout=1"):
            assert code(client.get(f"/v1/captures/{gone}{path}")) == (404, "not_found"), path
        assert gone not in client.get("/v1/captures?limit=100").text


def test_captures_of_other_nodes_are_deleted_where_that_was_asked_for(nodes: Nodes, pushed: list[str], url: str,
                                                                      tmp_path: Path) -> None:
    gone = nodes.captures["b"][0]
    with also(tmp_path / "all", nodes.stores["a"], "--also", f"{url}/*", "--deletes", *NEVER) as client:
        assert client.delete(f"/v1/captures/{gone}").status_code == 204
        assert client.get(f"/v1/captures/{gone}").status_code == 404 and gone not in client.get("/v1/captures").text
    assert push(nodes.stores["b"], pushed[1]).followed == 1


def test_keys_are_for_the_captures_of_their_names(nodes: Nodes, pushed: list[str], url: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    anna, ben = make_key(keys, "anna"), make_key(keys, "ben")
    hers = nodes.captures["c"][2]
    with also(tmp_path / "all", nodes.stores["a"], "--also", f"{url}/*", "--deletes", "--keys", str(keys), key=anna
              ) as client:
        assert len(listed(client)) == 6 and client.get(f"/v1/captures/{hers}").status_code == 200
        client.headers["x-api-key"] = ben
        assert listed(client) == []
        for method in ("GET", "DELETE"):
            assert code(client.request(method, f"/v1/captures/{hers}")) == (404, "not_found")


def test_before_others_have_pushed_and_afterwards(nodes: Nodes, tmp_path: Path) -> None:
    url, late = (tmp_path / "bucket").as_uri(), new_ulid()
    (tmp_path / "bucket").mkdir()
    with also(tmp_path / "all", nodes.stores["a"], "--also", f"{url}/*", *OFTEN) as client:
        mine = listed(client)
        assert mine and not set(mine) - set(nodes.captures["a"])
        assert code(client.get(f"/v1/captures/{late}")) == (404, "not_found")
        fill(tmp_path / "d", [late], 950, began_ms=BEGAN_MS + 2000)
        push(tmp_path / "d", f"{url}/node-d")
        assert until(lambda: client.get(f"/v1/captures/{late}").status_code == 200)
        assert listed(client) == [late, *mine]


def test_a_bucket_that_is_away_costs_no_capture_of_this_node(nodes: Nodes, pushed: list[str], url: str, tmp_path: Path,
                                                             s3: FaultProxy) -> None:
    """What may be elsewhere is 503, never 404."""
    if not url.startswith("s3://"):
        pytest.skip("a folder is never away")
    path, theirs = f"/v1/captures/{nodes.captures['a'][0]}", f"/v1/captures/{nodes.captures['b'][0]}"
    s3.fault = lambda method, path: "503"
    with also(tmp_path / "all", nodes.stores["a"], "--also", f"{url}/*", "--bucket-answer-s", "1", *OFTEN) as client:
        for more in ("", f"/activations?site={SITE}&layer=1", f"/map?site={SITE}"):
            assert client.get(f"{path}{more}").status_code == 200
        for away in ("/v1/captures", theirs, f"{theirs}/activations?site={SITE}&layer=1"):
            refused = client.get(away)
            assert code(refused) == (503, "bucket_unavailable") and refused.headers["retry-after"], away
        s3.fault = lambda method, path: None
        assert until(lambda: client.get(theirs).status_code == 200) and client.get("/v1/captures").is_success


@pytest.mark.parametrize(("given", "says"), [
    (["--store", "s3://b/p", "--also", "s3://b/q"], "also = ['s3://b/q']: an API that reads a bucket"),
    (["--store", "folder", "--endpoint", "ipc:///x", "--also", "other"], "also = 'other': valid: the URL"),
    (["--store", "folder", "--endpoint", "ipc:///x", "--also", "nothing://b"], "also = 'nothing://b'"),
])
def test_what_does_not_belong_together_does_not_start(given: list[str], says: str, capsys: pytest.CaptureFixture[str]
                                                      ) -> None:
    assert main([*given, "--port", "0"]) == 2
    assert says in capsys.readouterr().err
