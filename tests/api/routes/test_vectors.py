"""Stored vectors: each key's own, durable, never changed, and in edits by their names."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from api.auth.keys import make_key
from api.generate.stored_vectors import StoredVectors
from schemas import limits
from schemas.edits.vectors import digest_of
from schemas.errors import ConflictError, CorruptError, LimitError, NotFoundError, StoreError
from schemas.store.paths import KEYS_FILE, VECTORS_FOLDER
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import WIDTH

CALM = np.linspace(-1, 1, WIDTH).astype(np.float32)
ADD = {"site": "resid_post.1", "op": "add"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("vectors"), "bfloat16", owner="alice") as stack:
        yield stack


@pytest.fixture(scope="module")
def bob(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, headers={"x-api-key": make_key(stack.store / KEYS_FILE, "bob")}) as client:
        yield client


def text(numbers: Any) -> str:
    return base64.b64encode(np.asarray(numbers, "<f4").tobytes()).decode()


def put(client: httpx.Client, name: str, vector: Any) -> httpx.Response:
    return client.put(f"/v1/vectors/{name}", json={"vector": vector})


def names(client: httpx.Client) -> list[str]:
    return [each["name"] for each in client.get("/v1/vectors").json()["data"]]


def test_a_vector_is_stored_told_and_deleted(stack: Stack) -> None:
    made = stack.http.put("/v1/vectors/told", content=save({"vector": CALM}),
                          headers={"content-type": "application/octet-stream"})
    about = {"name": "told", "digest": digest_of(CALM), "width": WIDTH, "created_ms": made.json()["created_ms"]}
    assert (made.status_code, made.json()) == (201, about)
    assert stack.http.get("/v1/vectors").json()["data"] == [about]
    found = stack.http.get("/v1/vectors/told").json()
    assert found == {**about, "vector": {"base64": text(CALM)}}
    again = put(stack.http, "told", found["vector"])  # as it was told
    assert (again.status_code, again.json()) == (200, about)
    other = put(stack.http, "told", [1.0])
    assert other.status_code == 409 and other.json()["error"]["code"] == "conflict"
    assert digest_of(CALM) in other.text and "delete it first" in other.text
    assert stack.http.delete("/v1/vectors/told").status_code == 204
    for gone in (stack.http.get("/v1/vectors/told"), stack.http.delete("/v1/vectors/told")):
        assert gone.status_code == 404 and "no vector 'told'" in gone.text
    assert put(stack.http, "told", [1.0]).status_code == 201 and stack.http.delete("/v1/vectors/told").is_success


def test_vectors_are_their_keys_own(stack: Stack, bob: httpx.Client) -> None:
    assert put(stack.http, "mine", CALM.tolist()).status_code == 201
    for theirs in (bob.get("/v1/vectors/mine"), bob.delete("/v1/vectors/mine")):
        never = bob.get("/v1/vectors/never")
        assert theirs.status_code == 404 and theirs.text == never.text.replace("never", "mine")
    assert names(bob) == [] and put(bob, "mine", [7.0]).status_code == 201
    assert stack.http.get("/v1/vectors/mine").json()["digest"] == digest_of(CALM)
    assert bob.delete("/v1/vectors/mine").is_success and names(stack.http) == ["mine"]
    edit = [{**ADD, "vector": "mine"}]
    assert stack.complete(edit=edit).status_code == 200
    refused = bob.post("/v1/completions", json={"model": "played", "prompt": "hello", "edit": edit})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "edit[0].vector"
    assert "no such vector; registered: tone" in refused.text and "PUT /v1/vectors/NAME" in refused.text


def test_an_edits_name_becomes_numbers(stack: Stack) -> None:
    put(stack.http, "calm", CALM.tolist())
    edit = [{**ADD, "vector": "calm", "scale": 2}, {**ADD, "vector": "tone"}, {**ADD, "vector": {"base64": text(CALM)}}]
    assert stack.complete(edit=edit).status_code == 200
    sent: Any = stack.seen()[-1]["body"]
    assert json.loads(sent["vllm_xargs"]["edit"]) == [
        {**edit[0], "vector": {"base64": text(CALM), "name": "calm"}}, *edit[1:]]
    refused = stack.complete(edit=[{**ADD, "vector": {"base64": text(CALM), "name": "tone"}}]).json()["error"]
    assert (refused["param"], refused["code"]) == ("edit[0].vector.name", "invalid_edit")


def test_a_name_of_the_engines_is_not_taken_and_never_guessed(stack: Stack) -> None:
    refused = put(stack.http, "tone", CALM.tolist())
    assert refused.status_code == 409 and "the engine was started with one of this name" in refused.text
    StoredVectors(stack.store).put("alice", "tone", CALM)  # as if the engine had been started anew since
    both = stack.complete(edit=[{**ADD, "vector": "tone"}])
    assert both.status_code == 400 and "which is meant?" in both.text
    assert stack.http.delete("/v1/vectors/tone").is_success
    assert stack.complete(edit=[{**ADD, "vector": "tone"}]).is_success


@pytest.mark.parametrize("name", [
    "-x", "_x", "a.b", "..", "%2e%2e", "a%2fb", "..%2f..%2fkeys", "a" * 65, "é", "a%0a", "%00", " "])
def test_no_name_becomes_a_path(stack: Stack, name: str) -> None:
    before = sorted(path for path in stack.store.parent.rglob("*") if VECTORS_FOLDER in path.parts)
    for method in ("PUT", "GET", "DELETE"):
        answer = stack.http.request(method, f"/v1/vectors/{name}", json={"vector": [1]} if method == "PUT" else None)
        assert answer.status_code in (400, 404, 405) and "error" in answer.json(), answer.text
    assert sorted(path for path in stack.store.parent.rglob("*") if VECTORS_FOLDER in path.parts) == before


@pytest.mark.parametrize(("content", "kind", "status", "param", "says"), [
    (b'{"vector": [1, NaN]}', "application/json", 400, "vector[1]", "finite number"),
    (b'{"vector": []}', "application/json", 400, "vector", "has no numbers"),
    (b'{"vector": [1]', "application/json", 400, "body", "malformed JSON"),
    (b"[" * 100_000, "application/json", 400, "body", "nested too deeply"),
    (save({"vector": np.zeros((2, 2))}), "application/octet-stream", 400, "vector", "[width]"),
    (save({"vector": np.zeros(limits.vector_width_max + 1)}), "application/octet-stream", 413, None, "limit 524288"),
    (b"0" * 200, "application/octet-stream", 400, "body", "no safetensors file"),
    (b'{"vector": [1]}', "text/plain", 400, "Content-Type", "valid: application/json"),
    (b'{"vector": [' + b"0," * limits.request_values_max + b"0]}", "application/json", 413, None, "values in the body"),
])
def test_bodies_that_hold_no_vector(stack: Stack, content: bytes, kind: str, status: int, param: str | None, says: str
                                    ) -> None:
    answer = stack.http.put("/v1/vectors/bad", content=content, headers={"content-type": kind})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param) and says in error["message"], answer.text
    assert "bad" not in names(stack.http)


def test_a_body_over_the_limit_is_not_read(stack: Stack) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(limits.vector_body_bytes_max // 2**20 + 2):
            yield bytes(2**20)

    for body in (bytes(limits.vector_body_bytes_max + 1), endless()):
        try:
            answer = stack.http.put("/v1/vectors/huge", content=body, headers={"content-type": "application/json"})
        except httpx.WriteError:  # cut off while it still sends
            continue
        assert answer.status_code == 413


def test_of_many_at_once_one_wins_and_stays(stack: Stack) -> None:
    vectors = [[float(number), 1.0] for number in range(8)]
    gate = threading.Barrier(len(vectors))

    def race(vector: list[float]) -> httpx.Response:
        gate.wait()
        return httpx.put(f"{stack.url}/v1/vectors/raced", json={"vector": vector}, headers={"x-api-key": stack.key})

    with ThreadPoolExecutor(len(vectors)) as pool:
        answers = list(pool.map(race, vectors))
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 7
    won = next(vector for vector, answer in zip(vectors, answers, strict=True) if answer.status_code == 201)
    assert stack.http.get("/v1/vectors/raced").json()["vector"] == {"base64": text(won)}


def test_what_was_stored_survives_a_kill(stack: Stack) -> None:
    assert put(stack.http, "kept", CALM.tolist()).status_code == 201
    stack.processes["api"].kill()
    folder = next(path.parent for path in stack.store.rglob("kept.safetensors"))
    (folder / ".half").write_bytes(b"half")  # what a kill leaves of another
    stack.start_api()
    stack.wait_ready()
    assert stack.http.get("/v1/vectors/kept").json()["vector"] == {"base64": text(CALM)}
    assert put(stack.http, "kept", CALM.tolist()).status_code == 200 and ".half" not in names(stack.http)
    assert not (folder / ".half").exists()


def test_a_file_that_was_changed_is_not_believed(stack: Stack) -> None:
    put(stack.http, "rotten", CALM.tolist())
    path = next(stack.store.rglob("rotten.safetensors"))
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    for answer in (stack.http.get("/v1/vectors/rotten"), stack.complete(edit=[{**ADD, "vector": "rotten"}])):
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "corrupt")
    path.write_bytes(b"nothing")
    assert put(stack.http, "rotten", CALM.tolist()).status_code == 500
    assert stack.http.delete("/v1/vectors/rotten").is_success and put(stack.http, "rotten", [1.0]).status_code == 201


def test_an_owner_has_so_much_room(tmp_path: Path) -> None:
    stored = StoredVectors(tmp_path, count_max=2, bytes_max=1000)
    one = np.ones(64, np.float32)
    stored.put("alice", "a", one)
    stored.put("alice", "b", one)
    with pytest.raises(LimitError, match="stored vectors of one key: 3 asked, limit 2; delete some"):
        stored.put("alice", "c", one)
    assert stored.put("alice", "a", one)[1] is False and stored.put("bob", "c", one)[1] is True
    stored.delete("alice", "a")
    with pytest.raises(LimitError, match="bytes of the stored vectors of one key"):
        stored.put("alice", "c", np.ones(256, np.float32))
    assert [each.name for each in stored.all("alice")] == ["b"] and stored.all("nobody") == []


def test_a_store_that_cannot_be_written_to_says_so(tmp_path: Path) -> None:
    (tmp_path / VECTORS_FOLDER).write_text("no folder")
    with pytest.raises(StoreError, match=r"write vector .*is the disk full"):
        StoredVectors(tmp_path).put("", "x", np.ones(1, np.float32))


def test_owners_and_names_are_no_paths(tmp_path: Path) -> None:
    stored, one = StoredVectors(tmp_path), np.ones(1, np.float32)
    for owner in ("", "..", "a/b", "Alice", "alice"):
        assert stored.put(owner, "x", one)[1]
    assert len(list((tmp_path / VECTORS_FOLDER).iterdir())) == 5
    assert stored.numbers("", "../x") is None and stored.numbers("", "x\n") is None
    with pytest.raises(NotFoundError):
        stored.delete("", "../x")
    with pytest.raises(ConflictError, match=digest_of(one)):
        stored.put("", "x", one * 2)
    next((tmp_path / VECTORS_FOLDER).rglob("x.safetensors")).write_bytes(save({"vector": one}))
    with pytest.raises(CorruptError):
        [stored.numbers(owner, "x") for owner in ("", "..", "a/b", "Alice", "alice")]
