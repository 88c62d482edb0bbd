"""What a tap costs generation: ratios over the same engine without us, in the same run, processes interleaved."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGURATIONS = ("base", "eager", "builtin", "tap")


@dataclass(slots=True)
class Result:
    """Every iteration of every scenario, in seconds; what could not run, with the reason."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    durable: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    same_tokens: dict[str, bool] = field(default_factory=dict)
    dropped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    ratio: dict[str, list[float]] = field(default_factory=dict)  # a pair of processes each


def measure(shape: str, configurations: Sequence[str], pairs: int, iterations: int,
            say: Callable[[str], None]) -> Result:
    """``pairs`` rounds of one process a configuration, "base" first; ratios are of medians within a round."""
    result = Result()
    for pair in range(pairs):
        medians: dict[str, float] = {}
        for configuration in configurations:
            if configuration in result.failed:
                continue
            say(f"round {pair + 1}/{pairs}: {configuration} (an engine starts in half a minute to two)")
            for line in _run(configuration, shape, iterations, result):
                if "dropped" in line:
                    result.dropped += line["dropped"]
                    continue
                name = line["scenario"]
                result.seconds.setdefault(name, []).extend(line["seconds"])
                result.durable.setdefault(name, []).extend(line["durable"])
                result.same_tokens[name] = result.same_tokens.get(name, True) and line["same_tokens_as_idle"]
                result.tokens = line["tokens"]
                medians[name] = statistics.median(line["seconds"])
                ratio = medians[name] / medians["base"]
                result.ratio.setdefault(name, []).append(ratio)
                say(f"    {name:28} {ratio:6.3f} × base")
    return result


def _run(configuration: str, shape: str, iterations: int, result: Result) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_TAP_")}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "2"}
    command = [sys.executable, "-m", "bench.engine_run", configuration, shape, str(iterations)]
    with tempfile.TemporaryDirectory(prefix="vllm-tap-bench-") as folder:
        writer = None
        if configuration == "tap":
            endpoint = f"ipc://{folder}/writer.sock"
            environment |= {"VLLM_TAP_ENDPOINT": endpoint, "VLLM_TAP_ON_FULL": "wait",
                            "VLLM_TAP_RING_BYTES": str(1 << 30), "BENCH_STORE": f"{folder}/store"}
            writer = subprocess.Popen(
                [sys.executable, "-m", "writer_service", "--store", f"{folder}/store", "--endpoint", endpoint],
                stdout=subprocess.PIPE, text=True)
            assert writer.stdout is not None
            writer.stdout.readline()
        else:
            environment["VLLM_PLUGINS"] = ""
        try:
            run = subprocess.run(command, env=environment, capture_output=True, text=True,
                                 cwd=Path(__file__).parents[1])
        finally:
            if writer is not None:
                writer.terminate()
                writer.wait()
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode != 0 and not lines:
        reason = [line for line in run.stderr.splitlines() if "Error" in line and "EngineDeadError" not in line]
        result.failed[configuration] = reason[-1][-200:] if reason else f"exit code {run.returncode}"
    return lines
