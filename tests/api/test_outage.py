"""What the service says while something it needs is away, and how it stops."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from schemas.ids import new_ulid
from tests.support.api_stack import ROOT, Stack, running
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import until

SPEC = {"sites": ["resid_post"]}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running(tmp_path) as stack:
        yield stack


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Stack]:
    """An API alone: no writer, no store, no upstream."""
    sockets = tempfile.mkdtemp(prefix="tap-")
    stack = Stack(tmp_path / "store", f"ipc://{sockets}/w")
    stack.start_api("http://127.0.0.1:9")
    yield stack
    stack.http.close()
    for process in stack.processes.values():
        process.stop()
    shutil.rmtree(sockets)


def test_the_loops_over_rows_are_compiled_at_its_start(tmp_path: Path) -> None:
    """Not beside the first slices, which would wait for the interpreter."""
    command = [sys.executable, "-m", "api", "--store", str(tmp_path), "--endpoint", f"ipc://{tmp_path}/w",
               "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline().startswith("api ready")
            assert until(lambda: "llvmlite" in Path(f"/proc/{process.pid}/maps").read_text())
        finally:
            process.terminate()
    assert process.returncode == 0


def test_alone_it_lives_and_says_what_it_lacks(bare: Stack) -> None:
    assert bare.http.get("/healthz").status_code == 200
    ready = bare.http.get("/readyz")
    assert ready.status_code == 503
    assert all(name in ready.json()["error"]["message"] for name in ("writer", "engine", "upstream", bare.endpoint))
    assert bare.http.get("/v1/capabilities").json()["engine"] is None
    models = bare.http.get("/v1/models")
    assert models.status_code == 503 and "127.0.0.1:9" in models.json()["error"]["message"]
    assert bare.http.get("/v1/captures").status_code == 503
    assert bare.complete("x").status_code == 503
    assert bare.complete("x", capture={"sites": ["nothing"]}).status_code == 400
    assert bare.complete("x", capture=SPEC).status_code == 503
    # The writer comes, still without an engine: now the reason is another.
    bare.start_writer()
    bare.processes["writer"].wait_ready()
    refused = bare.complete("x", capture=SPEC)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_engine")
    assert refused.headers["retry-after"]


def test_the_writer_dies_and_comes_back(stack: Stack) -> None:
    ulid = stack.complete("before", capture=SPEC).json()["capture"]["id"]
    rows = stack.http.get(f"/v1/captures/{ulid}/activations").content
    stack.processes["writer"].kill()
    started_s = time.monotonic()
    refused = stack.complete("during", capture=SPEC)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert time.monotonic() - started_s < 8
    assert len(stack.seen()) == 1, "upstream was asked for a capture that nobody owns"
    assert stack.http.get(f"/v1/captures/{ulid}/activations").content == rows
    assert stack.complete("plain").status_code == 200
    assert "writer" in stack.http.get("/readyz").json()["error"]["message"]
    stack.start_writer()
    stack.processes["writer"].wait_ready()
    end_s = time.monotonic() + PATIENCE_S
    while stack.http.get("/readyz").status_code != 200:
        assert time.monotonic() < end_s
        time.sleep(0.1)
    assert stack.http.get(f"/v1/captures/{ulid}").json()["status"] == "complete"
    listed = stack.http.get("/v1/captures").json()["data"]
    assert [row["status"] for row in listed if row["id"] != ulid] in ([], ["failed"])


def test_the_catalog_is_rebuilt_under_a_running_service(stack: Stack) -> None:
    before = stack.complete("before", capture=SPEC).json()["capture"]["id"]
    rows = stack.http.get(f"/v1/captures/{before}/activations").content
    stack.processes["writer"].kill()
    for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
        (stack.store / name).unlink()
    assert stack.http.get(f"/v1/captures/{before}").status_code == 503
    stack.start_writer()
    stack.processes["writer"].wait_ready()
    assert stack.http.get(f"/v1/captures/{before}/activations").content == rows
    made = new_ulid()
    assert stack.complete("after", play={"unopened": True}, capture={**SPEC, "id": made}).status_code == 200
    assert {row["id"] for row in stack.http.get("/v1/captures").json()["data"]} == {before, made}


def test_upstream_dies(stack: Stack) -> None:
    ulid, cut = new_ulid(), new_ulid()
    killer = threading.Timer(0.7, stack.processes["upstream"].kill)
    killer.start()
    broken = stack.complete("x", play={"delay_s": 20}, capture={**SPEC, "id": cut})
    killer.join()
    assert (broken.status_code, broken.json()["error"]["code"]) == (502, "upstream_broken")
    refused = stack.complete("x", capture={**SPEC, "id": ulid})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "upstream_unavailable")
    end_s = time.monotonic() + 5  # before the writer takes the engine for lost
    while (body := stack.http.get(f"/v1/captures/{ulid}").json()).get("status") != "failed":
        assert time.monotonic() < end_s, body
        time.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_with_a_request_in_flight_is_quick_and_ends_it_upstream(stack: Stack, stream: bool) -> None:
    ulid = new_ulid()
    failures: list[Exception] = []

    def ask() -> None:
        try:
            httpx.post(f"{stack.url}/v1/completions", json={
                "model": "played", "prompt": "x", "stream": stream, "max_tokens": 100, "play": {"delay_s": 5},
                "capture": {**SPEC, "id": ulid}}).raise_for_status()
        except httpx.HTTPError as error:
            failures.append(error)

    caller = threading.Thread(target=ask)
    caller.start()
    while not stack.seen():
        time.sleep(0.02)
    started_s = time.monotonic()
    assert stack.processes["api"].stop() == 0, stack.processes["api"].log.read_text()[-3000:]
    assert time.monotonic() - started_s < 8
    caller.join()
    end_s = time.monotonic() + PATIENCE_S
    while stack.seen()[-1]["ended"] != "abort":
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_a_stop_does_not_wait_for_a_writer_that_is_away(stack: Stack) -> None:
    stack.processes["writer"].kill()
    answers: list[httpx.Response] = []
    callers = [threading.Thread(target=lambda: answers.append(stack.complete("x", capture=SPEC))) for _ in range(3)]
    for caller in callers:
        caller.start()
    time.sleep(0.5)  # they wait for the writer by now, and would for seconds
    started_s = time.monotonic()
    assert stack.processes["api"].stop() == 0
    for caller in callers:
        caller.join()
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [(503, "stopping")] * 3
    assert "Traceback" not in (said := stack.processes["api"].log.read_text()), said[-3000:]
    assert time.monotonic() - started_s < 4.5  # of which two for what is still to be said to the writer


@pytest.mark.parametrize(("args", "says"), [
    (["--host", "0.0.0.0"], "vllm-tap keys make"), (["--host", "10.1.2.3"], "vllm-tap keys make"),
    (["--host", "example.org"], "loopback"), (["--keys", "no/such.json"], "no/such.json"),
    (["--generations-in-flight-max", "0"], "generations_in_flight_max"),
    (["--port", "70000"], "port"), (["--upstream", "ftp://x"], "upstream"), (["--endpoint", "x"], "endpoint"),
])
def test_it_refuses_to_start_with_one_clear_line(tmp_path: Path, args: list[str], says: str) -> None:
    base = ["--store", str(tmp_path), "--endpoint", "ipc:///tmp/none"]
    done = subprocess.run([sys.executable, "-m", "api", *base, *args], cwd=ROOT, capture_output=True, text=True,
                          timeout=PATIENCE_S)
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.strip().splitlines()) == 1 and says in done.stderr


def test_a_taken_port_is_refused(bare: Stack, tmp_path: Path) -> None:
    port = bare.url.rsplit(":", 1)[1]
    done = subprocess.run([sys.executable, "-m", "api", "--store", str(tmp_path), "--endpoint", "ipc:///tmp/none",
                           "--port", port], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and port in done.stderr and "--port" in done.stderr


def test_errors_are_json_even_then(bare: Stack) -> None:
    for path in ("/v1/captures/x", "/v1/captures/x/activations"):
        body = json.loads(bare.http.get(path).content)
        assert set(body["error"]) == {"message", "type", "param", "code"}
