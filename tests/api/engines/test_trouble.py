"""Engines that stand still, lose their name, or serve another model: nobody else pays for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from api.config import Config
from api.engines import upstreams
from api.engines.upstreams import Upstreams
from api.metrics import Metrics
from tests.api.engines.test_several import ENGINE, SPEC, all_up, at, checks, start, until
from tests.support.api_stack import Stack, stack_in


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Engines a and b, each with a model of its own."""
    with stack_in(tmp_path_factory.mktemp("unlike")) as stack:
        start(stack)
        stack.start_engine("a")
        stack.start_engine("b", "--model", "other")
        stack.start_gateway()
        all_up(stack)
        yield stack


@pytest.mark.parametrize("model", ["", None])
def test_which_of_several_models_must_be_said(unlike: Stack, model: str | None) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/completions", {"prompt": "x", "capture": SPEC}),
                       ("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        refused = unlike.http.post(path, json={**body, "model": model})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "model"), refused.text
        assert "different models" in error["message"]
        served = unlike.http.post(path, json={**body, "model": model}, headers={ENGINE: "b"})
        assert served.headers[ENGINE] == "b"
    assert unlike.http.get("/version").headers[ENGINE] in ("a", "b")


def test_a_callers_header_is_passed_on_as_it_came(unlike: Stack) -> None:
    answer = unlike.http.post("/v1/completions", json={"model": "other", "prompt": "x"},
                              headers=[("x-who", "é".encode("latin-1"))])
    assert answer.status_code == 200
    assert unlike.seen("b")[-1]["headers"]["x-who"] == "é"  # type: ignore[index]


def test_an_engine_that_lost_its_name_is_left_out_until_it_was_started_again(tmp_path: Path) -> None:
    with stack_in(tmp_path) as stack:
        start(stack)
        stack.start_engine("a")
        stack.start_engine("b")
        stack.start_gateway()
        all_up(stack)
        prompt = at(stack, "b")
        stack.processes["b"].kill()
        until(lambda: checks(stack)["b"]["upstream"] != "ok")
        stack.start_upstream("bfloat16", "--port", stack.engines["b"].rpartition(":")[2])  # without VLLM_TAP_ENGINE
        until(lambda: checks(stack)["b"]["upstream"] == "ok")
        answer = stack.complete(prompt, capture=SPEC)
        assert answer.status_code == 200 and answer.json()["capture"]["engine"] == ""
        until(lambda: "started without VLLM_TAP_ENGINE" in checks(stack)["b"]["upstream"])
        assert stack.complete(prompt, capture=SPEC).headers[ENGINE] == "a"
        stack.processes["upstream"].kill()
        until(lambda: "connection attempts failed" in checks(stack)["b"]["upstream"])  # nobody is there
        stack.start_engine("b")
        until(lambda: checks(stack)["b"]["upstream"] == "ok")


def test_what_nobody_asked_for_fails_no_request_when_its_engine_goes(tmp_path: Path) -> None:
    with stack_in(tmp_path) as stack:
        start(stack)
        stack.start_engine("a")
        stack.start_engine("b", "--armed", "attn_out")
        stack.start_gateway("--capture-all", '{"sites": ["resid_post"]}')
        until(lambda: all(each["upstream"] == "ok" for each in checks(stack).values()))
        assert stack.complete("x").headers[ENGINE] == "a"
        stack.processes["a"].kill()
        answers = [stack.complete(f"prompt {number}") for number in range(12)]
        assert {(each.status_code, each.headers[ENGINE]) for each in answers} == {(200, "b")}
        asked = stack.complete("x", capture=SPEC)
        assert (asked.status_code, asked.json()["error"]["code"]) == (503, "upstream_unavailable")


@pytest.mark.parametrize("pieces", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n"])
def test_who_stands_still_or_answers_byte_by_byte_holds_nobody_up(pieces: bytes, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a look ends, and what does not wait for it is not held up, however slowly this test runs."""
    monkeypatch.setattr(upstreams, "_ANSWER_S", 2.0)
    monkeypatch.setattr(upstreams, "_WAIT_S", 0.2)

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(pieces or b"")
            await writer.drain()
            await asyncio.sleep(0.05)
            if pieces:
                writer.write(b" ")

    async def look() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        config = Config(tmp_path, f"ipc://{tmp_path}/none.sock", (f"a={url}", f"b={url}/b"))
        found = Upstreams(config, Metrics(engines=("a", "b")))
        slow = asyncio.create_task(found.get("b").look())  # type: ignore[union-attr]
        await asyncio.sleep(0)
        await found.begun()
        assert not slow.done(), "it was waited for"
        await slow
        assert "no answer" in found.get("b").away  # type: ignore[union-attr]
        await found.close()
        server.close()

    anyio.run(look)
