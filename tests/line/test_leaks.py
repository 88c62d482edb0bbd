"""Nothing grows: descriptors, maps and memory of API, writer and sender, after captures of every kind and end.

A reader keeps the blocks that it read last open, at most ``segment_cache.files_max`` files of them: the traffic goes
beyond that before anything is counted.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, count
from pathlib import Path
from threading import get_ident

import httpx
import pytest

from schemas.ids import new_ulid
from schemas.read import segment_cache
from schemas.read.reader import StoreReader
from tests.support.api_stack import Stack, stack_in
from tests.support.footprint import ROWS, Footprint, at_rest, footprint, weigh
from tests.support.store_helpers import ROOT, WriterProcess, until
from vllm_tap import Client

SPEC = {"sites": ["resid_post", "attn_out"], "layers": [1, 3], "codec": "raw"}
# Of memory in use, a capture: a thirtieth of what a reader works out for each and keeps for a while. It is bounded:
#  - the API's by what a reader keeps, a million rows: flat (107 MB) from the 1,650th of the captures here on;
#  - the writer's by what it remembers of captures, 20,000 of them (``capture_rules.remembered_max``), and a name for
#    each block, of which there is one every frame or two here, else one every 256 MiB: together 1.7 KB a capture.
# What a process holds of the system is more: malloc keeps what was freed, in an arena of each thread, and that grew by
# steps, by 11 KB a capture of the API's in one run, while its memory in use stayed.
GROWTH_BYTES_MAX = 4096
many = pytest.mark.parametrize("captures", [
    300, pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])


class Traffic:
    """Clients of every manner, each asking for captures in turns; some leave in the middle."""

    def __init__(self, stack: Stack, prompt: str) -> None:
        self.stack, self.prompt = stack, prompt
        self.host, port = stack.url.removeprefix("http://").split(":")
        self.port = int(port)
        self.number = count()
        self.clients: dict[int, tuple[httpx.Client, Client]] = {}
        self.large = new_ulid()
        self.ways: list[Callable[[httpx.Client, Client, str], None]] = [
            self.whole, self.inline, self.left_by_a_follower, self.left_by_all, self.cut_slice, self.deleted_followed,
            self.several, self.refused]

    def go(self, captures: int) -> None:
        """So many captures; then no connection of these clients is open."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self._one, range(captures)))
        for http, client in self.clients.values():
            http.close()
            client.close()
        self.clients.clear()

    def _one(self, _: int) -> None:
        if get_ident() not in self.clients:
            self.clients[get_ident()] = httpx.Client(base_url=self.stack.url), Client(self.stack.url)
        number = next(self.number)
        self.ways[number % len(self.ways)](*self.clients[get_ident()], f"leak-{number}")

    def body(self, **fields: object) -> dict[str, object]:
        return {"model": "played", "prompt": self.prompt, "max_tokens": 6, "capture": SPEC, **fields}

    def ask(self, http: httpx.Client, name: str, **fields: object) -> dict[str, object]:
        answer = http.post("/v1/completions", json=self.body(**fields), headers={"X-Request-Id": name})
        assert answer.status_code == 200, answer.text
        found: dict[str, object] = answer.json()
        return found

    def rows(self, http: httpx.Client, name: str) -> None:
        answer = http.get(f"/v1/captures/{name}/activations?site=resid_post&site=attn_out&wait=complete&timeout=60")
        assert answer.status_code == 200, answer.text

    def leave(self, path: str, after: bytes) -> None:
        """A client that goes away when it has seen ``after``; its window is small, so that the rest waits."""
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.settimeout(60)
            plain.connect((self.host, self.port))
            plain.sendall(f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\n\r\n".encode())
            seen = b""
            while after not in seen:
                part = plain.recv(4096)
                assert part, seen
                seen += part

    def whole(self, http: httpx.Client, client: Client, name: str) -> None:
        generation = client.generate(self.prompt, max_tokens=4, capture=SPEC)
        assert generation["resid_post", 3].shape == generation["attn_out", 1].shape
        assert generation.manifest().status == "complete"

    def inline(self, http: httpx.Client, client: Client, name: str) -> None:
        self.ask(http, name, capture={**SPEC, "return": "inline"})

    def left_by_a_follower(self, http: httpx.Client, client: Client, name: str) -> None:
        with http.stream("POST", "/v1/completions", headers={"X-Request-Id": name}, json=self.body(
                stream=True, play={"live": True, "delay_s": 0.005})) as answer:
            lines = answer.iter_lines()
            next(lines)
            self.leave(f"/v1/captures/{name}/live?site=resid_post", b"event: rows")
            self.leave(f"/v1/captures/{name}/events?site=resid_post", b"event: ")
            assert list(lines)
        self.rows(http, name)

    def left_by_all(self, http: httpx.Client, client: Client, name: str) -> None:
        with http.stream("POST", "/v1/completions", headers={"X-Request-Id": name}, json=self.body(
                stream=True, max_tokens=2000, play={"live": True, "delay_s": 0.02})) as answer:
            next(answer.iter_lines())
            self.leave(f"/v1/captures/{name}/live?site=resid_post", b"event: rows")
        self.rows(http, name)

    def cut_slice(self, http: httpx.Client, client: Client, name: str) -> None:
        self.ask(http, name)
        self.rows(http, name)
        self.leave(f"/v1/captures/{self.large}/activations?site=resid_post", b"resid_post")
        client.delete(name)

    def deleted_followed(self, http: httpx.Client, client: Client, name: str) -> None:
        self.ask(http, name, play={"unfinished": True})
        with http.stream("GET", f"/v1/captures/{name}/live?site=resid_post") as answer:
            lines = answer.iter_lines()
            next(lines)
            client.delete(name)
            assert any("deleted" in line for line in lines)

    def several(self, http: httpx.Client, client: Client, name: str) -> None:
        found = self.ask(http, name, n=2)
        sample = f"{found['capture']['id']}.0"  # type: ignore[index]
        self.rows(http, sample)
        for path in (f"{sample}/map?site=resid_post", f"{sample}/tokens", name):
            assert http.get(f"/v1/captures/{path}").status_code == 200
        assert http.get("/v1/captures?limit=20").status_code == 200

    def refused(self, http: httpx.Client, client: Client, name: str) -> None:
        for path, status in ((f"{name}/activations?site=resid_post", 404), ("..%2F", 404),
                             (f"{self.large}/activations?site=resid_pre", 404),
                             (f"{self.large}/activations?site=resid_post&layer=x", 400)):
            assert http.get(f"/v1/captures/{path}").status_code == status, path
        bad = http.post("/v1/completions", json=self.body(capture={"sites": ["nothing"]}))
        assert bad.status_code == 400
        self.ask(http, name)
        self.rows(http, name)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A writer that seals after every frame or two, so that there are many blocks: in memory, where that is quick.

    API and writer tell what memory they have in use (``weigh``).
    """
    monkeypatch.setenv("WEIGHED", str(tmp_path))
    monkeypatch.setenv("PYTHONMALLOC", "malloc")
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tap-leaks-", dir=shared) as folder, stack_in(Path(folder)) as stack:
        stack.start_writer("tests.programs.weighed_writer", "--segment-bytes", "4096", "--seal-idle-s", "0.2",
                           "--keep-s", "0.2", "--durability", "os")
        stack.processes["writer"].wait_ready()
        stack.start_upstream()
        stack.start_api(program="tests.programs.weighed_api")
        stack.wait_ready()
        yield stack


def sealed(stack: Stack) -> bool:
    return until(lambda: not list((stack.store / "writers/w0/journal").glob("*.open")))


def looks(stack: Stack) -> dict[str, Footprint]:
    assert sealed(stack)
    stack.http.close()
    # The service closes connections to upstream that were not used for five seconds when it next uses one.
    time.sleep(6.0)
    assert httpx.get(f"{stack.url}/v1/models").status_code == 200
    return {name: at_rest(stack.processes[name].child.pid, stack.store) for name in ("api", "writer")}


def growth(seen: list[int]) -> float:
    """By step, of the second half: the median between any two, so that one step up does not count for all."""
    late = enumerate(seen[len(seen) // 2:])
    return statistics.median((b - a) / (j - i) for (i, a), (j, b) in combinations(late, 2))


@pytest.mark.soak
@many
def test_api_and_writer(stack: Stack, tmp_path: Path, captures: int) -> None:
    soak = captures > 1000
    traffic = Traffic(stack, "x" * (400 if soak else 24))
    stack.http.post("/v1/completions", json=traffic.body(
        prompt=[7] * 3000, capture={"sites": ["resid_post"], "codec": "raw", "id": traffic.large})).raise_for_status()
    traffic.go(captures // 2)
    before = looks(stack)
    assert before["api"].files[ROWS] > segment_cache.files_max * 3 // 4, "traffic must exceed the cache"
    memory: dict[str, list[int]] = {"api": [], "writer": []}
    for _ in range(10):
        traffic.go(captures // 20)
        if soak:
            assert sealed(stack)
            for name, seen in memory.items():
                seen.append(weigh(stack.processes[name].child.pid, tmp_path))
    after = looks(stack)
    for name in ("api", "writer"):
        print(name, "descriptors", sum(before[name].files.values()), "→", sum(after[name].files.values()), "maps",
              sum(before[name].maps.values()) + before[name].unnamed, "→",
              sum(after[name].maps.values()) + after[name].unnamed, "held of the system, MB",
              round(before[name].anonymous / 1e6, 1), "→", round(after[name].anonymous / 1e6, 1), "in use, MB",
              [round(seen / 1e6, 2) for seen in memory[name]])
        assert after[name].open == before[name].open
        assert after[name].files[ROWS] <= segment_cache.files_max and after[name].maps[ROWS] <= segment_cache.files_max
        assert not after[name].files["removed"] and not after[name].maps["removed"]
        assert not any("/dev/shm" in one and "tap-leaks-" not in one for one in (*after[name].files, *after[name].maps))
        if soak:
            assert growth(memory[name]) / (captures // 20) < GROWTH_BYTES_MAX


def test_a_block_that_is_removed_is_let_go_of_while_nobody_reads(stack: Stack) -> None:
    """What is mapped stays on the disk, and is not free."""
    name = str(stack.complete([1] * 20, capture=SPEC).json()["capture"]["id"])
    pid = stack.processes["api"].child.pid
    assert until(lambda: not list((stack.store / "writers/w0/journal").glob("*.open")))
    assert stack.http.get(f"/v1/captures/{name}/activations?site=resid_post").status_code == 200
    assert footprint(pid, stack.store).maps[ROWS]
    assert stack.http.delete(f"/v1/captures/{name}").status_code in (200, 202, 204)
    assert until(lambda: not (seen := footprint(pid, stack.store)).maps[ROWS] and not seen.maps["removed"])


def test_a_reader_has_no_more_files_open_than_it_may(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that were parsed keep no map beside."""
    monkeypatch.setattr(segment_cache, "files_max", 12)
    names = [str(stack.complete([1] * 20, capture=SPEC).json()["capture"]["id"]) for _ in range(20)]
    assert until(lambda: not list((stack.store / "writers/w0/journal").glob("*.open")))
    with StoreReader(stack.store) as reader:
        for _ in range(2):
            for name in names:
                assert reader.slice(name, "resid_post", [1, 3]).positions.size
        seen = footprint(os.getpid(), stack.store)
        assert 6 <= seen.files[ROWS] <= 12 and seen.maps[ROWS] <= 12
    assert not footprint(os.getpid(), stack.store).maps[ROWS]


@many
def test_the_sender(tmp_path: Path, captures: int) -> None:
    """Its process, and what the engine's process shares with it."""
    with WriterProcess(tmp_path / "store", "--durability", "os") as writer:
        run = subprocess.run([sys.executable, "-m", "tests.programs.tapped_traffic", writer.endpoint, writer.store,
                              str(captures)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    for name, seen in json.loads(run.stdout.splitlines()[-1]).items():
        before, after = Footprint(**seen["before"]), Footprint(**seen["after"])
        print(name, sum(before.files.values()), "→", sum(after.files.values()), "maps",
              sum(before.maps.values()) + before.unnamed, "→", sum(after.maps.values()) + after.unnamed, "memory, MB",
              [round(held / 1e6, 1) for held in (before.anonymous, *seen["memory"])])
        assert before.files and after.open == before.open
        if captures > 1000:
            assert growth(seen["memory"]) / (captures // 20) < GROWTH_BYTES_MAX
