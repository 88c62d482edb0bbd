"""DELETE at a service that reads buckets and was started with ``--deletes``."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from api.auth.keys import make_key
from schemas.ids import new_ulid
from tests.support.buckets import FaultProxy
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import SITE, Sender, WriterProcess, until
from tests.vllm_tap.bucket.conftest import Sample, grow
from tests.vllm_tap.bucket.serving.test_api import NEVER, bucket, code
from tests.vllm_tap.bucket.test_deletes_from_anywhere import deleted
from vllm_tap import open_store
from vllm_tap.bucket.check import check
from vllm_tap.bucket.push import push
from vllm_tap.store_control import hold

DELETES = ("--deletes", *NEVER)  # so that nothing but the deletion itself looks for a newer head


def test_a_deleted_capture_is_gone_at_once_and_leaves_the_folder_with_its_next_push(
    sample: Sample, store: Path, tmp_path: Path, url: str
) -> None:
    few, long = sample.captures["few"], sample.captures["long"]
    push(store, url)
    with bucket(tmp_path / "b", url, *DELETES) as client:
        assert client.get("/v1/capabilities").json()["bucket"]["deletes"] is True
        assert client.get(f"/v1/captures/{few}/activations?site={SITE}&layer=1").status_code == 200
        assert client.delete(f"/v1/captures/{few}").status_code == 204
        for path in ("", f"/activations?site={SITE}&layer=1", "/zarr/zarr.json"):
            assert code(client.get(f"/v1/captures/{few}{path}")) == (404, "not_found")
        assert few not in client.get("/v1/captures").text and long in client.get("/v1/captures").text
        assert code(client.delete(f"/v1/captures/{few}")) == (404, "not_found")
        assert code(client.delete("/v1/captures/none")) == (404, "not_found")
        for method, path in [("DELETE", f"/v1/captures/{long}/hold"), ("PUT", f"/v1/captures/{long}/hold"),
                             ("DELETE", "/v1/vectors/a"), ("POST", "/v1/completions")]:
            assert code(client.request(method, path)) == (403, "read_only"), path
        assert client.get(f"/v1/captures/{long}/activations?site={SITE}&layer=1").status_code == 200
    with open_store(url, tmp_path / "fresh") as other:
        assert few not in {row.id for row in other.captures()}
    assert few not in deleted(store)
    push(store, url)
    assert few in deleted(store) and not check(url, deep=True).bad


def test_all_samples_of_a_request(store: Path, tmp_path: Path) -> None:
    url, several = (tmp_path / "bucket").as_uri(), grow(store, 2)
    push(store, url)
    with bucket(tmp_path / "b", url, *DELETES) as client:
        assert client.delete(f"/v1/captures/{several}").status_code == 204
        assert {client.get(f"/v1/captures/{several}.{sample}").status_code for sample in range(2)} == {404}


def test_a_key_deletes_its_own_alone(store: Path, tmp_path: Path) -> None:
    url, keys = (tmp_path / "bucket").as_uri(), tmp_path / "keys.json"
    mine, other = make_key(keys, "mine"), make_key(keys, "other")
    owned = grow(store, owner="mine")
    push(store, url)
    at = f"/v1/captures/{owned}"
    with bucket(tmp_path / "b", url, *DELETES, "--keys", str(keys), key=other) as client:
        assert code(client.delete(at)) == (404, "not_found")
        assert client.delete(at, headers={"x-api-key": "tap_wrong"}).status_code == 401
        assert client.get(at, headers={"x-api-key": mine}).status_code == 200
        assert client.delete(at, headers={"x-api-key": mine}).status_code == 204
        assert client.get(at, headers={"x-api-key": mine}).status_code == 404


def test_what_is_on_hold_stays(sample: Sample, store: Path, tmp_path: Path) -> None:
    url, few = (tmp_path / "bucket").as_uri(), sample.captures["few"]
    with WriterProcess(store, "--keep-s", "1000") as writer, Sender(writer.endpoint):
        hold(store, few, True)
        writer.stop()
    push(store, url)
    with bucket(tmp_path / "b", url, *DELETES) as client:
        refused = client.delete(f"/v1/captures/{few}")
        assert code(refused) == (409, "conflict") and "is on hold" in refused.text
        assert client.get(f"/v1/captures/{few}").status_code == 200


def test_deletes_of_several_callers_at_once(sample: Sample, store: Path, tmp_path: Path) -> None:
    """Two services write one head, and a push does too: all of it is there in the end."""
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    first, second = [sample.captures[name] for name in ("few", "plain")], [sample.captures[name]
                                                                        for name in ("again", "other")]
    found: list[int] = []

    def ask(client: httpx.Client, capture: str) -> None:
        found.append(client.delete(f"/v1/captures/{capture}").status_code)

    with bucket(tmp_path / "a", url, *DELETES) as one, bucket(tmp_path / "b", url, *DELETES) as two:
        asking = [threading.Thread(target=ask, args=(client, capture))
                  for client, captures in ((one, first), (two, second)) for capture in captures]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert found == [204] * 4
    with open_store(url, tmp_path / "fresh") as left:
        assert not {row.id for row in left.captures()} & {*first, *second}


def test_deletes_that_wait_keep_no_read_waiting(sample: Sample, store: Path, tmp_path: Path, s3: FaultProxy) -> None:
    """More of them than a service has threads, and a bucket that takes no write until reads have been answered."""
    url, few = f"s3://bucket/{new_ulid()}", sample.captures["few"]
    push(store, url)
    found: list[int] = []
    with bucket(tmp_path / "b", url, *DELETES) as client:
        s3.let_go.clear()
        s3.fault = lambda method, path: "slow" if method == "PUT" else None

        def ask() -> None:
            with httpx.Client(base_url=client.base_url, timeout=600) as mine:
                found.append(mine.delete(f"/v1/captures/{few}").status_code)

        asking = [threading.Thread(target=ask) for _ in range(60)]
        for thread in asking:
            thread.start()
        try:
            assert until(lambda: any(method == "PUT" for method, _ in s3.seen[-5:]))
            for path in ("/v1/captures", f"/v1/captures/{few}/activations?site={SITE}&layer=1", "/v1/captures"):
                assert client.get(path, timeout=PATIENCE_S).status_code == 200
            assert not found
        finally:
            s3.fault = lambda method, path: None
            s3.let_go.set()
            for thread in asking:
                thread.join()
    assert sorted(found) == [204] + [404] * 59


def test_of_several_stores_the_one_that_has_it(sample: Sample, store: Path, tmp_path: Path) -> None:
    root = (tmp_path / "bucket").as_uri()
    other = tmp_path / "other"
    with WriterProcess(other, "--seal-idle-s", "0.3", "--keep-s", "1000") as writer:
        writer.stop()
    theirs = grow(other)
    push(store, f"{root}/a")
    push(other, f"{root}/b")
    with bucket(tmp_path / "b", f"{root}/*", *DELETES) as client:
        assert client.delete(f"/v1/captures/{theirs}").status_code == 204
        assert client.get(f"/v1/captures/{theirs}").status_code == 404
        assert client.get(f"/v1/captures/{sample.captures['few']}").status_code == 200
    push(other, f"{root}/b")
    assert theirs in deleted(other)


def test_a_bucket_that_refuses_is_named_and_deletes_nothing(sample: Sample, store: Path, tmp_path: Path,
                                                            s3: FaultProxy) -> None:
    url, at = "s3://bucket/refused", f"/v1/captures/{sample.captures['few']}"
    push(store, url)
    with bucket(tmp_path / "b", url, *DELETES) as client:
        s3.fault = lambda method, path: "503" if method == "PUT" else None
        refused = client.delete(at)
        assert code(refused) == (503, "bucket_unavailable") and refused.headers["retry-after"]
        s3.fault = lambda method, path: None
        assert client.get(at).status_code == 200
        assert client.delete(at).status_code == 204 and until(lambda: client.get(at).status_code == 404)
