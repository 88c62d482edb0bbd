"""Images in a chat over HTTP, through the gateway and straight to vLLM: rows are those of the same pixels."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from schemas.read.reader import StoreReader
from tests.engine.conftest import ENVIRONMENT
from tests.support.engines.engines import DTYPE, ON_GPU
from tests.support.engines.installed import entry_points
from tests.support.models.families import family_model
from tests.support.models.imaged import NO_VISION, PART, image
from tests.support.models.images_reference import ImagesReference
from tests.support.processes import free_port
from tests.support.served import serving
from tests.support.store_helpers import until
from vllm_tap.tiny_model import cache_dir

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900),
              pytest.mark.skipif(ON_GPU, reason="rows are held against the reference in float32, on a CPU"),
              pytest.mark.skipif(bool(NO_VISION), reason=NO_VISION)]
FAMILY = "qwen2_5_vl"
ARM = "resid_pre,resid_post,attn_out,mlp_out"
# A word stands between blanks, so that each is a token.
TEMPLATE = ("{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
            " {{ part['text'] }} {% else %} <|vision_start|> <|image_pad|> <|vision_end|> {% endif %}{% endfor %}"
            "{% endfor %}")


@dataclass
class Service:
    """A server, vLLM behind it, and their store."""

    url: str
    vllm: str
    model: str
    store: StoreReader
    reference: ImagesReference


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder, model = tmp_path_factory.mktemp("images"), family_model(FAMILY, DTYPE)
    (folder / "template.jinja").write_text(TEMPLATE)
    port, behind = free_port(), free_port()
    environment = {key: value for key, value in {**os.environ, **ENVIRONMENT}.items()
                   if not key.startswith("VLLM_TAP_")}
    environment |= {"VLLM_CACHE_ROOT": str(cache_dir() / "vllm"),
                    "PYTHONPATH": f"{entry_points(folder)}:{os.environ['PYTHONPATH']}"}
    words = [str(model), "--port", str(port), "--engine-port", str(behind), "--store", str(folder / "captures"),
             "--arm", ARM, "--", "--dtype", DTYPE, "--max-num-batched-tokens", "64", "--max-num-seqs", "8",
             "--block-size", "32", "--max-model-len", "256", "--chat-template", str(folder / "template.jinja")]
    with serving(words, environment, ready_s=400), StoreReader(folder / "captures") as store:
        yield Service(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{behind}", str(model), store,
                      ImagesReference(model, FAMILY))


def part(picture: Any) -> dict[str, Any]:
    """An image as OpenAI's clients send it."""
    picture.save(data := io.BytesIO(), "PNG")
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64,"
                                               + base64.b64encode(data.getvalue()).decode()}}


def said(*words: int) -> dict[str, Any]:
    return {"type": "text", "text": " ".join(f"w{word}" for word in words)}


def held_against(service: Service, id_: str, pictures: list[Any]) -> None:
    """Every row of a capture against Hugging Face with the same images."""
    assert until(lambda: service.store.capture(id_).status == "complete"), service.store.manifest(id_)
    manifest = service.store.manifest(id_)
    text = (*manifest.prompt_token_ids, *manifest.output_token_ids)
    filled = [position for start, stop in manifest.resolved.get("images", []) for position in range(start, stop)]
    assert filled == [position for position, token in enumerate(manifest.prompt_token_ids) if token == PART]
    assert bool(filled) == bool(pictures)
    service.reference.images = pictures
    wanted = service.reference.rows(text)
    assert {row.site for row in manifest.rows} == set(ARM.split(","))
    for row in manifest.rows:
        found = service.store.slice(id_, row.site, [row.layer])
        assert found.positions.tolist() == list(range(len(text) - 1)) and not row.missing
        whole = wanted[row.site, row.layer][: len(text) - 1]
        assert np.abs(found.values()[0] - whole).max() <= 1e-4 * max(1, np.abs(whole).max()), (row.site, row.layer)


def streamed(answer: httpx.Response) -> str:
    """The id of the capture that a streamed answer names in one of its chunks."""
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines()
              if line.startswith("data: {")]
    return next(str(chunk["capture"]["id"]) for chunk in chunks if "capture" in chunk)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_images(service: Service, stream: bool) -> None:
    pictures = [image(1), image(2, 48, 32)]
    body = {"model": service.model, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": stream,
            "messages": [{"role": "user", "content": [said(20, 21, 22), part(pictures[0]), said(30, 31),
                                                      part(pictures[1]), said(*range(40, 52))]}],
            "capture": {"codec": "raw"}}
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    held_against(service, streamed(answer) if stream else answer.json()["capture"]["id"], pictures)


def test_a_chat_of_text_beside_it(service: Service) -> None:
    body = {"model": service.model, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "capture": {"codec": "raw"},
            "messages": [{"role": "user", "content": [said(20, 21, 22)]}]}
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    held_against(service, answer.json()["capture"]["id"], [])


def test_straight_to_vllm(service: Service) -> None:
    body = {"model": service.model, "max_tokens": 4, "temperature": 0, "ignore_eos": True,
            "vllm_xargs": {"capture": '{"codec": "raw"}'},
            "messages": [{"role": "user", "content": [part(image(3)), said(20, 21, 22)]}]}
    answer = httpx.post(f"{service.vllm}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    newest = httpx.get(f"{service.url}/v1/captures", params={"limit": 1}).json()
    held_against(service, newest["data"][0]["id"], [image(3)])


def test_an_edit_of_a_prompt_with_an_image_is_refused_by_name(service: Service) -> None:
    """The engine is armed for none here; it says so, and goes on."""
    body = {"model": service.model, "max_tokens": 4, "edit": [{"site": "resid_post.1", "op": "scale", "by": 0}],
            "messages": [{"role": "user", "content": [part(image(3)), said(20)]}]}
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 400 and "edit" in answer.text
    test_a_chat_of_text_beside_it(service)
