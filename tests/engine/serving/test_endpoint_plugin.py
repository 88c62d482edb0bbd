"""vLLM's own server with the plugin and no gateway: the service on its port, over a writer that its front end starts.

The same on a server that stands behind a gateway, and without a start of its own: tests/engine/serving/test_serve.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load

from api.page_files import FILES
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.engine.conftest import ENVIRONMENT
from tests.support.engines.installed import entry_points
from tests.support.models.reference import Reference
from tests.support.processes import PATIENCE_S, descendants, free_port, runs
from tests.support.served import until_it_was_cut_off
from tests.support.store_helpers import until
from vllm_tap.client.client import Client
from vllm_tap.tiny_model import LAYERS, cache_dir, tiny_model

pytestmark = pytest.mark.soak

KEY = "one-key-for-all"
HTTP = httpx.Client(headers={"authorization": f"Bearer {KEY}"})

@dataclass
class Server:
    """vLLM's server and what it stores."""

    url: str
    store: Path
    process: subprocess.Popen[str]
    reference: Reference

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def check(self, ref: str, site: str = "resid_post") -> dict[str, Any]:
        """Every row of a ``raw`` capture against Hugging Face, fetched from vLLM's port."""
        manifest = HTTP.get(f"{self.url}/v1/captures/{ref}", params={"wait": "complete", "timeout": 20})
        assert manifest.status_code == 200, manifest.text
        found: dict[str, Any] = manifest.json()
        assert found["status"] == "complete" and found["missing"] == 0
        tokens = (*found["prompt_token_ids"], *found["output_token_ids"])
        reference = self.reference.rows(tokens)
        answer = HTTP.get(f"{self.url}/v1/captures/{ref}/activations", params={"site": site})
        assert answer.status_code == 200, answer.text
        arrays = load(answer.content)
        for layer in range(LAYERS):
            rows = arrays[f"{site}.{layer}"]
            assert len(rows) == len(tokens) - 1
            assert np.abs(rows - reference[site, layer][:len(rows)]).max() <= 1e-4
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, reference_of: Callable[[str], Reference]) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("endpoint"), free_port()
    with tempfile.TemporaryDirectory(prefix="vllm-tap-") as sockets:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")} | ENVIRONMENT | {
            "PYTHONPATH": f"{entry_points(folder)}:{os.environ['PYTHONPATH']}",
            "VLLM_CACHE_ROOT": str(cache_dir() / "vllm"),
            "VLLM_PLUGINS": "vllm_tap,vllm_tap_http", "VLLM_TAP_STORE": str(folder / "captures"),
            "VLLM_TAP_ENDPOINT": f"ipc://{sockets}/writer.sock", "PYTHONUNBUFFERED": "1",
            "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
        log = folder / "server.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model()),
                 "--served-model-name", "tiny", "--port", str(port), "--dtype", "float32", "--max-num-batched-tokens",
                 "48", "--max-num-seqs", "16", "--block-size", "32", "--max-model-len", "4096",
                 "--api-key", KEY],
                env=environment, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        url = f"http://127.0.0.1:{port}"

        def healthy() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                return HTTP.get(f"{url}/health", timeout=2).status_code == 200
            except httpx.HTTPError:
                return False

        try:
            assert until(healthy), log.read_text()[-4000:]
            yield Server(url, folder / "captures", process, reference_of("qwen3"))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


CHAT: list[Any] = [{"role": "user", "content": "What does the second layer think?"}]


def test_a_chat_its_slices_and_its_names(server: Server) -> None:
    answer = server.openai.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=12, temperature=0, extra_headers={"X-Request-Id": "my-own-name"},
        extra_body={"capture": {"codec": "raw"}, "ignore_eos": True})
    capture = answer.model_extra["capture"]  # type: ignore[index]
    assert answer.id == f"chatcmpl-{capture['id']}" and capture["status"] == "complete"
    manifest = server.check(capture["id"])
    assert manifest["total_len"] == answer.usage.total_tokens  # type: ignore[union-attr]
    for name in (answer.id, "my-own-name"):
        assert HTTP.get(f"{server.url}/v1/captures/{name}").json()["id"] == capture["id"]
    plain = server.openai.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, temperature=0,
                                                  extra_body={"ignore_eos": True})
    assert plain.choices[0].message.content == answer.choices[0].message.content
    assert "capture" not in (plain.model_extra or {})


def test_a_stream_ends_with_the_capture(server: Server) -> None:
    chunks = list(server.openai.completions.create(
        model="tiny", prompt="Stream me.", max_tokens=10, stream=True,
        extra_body={"capture": {"codec": "raw"}, "ignore_eos": True}))
    assert len(chunks) >= 10  # they came one by one
    server.check(chunks[-1].model_extra["capture"]["id"])  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_captured(server: Server, stream: bool) -> None:
    answer: Any = server.openai.responses.create(
        model="tiny", instructions="Be brief.", input="What does the second layer think?", max_output_tokens=12,
        temperature=0, stream=stream, extra_headers={"X-Request-Id": f"turn-{stream}"},
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
        extra_body={"capture": {"codec": "raw"}, "ignore_eos": True})
    if stream:
        events = list(answer)
        assert [event.type for event in events].count("response.output_text.delta") > 5
        assert events[-1].type == "response.completed"
        answer = events[-1].response
    capture = answer.model_extra["capture"]
    assert answer.id == f"resp_{capture['id']}" and capture["status"] == "complete"
    manifest = server.check(capture["id"])
    assert manifest["prompt_len"] == answer.usage.input_tokens and manifest["total_len"] == answer.usage.total_tokens
    for name in (answer.id, f"turn-{stream}"):
        assert HTTP.get(f"{server.url}/v1/captures/{name}").json()["id"] == capture["id"]


def test_a_response_that_goes_on_from_another_is_captured_whole(server: Server) -> None:
    first, then = "The first thing.", "And the next."
    one: Any = server.openai.responses.create(model="tiny", input=first, max_output_tokens=6, temperature=0,
                                              extra_body={"capture": {"codec": "raw"}, "ignore_eos": True})
    two: Any = server.openai.responses.create(model="tiny", input=then, previous_response_id=one.id, temperature=0,
                                              max_output_tokens=6, extra_body={"capture": {"codec": "raw"}})
    before, after = server.check(one.id), server.check(two.id)
    assert after["prompt_len"] > before["total_len"] and two.model_extra["capture"]["id"] == after["id"]


def message(server: Server, **fields: Any) -> httpx.Response:
    return HTTP.post(f"{server.url}/v1/messages", json={
        "model": "tiny", "max_tokens": 10, "temperature": 0, "system": "Be brief.", "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What does the second layer think?"}]}], **fields})


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_is_captured(server: Server, stream: bool) -> None:
    answer = message(server, stream=stream, capture={"codec": "raw", "tags": {"of": "a message"}})
    assert answer.status_code == 200, answer.text
    if stream:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line[:5] == "data:"]
        assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
        name, capture = events[0]["message"]["id"], events[-1]["capture"]
        usage = events[-2]["usage"]
    else:
        name, capture, usage = answer.json()["id"], answer.json()["capture"], answer.json()["usage"]
    assert name == f"chatcmpl-{capture['id']}" and capture["status"] == "complete"
    manifest = server.check(name)
    assert manifest["id"] == capture["id"] and manifest["tags"] == {"of": "a message"}
    assert manifest["total_len"] == manifest["prompt_len"] + usage["output_tokens"]


def test_the_rows_of_all_protocols_are_those_of_their_tokens(server: Server) -> None:
    """The same ids, asked for as a completion."""
    found = message(server, capture={"codec": "raw"}).json()["capture"]["id"]
    manifest = server.check(found)
    again = HTTP.post(f"{server.url}/v1/completions", json={
        "model": "tiny", "prompt": manifest["prompt_token_ids"], "max_tokens": len(manifest["output_token_ids"]),
        "temperature": 0, "capture": {"codec": "raw"}}).json()["capture"]["id"]
    rows, same = (load(HTTP.get(f"{server.url}/v1/captures/{each}/activations").content) for each in (found, again))
    assert rows.keys() == same.keys()
    for name, row in rows.items():
        assert np.allclose(row, same[name], atol=1e-4), name


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("responses", {"background": True}, "background"), ("responses", {"request_id": "resp_mine"}, "request_id"),
    ("responses", {"tools": [{"type": "web_search_preview"}]}, "tools[0].type"),
    ("responses", {"tools": [{"type": "mcp", "server_label": "m", "server_url": "https://m"}]}, "tools[0].type"),
    ("responses", {"n": 2}, "n"), ("messages", {"n": 2}, "n"), ("messages", {"use_beam_search": True},
                                                                "use_beam_search"),
])
def test_what_cannot_be_captured_is_refused_by_name(server: Server, path: str, fields: dict[str, Any], param: str
                                                    ) -> None:
    asked = {"input": "x"} if path == "responses" else {"max_tokens": 2, "messages": [
        {"role": "user", "content": "x"}]}
    answer = HTTP.post(f"{server.url}/v1/{path}", json={"model": "tiny", **asked, **fields, "capture": {}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_no_route_of_this_server_passes_over_a_capture(server: Server) -> None:
    """In tests/engine/serving/test_routes.py more of them, and of what may be named."""
    paths = [path for path, of in HTTP.get(f"{server.url}/openapi.json").json()["paths"].items() if "post" in of]
    assert len(paths) > 8
    ours = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
    for path in [*paths, "/v9/not/yet"]:
        for body, param in (({"capture": {}}, "capture"), ({"captures": {}}, "captures"),
                            ({"vllm_xargs": {"capture": "{}"}}, "vllm_xargs.capture"),
                            ({"extra_body": {"capture": {}}}, "extra_body.capture")):
            if path in ours and param == "capture":
                continue
            answer = HTTP.post(f"{server.url}{path}", json={"model": "tiny", "prompt": "hi", **body})
            assert answer.status_code == 400, (path, body, answer.text)
            assert answer.json()["error"]["param"] == param, (path, answer.text)


def test_samples_make_one_capture_each(server: Server) -> None:
    answer = server.openai.completions.create(
        model="tiny", prompt="two of them", n=2, temperature=1.0, max_tokens=6,
        extra_body={"capture": {"codec": "raw"}, "ignore_eos": True, "return_token_ids": True})
    capture = answer.model_extra["capture"]  # type: ignore[index]
    for choice in answer.choices:
        found = server.check(capture["ids"][choice.index])
        assert found["output_token_ids"] == choice.model_extra["token_ids"]  # type: ignore[index]


def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    found: dict[str, Any] = {}

    def left() -> str:
        ulid = new_ulid()
        with HTTP.stream("POST", f"{server.url}/v1/completions", json={
            "model": "tiny", "prompt": "count to four thousand", "max_tokens": 4000, "ignore_eos": True, "stream": True,
            "capture": {"id": ulid, "layers": [0]}}) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number > 10:
                    break
        return ulid

    def reason(ulid: str) -> str:
        found.update(HTTP.get(f"{server.url}/v1/captures/{ulid}", params={"wait": "complete", "timeout": 20}).json())
        return str(found["finish_reason"])

    until_it_was_cut_off(left, reason)
    assert found["total_len"] < 4000


def test_the_python_client_and_everything_beside_generating(server: Server) -> None:
    client = Client(server.url, api_key=KEY)
    generation = client.generate("Rows by name.", max_tokens=5, capture={"codec": "raw"}, ignore_eos=True)
    server.check(generation.capture_id)
    assert generation["blocks.2.hook_resid_post"].shape[0] == generation.manifest().total_len - 1
    capabilities = HTTP.get(f"{server.url}/v1/capabilities").json()
    assert capabilities["engine"]["n_layers"] == LAYERS
    assert {site["source"] for site in capabilities["armed"].values()} == {"table"}
    proved = {name: site["proved"] for name, site in capabilities["armed"].items()}  # none says not_proved
    assert proved["resid_post"]["identity"] == "resid_post = resid_pre + attn_out + mlp_out"
    assert all(0 <= site["off"] < 1e-6 for site in proved.values() if site["off"] is not None)
    events = HTTP.get(f"{server.url}/v1/captures/{generation.capture_id}/events").text
    assert '"status":"complete"' in events.replace(" ", "")
    live = HTTP.get(f"{server.url}/v1/captures/{generation.capture_id}/live?site=resid_post").text
    assert "event: finish" in live
    texts = HTTP.get(f"{server.url}/v1/captures/{generation.capture_id}/tokens").json()["texts"]
    assert "".join(text for text in texts if text).startswith("Rows by name.")
    assert generation.capture_id in [row.id for row in client.captures()]
    assert HTTP.delete(f"{server.url}/v1/captures/{generation.capture_id}").status_code == 204
    assert HTTP.get(f"{server.url}/v1/captures/{generation.capture_id}").status_code == 404


@pytest.mark.parametrize(("body", "status", "says"), [
    ({"capture": {"sites": ["nope"]}}, 400, "unknown site"),
    ({"capture": {"layers": [4]}}, 400, "0 to 3"),
    ({"capture": {}, "use_beam_search": True, "n": 2}, 400, "beam"),
    ({"capture": {}, "prompt": "x " * 3000}, 400, "maximum context length"),
    ({"capture": {}, "max_tokens": "many"}, 400, "max_tokens"),
    ({"capture": {}, "model": "someone-else"}, 404, "does not exist"),
])
def test_bad_requests_are_refused_with_a_reason(server: Server, body: dict[str, Any], status: int, says: str) -> None:
    answer = HTTP.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 2, **body})
    assert (answer.status_code, says in answer.text) == (status, True), answer.text


def test_vllm_asks_for_its_key(server: Server) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        for path in ("/v1/captures", f"/v1/captures/{new_ulid()}/live", "/v1/capabilities"):
            assert httpx.get(f"{server.url}{path}", headers=headers).status_code == 401
        answer = httpx.post(f"{server.url}/v1/completions", headers=headers,
                            json={"model": "tiny", "prompt": "hi", "capture": {"id": (ulid := new_ulid())}})
        assert answer.status_code == 401
        for path, body in (("responses", {"input": "hi"}), ("messages", {"max_tokens": 2, "messages": []})):
            assert httpx.post(f"{server.url}/v1/{path}", headers=headers,
                              json={"model": "tiny", **body, "capture": {"id": ulid}}).status_code == 401
        assert HTTP.get(f"{server.url}/v1/captures/{ulid}").status_code == 404


def test_what_is_vllms_stays_vllms(server: Server) -> None:
    assert HTTP.get(f"{server.url}/v1/captures/{new_ulid()}").status_code == 404
    metrics = HTTP.get(f"{server.url}/metrics").text
    assert "vllm:" in metrics and "vllm_tap_api_writer_alive 1.0" in metrics
    assert httpx.get(f"{server.url}/captures/").content == FILES["/"].data  # the page asks for the key
    assert "/v1/completions" in HTTP.get(f"{server.url}/openapi.json").json()["paths"]
    assert HTTP.get(f"{server.url}/healthz").json() == {"detail": "Not Found"}
    assert HTTP.post(f"{server.url}/v1/completions", content=b"{capture").status_code == 400
    for spec, status in (({"id": new_ulid(), "codec": "raw"}, 200), ({"codec": "raw"}, 400)):  # not without a name
        answer = HTTP.post(f"{server.url}/v1/completions", json={
            "model": "tiny", "prompt": "hi", "max_tokens": 2, "vllm_xargs": {"capture": json.dumps(spec)}})
        assert answer.status_code == status and "capture" not in answer.json(), answer.text
    assert answer.json()["error"]["param"] == "vllm_xargs.capture"


def test_the_writer_goes_with_the_server(server: Server) -> None:
    """Ends the server: the last here."""
    everything = descendants(server.process.pid)
    writer, = (pid for pid in everything if "writer_service" in Path(f"/proc/{pid}/cmdline").read_text())
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(PATIENCE_S)
    assert until(lambda: not any(map(runs, everything))), writer
    with StoreReader(server.store) as reader:
        assert reader.captures(status="running") == []
