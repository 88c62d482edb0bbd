"""Two engines of one server, each with a sender of its own, in one store: rows are those of their own requests.

The engines of a model with experts step together: vLLM's CPU build lacks the exchange, so a test brings one along. On
GPUs they are vLLM's own, with a share of the experts each.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import save_file

from schemas.read.reader import StoreReader
from schemas.wire.layout import siblings
from tests.engine.conftest import ENVIRONMENT, Store
from tests.engine.test_architectures import SITES as SITES_OF
from tests.engine.test_architectures import after_a_choice
from tests.support.engines.cpu_exchange import plugin
from tests.support.engines.engines import DTYPE, ON_GPU, row_errors
from tests.support.engines.installed import entry_points
from tests.support.models.families import family_model
from tests.support.models.features import tokens
from tests.support.models.reference import Reference
from tests.support.processes import descendants, free_port, runs
from tests.support.served import serving
from tests.support.store_helpers import until
from vllm_tap.tiny_model import cache_dir, tiny_model

pytestmark = [pytest.mark.timeout(1200), pytest.mark.soak,
              pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="one GPU cannot hold two engines")]
on_a_cpu = pytest.mark.skipif(ON_GPU, reason="of vLLM's CPU build")
four_ranks = pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 4, reason="NOT RUN: needs four GPUs")
ROUTED = ("router_logits", "experts")
STEER = np.random.default_rng(8).standard_normal(256).astype(np.float32)


@dataclass
class Service:
    """A server of two engines, and its store."""

    pid: int
    url: str
    store: Path
    model: str
    sites: list[str]

    def ask(self, prompt: Sequence[int], generated: int, **fields: Any) -> str:
        """The id of the capture of a generation, which everything armed is asked of."""
        answer = httpx.post(f"{self.url}/v1/completions", timeout=300, json={
            "model": self.model, "prompt": list(prompt), "max_tokens": generated, "ignore_eos": True, "temperature": 0,
            "capture": {"codec": "raw", "sites": self.sites, "probe": ["tone"]}, **fields})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["capture"]["id"])

    def ask_at_once(self, lengths: Sequence[int], generated: int, **fields: Any) -> list[str]:
        """So for prompts of these lengths, all at the same time."""
        with ThreadPoolExecutor(len(lengths)) as pool:
            return list(pool.map(lambda length: self.ask(tokens(length, seed=length), generated, **fields), lengths))

    def streams(self, captures: Sequence[str]) -> list[str]:
        """The engine that each was served by, as the writer knows it."""
        with sqlite3.connect(f"file:{self.store}/catalog.sqlite?mode=ro", uri=True) as db:
            return [db.execute("SELECT stream FROM captures WHERE id = ?", (one,)).fetchone()[0] for one in captures]


def environment(folder: Path, more: Sequence[Path] = ()) -> dict[str, str]:
    """Of a server whose plugin is this checkout's."""
    found = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_TAP_")}
    found |= {key: value for key, value in ENVIRONMENT.items() if not key.startswith("VLLM_TAP_")}
    return found | {"VLLM_CACHE_ROOT": str(cache_dir() / "vllm"), "PYTHONUNBUFFERED": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "PYTHONPATH": ":".join(map(str, [*more, entry_points(folder), os.environ["PYTHONPATH"]]))}


def directions(width: int) -> np.ndarray[Any, Any]:
    """Of a probe: [2, width]."""
    return np.random.default_rng(7).standard_normal((2, width)).astype(np.float32)


def probe(folder: Path, model: Path) -> list[str]:
    """The flags that register it."""
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    save_file({"directions": directions(width)}, folder / "tone.safetensors", {"site": "resid_post", "layer": "2"})
    return ["--probe", f"tone={folder / 'tone.safetensors'}"]


@contextmanager
def two_engines(folder: Path, model: Path, arm: Sequence[str], ours: Sequence[str] = (), vllm: Sequence[str] = (),
                paths: Sequence[Path] = ()) -> Iterator[Service]:
    """A server with flags of ours and of vLLM, and more folders on its Python path."""
    port = free_port()
    words = [str(model), "--port", str(port), "--engine-port", str(free_port()), "--store", str(folder / "captures"),
             "--arm", ",".join(arm), *probe(folder, model), *ours, "--", "--data-parallel-size", "2",
             "--dtype", DTYPE, "--max-num-batched-tokens", "48", "--max-num-seqs", "8", "--block-size", "32",
             "--max-model-len", "256", "--no-enable-prefix-caching", *vllm,
             *(["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30)] if ON_GPU else [])]
    if not (model / "tokenizer.json").exists():
        words.append("--skip-tokenizer-init")
    with serving(words, environment(folder, paths), ready_s=600) as (process, _):
        yield Service(process.pid, f"http://127.0.0.1:{port}", folder / "captures", str(model), list(arm))


def check(service: Service, reference: Reference, captures: Sequence[str], ranks: int = 1, family: str = "qwen3"
          ) -> None:
    """Every row of every capture, each site and layer whole, against Hugging Face."""
    with StoreReader(service.store) as reader:
        for id_ in captures:
            assert until(lambda id_=id_: reader.capture(id_).status == "complete"), reader.manifest(id_)
            manifest = reader.manifest(id_)
            text = (*manifest.prompt_token_ids, *manifest.output_token_ids)
            assert {row.site for row in manifest.rows} == {*service.sites, "probe.tone"}
            assert len(manifest.parts) == (ranks if ranks > 1 else 0)
            want = dict(reference.rows(text))
            want["probe.tone", 2] = want["resid_post", 2] @ directions(want["resid_post", 2].shape[1]).T
            for row in manifest.rows:
                got = reader.slice(id_, row.site, [row.layer])
                assert got.positions.tolist() == list(range(len(text) - 1))
                whole = want[row.site, row.layer][: len(text) - 1]
                if ON_GPU:  # in bfloat16; a score is a sum of what may cancel out
                    held = row.site == "probe.tone" or after_a_choice(family, row.site, row.layer)
                    assert held or row_errors(got.values()[0], whole).max() <= 1, f"{row.site}.{row.layer}"
                    continue
                off = np.abs(got.values()[0] - whole).max()
                assert off <= 1e-4 * max(1, np.abs(whole).max()), f"{row.site}.{row.layer}: {off:.1e}"


def test_each_engine_of_two_serves_its_requests(tmp_path: Path, reference_of: Callable[[str], Reference]) -> None:
    """Of a model without experts they know nothing of each other; edits are made by whichever serves the request. Then
    the sender of one is killed: no capture is begun, since a request may go to it, and generation goes on.
    """
    save_file({"vector": STEER}, tmp_path / "steer.safetensors")
    model, sites = tiny_model(dtype=DTYPE), SITES_OF["qwen3"]
    edits = ["--edit", "resid_post.1", "--vector", f"steer={tmp_path / 'steer.safetensors'}"]
    with two_engines(tmp_path, model, sites, edits) as service:
        captures = service.ask_at_once([5, 90, 31, 12, 64, 7], 20)
        check(service, reference_of("qwen3"), captures)
        assert len(set(service.streams(captures))) == 2, "one engine served all"
        one = {"sites": ["resid_post"], "layers": [1], "codec": "raw", "positions": "prompt"}
        edit = [{"site": "resid_post.1", "op": "add", "vector": "steer", "scale": 2}]
        plain = service.ask_at_once([9, 14, 23, 40], 30, capture=one)
        edited = service.ask_at_once([9, 14, 23, 40], 30, capture=one, edit=edit)
        assert len(set(service.streams(edited))) == 2
        with StoreReader(service.store) as reader:
            for before, after in zip(plain, edited, strict=True):
                assert until(lambda after=after: reader.capture(after).status == "complete")
                rows = [reader.slice(each, "resid_post", [1]).values() for each in (before, after)]
                assert np.abs(rows[1] - rows[0] - 2 * STEER).max() < (0.05 if ON_GPU else 1e-4)  # bfloat16
                (told,) = reader.manifest(after).edits
                assert [(row["applied"], row["expected"]) for row in told["rows"]] and all(
                    row["applied"] == row["expected"] for row in told["rows"])
        os.kill(sender_of(service.pid, 1), signal.SIGKILL)
        assert until(lambda: httpx.get(f"{service.url}/v1/capabilities").json()["lost_ranks"] == [0])
        ask = {"model": service.model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        refused = httpx.post(f"{service.url}/v1/completions", json={**ask, "capture": one}, timeout=300)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "part_lost"), refused.text
        assert "rank 0 of data-parallel engine 1 has no sender" in refused.json()["error"]["message"]
        assert all(httpx.post(f"{service.url}/v1/completions", json=ask, timeout=300).status_code == 200
                   for _ in range(4))


def test_engines_of_experts_step_together_and_dummy_steps_are_nobodys(tmp_path: Path) -> None:
    """While one has requests the other takes dummy steps, between steps of its own too."""
    model, sites = family_model("mixtral", DTYPE), [s for s in SITES_OF["mixtral"] if s not in ROUTED]
    # The CPU's experts are traced with the rest of the model, and an exchange of rows that others count is not traced.
    how, paths = (["--enable-expert-parallel"], []) if ON_GPU else (["--enforce-eager"], [plugin(tmp_path)])
    with two_engines(tmp_path, model, sites, (), how, paths) as service:
        alone = [service.ask(tokens(40, seed=1), 30)]  # the other takes dummy steps alone
        alone += [service.ask(tokens(9, seed=2), 5), service.ask(tokens(70, seed=3), 12)]
        together = service.ask_at_once([5, 60, 31, 12, 44, 7], 25)
        check(service, Reference(model), [*alone, *together], family="mixtral")
        assert len(set(service.streams(together))) == 2, "one engine served all"


def sender_of(pid: int, engine: int, rank: int | None = None) -> int:
    """The process that sends for a rank of an engine of the server ``pid``, or for the engine that is one process."""
    found = [psutil.Process(each) for each in descendants(pid) if runs(each)]
    names = [f"EngineCore_DP{engine}", *([] if rank is None else [f"Worker_TP{rank}"])]
    senders = [one.pid for one in found if "engine_side.transport.sender_process" in " ".join(one.cmdline())
               and all(any(name in " ".join(above.cmdline()) for above in one.parents()) for name in names)]
    assert len(senders) == 1, senders
    return senders[0]


@four_ranks
def test_engines_of_two_ranks_each_and_one_whose_sender_is_killed(tmp_path: Path,
                                                                  reference_of: Callable[[str], Reference]) -> None:
    """A group each. What needs the dead rank of one of them is refused over HTTP, the rest goes on at both."""
    model, sites = tiny_model(dtype=DTYPE), SITES_OF["qwen3"]
    with two_engines(tmp_path, model, sites, (), ["--tensor-parallel-size", "2"]) as service:
        captures = service.ask_at_once([5, 40, 31, 12], 20)
        check(service, reference_of("qwen3"), captures, ranks=2)
        with sqlite3.connect(f"file:{service.store}/catalog.sqlite?mode=ro", uri=True) as db:
            groups = [row[0] for row in db.execute('SELECT DISTINCT "group" FROM engines ORDER BY "group"')]
        assert len(groups) == 2 and len({siblings(group) for group in groups}) == 1
        assert len(set(service.streams(captures))) == 2, "one engine served all"
        os.kill(sender_of(service.pid, 0, 1), signal.SIGKILL)
        assert until(lambda: httpx.get(f"{service.url}/v1/capabilities").json()["lost_ranks"] == [1])
        ask = {"model": service.model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        refused = httpx.post(f"{service.url}/v1/completions", json={**ask, "capture": {"sites": ["q"]}}, timeout=300)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "part_lost"), refused.text
        assert "rank 1" in refused.json()["error"]["message"]
        others = service.ask_at_once([5, 40, 31, 12], 20, capture={
            "codec": "raw", "sites": ["resid_post"], "layers": [0, 2]})
        with StoreReader(service.store) as reader:
            assert all(until(lambda one=one: reader.capture(one).status == "complete") for one in others)
        assert httpx.post(f"{service.url}/v1/completions", json=ask, timeout=300).status_code == 200


@on_a_cpu
def test_engines_of_experts_end_with_their_server(tmp_path: Path, store: Store) -> None:
    """A plain vLLM, which nobody supervises: its engines would step on for nobody, and then idle for ever."""
    model, port = family_model("mixtral", "float32"), free_port()
    endpoint = {"VLLM_TAP_ENDPOINT": os.environ["VLLM_TAP_ENDPOINT"], "VLLM_TAP_ARM": "resid_post"}
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
         "--host", "127.0.0.1", "--data-parallel-size", "2", "--dtype", "float32", "--skip-tokenizer-init",
         "--max-model-len", "256", "--block-size", "32", "--enforce-eager"],
        env=environment(tmp_path, [plugin(tmp_path)]) | endpoint, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def healthy() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.HTTPError:
            return server.poll() is not None

    below = list[int]()
    try:
        assert until(healthy, 600) and server.poll() is None
        below = [pid for pid in descendants(server.pid) if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(below) == 2
        server.kill()
        server.wait()
        assert until(lambda: not any(map(runs, below))), "engines that nobody asks anything"
    finally:
        server.kill()
        server.wait()
        for pid in filter(runs, below):
            os.kill(pid, signal.SIGKILL)


@on_a_cpu
def test_what_an_engine_on_a_cpu_cannot_do_is_said_at_the_start(tmp_path: Path) -> None:
    model, port = family_model("mixtral", "float32"), free_port()
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tap", "serve", str(model), "--port", str(port), "--engine-port", str(free_port()),
         "--store", str(tmp_path / "captures"), "--", "--data-parallel-size", "2", "--skip-tokenizer-init",
         "--max-model-len", "256", "--block-size", "32"], env=environment(tmp_path), capture_output=True, text=True,
        timeout=600)
    assert done.returncode != 0
    assert "data_parallel_size=2: on a CPU this vLLM cannot exchange the tokens" in done.stdout + done.stderr
