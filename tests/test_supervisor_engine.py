"""``vllm-tap serve`` with a real vLLM: deaths under traffic, a stop with requests in flight, no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file

from schemas.reader import StoreReader
from tests.readme import blocks, commands
from tests.test_supervisor import free_port, runs, until

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(420)

ROOT = Path(__file__).parent.parent
READY_S = 240


class Serve:
    """One ``vllm-tap serve --tiny``, its URL, its store and its log."""

    def __init__(self, folder: Path) -> None:
        self.store, self.log = folder / "store", folder / "serve.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vllm_tap", "serve", "--tiny", "--port", str(port),
                 "--engine-port", str(free_port()), "--store", str(self.store)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_CI_ENV": "1"})

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until_ready(self) -> None:
        until(lambda: "vllm-tap is ready" in self.text() or self.process.poll() is not None, READY_S, self.text)
        assert self.process.poll() is None, self.text()

    def descendants(self) -> list[int]:
        """Every process below the supervisor, by walking /proc."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
        found, front = set(), {self.process.pid}
        while front:
            front = {pid for pid, parent in parents.items() if parent in front} - found
            found |= front
        return sorted(found)

    def child(self, module: str) -> int:
        return next(pid for pid in self.descendants()
                    if f"-m\0{module}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes())

    def stream(self, max_tokens: int, seen: threading.Event, results: list[str]) -> None:
        """One long streamed completion with a capture; ``seen`` is set at its first token."""
        body = {"model": "tiny", "prompt": "The sea", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "capture": {}}
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        seen.set()
                        results.append(line)
        except httpx.HTTPError as error:
            results.append(f"error: {type(error).__name__}")

    def complete(self) -> dict[str, Any]:
        """A short completion with a capture, which must come out complete."""
        answer = httpx.post(f"{self.url}/v1/completions", timeout=60, json={
            "model": "tiny", "prompt": "The sea", "max_tokens": 8, "temperature": 0, "capture": {"codec": "raw"}})
        assert answer.status_code == 200, answer.text
        manifest = self.final(answer.json()["capture"]["id"])
        assert manifest["status"] == "complete", manifest
        return manifest

    def final(self, ref: str) -> dict[str, Any]:
        """The manifest once the capture is final."""
        answer = httpx.get(f"{self.url}/v1/captures/{ref}", params={"wait": "complete", "timeout": 30}, timeout=40)
        return dict(answer.json())


def run_the_readme(run: Serve) -> None:
    """What the README tells its reader to type once the server is up, against this server and its store."""

    def here(text: str) -> str:
        return text.replace("http://127.0.0.1:8100", run.url).replace("Client()", f"Client({run.url!r})")

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    folder = run.store.parent
    (folder / "captures").symlink_to(run.store)  # the default folder of a reader
    typed = [command for command in commands()
             if command.startswith(("curl ", "vllm-tap ls", "vllm-tap show", "vllm-tap export"))]
    assert len(typed) >= 6
    for command in typed:
        command = here(command).replace("vllm-tap ", f"{sys.executable} -m vllm_tap ")
        if command.startswith("curl "):
            command = command.replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    arrays = load_file(folder / "slice.safetensors")
    assert arrays["resid_post.3"].shape[0] == 8
    assert list(folder.glob("*.npz"))
    for block in blocks("python"):
        done = subprocess.run([sys.executable, "-c", here(block)], cwd=folder, env=environment, capture_output=True,
                              text=True, timeout=60)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], Serve]]:
    begun: list[Serve] = []

    def begin() -> Serve:
        begun.append(Serve(tmp_path))
        begun[-1].until_ready()
        return begun[-1]

    yield begin
    for run in begun:
        left = [pid for pid in run.descendants() if runs(pid)]
        for pid in [run.process.pid, *left]:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        run.process.wait(10)


def test_deaths_under_traffic_and_a_stop_with_requests_in_flight(serve: Callable[[], Serve]) -> None:
    run = serve()
    first = run.complete()
    run_the_readme(run)

    # The writer is killed in mid-generation: the stream goes on, and nothing of its capture is missing.
    seen, results = threading.Event(), list[str]()
    streaming = threading.Thread(target=run.stream, args=(400, seen, results))
    streaming.start()
    assert seen.wait(30)
    os.kill(run.child("writer_service"), signal.SIGKILL)
    streaming.join(60)
    assert not any(line.startswith("error") for line in results)
    until(lambda: "writer ended (SIGKILL): starting it again" in run.text(), 10, run.text)
    manifest = run.final(next(json.loads(line[6:])["id"] for line in results))
    assert manifest["status"] == "complete", manifest
    assert all(row["expected"] == row["captured"] == 400 + manifest["prompt_len"] - 1 for row in manifest["rows"])

    # The API is killed and comes back.
    os.kill(run.child("api"), signal.SIGKILL)
    until(lambda: run.text().count("api is ready") == 2, 20, run.text)
    assert run.complete()["prompt_token_ids"] == first["prompt_token_ids"]

    # A stop with requests in flight: their captures are closed with their reason, and everything is gone in time.
    streams = [(threading.Event(), list[str]()) for _ in range(3)]
    threads = [threading.Thread(target=run.stream, args=(3500, seen, out)) for seen, out in streams]
    for thread in threads:
        thread.start()
    assert all(seen.wait(30) for seen, _ in streams)
    everything = run.descendants()
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(20) == 0, run.text()
    assert time.monotonic() - began < 15, run.text()
    assert not [pid for pid in everything if runs(pid)]
    for thread in threads:
        thread.join(10)
    with StoreReader(run.store) as reader:
        assert reader.captures(status="running") == []
        for _, out in streams:
            found = reader.manifest(json.loads(out[0][6:])["id"])
            assert found.finish_reason == "abort"
            assert found.status in ("complete", "incomplete")
            assert found.expected == found.captured + sum(gap.rows for row in found.rows for gap in row.missing)
            assert found.captured > 0


def test_nothing_outlives_a_killed_supervisor_under_traffic(serve: Callable[[], Serve]) -> None:
    run = serve()
    seen, results = threading.Event(), list[str]()
    streaming = threading.Thread(target=run.stream, args=(3500, seen, results))
    streaming.start()
    assert seen.wait(30)
    everything = run.descendants()
    assert len(everything) >= 6  # guard, writer, API, vLLM's server, its core and its worker
    run.process.kill()
    until(lambda: not [pid for pid in everything if runs(pid)], 20,
          lambda: str([Path(f"/proc/{pid}/cmdline").read_bytes()[:80] for pid in everything if runs(pid)]))
    streaming.join(10)
