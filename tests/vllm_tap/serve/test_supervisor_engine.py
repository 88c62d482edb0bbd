"""``vllm-tap serve`` with a real vLLM: deaths under traffic, its own at last, no orphans (a stop: test_serve.py)."""

from __future__ import annotations

import doctest
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file

from tests.support.pages.readme import blocks, commands
from tests.support.processes import PATIENCE_S, descendants, free_port, runs
from tests.vllm_tap.serve.test_supervisor import until

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[3]
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
                 "--engine-port", str(free_port()), "--store", str(self.store),
                 "--arm", "resid_post,attn_out,mlp_out"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "VLLM_CPU_CI_ENV": "1"})

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until_ready(self) -> None:
        until(lambda: "vllm-tap is ready" in self.text() or self.process.poll() is not None, READY_S, self.text)
        assert self.process.poll() is None, self.text()

    def child(self, module: str) -> int:
        return next(pid for pid in descendants(self.process.pid)
                    if f"-m\0{module}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes())

    def stream(self, max_tokens: int, seen: threading.Event, results: list[str]) -> None:
        """One long streamed completion with a capture; ``seen`` is set at its first token."""
        body = {"model": "tiny", "prompt": "The sea", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "capture": {}}
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        seen.set()
                        results.append(line)
        except httpx.HTTPError as error:
            results.append(f"error: {type(error).__name__}")

    def complete(self) -> dict[str, Any]:
        """A short completion with a capture, which must come out complete."""
        answer = httpx.post(f"{self.url}/v1/completions", json={
            "model": "tiny", "prompt": "The sea", "max_tokens": 8, "temperature": 0, "capture": {"codec": "raw"}})
        assert answer.status_code == 200, answer.text
        manifest = self.final(answer.json()["capture"]["id"])
        assert manifest["status"] == "complete", manifest
        return manifest

    def final(self, ref: str) -> dict[str, Any]:
        """The manifest once the capture is final."""
        answer = httpx.get(f"{self.url}/v1/captures/{ref}", params={"wait": "complete", "timeout": 30})
        return dict(answer.json())


def run_the_readme(run: Serve) -> None:
    """What README and tutorials tell their reader to type once the server is up, against this server and its store."""

    def here(text: str) -> str:
        return text.replace("http://127.0.0.1:8100", run.url).replace("Client()", f"Client({run.url!r})")

    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    folder = run.store.parent
    (folder / "captures").symlink_to(run.store)  # the default folder of a reader
    session, = blocks("pycon")
    examples = doctest.DocTestParser().get_doctest(here(session), {}, "README.md", "README.md", 0)
    told: list[str] = []
    assert len(examples.examples) == 5
    assert doctest.DocTestRunner().run(examples, out=told.append).failed == 0, "".join(told)
    first = "docs/tutorials/first-capture.md"
    typed = [command for command in commands(first)
             if command.startswith(("curl ", "vllm-tap ls", "vllm-tap show", "vllm-tap export"))]
    assert len(typed) >= 6
    for command in typed:
        command = here(command).replace("vllm-tap ", f"{sys.executable} -m vllm_tap ")
        if command.startswith("curl "):
            command = command.replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True,
                              timeout=PATIENCE_S)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    arrays = load_file(folder / "slice.safetensors")
    assert arrays["resid_post.3"].shape[0] == 8
    assert list(folder.glob("*.npz"))
    # What trains on a file of prompts needs the store of one: docs/howto/sae-training.md has the same lines, which run.
    for block in (block for block in blocks("python", first) if "activations(" not in block):
        done = subprocess.run([sys.executable, "-c", here(block)], cwd=folder, env=environment, capture_output=True,
                              text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{block}\n{done.stderr}"
    # The tutorial of the lens is one session of Python.
    session = here("\n".join(blocks("python", "docs/tutorials/logit-lens.md")))
    done = subprocess.run([sys.executable, "-c", session], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=PATIENCE_S)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert (folder / "lens.png").stat().st_size > 5000


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Serve]:
    run = Serve(tmp_path)
    try:
        run.until_ready()
        yield run
    finally:
        for pid in [run.process.pid, *descendants(run.process.pid)]:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        run.process.wait(10)


def test_deaths_under_traffic(run: Serve) -> None:
    first = run.complete()
    run_the_readme(run)

    # The writer is killed in mid-generation: the stream goes on, and nothing of its capture is missing.
    seen, results = threading.Event(), list[str]()
    streaming = threading.Thread(target=run.stream, args=(400, seen, results))
    streaming.start()
    assert seen.wait(PATIENCE_S)
    os.kill(run.child("writer_service"), signal.SIGKILL)
    streaming.join(PATIENCE_S)
    assert not any(line.startswith("error") for line in results)
    until(lambda: "writer ended (SIGKILL): starting it again" in run.text(), 60, run.text)
    manifest = run.final(next(json.loads(line[6:])["id"] for line in results))
    assert manifest["status"] == "complete", manifest
    assert all(row["expected"] == row["captured"] == 400 + manifest["prompt_len"] - 1 for row in manifest["rows"])

    # The API is killed and comes back.
    os.kill(run.child("api"), signal.SIGKILL)
    until(lambda: run.text().count("api is ready") == 2, 60, run.text)
    assert run.complete()["prompt_token_ids"] == first["prompt_token_ids"]

    # The supervisor itself is killed in mid-generation: nothing outlives it.
    seen, results = threading.Event(), list[str]()
    streaming = threading.Thread(target=run.stream, args=(3500, seen, results))
    streaming.start()
    assert seen.wait(PATIENCE_S)
    everything = descendants(run.process.pid)
    assert len(everything) >= 6  # guard, writer, API, vLLM's server, its core and its worker
    run.process.kill()
    until(lambda: not [pid for pid in everything if runs(pid)], 60,
          lambda: str([Path(f"/proc/{pid}/cmdline").read_bytes()[:80] for pid in everything if runs(pid)]))
    streaming.join(10)
