"""Keys: nothing is answered without one in use, and nobody learns of another's captures."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from api.app import create_app
from api.auth.guard import OPEN
from api.auth.keys import KeyFile, make_key, read_keys, revoke_key, set_quota
from api.config import Config
from api.engines.upstreams import Upstreams
from api.errors import ApiError
from api.metrics import Metrics
from api.service import ApiService
from api.slices.reading import SliceMemory
from schemas import limits
from schemas.catalog.tables import CAPTURE_BYTES
from schemas.codecs import streams
from schemas.errors import NotFoundError, StartError, TapError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.store.paths import KEYS_FILE
from schemas.wire.control_channel import ControlChannel
from tests.support.api_stack import ROOT, Stack, running
from tests.support.engines.engine_player import WIDTH
from tests.support.forked import tap
from tests.support.store_helpers import until
from vllm_tap.client.client import Client
from vllm_tap.errors import NotFound, ServiceError

SPEC = {"sites": ["resid_post"], "layers": [0]}
ROUTES = [(method.upper(), path) for path, methods in create_app(Config(ROOT, "ipc:///tmp/none")).openapi()["paths"].items()
          for method in methods] + [("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/"), ("POST", "/nothing")]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("keys"), "bfloat16", "--generations-in-flight-max", "2",
                 "--requests-in-flight-max", "5", owner="alice") as stack:
        yield stack


@pytest.fixture(scope="module")
def others(stack: Stack) -> dict[str, str]:
    """Another's key, one that was revoked, one that never was."""
    keys = stack.store / KEYS_FILE
    made = {name: make_key(keys, name) for name in ("bob", "mallory")}
    revoke_key(keys, "mallory")
    return {**made, "wrong": made["bob"][:-1] + ("A" if made["bob"][-1] != "A" else "B")}


@pytest.fixture(scope="module")
def hers(stack: Stack) -> dict[str, str]:
    """Alice's capture by each of its names."""
    answer = stack.http.post("/v1/completions", json={"model": "played", "prompt": "hello", "capture": SPEC},
                             headers={"x-request-id": "hers"}).json()
    several = stack.complete("hello", n=2, capture=SPEC).json()["capture"]
    return {"id": answer["capture"]["id"], "response id": answer["id"], "request id": "hers", "several": several["id"],
            "sample": several["ids"][1]}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_a_key(stack: Stack, others: dict[str, str], method: str, path: str) -> None:
    url = stack.url + path.replace("{ref}", new_ulid()).replace("{model}", "m")
    refused: tuple[dict[Any, Any], ...] = (
        {}, {"authorization": f"Bearer {others['wrong']}"}, {"x-api-key": others["mallory"]}, {"x-api-key": ""},
        {"authorization": f"Basic {stack.key}"}, {"authorization": "Bearer"}, {b"x-api-key": b"\xff"})
    answers = [httpx.request(method, url, headers=headers) for headers in refused]
    for answer in answers:
        if path in OPEN:
            assert answer.status_code == 200
        else:
            assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.content == answers[0].content
            assert method == "HEAD" or answer.json()["error"]["code"] == "invalid_key"
    for headers in ({"authorization": f"bearer {stack.key}"}, {"x-api-key": stack.key}, {"x-api-key": others["bob"]}):
        assert httpx.request(method, url, headers=headers).status_code != 401


def test_only_health_and_the_page_are_open() -> None:
    assert {path for path in OPEN if path != "/" and not path.startswith("/page/")} == {"/healthz"}


DIRECTION = save({"direction": np.ones(4)})  # a body for what takes one


def test_anothers_captures_are_as_if_absent(stack: Stack, others: dict[str, str], hers: dict[str, str]) -> None:
    with httpx.Client(base_url=stack.url, headers={"x-api-key": others["bob"]}) as bob:
        assert bob.get("/v1/captures").json()["data"] == []
        for name, ref in hers.items():
            absent = new_ulid() + (".1" if name == "sample" else "")
            absent = {"response id": f"cmpl-{absent}", "request id": "none"}.get(name, absent)
            for method, suffix in (("GET", ""), ("GET", "?wait=complete&timeout=0"), ("GET", "/activations"),
                                   ("HEAD", "/activations"), ("GET", "/activations?wait=rows&stop=2&timeout=0"),
                                   ("GET", "/map"), ("POST", "/map"), ("GET", "/tokens"), ("DELETE", "")):
                asked = [bob.request(method, f"/v1/captures/{each}{suffix}", content=DIRECTION)
                         for each in (ref, absent)]
                assert [answer.status_code for answer in asked] == [404, 404], (name, suffix)
                texts = [answer.text.replace(each, "REF") for answer, each in zip(asked, (ref, absent), strict=True)]
                assert texts[0].replace(hers["several"], "REF") == texts[1], (name, suffix)
        nobody = new_ulid()
        asked = [bob.get(f"/v1/captures?before={ref}") for ref in (hers["id"], nobody)]
        assert asked[0].text.replace(hers["id"], "") == asked[1].text.replace(nobody, "")
        taken = bob.post("/v1/completions", json={"model": "played", "prompt": "x",
                                                  "capture": {**SPEC, "id": hers["id"]}})
        assert taken.status_code == 409
    assert stack.http.get(f"/v1/captures/{hers['id']}").status_code == 200


def test_a_request_id_is_its_callers(stack: Stack, others: dict[str, str], hers: dict[str, str]) -> None:
    with httpx.Client(base_url=stack.url, headers={"x-api-key": others["bob"]}) as bob:
        his = bob.post("/v1/completions", json={"model": "played", "prompt": "his", "capture": SPEC},
                       headers={"x-request-id": "hers"}).json()["capture"]["id"]
        assert bob.get("/v1/captures/hers").json()["id"] == his
    assert stack.http.get("/v1/captures/hers").json()["id"] == hers["id"]


def test_a_key_ends_and_begins_without_a_restart(stack: Stack) -> None:
    keys = stack.store / KEYS_FILE
    carol = {"x-api-key": make_key(keys, "carol")}
    assert httpx.get(f"{stack.url}/v1/captures", headers=carol).status_code == 200
    made = httpx.post(f"{stack.url}/v1/completions", headers=carol,
                      json={"model": "played", "prompt": "x", "capture": SPEC}).json()["capture"]["id"]
    again = {"x-api-key": make_key(keys, "carol", replace=True)}
    assert httpx.get(f"{stack.url}/v1/captures", headers=carol).status_code == 401
    assert httpx.get(f"{stack.url}/v1/captures/{made}", headers=again).status_code == 200
    revoke_key(keys, "carol")
    assert httpx.get(f"{stack.url}/v1/captures", headers=again).status_code == 401


def test_without_its_file_nobody_gets_in(stack: Stack) -> None:
    keys = stack.store / KEYS_FILE
    kept = keys.read_bytes()
    for spoil in (keys.unlink, lambda: keys.write_bytes(b"{}"), lambda: keys.write_bytes(kept[: len(kept) // 2])):
        spoil()
        assert stack.http.get("/v1/captures").status_code == 401
        assert httpx.get(f"{stack.url}/v1/captures").status_code == 401
    keys.unlink()
    keys.write_bytes(kept)
    assert stack.http.get("/v1/captures").status_code == 200


def test_limits_are_each_keys_own(stack: Stack, others: dict[str, str]) -> None:
    answers: list[httpx.Response] = []
    body = {"model": "played", "prompt": "slow", "play": {"delay_s": 1.5}}

    def ask() -> None:
        answers.append(httpx.post(f"{stack.url}/v1/completions", json=body, headers={"x-api-key": stack.key}))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.7)
    refused = stack.http.post("/v1/completions", json=body)
    assert refused.status_code == 429 and refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "too_many_generations" and "limit 2" in refused.json()["error"]["message"]
    assert stack.http.get("/v1/captures").status_code == 200  # others than generations have a limit of their own
    bob = httpx.post(f"{stack.url}/v1/completions", json={"model": "played", "prompt": "x"},
                     headers={"x-api-key": others["bob"]})
    assert bob.status_code == 200
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert until(lambda: stack.complete("x").status_code == 200)  # what ended counts no more, once the service knows


def test_no_key_takes_all_that_they_share(stack: Stack) -> None:
    half = limits.followers_max // 2

    def refused(take: Callable[[], object]) -> bool:
        try:
            take()
        except ApiError as error:
            assert error.status == 429 and "for one key" in error.message
            return True
        return False

    async def check() -> None:
        config = Config(stack.store, stack.endpoint, slices_in_flight_bytes_max=1000)
        metrics = Metrics()
        service = ApiService(config, metrics, ControlChannel(config.endpoint, "api"), Upstreams(config, metrics))
        with ExitStack() as streams:
            def follow(owner: str) -> object:
                return streams.enter_context(service.feed.follow([new_ulid()], owner))

            assert [refused(lambda: follow("alice")) for _ in range(half + 1)] == [False] * half + [True]
            assert [refused(lambda: follow("bob")) for _ in range(half)] == [False] * half
            assert refused(lambda: follow("carol"))
        held = [SliceMemory(service, "alice", 300)]
        assert refused(lambda: SliceMemory(service, "alice", 300))
        held += [SliceMemory(service, "bob", 600), SliceMemory(service, "carol", 100)]
        assert refused(lambda: SliceMemory(service, "carol", 200))
        for each in held:
            each.release()
        huge = SliceMemory(service, "alice", 5000)  # it would never be served otherwise
        assert refused(lambda: SliceMemory(service, "alice", 1))
        assert not refused(lambda: SliceMemory(service, "bob", 400))
        huge.release()
        done = threading.Event()
        slow = [asyncio.create_task(service.read_map("a", "alice", lambda _: done.wait(10))) for _ in range(8)]
        await asyncio.sleep(0.1)
        assert await asyncio.wait_for(service.read_map("b", "bob", lambda _: "his"), 5) == "his"
        done.set()
        assert all(await asyncio.gather(*slow))
        await service.close()

    asyncio.run(check())


def test_a_prefix_cache_is_its_owners(stack: Stack, others: dict[str, str]) -> None:
    """How much of a prompt was cached tells nobody what others have asked: that is salted, whoever asks and however."""

    def salt(key: str, path: str = "completions", **fields: object) -> object:
        asked = {"completions": {"prompt": "hello"}, "responses": {"input": "hello"}}
        body = {"model": "played", **asked.get(path, {"messages": [{"role": "user", "content": "hello"}]}), **fields}
        answer = httpx.post(f"{stack.url}/v1/{path}", json=body, headers={"x-api-key": key})
        assert answer.status_code == 200, answer.text
        sent = stack.seen()[-1]
        assert sent["path"] == f"/v1/{path}"
        return sent["body"]["cache_salt"]  # type: ignore[index]

    hers, his = stack.key, others["bob"]
    mine = {salt(hers), salt(hers, capture=SPEC), salt(hers, capture=None), salt(hers, "chat/completions"),
            salt(hers, "chat/completions", capture=SPEC), salt(hers, "responses"), salt(hers, "messages"),
            salt(hers, "responses", capture=SPEC), salt(hers, "messages", capture=SPEC), salt(hers, cache_salt=None)}
    own = {salt(hers, cache_salt="s"), salt(hers, cache_salt="s", capture=SPEC)}
    assert len(mine) == len(own) == 1
    assert len({*mine, *own, salt(his), salt(his, cache_salt="s"), salt(his, cache_salt=str(*mine))}) == 5
    assert all(isinstance(text, str) and len(text) == 64 for text in (*mine, *own))
    for wrong in ("", 1, ["s"]):
        refused = stack.complete("hello", cache_salt=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"


def test_keys_stay_here(stack: Stack, others: dict[str, str]) -> None:
    for name in ("authorization", "x-api-key"):
        value = f"Bearer {stack.key}" if name == "authorization" else stack.key
        for capture in ({}, {"capture": SPEC}):
            httpx.post(f"{stack.url}/v1/completions", headers={name: value},
                       json={"model": "played", "prompt": "x", **capture})
            assert not {"authorization", "x-api-key"} & set(stack.seen()[-1]["headers"])  # type: ignore[call-overload]
    secrets = [stack.key, *others.values()]
    files = [*stack.store.parent.glob("*.log"), stack.store / KEYS_FILE, *stack.store.rglob("*.log")]
    assert len(files) >= 4
    for file in files:
        assert not any(secret.encode() in file.read_bytes() for secret in secrets), file
    metrics = stack.http.get("/metrics").text
    assert not any(secret in metrics for secret in secrets)


def test_the_client_brings_its_key(stack: Stack, hers: dict[str, str], monkeypatch: pytest.MonkeyPatch,
                                   others: dict[str, str]) -> None:
    with Client(stack.url, api_key=stack.key) as client:
        assert client.manifest(hers["id"]).id == hers["id"]
    monkeypatch.setenv("VLLM_TAP_API_KEY", others["bob"])
    with Client(stack.url) as client, pytest.raises(NotFound):
        client.manifest(hers["id"])
    monkeypatch.delenv("VLLM_TAP_API_KEY")
    with Client(stack.url) as client, pytest.raises(ServiceError, match="api_key=…, or VLLM_TAP_API_KEY") as refused:
        list(client.captures())
    assert refused.value.status == 401


def test_a_quota_is_a_keys_own(stack: Stack, others: dict[str, str]) -> None:
    keys = stack.store / KEYS_FILE
    body = {"model": "played", "prompt": list(b"hello"), "max_tokens": 4}
    key = make_key(keys, "quentin", quota_bytes=10**6)
    with httpx.Client(base_url=stack.url, headers={"x-api-key": key}) as quentin, StoreReader(stack.store) as reader:
        first = quentin.post("/v1/completions", json={**body, "capture": SPEC}).json()["capture"]["id"]
        rows = 8 * sum(stream.nbytes for stream in streams("int8b64", WIDTH, "bfloat16"))  # 5 + 4 - 1 of them
        assert until(lambda: reader.capture(first).status == "complete")
        used = reader.owner_bytes("quentin")
        asked = len(msgspec.json.encode(reader.manifest(first).asked))
        assert used == rows + CAPTURE_BYTES + asked + len("{}") + 4 * (5 + 4)
        assert reader.owner_bytes("nobody") == 0

        def refused(capture: dict[str, object] = SPEC, **fields: object) -> bool:
            answer = quentin.post("/v1/completions", json={**body, "capture": capture, **fields})
            if answer.status_code == 200:
                return False
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (413, "over_quota"), answer.text
            assert f"take {reader.owner_bytes('quentin')} bytes" in error["message"]
            return f"quota {limit}" in error["message"]

        limit = used * 2 - 1
        set_quota(keys, "quentin", limit)  # of a running service
        assert refused()
        for goes_on in ({}, {"capture": None}):
            assert quentin.post("/v1/completions", json={**body, **goes_on}).status_code == 200
        assert quentin.get(f"/v1/captures/{first}").status_code == stack.complete("x", capture=SPEC).status_code == 200
        limit = used * 2
        set_quota(keys, "quentin", limit)
        assert not refused() and until(lambda: reader.owner_bytes("quentin") == 2 * used) and refused()
        assert refused({"sites": []}), "without a row it takes room too"
        assert quentin.delete(f"/v1/captures/{first}").status_code == 204
        assert until(lambda: reader.owner_bytes("quentin") == used) and not refused()
        limit = used + 10**6
        set_quota(keys, "quentin", limit)
        assert refused(prompt=[7] * 4000, capture={"sites": ["resid_post"]}), "4000 rows of four layers are too many"
        assert refused(prompt="seven " * 4000, capture={"sites": ["resid_post"]})
        assert refused(max_tokens=4000, capture={"sites": ["resid_post"]})
        assert refused(n=60, capture={"sites": [], "tags": {f"t{n}": "x" * 500 for n in range(60)}})
        assert not refused(prompt=[7] * 4000, capture={"sites": ["resid_post"], "positions": "last_prompt"})
        set_quota(keys, "quentin", 0)
        assert not refused()


def test_a_quota_is_for_all_requests_at_once(stack: Stack, others: dict[str, str]) -> None:
    """What one in flight may yet add is kept for it, and is free again however it ends."""
    keys = stack.store / KEYS_FILE
    body = {"model": "played", "prompt": list(b"hello"), "max_tokens": 4, "capture": SPEC}
    key = make_key(keys, "paula", quota_bytes=10**6)
    with httpx.Client(base_url=stack.url, headers={"x-api-key": key}) as paula, \
            StoreReader(stack.store) as reader:

        def ask(**fields: object) -> int:
            return paula.post("/v1/completions", json={**body, **fields}).status_code

        def room_for(count: int) -> None:
            """A quota of so many requests more than there are."""
            assert until(lambda: all(row.status != "running" for row in reader.captures("paula")))
            set_quota(keys, "paula", reader.owner_bytes("paula") + count * asked)

        assert ask() == 200
        assert until(lambda: reader.captures("paula")[0].status == "complete")
        asked = reader.owner_bytes("paula")
        for _ in range(5):
            room_for(1)
            with ThreadPoolExecutor(2) as pool:
                assert sorted(pool.map(lambda _: ask(play={"delay_s": 0.3}), range(2))) == [200, 413]
        room_for(2)
        before = reader.owner_bytes("paula")
        slow = {**body, "stream": True, "play": {"delay_s": 0.4, "live": True}}
        with paula.stream("POST", "/v1/completions", json=slow) as answer:
            lines = answer.iter_lines()
            for _ in range(4):
                next(lines)
            assert until(lambda: reader.owner_bytes("paula") > before + asked / 2)
            assert ask() == 200, "what is stored of one in flight counts once"
            refused = paula.post("/v1/completions", json=body)
            assert refused.status_code == 413 and "in flight may yet add" in refused.json()["error"]["message"]
            assert paula.post("/v1/completions", json={**body, "capture": None}).status_code == 200
        ends: tuple[dict[str, object], ...] = (
            {"play": {"status": 500}}, {"play": {"fail": True}}, {"stream": True, "play": {"break_after": 1}},
            {"capture": {**SPEC, "id": reader.captures("paula")[0].id}})
        for fields in ends:
            room_for(1)
            ask(**fields)
            room_for(1)
            # An engine that failed closes its connection, which may be the one that the next request takes: 502.
            assert next(status for _ in range(20) if (status := ask()) != 502) == 200, fields
        for stream in (False, True):
            room_for(1)
            with pytest.raises(httpx.ReadTimeout), paula.stream(
                    "POST", "/v1/completions", json={**body, "stream": stream, "play": {"delay_s": 60}}, timeout=0.5
                    ) as left:
                left.read()
            room_for(1)
            assert until(lambda: ask() == 200), "who left keeps nothing"


def test_the_owner_survives_a_rebuilt_catalog(stack: Stack, others: dict[str, str], hers: dict[str, str]) -> None:
    assert stack.processes["writer"].stop() == 0
    (stack.store / "catalog.sqlite").unlink()
    stack.start_writer()
    stack.processes["writer"].wait_ready()
    with StoreReader(stack.store) as reader:
        assert reader.capture(hers["id"]).owner == "alice"
    assert stack.http.get(f"/v1/captures/{hers['id']}").status_code == 200
    assert httpx.get(f"{stack.url}/v1/captures/{hers['id']}", headers={"x-api-key": others["bob"]}).status_code == 404


# ── the file and the command ────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_that_comes_back_counts_again(tmp_path: Path) -> None:
    file, away = tmp_path / KEYS_FILE, tmp_path / "away"
    key = make_key(file, "ann", quota_bytes=7)
    keys = KeyFile(file, needed=True)
    assert keys.owner(key) == "ann"
    file.rename(away)
    assert keys.owner(key) is None and not keys.open
    away.rename(file)
    assert keys.owner(key) == "ann" and keys.quota_bytes("ann") == 7
    file.chmod(0o666)
    assert keys.owner(key) is None
    file.chmod(0o600)
    assert keys.owner(key) == "ann"


def test_the_command(tmp_path: Path) -> None:
    store = tmp_path / "kept" / "store"
    made = tap("keys", "make", "ann", "--store", store)
    key = made.stdout.strip()
    assert made.returncode == 0 and re.fullmatch(r"tap_[A-Za-z0-9_-]{43}", key) and key not in made.stderr
    file = store / KEYS_FILE
    assert {stat.S_IMODE(each.stat().st_mode) for each in (store, store.parent)} == {0o700}  # as a writer makes them
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and key not in file.read_text()
    assert KeyFile(file, needed=True).owner(key) == "ann"
    listed = tap("keys", "ls", "--store", store).stdout
    assert "ann" in listed and key not in listed
    assert tap("keys", "set", "ann", "--quota", "1.5GB", "--store", store).returncode == 0
    assert "1.5 GB" in tap("keys", "ls", "--store", store).stdout
    for wrong in ("-1", "0", "1.5", "many", "5 apples"):
        done = tap("keys", "set", "ann", "--quota", wrong, "--store", store)
        assert (done.returncode, "--quota" in done.stderr) == (2 if wrong != "1.5" else 0, wrong != "1.5"), done
    assert tap("keys", "set", "bob", "--quota", "1GB", "--store", store).returncode == 2
    assert tap("keys", "make", "ann", "--replace", "--store", store).returncode == 0
    assert [key.quota_bytes for key in read_keys(file)] == [2, 2]
    key = tap("keys", "make", "ann", "--replace", "--quota", "none", "--store", store).stdout.strip()
    assert read_keys(file)[-1].quota_bytes == 0
    again = tap("keys", "make", "ann", "--store", store)
    assert again.returncode == 2 and "--replace" in again.stderr and again.stdout == ""
    assert tap("keys", "revoke", "ann", "--store", store).returncode == 0
    assert KeyFile(file, needed=False).owner(key) is None
    assert tap("keys", "revoke", "ann", "--store", store).returncode == 2
    assert tap("keys", "make", "../x", "--keys", tmp_path / "k").returncode == 2


def test_a_file_that_cannot_be_trusted_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    with pytest.raises(StartError, match="vllm-tap keys make"):
        KeyFile(file, needed=True)
    assert KeyFile(file, needed=False).open
    make_key(file, "ann")
    file.chmod(0o620)
    with pytest.raises(StartError, match="chmod 600"):
        KeyFile(file, needed=False)
    file.chmod(0o600)
    revoke_key(file, "ann")
    with pytest.raises(StartError, match="no key in use"):
        KeyFile(file, needed=True)
    assert not KeyFile(file, needed=False).open  # all revoked is not the same as none
    for text in ("", "[]", json.dumps({"version": 2, "keys": []}), json.dumps({"version": 1, "keys": [
            {"name": "a", "sha256": "00", "created_ms": 1}]})):
        file.write_text(text)
        with pytest.raises(StartError, match="keys"):
            KeyFile(file, needed=False)


def test_keys_made_at_once_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    threads = [threading.Thread(target=make_key, args=(file, f"n{i}")) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(file)} == {f"n{i}" for i in range(8)}
    with pytest.raises(TapError):
        make_key(file, "n1")
    with pytest.raises(NotFoundError):
        revoke_key(file, "n9")
