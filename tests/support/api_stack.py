"""A whole service for tests: real writer, real API and the small upstream server, each a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from api.auth.keys import make_key
from schemas.store.paths import KEYS_FILE
from tests.support.forked import started
from tests.support.processes import PATIENCE_S

ROOT = Path(__file__).parents[2]


class Process:
    """A child that says ``… ready …`` on its standard output."""

    def __init__(self, args: list[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.child = started(args[0], args[1:], errors, PYTHONUNBUFFERED="1")
        self.ready = threading.Event()
        self.said = ""
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            if " ready " in line:
                self.said = line.strip()
                self.ready.set()
        self.ready.set()

    def wait_ready(self) -> str:
        """The last word of the ready line: its URL or endpoint."""
        if not self.ready.wait(PATIENCE_S) or not self.said:
            raise AssertionError(f"not ready: {self.log.read_text()[-2000:]}")
        return self.said.split()[-1]

    def stop(self) -> int:
        """SIGTERM, and SIGKILL if that does not help; the exit status."""
        self.child.terminate()
        try:
            self.child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
        return self._gone()

    def kill(self) -> None:
        """SIGKILL."""
        self.child.kill()
        self._gone()

    def _gone(self) -> int:
        status = self.child.wait()
        self.listener.join()
        assert self.child.stdout is not None
        self.child.stdout.close()
        return status


@dataclass
class Stack:
    """The processes and how to reach them."""

    store: Path
    endpoint: str
    url: str = ""
    upstream_url: str = ""
    engines: dict[str, str] = field(default_factory=dict)  # URLs by name
    processes: dict[str, Process] = field(default_factory=dict)
    http: httpx.Client = field(default_factory=httpx.Client)
    key: str = ""  # where the service has keys

    def start_writer(self, program: str = "writer_service", *more: str) -> None:
        args = [program, "--store", str(self.store), "--endpoint", self.endpoint, *more]
        self.processes["writer"] = Process(args, self.store.parent / "writer.log")

    def start_upstream(self, dtype: str = "bfloat16", *more: str) -> None:
        args = ["tests.support.upstream_server", "--endpoint", self.endpoint, "--dtype", dtype, *more]
        self.processes["upstream"] = Process(args, self.store.parent / "upstream.log")
        self.upstream_url = self.processes["upstream"].wait_ready()

    def start_engine(self, name: str, *more: str) -> None:
        """An upstream of several; one that was there before comes back at its URL."""
        port = self.engines[name].rpartition(":")[2] if name in self.engines else "0"
        args = ["tests.support.upstream_server", "--endpoint", self.endpoint, "--engine", name, "--port", port, *more]
        self.processes[name] = Process(args, self.store.parent / f"{name}.log")
        self.engines[name] = self.processes[name].wait_ready()

    def start_gateway(self, *more: str) -> None:
        """The API in front of all engines that were started."""
        first, *others = [f"{name}={url}" for name, url in self.engines.items()]
        self.start_api(first, *(word for each in others for word in ("--upstream", each)), *more)

    def start_api(self, upstream: str | None = None, *more: str, program: str = "api") -> None:
        args = [program, "--store", str(self.store), "--endpoint", self.endpoint, "--port", "0",
                "--upstream", upstream or self.upstream_url, *more]
        self.processes["api"] = Process(args, self.store.parent / "api.log")
        self.url = self.processes["api"].wait_ready()
        self.http.close()
        self.http = httpx.Client(base_url=self.url,
                                 timeout=PATIENCE_S, headers={"x-api-key": self.key} if self.key else None)

    def wait_ready(self) -> None:
        """Until generations with captures are served."""
        end_s = time.monotonic() + PATIENCE_S
        while (answer := self.http.get("/readyz")).status_code != 200:
            assert time.monotonic() < end_s, answer.text
            time.sleep(0.05)

    def complete(self, prompt: object = "hello", **fields: object) -> httpx.Response:
        """A completion request."""
        return self.http.post("/v1/completions", json={"model": "played", "prompt": prompt, **fields})

    def seen(self, engine: str = "") -> list[dict[str, object]]:
        """What upstream was asked, or one of several."""
        url = self.engines[engine] if engine else self.upstream_url
        body: list[dict[str, object]] = httpx.get(f"{url}/_log").json()
        return body


@contextmanager
def running(folder: Path, dtype: str = "bfloat16", *api: str, owner: str = "", writer: str = "writer_service",
            program: str = "api") -> Iterator[Stack]:
    """The whole service, ready; everything is ended afterwards, and each process must end by itself.

    ``api`` are more arguments of the API, which is ``program``; with an ``owner`` it has keys, and the stack asks with
    that owner's.
    """
    with stack_in(folder) as stack:
        if owner:
            stack.key = make_key(stack.store / KEYS_FILE, owner)
        stack.start_writer(writer)
        stack.processes["writer"].wait_ready()
        stack.start_upstream(dtype)
        stack.start_api(None, *api, program=program)
        stack.wait_ready()
        yield stack


@contextmanager
def stack_in(folder: Path) -> Iterator[Stack]:
    """A stack of which nothing runs yet; what was started is ended afterwards, the last first."""
    sockets = tempfile.mkdtemp(prefix="tap-")
    stack = Stack(folder / "store", f"ipc://{sockets}/writer.sock")
    try:
        yield stack
    finally:
        stack.http.close()
        for process in reversed(stack.processes.values()):
            process.stop()
        shutil.rmtree(sockets, ignore_errors=True)
