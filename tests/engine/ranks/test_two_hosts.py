"""One engine, or two, on two hosts with one writer: rows of every rank, by shared memory here and by TCP from there."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from schemas.bucket.reader import open_reader
from schemas.read.reader import StoreReader
from schemas.wire.curve import make_sender
from tests.engine.conftest import ENVIRONMENT
from tests.support.engines.engines import ON_GPU
from tests.support.engines.hosts import SERVE, Host, connections, possible, two_hosts
from tests.support.models.features import tokens
from tests.support.models.reference import Reference
from tests.support.store_helpers import until
from vllm_tap.tiny_model import cache_dir, tiny_model

pytestmark = [pytest.mark.timeout(1800), pytest.mark.soak,
              pytest.mark.skipif(ON_GPU or not possible(), reason="needs network namespaces, which root makes")]
SITES = ["resid_post", "mlp_out", "q", "z"]
PORT, WRITER = 8000, 5570
ASK = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
import httpx
bodies = json.loads(sys.argv[1])
with ThreadPoolExecutor(len(bodies)) as pool:
    url = "http://127.0.0.1:8001/v1/completions"
    answers = list(pool.map(lambda body: httpx.post(url, json=body, timeout=300), bodies))
print(json.dumps([[answer.status_code, answer.json()] for answer in answers]))
"""


@dataclass
class Pair:
    """The service of engines on two hosts."""

    hosts: tuple[Host, Host]
    store: Path
    model: str

    @property
    def stores(self) -> list[str]:
        """All of the writers' stores."""
        return [str(store) for store in (self.store, self.store.with_name("store-b")) if store.exists()]

    def ask(self, lengths: list[int], **capture: Any) -> list[tuple[int, Any]]:
        """Status and body of generations with captures, at once, for prompts of these lengths."""
        bodies = [{"model": self.model, "prompt": tokens(length, seed=length), "max_tokens": 12, "ignore_eos": True,
                   "temperature": 0, "capture": {"codec": "raw", "sites": SITES, **capture}} for length in lengths]
        return [(status, body) for status, body in json.loads(self.hosts[0].run(ASK, json.dumps(bodies)))]

    def captures(self, lengths: list[int], **capture: Any) -> list[str]:
        """Ids of captures that end in order."""
        answers = self.ask(lengths, **capture)
        assert all(status == 200 for status, _ in answers), answers
        ids = [str(body["capture"]["id"]) for _, body in answers]
        with open_reader(self.stores) as reader:
            assert all(until(lambda one=one: reader.capture(one).status == "complete") for one in ids)
        return ids

    def check(self, ids: list[str], reference: Reference, ranks: int, sites: list[str] = SITES) -> None:
        """Every row against Hugging Face."""
        with open_reader(self.stores) as reader:
            for id_ in ids:
                manifest = reader.manifest(id_)
                assert {row.site for row in manifest.rows} == {*sites} and len(manifest.parts) == ranks
                text = (*manifest.prompt_token_ids, *manifest.output_token_ids)
                want = reference.rows(text)
                for row in manifest.rows:
                    got, whole = reader.slice(id_, row.site, [row.layer]), want[row.site, row.layer][: len(text) - 1]
                    assert got.positions.tolist() == list(range(len(text) - 1))
                    assert np.abs(got.values()[0] - whole).max() <= 1e-4 * max(1, np.abs(whole).max())

    def senders(self, host: Host) -> list[int]:
        """The processes that send rows on a host."""
        return [pid for pid in host.pids() if "sender_process" in " ".join(psutil.Process(pid).cmdline())]


@contextmanager
def pair(folder: Path, sockets: Path, first: list[str], second: list[str], sites: list[str] = SITES,
         writers: str = "one") -> Iterator[Pair]:
    """Engines with these flags of vLLM on either host; writer, store and API on the first, and a writer with a store
    of its own on the second where there are several.
    """
    keys, store, model = make_sender(folder / "curve", "second"), folder / "store", str(tiny_model())
    local = f"ipc://{sockets}/writer.sock"
    plain = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_TAP_")}
    plain |= {key: value for key, value in ENVIRONMENT.items() if not key.startswith("VLLM_TAP_")}
    plain |= {"VLLM_CACHE_ROOT": str(cache_dir() / "vllm"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    taps = {"VLLM_TAP_ENDPOINT": f"{local}|tcp://10.77.0.1:{WRITER}", "VLLM_TAP_CURVE": str(keys),
            "VLLM_TAP_GROUP": "pair", "VLLM_TAP_ARM": ",".join(sites), "VLLM_PLUGINS": "vllm_tap",
            "VLLM_TAP_WRITERS": writers}
    taps_there = taps
    if writers == "several":
        (folder / "there").mkdir(mode=0o700)
        taps_there = {**taps, "VLLM_TAP_ENDPOINT": f"ipc://{folder}/there/writer.sock", "VLLM_TAP_CURVE": ""}
    (folder / "serve.py").write_text(SERVE)
    serve = [sys.executable, str(folder / "serve.py"), model, "--dtype", "float32", "--max-model-len", "256",
             "--block-size", "32", "--max-num-seqs", "8", "--max-num-batched-tokens", "48", "--enforce-eager",
             "--no-enable-prefix-caching"]
    with two_hosts(sockets) as hosts:
        here, there = hosts
        started = {
            "writer": here.start([sys.executable, "-m", "writer_service", "--store", str(store), "--endpoint", local,
                                  "--listen", f"tcp://10.77.0.1:{WRITER}", "--curve", str(folder / "curve")], plain,
                                 folder / "writer.log")}
        assert until(lambda: "writer listens" in (folder / "writer.log").read_text())
        if writers == "several":
            started["other"] = there.start([sys.executable, "-m", "writer_service", "--store", str(folder / "store-b"),
                                            "--endpoint", taps_there["VLLM_TAP_ENDPOINT"], "--seal-idle-s", "1"], plain,
                                           folder / "other.log")
            assert until(lambda: "writer ready" in (folder / "other.log").read_text())
        started["first"] = here.start([*serve, "--port", str(PORT), *first], plain | taps, folder / "first.log")
        started["second"] = there.start([*serve, "--headless", *second], plain | taps_there, folder / "second.log")

        def ready() -> bool:
            for name, process in started.items():
                assert process.poll() is None, f"{name}: {(folder / f'{name}.log').read_text()[-3000:]}"
            return "Application startup complete" in (folder / "first.log").read_text()

        assert until(ready, 900), (folder / "first.log").read_text()[-3000:]
        here.start([sys.executable, "-m", "api", "--store", str(store), "--endpoint", local, "--upstream",
                    f"http://127.0.0.1:{PORT}", "--port", "8001"], plain, folder / "api.log")
        assert until(lambda: "api ready" in (folder / "api.log").read_text())
        yield Pair(hosts, store, model)


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    """The folder of the writer's socket, which the second host does not see."""
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run"


def test_a_server_of_an_engine_on_each_host(tmp_path: Path, sockets: Path,
                                            reference_of: Callable[[str], Reference]) -> None:
    flags = ["--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-address", "10.77.0.1",
             "--data-parallel-rpc-port", "13345"]
    with pair(tmp_path, sockets, flags, [*flags, "--data-parallel-start-rank", "1"]) as service:
        ids = service.captures([5, 90, 31, 12, 64, 7])
        service.check(ids, reference_of("qwen3"), 0)
        with sqlite3.connect(f"file:{service.store}/catalog.sqlite?mode=ro", uri=True) as db:
            assert len({db.execute("SELECT stream FROM captures WHERE id = ?", (id_,)).fetchone() for id_ in ids}) == 2
        assert connections(service.hosts[1].pids()[0], WRITER)


def test_an_engine_whose_ranks_are_on_two_hosts(tmp_path: Path, sockets: Path,
                                                reference_of: Callable[[str], Reference]) -> None:
    """Then the sender on the other host is killed: what needs its rank is refused by name, generation goes on."""
    flags = ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "10.77.0.1", "--master-port", "29511"]
    with pair(tmp_path, sockets, [*flags, "--node-rank", "0"], [*flags, "--node-rank", "1"]) as service:
        service.check(service.captures([5, 90, 31, 12]), reference_of("qwen3"), 2)
        (one,), (other,) = map(service.senders, service.hosts)
        assert one != other and connections(other, WRITER)
        os.kill(other, signal.SIGKILL)

        def refused() -> bool:
            ((status, body),) = service.ask([9], sites=["q"])
            error = body.get("error", {})
            return (status, error.get("code")) == (503, "part_lost") and "rank 1" in error["message"]

        assert until(refused)
        ((status, _),) = service.ask([9], sites=["resid_post"], layers=[0, 2])
        assert status == 200


@pytest.mark.parametrize(("way", "sites", "first"), [
    ("--tensor-parallel-size", ["resid_post", "mlp_out"], [0, 2]), ("--pipeline-parallel-size", SITES, [0, 1])])
def test_an_engine_whose_ranks_have_a_writer_each(
    tmp_path: Path, sockets: Path, reference_of: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch, way: str,
    sites: list[str], first: list[int],
) -> None:
    """Tensor-parallel ranks deal the layers out, stages have theirs; each store has those of its host."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # without it vLLM's CPU build runs no stages of so small a model
    flags = [way, "2", "--nnodes", "2", "--master-addr", "10.77.0.1", "--master-port", "29511"]
    with pair(tmp_path, sockets, [*flags, "--node-rank", "0"], [*flags, "--node-rank", "1"], sites, "several"
              ) as service:
        ids = service.captures([5, 90, 31, 12], sites=sites)
        service.check(ids, reference_of("qwen3"), 0, sites)
        halves = []
        for store in service.stores:
            with StoreReader(store) as reader:
                rows = reader.manifest(ids[0]).rows
                halves.append({row.layer for row in rows if row.captured})
                assert {gap.reason for row in rows for gap in row.missing} == {"elsewhere"}
        assert halves[0] == {*first} and not halves[0] & halves[1] and halves[1]
        (last,) = service.captures([7], sites=sites, layers=[max(halves[1])])
        with open_reader(service.stores) as together:
            assert together.slice(last, "mlp_out", [max(halves[1])]).positions.size == 7 + 12 - 1


def test_columns_of_a_row_go_to_one_writer(tmp_path: Path, sockets: Path) -> None:
    flags = ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "10.77.0.1", "--master-port", "29511"]
    with pytest.raises(AssertionError, match=r"several: ranks .* have a share of the columns of q\.0"), \
            pair(tmp_path, sockets, [*flags, "--node-rank", "0"], [*flags, "--node-rank", "1"], ["q"], "several"):
        pass
