"""The Python client and the local store: one reading interface, compared number by number with what was sent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

import vllm_tap
from schemas.errors import ConflictError, NotFoundError, SpecError, TapError
from schemas.ids import new_ulid
from schemas.manifest import Missing
from schemas.spec import CaptureSpec
from tests.api_stack import ROOT, Stack, running
from tests.engine_player import WIDTH, decoded, rows
from vllm_tap import Client, MissingRows, NotComplete, ServiceError, Store, Unavailable, open_store

PROMPT = "inside out"
END = len(PROMPT) + 4 - 1
ALL = list(range(END))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("client"), "float32") as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, wait_s=5) as client:
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
    assert [row["id"] for row in client.captures(limit=2)] == ids[:0:-1]
    assert [row.id for row in store.captures(limit=2)] == ids[:0:-1]
    assert [row["id"] for row in client.captures(limit=1, before=ids[1])] == [ids[0]]
    assert [capture.id for capture in store][:3] == ids[::-1]
    client.delete(ids[0])
    for gone in (lambda: client.capture(ids[0]).manifest(), lambda: store[ids[0]], lambda: client.delete(ids[0])):
        with pytest.raises(NotFoundError):
            gone()
    assert client.capabilities()["armed"]["resid_post"]["layers"] == [0, 1, 2, 3]
    assert store.engine().model == "played"


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
    with pytest.raises(Unavailable, match="is the service running"), Client("http://127.0.0.1:9") as nobody:
        nobody.capabilities()
    with pytest.raises(NotFoundError):
        client.capture("../../healthz").manifest()


def test_something_else_than_the_service_is_an_error(stack: Stack) -> None:
    with Client(stack.upstream_url) as wrong, pytest.raises(NotFoundError, match="404"):
        wrong.capabilities()


def test_a_store_that_is_none(tmp_path: object) -> None:
    with pytest.raises(TapError, match=r"store\.json"):
        open_store(str(tmp_path))


def test_the_public_names_are_sorted_and_there() -> None:
    assert vllm_tap.__all__ == sorted(vllm_tap.__all__)
    public = {name for names in vllm_tap._MODULES.values() for name in names}
    assert public == set(vllm_tap.__all__) and all(getattr(vllm_tap, name) is not None for name in public)
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
