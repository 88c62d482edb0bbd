"""What captures ask beyond what the store takes is told before rows are dropped for it, and never refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.engines.pressure import Demand
from api.engines.speed import Rates, Speed
from api.generate.generation import capture_request, demand_of
from api.protocols import COMPLETION
from schemas.codecs import row_bytes
from schemas.spec import resolve
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import ARMED, WIDTH, engine_info
from tests.support.store_helpers import until

TAKES = 4 << 20  # bytes a second at most, as the slow writer measures: its first piece takes a second and more
CAPTURE = {"sites": ["resid_post"], "codec": "raw"}
TOKEN_BYTES = 4 * WIDTH * 2


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setenv("PROBE_S", "1")
    with running(tmp_path, writer="tests.support.writers.slow_writer") as found:
        assert until(lambda: found.http.get("/v1/capabilities").json()["store"])
        yield found


def speed(stack: Stack, **told: float) -> None:
    httpx.post(f"{stack.upstream_url}/_speed", json=told).raise_for_status()


def field(stack: Stack, **more: Any) -> dict[str, Any]:
    answer = stack.complete(capture=CAPTURE, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["capture"]
    assert found["status"] == "complete"
    return found


def metric(stack: Stack, name: str) -> float:
    return next(float(line.split()[1]) for line in stack.http.get("/metrics").text.splitlines()
                if line.startswith(f"{name} "))


def test_what_the_store_takes_is_told(stack: Stack) -> None:
    told = stack.http.get("/v1/capabilities").json()
    assert told["store"]["measured"] == "start"
    assert 0 < told["store"]["bytes_s"] <= TAKES
    assert told["engine"]["ring"] == {"nbytes": 1 << 20, "why": "played", "on_full": "drop"}


def test_nothing_is_said_before_anything_is_known_nor_while_the_store_keeps_up(stack: Stack) -> None:
    assert "pressure" not in field(stack)  # the model server has no metrics
    speed(stack, prompt=0.01, generated=0.01, running=1)
    for _ in range(8):
        assert "pressure" not in field(stack, play={"delay_s": 0.6})
    assert metric(stack, "vllm_tap_api_captures_pressed_total") == 0


def test_more_than_the_store_takes(stack: Stack) -> None:
    speed(stack, prompt=1e6, generated=1e6, running=2, ring=1 << 20, used=1 << 18)
    # Its speed is known once it was looked at twice, its ring once it has said it.
    assert until(lambda: field(stack).get("pressure", {}).get("ring_full_in_s"))
    before = metric(stack, "vllm_tap_api_captures_pressed_total")
    answer = stack.complete(capture=CAPTURE)
    said = answer.json()["capture"]["pressure"]
    assert said["asked_bytes_s"] > 10 * said["store_bytes_s"] > 0 and said["store_bytes_s"] <= TAKES
    excess = said["asked_bytes_s"] - said["store_bytes_s"]
    assert said["ring_full_in_s"] == pytest.approx(0.75 * (1 << 20) / excess, abs=0.001) != 0
    assert "rows are dropped, and named in the manifest" in said["help"]
    assert json.loads(answer.headers["x-tap-pressure"]) == {
        name: said[name] for name in ("asked_bytes_s", "store_bytes_s", "ring_full_in_s")}
    assert metric(stack, "vllm_tap_api_captures_pressed_total") == before + 1
    nothing = stack.complete(capture={"sites": []})
    assert "pressure" not in nothing.json()["capture"] and "x-tap-pressure" not in nothing.headers
    assert "pressure" not in stack.complete(capture={**CAPTURE, "positions": [[3000, 3001]]}, max_tokens=2).json()[
        "capture"]


def test_a_stream_is_told_before_its_first_token(stack: Stack) -> None:
    speed(stack, prompt=1e9, generated=1e9, running=1)
    assert until(lambda: "pressure" in field(stack))
    body = {"model": "played", "prompt": "hello", "stream": True, "max_tokens": 3, "capture": CAPTURE,
            "play": {"delay_s": 0.3}}
    with stack.http.stream("POST", "/v1/completions", json=body) as answer:
        early = json.loads(answer.headers["x-tap-pressure"])
        assert early["asked_bytes_s"] > early["store_bytes_s"]
        assert metric(stack, "vllm_tap_api_asked_bytes_per_second") > TAKES
        last = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if '"capture"' in line]
    assert last[-1]["capture"]["pressure"].items() >= early.items()
    assert until(lambda: metric(stack, "vllm_tap_api_asked_bytes_per_second") == 0) is True


def test_captures_in_flight_add_up(stack: Stack) -> None:
    """One alone is well below what the store takes; many at once are not."""
    takes = stack.http.get("/v1/capabilities").json()["store"]["bytes_s"]
    each = takes / 50
    speed(stack, prompt=1e-6, generated=each / TOKEN_BYTES, running=1)
    for _ in range(3):
        assert "pressure" not in field(stack, play={"delay_s": 2.5})
    found: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: found.append(
        httpx.post(f"{stack.url}/v1/completions", json={
            "model": "played", "prompt": "x", "capture": CAPTURE, "play": {"delay_s": 8}}).json()["capture"]))
        for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = [one["pressure"] for one in found if "pressure" in one]
    assert said and max(one["asked_bytes_s"] for one in said) > takes


def text(prompt: float, generated: float, running: float) -> str:
    return (f'# HELP vllm:prompt_tokens_total …\nvllm:prompt_tokens_total{{engine="0",model_name="}} 3"}} {prompt}\n'
            f'vllm:generation_tokens_total{{engine="0"}} {generated / 2}\nother 3\n'
            f'vllm:generation_tokens_total{{engine="1"}} {generated / 2}\nvllm:num_requests_running {running}\n')


def test_speed_of_one_request_by_what_all_have() -> None:
    found = Speed()
    assert found.rates(0.0) is None
    found.take(text(100, 10, 4), 10.0)
    assert found.rates(10.0) is None
    found.take(text(300, 50, 4), 12.0)
    assert found.rates(12.0) == Rates(25.0, 5.0)
    found.take(text(300, 50, 0), 14.0)
    assert found.rates(14.0) is not None  # over the whole of it
    for at in range(16, 40, 2):
        found.take(text(300, 50, 0), float(at))
    before = found.rates(40.0)
    assert before is not None  # the last that was seen
    found.take(text(0, 0, 1), 42.0)  # a server that began anew
    assert found.rates(42.0) == before
    found.take(text(10, 2, 1), 44.0)
    assert found.rates(44.0) == Rates(5.0, 1.0)
    assert found.rates(2000.0) is None


@pytest.mark.parametrize("said", [
    "", "vllm:prompt_tokens_total 3\n", text(float("nan"), 1, 1), text(1, 1, 1).replace(" 1\n", " many\n")])
def test_answers_that_tell_no_speed(said: str) -> None:
    found = Speed()
    for at in (1.0, 2.0, 3.0):
        found.take(said, at)
    assert found.rates(3.0) is None


@pytest.mark.parametrize(("spec", "body", "prompt", "generated"), [
    ({}, {}, 1.0, 1.0),
    ({"positions": "prompt"}, {}, 1.0, 0.0),
    ({"positions": "generated"}, {}, 0.0, 1.0),
    ({"positions": "last_prompt"}, {}, 0.1, 0.0),
    ({"positions": [[0, 5], [10, 20]]}, {"max_tokens": 40}, 0.5, 0.25),
    ({}, {"n": 3}, 3.0, 3.0),
    ({"positions": "prompt"}, {"prompt": [[1] * 10, [2] * 30]}, 2.0, 0.0),
    ({"layers": [0]}, {}, 0.25, 0.25),
    ({"sites": []}, {}, 0.0, 0.0),
])
def test_demand_by_spec(spec: dict[str, Any], body: dict[str, Any], prompt: float, generated: float) -> None:
    asked = capture_request({"prompt": [1] * 10, "capture": {**CAPTURE, **spec}, **body}, COMPLETION, None)
    engine = engine_info("bfloat16")
    token = 4 * row_bytes("raw", WIDTH, "bfloat16")
    found = demand_of(asked, resolve(asked.spec, ARMED, engine.widths), engine)
    assert found == Demand(pytest.approx(prompt * token), pytest.approx(generated * token), "drop")
