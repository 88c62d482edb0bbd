"""What a tap costs generation: engines that stand side by side, asked in turns, each against the base beside it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.scenarios import ENGINES
from bench.shapes import drafter_layers, make_probe, make_vector
from schemas.codecs import parse_codec
from vllm_tap.serve.writer_process import WriterProcess

START_S = 400.0
_COMPILED_S = 15.0  # kernels of projections are compiled beside the steps, when they are first asked for


@dataclass(slots=True)
class Series:
    """A scenario under a load: a list a round of what every iteration took, in seconds."""

    seconds: list[list[float]] = field(default_factory=list)
    durable: list[list[float]] = field(default_factory=list)
    ratio: list[list[float]] = field(default_factory=list)  # over the mean of the base before and after
    tokens: list[str] = field(default_factory=list)  # digests of all answers that differ


@dataclass(slots=True)
class Result:
    """Everything that was measured; what could not run, with the reason."""

    series: dict[str, dict[str, Series]] = field(default_factory=dict)  # by load, by scenario
    memory: dict[str, list[dict[str, int]]] = field(default_factory=dict)  # by engine, as iterations went on
    logprobs: dict[str, float] = field(default_factory=dict)  # the largest shift from the base's, by engine
    dropped: dict[str, int] = field(default_factory=dict)  # rows that are missing, by scenario and reason
    bad: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def of(self, load: str, scenario: str) -> Series:
        """The series, begun where there is none."""
        return self.series.setdefault(load, {}).setdefault(scenario, Series())


class Process:
    """An engine that takes commands."""

    def __init__(self, name: str, shape: str, loads: Sequence[str], folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        engine = ENGINES[name]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_TAP_")}
        environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "2"}
        self.name, self.engine, self._log = name, engine, (folder / f"{name}.log").open("w+")
        self._beside = ExitStack()  # the writer and its store
        if engine.arm or engine.builtin:
            shared = Path("/dev/shm") if engine.store == "shm" and Path("/dev/shm").is_dir() else None
            place = self._beside.enter_context(tempfile.TemporaryDirectory(prefix="vllm-tap-bench-", dir=shared))
            environment["BENCH_STORE"] = store = f"{place}/store"
        if engine.arm:
            endpoint = f"ipc://{folder}/{name}.sock"
            layers = drafter_layers(shape) if engine.drafter else []
            environment |= {"VLLM_TAP_ENDPOINT": endpoint,
                            "VLLM_TAP_ARM": ",".join(f"{engine.arm}.{layer}" for layer in layers) or engine.arm,
                            "VLLM_TAP_STAGING_BYTES_MAX": str(64 << 30), "VLLM_TAP_PROBES": make_probe(shape, folder)}
            environment |= {"VLLM_TAP_EDIT": engine.edit,
                            "VLLM_TAP_VECTORS": make_vector(shape, folder)} if engine.edit else {}
            # raw16 is 3 GB in half a second: what a writer lags behind must find room, or rows are dropped.
            environment |= {"VLLM_TAP_RING_BYTES": str(4 << 30)} if shape != "small" else {}
            environment |= {key: value for key, value in os.environ.items() if key in (
                "VLLM_TAP_RING_BYTES", "VLLM_TAP_SCRATCH_BYTES", "VLLM_TAP_ON_FULL")}
            self._beside.enter_context(WriterProcess(Path(store), endpoint))
        else:
            environment["VLLM_PLUGINS"] = ""
        self._engine = subprocess.Popen(
            [sys.executable, "-m", "bench.engine_run", name, shape, ",".join(loads), str(folder)],
            env=environment, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._engine.stdout is not None
        for line in self._engine.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def answer(self, timeout: float) -> dict[str, Any]:
        """The next line; ChildProcessError with the reason where the engine ended or said nothing in time."""
        try:
            found = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise ChildProcessError(f"no answer within {timeout:.0f} s") from None
        if found is None:
            self._log.seek(0)
            lines = self._log.read().splitlines()
            errors = [line for line in lines if re.search(r"\w(Error|Exception): ", line)
                      and "EngineDeadError" not in line and "Engine core initialization failed" not in line]
            raise ChildProcessError((errors or lines or [f"exit code {self._engine.wait()}"])[-1][-300:])
        return found

    def ask(self, **command: Any) -> dict[str, Any]:
        """One command, its answer; ChildProcessError with the reason where there is none."""
        assert self._engine.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the answer says why
            self._engine.stdin.write(json.dumps(command) + "\n")
            self._engine.stdin.flush()
        return self.answer(120.0)

    def kill(self) -> None:
        """End the engine at once."""
        self._engine.kill()

    def close(self) -> dict[str, Any]:
        """End the engine, then its writer; what it said last."""
        try:
            assert self._engine.stdin is not None
            self._engine.stdin.close()
            return self.answer(60.0)
        except (ChildProcessError, BrokenPipeError):
            return {}
        finally:
            try:
                self._engine.wait(30.0)
            except subprocess.TimeoutExpired:
                self._engine.kill()
            self._beside.close()


@contextmanager
def standing(names: Sequence[str], pairs: int, shape: str, loads: Sequence[str], result: Result,
             say: Callable[[str], None], on_gpu: bool) -> Iterator[list[dict[str, Process]]]:
    """``pairs`` sets of engines that are ready, by name; on a GPU all start side by side."""
    with tempfile.TemporaryDirectory(prefix="vllm-tap-bench-") as folder, ExitStack() as stack:
        sets: list[dict[str, Process]] = [{} for _ in range(pairs)]

        def close(name: str, process: Process) -> None:
            last = process.close()
            if not last and name not in result.failed and ENGINES[name].arm:
                result.bad.append(f"{name}: its engine did not end well: what it dropped is not known")
            for where, rows in last.get("dropped", {}).items():
                result.dropped[where] = result.dropped.get(where, 0) + rows
            result.bad += last.get("bad", [])

        def wait(processes: dict[str, Process], name: str) -> None:
            try:
                processes[name].answer(START_S)
            except ChildProcessError as error:
                _leave_out(processes, name, error, result, say)

        begin = time.monotonic()
        for number, processes in enumerate(sets):
            for name in filter(lambda name: number == 0 or ENGINES[name].every_set, names):
                processes[name] = Process(name, shape, loads, Path(folder) / str(number))
                stack.callback(close, name, processes[name])
                if not on_gpu:
                    wait(processes, name)
        if on_gpu:
            for processes in sets:
                for name in list(processes):
                    wait(processes, name)
        for processes in sets:
            say(f"{', '.join(processes)} stand after {time.monotonic() - begin:.0f} s")
        yield [processes for processes in sets if len(processes) > 1 and "base" in processes]


def _leave_out(processes: dict[str, Process], name: str, error: ChildProcessError, result: Result,
               say: Callable[[str], None]) -> None:
    """An engine that cannot run here is told of, and ended: it must not run beside what is measured."""
    result.failed[name] = str(error)
    say(f"{name}: could not run here: {error}")
    processes.pop(name).kill()


def measure(shape: str, names: Sequence[str], loads: Sequence[str], rounds: int, pairs: int, iterations: int,
            scenarios: Sequence[str], result: Result, say: Callable[[str], None], save: Callable[[], None]) -> None:
    """``rounds`` of ``pairs`` sets of fresh processes, "base" first; iterations in turns: the base, two scenarios, …"""
    on_gpu = _on_gpu()
    for number in range(rounds):
        say(f"round {number + 1}/{rounds}")
        with standing(names, pairs, shape, loads, result, say, on_gpu) as sets:
            for load in loads:
                _load(sets, load, iterations, scenarios, result, say, save)
                for name, series in result.series.get(load, {}).items():
                    if found := [ratio for ratios in series.ratio[-len(sets):] for ratio in ratios]:
                        say(f"    {load:10} {name:28} {statistics.median(found):6.3f} × base")
            for processes in sets:
                _outputs(processes, loads[0], result)
        save()


def _load(sets: list[dict[str, Process]], load: str, iterations: int, scenarios: Sequence[str], result: Result,
          say: Callable[[str], None], save: Callable[[], None]) -> None:
    turns = [_Turns(processes, load, scenarios, result) for processes in sets]
    for turn in turns:
        turn.warm(say)
    for iteration in range(iterations):
        for turn in turns:
            turn.go(iteration)
        save()  # a run that is cut short has what it measured


class _Turns:
    """One set of processes under one load: all its scenarios in turns, with the base between them."""

    def __init__(self, processes: dict[str, Process], load: str, scenarios: Sequence[str], result: Result) -> None:
        self.processes, self.load, self.result = processes, load, result
        self.chosen = [(process, name) for process in processes.values() for name in process.engine.scenarios
                       if process.name != "base" and (not scenarios or name in scenarios)]
        self.at = {}
        for name in ("base", *(name for _, name in self.chosen)):
            series = result.of(load, name)
            self.at[name] = len(series.seconds)
            series.seconds.append([])
            series.durable.append([])
            series.ratio.append([])

    def warm(self, say: Callable[[str], None]) -> None:
        """What is not measured: the first of everything. An engine that fails at it is left out, with its reason."""
        for process, name in (*((self.processes["base"], "base") for _ in range(2)), *self.chosen):
            try:
                for _ in range(process.engine.warmups if process.name in self.processes else 0):
                    process.ask(do="generate", scenario=name, load=self.load)
            except ChildProcessError as error:
                if process.name == "base":
                    raise
                _leave_out(self.processes, process.name, error, self.result, say)
        self.chosen = [one for one in self.chosen if one[0].name in self.processes]
        asked = [process.engine.scenarios[name] or {} for process, name in self.chosen]
        if any(parse_codec(spec["codec"]).family.projected for spec in asked if "codec" in spec):
            time.sleep(_COMPILED_S)
        self._discard()

    def go(self, iteration: int) -> None:
        """Every scenario once, two between two runs of the base."""
        chosen = [one for one in self.chosen if iteration < one[0].engine.iterations_max]
        before = self._ask(self.processes["base"], "base")
        for two in (chosen[at : at + 2] for at in range(0, len(chosen), 2)):
            seconds = [(name, self._ask(process, name)) for process, name in two]
            after = self._ask(self.processes["base"], "base")
            for name, taken in seconds:
                self.result.of(self.load, name).ratio[self.at[name]].append(2 * taken / (before + after))
            before = after
        self._discard()

    def _ask(self, process: Process, scenario: str) -> float:
        answer = process.ask(do="generate", scenario=scenario, load=self.load)
        series, at = self.result.of(self.load, scenario), self.at[scenario]
        series.seconds[at].append(answer["seconds"])
        if answer["durable"] is not None:
            series.durable[at].append(answer["durable"])
        if answer["tokens"] not in series.tokens:
            series.tokens.append(answer["tokens"])
        self.result.memory.setdefault(process.name, []).append(answer["memory"])
        return float(answer["seconds"])

    def _discard(self) -> None:
        for process in self.processes.values():
            if process.engine.arm or process.engine.builtin:
                process.ask(do="discard")


def _outputs(processes: dict[str, Process], load: str, result: Result) -> None:
    """How far log-probabilities of sampled tokens move: of each answer's first, which all have in common."""
    found = {}
    for name, process in processes.items():
        scenario = list(process.engine.scenarios)[-1]
        if name in ("base", "tap", "sites"):
            found[name] = process.ask(do="generate", scenario=scenario, load=load, logprobs=True)["logprobs"]
    for name, values in found.items():
        if name != "base":
            shift = max(abs(a[0] - b[0]) for a, b in zip(values, found["base"], strict=True))
            result.logprobs[name] = max(shift, result.logprobs.get(name, 0.0))


def _on_gpu() -> bool:
    """Asked of another process: this one must not hold a context on the device that it measures."""
    return shutil.which("nvidia-smi") is not None and subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
