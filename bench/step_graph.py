"""What taps and edits add to the CUDA graph of a decode step: ``python -m bench.step_graph`` (needs a GPU).

Two engines stand in this process, one of them without taps. Each has 32 requests in the middle of their answers. The
graphs of that step are replayed in turns, so neither the host nor its other work is in the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.engine_run import options
from bench.scenarios import ENGINES, Engine
from bench.shapes import LOADS, make_model, make_vector, prompts
from engine_side.plugin import register
from vllm_tap.serve.writer_process import WriterProcess

_STEPS = 24  # of each engine before its graph is replayed: prompts, then some tokens
_REPLAYS = 20  # timed at once
_WARM = 80  # nodes of idle edits are turned off meanwhile


def main() -> None:
    """Print a line of JSON for each scenario: its graph's µs, the base's beside it, and their ratio with quartiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="3b")
    parser.add_argument("--engine", default="edit-all", choices=[name for name, each in ENGINES.items()
                                                                 if each.arm and not each.drafter and _replayed(each)])
    parser.add_argument("--rounds", type=int, default=6, help="visits to each scenario")
    parser.add_argument("--samples", type=int, default=12, help=f"pairs of {_REPLAYS} replays in each visit")
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory(prefix="vllm-tap-bench-") as place, \
         tempfile.TemporaryDirectory(prefix="vllm-tap-bench-", dir="/dev/shm") as store:
        folder = Path(place)
        base = _Standing("base", args.shape, folder)
        base.begin(None)
        engine, endpoint = ENGINES[args.engine], f"ipc://{folder}/w.sock"
        os.environ |= {"VLLM_TAP_ENDPOINT": endpoint, "VLLM_TAP_ARM": engine.arm,
                       "VLLM_TAP_STAGING_BYTES_MAX": str(64 << 30)}
        if engine.edit:
            os.environ |= {"VLLM_TAP_EDIT": engine.edit, "VLLM_TAP_VECTORS": make_vector(args.shape, folder)}
        with WriterProcess(Path(store), endpoint):
            register()  # vLLM asked for plug-ins when the base was made
            tapped = _Standing(args.engine, args.shape, folder)
            _compare(base, tapped, args.rounds, args.samples)


def _replayed(engine: Engine) -> dict[str, dict[str, Any] | None]:
    """Scenarios that a replay shows: nothing is asked, or edits. What is captured leaves the graph."""
    return {name: asked for name, asked in engine.scenarios.items() if asked is None or "edit" in asked}


class _Standing:
    """An engine in this process, and the graph of its decode step."""

    def __init__(self, name: str, shape: str, folder: Path) -> None:
        from vllm import LLM

        before = {id(graph) for graph in _graphs()}
        self.load = LOADS["hook"]
        chosen = options(ENGINES[name], shape, [self.load], True)
        chosen |= {"max_num_seqs": self.load.batch, "compilation_config": {
            "cudagraph_capture_sizes": [self.load.batch], "cudagraph_mode": "FULL_DECODE_ONLY"}}
        self.llm: Any = LLM(str(make_model(shape, folder)), load_format="dummy", skip_tokenizer_init=True,
                            dtype="bfloat16", seed=0, enable_prefix_caching=False, **chosen)
        self.graph, = (graph for graph in _graphs() if id(graph) not in before)
        self.engine = ENGINES[name]

    def begin(self, asked: dict[str, Any] | None) -> None:
        """Take a batch of requests to the middle of their answers."""
        import torch
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=self.load.generated, ignore_eos=True, detokenize=False,
                                extra_args=asked)
        self.llm.enqueue(prompts(self.load, 0), [params] * self.load.batch, use_tqdm=False)
        for _ in range(_STEPS):
            self.llm.llm_engine.step()
        torch.cuda.synchronize()

    def end(self) -> None:
        """Let the requests end."""
        self.llm.wait_for_completion(use_tqdm=False)


def _graphs() -> list[Any]:
    import torch

    gc.unfreeze()  # vLLM freezes what it has made
    return [each for each in gc.get_objects() if issubclass(type(each), torch.cuda.graphs.CUDAGraph)]


def _compare(base: _Standing, tapped: _Standing, rounds: int, samples: int) -> None:
    scenarios = _replayed(tapped.engine)
    ratios: dict[str, list[float]] = {name: [] for name in scenarios}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in scenarios}
    for _ in range(rounds):
        for name, asked in scenarios.items():
            tapped.begin(asked)
            for _ in range(_WARM):
                tapped.graph.replay()
                base.graph.replay()
            for _ in range(samples):
                before, with_taps, after = (_microseconds(each.graph.replay) for each in (base, tapped, base))
                took[name].append((with_taps, (before + after) / 2))
                ratios[name].append(with_taps / (before + after) * 2)
            tapped.end()
        _print(ratios, took)


def _print(ratios: dict[str, list[float]], took: dict[str, list[tuple[float, float]]]) -> None:
    """Print all that was measured so far; the last lines are the result."""
    for name, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(json.dumps({"scenario": name, "us": round(statistics.median(us for us, _ in took[name]), 1),
                          "base_us": round(statistics.median(us for _, us in took[name]), 1),
                          "ratio": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)],
                          "pairs": len(found)}), flush=True)


def _microseconds(replay: Callable[[], None]) -> float:
    """What one replay takes on the device, in the mean of several in a row."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / _REPLAYS


if __name__ == "__main__":
    main()
