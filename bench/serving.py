"""The server under load: time to first token and between tokens, capture off and on in turns.

    python -m bench.serving [--shape 3b] [--windows 10] [--seconds 6] [--writer-cpus 14,15]

One ``vllm serve`` with the plugin, asked as clients do: requests arrive at random (Poisson) at half the rate that it
can serve, each a prompt of token ids and a streamed answer. Windows alternate: nothing is captured; every row of the
residual stream; the score of one probe at every token. With ``--writer-cpus`` every row once more, while the writer and
the engine's sender run on those processors and the server on the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from bench.report import interval
from bench.shapes import SHAPES, make_model, make_probe
from vllm_tap.serve.writer_process import WriterProcess
from vllm_tap.tiny_model import tiny_model

PROMPT, GENERATED = 256, 128
RESAMPLES = 400
SERIES = "first_token", "between_tokens"
Spec = dict[str, Any]
Waits = tuple[list[float], list[float]]  # seconds for each first token, and for each that followed
Round = dict[str, Waits]  # by kind
KINDS: dict[str, Spec | None] = {"nothing": None, "int8b64": {"codec": "int8b64"}, "probe": {"probe": ["probe"]}}
APART = "int8b64, writer apart"


def served_model(shape: str, inside: Path) -> Path:
    """A shape's configuration with the small model's tokenizer and vocabulary: a server answers in text."""
    folder, small = make_model(shape, inside), tiny_model()
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = json.loads((small / "config.json").read_text())["vocab_size"]
    for file in small.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def server(shape: str) -> Iterator[tuple[str, int, int]]:
    """The URL of a server with a writer beside it, its store in shared memory; process numbers of server and writer."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="vllm-tap-bench-") as folder, \
         tempfile.TemporaryDirectory(prefix="vllm-tap-bench-", dir="/dev/shm") as store, \
         WriterProcess(Path(store), endpoint := f"ipc://{folder}/w.sock") as writer:
        environment = {**os.environ, "VLLM_TAP_ENDPOINT": endpoint, "VLLM_TAP_ARM": "resid_post",
                       "VLLM_TAP_PROBES": make_probe(shape, Path(folder)),
                       "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
        log = open(f"{folder}/serve.log", "w+")  # noqa: SIM115 - read after the process ended
        model = served_model(shape, Path(folder))
        engine = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
             "--served-model-name", "m", "--load-format", "dummy", "--dtype", "bfloat16", "--port", str(port),
             "--max-model-len", str(PROMPT + GENERATED), "--no-enable-prefix-caching",
             "--no-enable-log-requests", "--gpu-memory-utilization", "0.1",
             "--kv-cache-memory-bytes", str(4 << 30)],
            env=environment, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait(url, engine, log)
            assert writer.pid is not None
            yield url, engine.pid, writer.pid
        finally:
            engine.terminate()
            engine.wait(60)


def _wait(url: str, engine: subprocess.Popen[bytes], log: Any) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and engine.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    log.seek(0)
    sys.exit("bench.serving: the server did not start:\n" + log.read()[-3000:])


async def ask(client: httpx.AsyncClient, url: str, prompt: list[int], spec: Spec | None, first: list[float],
              between: list[float]) -> None:
    """One streamed request; what it waited for its first token, and for each that followed, in seconds."""
    body: dict[str, Any] = {
        "model": "m", "prompt": prompt, "temperature": 0,
        "max_tokens": GENERATED, "stream": True, "ignore_eos": True,
    }
    if spec is not None:
        body["vllm_xargs"] = {"capture": json.dumps(spec)}
    begin = last = time.perf_counter()
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        seen = 0
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                (between if seen else first).append(now - (last if seen else begin))
                last, seen = now, seen + 1


async def window(url: str, rate: float, seconds: float, spec: Spec | None, seed: int) -> Waits:
    """Requests that arrive at random for a while, until the last has its answer; with one seed at the same times."""
    draw = random.Random(seed)
    first: list[float] = []
    between: list[float] = []
    async with httpx.AsyncClient(timeout=120.0, limits=httpx.Limits(max_connections=2000)) as client:
        tasks = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            tasks.append(asyncio.create_task(ask(client, url, prompt_of(draw), spec, first, between)))
            await asyncio.sleep(draw.expovariate(rate))
        await asyncio.gather(*tasks)
    return first, between


def prompt_of(draw: random.Random) -> list[int]:
    """Token ids of the small model's vocabulary."""
    return [draw.randrange(10, 500) for _ in range(PROMPT)]


async def saturation(url: str, requests: int) -> float:
    """Requests a second that the server answers when all come at once."""
    draw = random.Random(0)
    async with httpx.AsyncClient(timeout=120.0, limits=httpx.Limits(max_connections=2000)) as client:
        for _ in range(2):
            begin = time.perf_counter()
            await asyncio.gather(*(ask(client, url, prompt_of(draw), None, [], []) for _ in range(requests)))
            seconds = time.perf_counter() - begin
    return requests / seconds


def measure(shape: str, windows: int, seconds: float, load: float, requests: int, writer_cpus: set[int], file: Path
            ) -> dict[str, Any]:
    """Medians and 99th percentiles in milliseconds with nothing captured, and the others' ratios to them.

    A host is not as fast at one moment as at another: a ratio is of windows of the same round, which get the same
    requests at the same times, one after the other; shown is the median over rounds. *Pooled*: a percentile of what
    was waited for in all rounds together, over that of nothing captured, as a graph over the whole time would show it.

    ``file`` has the rounds so far after each, so that a run that is cut off has not been in vain.
    """
    kinds = KINDS | ({APART: KINDS["int8b64"]} if writer_cpus else {})
    with server(shape) as (url, engine, writer):
        rate = load * asyncio.run(saturation(url, requests))
        print(f"{rate:.1f} requests a second: {load:.0%} of what it can serve", file=sys.stderr, flush=True)
        for spec in KINDS.values():  # warm
            asyncio.run(window(url, rate, 2.0, spec, -1))
        rounds: list[Round] = []
        about = {"shape": shape, "requests_a_second": rate}
        for number in range(windows):
            order = list(kinds)
            random.Random(number).shuffle(order)
            rounds.append({})
            for kind in order:
                place(engine, writer, writer_cpus if kind == APART else set())
                rounds[-1][kind] = asyncio.run(window(url, rate, seconds, kinds[kind], number))
            keep(file, about | summary(rounds))
            print(f"round {number + 1}/{windows}", file=sys.stderr, flush=True)
    result = about | summary(rounds, over_all=True)
    keep(file, result)
    return result


def summary(rounds: list[Round], over_all: bool = False) -> dict[str, Any]:
    """What ``measure`` says of rounds, each with windows of the same kinds; ``over_all``: pooled too, which takes
    seconds.
    """
    shown = [{kind: percentiles(waits) for kind, waits in by_kind.items()} for by_kind in rounds]
    result: dict[str, Any] = {"rounds": shown}
    for name in shown[0]["nothing"]:
        result[name] = {"nothing": statistics.median(by_kind["nothing"][name] for by_kind in shown)}
        for kind in sorted(shown[0].keys() - {"nothing"}):
            ratios = [by_kind[kind][name] / by_kind["nothing"][name] for by_kind in shown]
            result[name][f"{kind} over nothing, 95 %"] = interval([ratios])
            if over_all:
                result[name][f"{kind} over nothing, pooled, 95 %"] = pooled(
                    [by_kind[kind] for by_kind in rounds], [by_kind["nothing"] for by_kind in rounds], name)
    return result


def keep(file: Path, result: dict[str, Any]) -> None:
    """In place of what the file had, whole or not at all."""
    file.parent.mkdir(exist_ok=True)
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(file)


def pooled(taken: list[Waits], nothing: list[Waits], name: str) -> tuple[float, float, float]:
    """The ratio of a percentile over all rounds together, and its 95 % interval: bootstrap over rounds."""
    draw, (what, _, share) = random.Random(0), name.rpartition("_p")
    waits = [[np.array(round_[SERIES.index(what)]) for round_ in rounds] for rounds in (taken, nothing)]

    def ratio(rounds: list[int]) -> float:
        over, under = (np.percentile(np.concatenate([of[number] for number in rounds]), int(share)) for of in waits)
        return float(over / under)

    every = list(range(len(taken)))
    found = sorted(ratio(draw.choices(every, k=len(every))) for _ in range(RESAMPLES))
    return ratio(every), found[RESAMPLES // 40], found[-RESAMPLES // 40]


def place(server: int, writer: int, cpus: set[int]) -> None:
    """The writer and the engine's sender on ``cpus``, the server on all others; none: everything everywhere."""
    every = set(range(os.cpu_count() or 1))
    below = {process.pid: " ".join(process.cmdline()) for process in psutil.Process(server).children(recursive=True)}
    beside = {writer, *(pid for pid, command in below.items() if "sender_process" in command)}
    for pid in (server, writer, *below):
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, (cpus if pid in beside else every - cpus) if cpus else every)


def percentiles(times: Waits) -> dict[str, float]:
    """Of a window, in milliseconds."""
    return {f"{name}_p{share}": 1000 * float(np.percentile(series, share))
            for name, series in zip(SERIES, times, strict=True) for share in (50, 99)}


def main() -> None:
    """Print the figures as JSON; bench/results/serving-SHAPE.json has them too, from the first round on."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--windows", type=int, default=10, help="rounds of a window of each kind")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--load", type=float, default=0.5, help="share of what the server can serve (default: 0.5)")
    parser.add_argument("--requests", type=int, default=256, help="at once, to find out what it can serve")
    parser.add_argument("--writer-cpus", default="", help="processors for writer and sender alone, as 14,15")
    args = parser.parse_args()
    cpus = {int(cpu) for cpu in args.writer_cpus.split(",") if cpu}
    if not cpus < os.sched_getaffinity(0):
        parser.error(f"--writer-cpus {args.writer_cpus}: there are {sorted(os.sched_getaffinity(0))}; leave some")
    file = Path(__file__).parent / "results" / f"serving-{args.shape}.json"
    print(json.dumps(measure(args.shape, args.windows, args.seconds, args.load, args.requests, cpus, file), indent=1))


if __name__ == "__main__":
    main()
