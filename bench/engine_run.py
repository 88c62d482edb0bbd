"""One engine, all its scenarios: ``python -m bench.engine_run CONFIGURATION SHAPE`` prints one JSON line a scenario.

A process of its own, because a compiled engine cannot change its taps and a crash must not end the benchmark.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.shapes import LOADS, SHAPES, make_model
from schemas.ids import new_ulid

# By configuration, the capture spec of each scenario (None: no capture asked).
SCENARIOS: dict[str, dict[str, dict[str, Any] | None]] = {
    "base": {"base": None},
    "eager": {"base eager": None},
    "builtin": {"vLLM extract_hidden_states": None},
    "tap": {
        "ours, idle": None,
        "ours, zero layers": {"sites": []},
        "ours, int8b64": {"codec": "int8b64"},
        "ours, raw16": {"codec": "raw16"},
        "ours, one layer": {"layers": [1], "codec": "int8b64"},
        "ours, last prompt token": {"positions": "last", "codec": "int8b64"},
    },
}


def options(configuration: str, shape: str) -> dict[str, Any]:
    """What ``LLM`` gets besides the model."""
    if configuration == "eager":
        return {"enforce_eager": True}
    if configuration == "builtin":
        layers = list(range(1, SHAPES[shape].layers + 1))
        folder = tempfile.mkdtemp(dir="/dev/shm")
        return {
            "speculative_config": {"method": "extract_hidden_states", "num_speculative_tokens": 1,
                                   "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}},
            "kv_transfer_config": {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
                                   "kv_connector_extra_config": {"shared_storage_path": folder}},
        }
    return {}


def main(configuration: str, shape: str, iterations: int) -> None:
    """Measure ``iterations`` generations of every scenario, interleaved, after two to warm up."""
    import torch
    from vllm import LLM, SamplingParams

    load = LOADS[shape]
    on_gpu = torch.cuda.is_available()
    llm = LLM(str(make_model(shape)), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
              max_model_len=2 * (load.prompt + load.generated), max_num_seqs=max(16, load.batch),
              enable_prefix_caching=False, **({"gpu_memory_utilization": 0.6} if on_gpu else {}),
              **options(configuration, shape))
    draw = random.Random(0)
    prompts: Any = [{"prompt_token_ids": [draw.randrange(10, 8000) for _ in range(load.prompt)]}
                    for _ in range(load.batch)]
    scenarios = SCENARIOS[configuration]
    seconds: dict[str, list[float]] = {name: [] for name in scenarios}
    durable: dict[str, list[float]] = {name: [] for name in scenarios}
    tokens: dict[str, list[list[int]]] = {}
    ids: list[str] = []
    for iteration in range(iterations + 2):
        for name, spec in scenarios.items():
            params = []
            for _ in range(load.batch):
                extra = None
                if spec is not None:
                    ids.append(new_ulid())
                    extra = {"capture": {**spec, "id": ids[-1]}}
                params.append(SamplingParams(temperature=0, max_tokens=load.generated, ignore_eos=True,
                                             detokenize=False, extra_args=extra))
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            end = time.perf_counter()
            if spec is not None:
                _wait_durable(ids[-load.batch :])
            tokens[name] = [list(output.outputs[0].token_ids) for output in outputs]
            if iteration >= 2:
                seconds[name].append(end - begin)
                durable[name].append(time.perf_counter() - begin)
    first = next(iter(tokens.values()))
    for name in scenarios:
        print(json.dumps({
            "scenario": name, "seconds": seconds[name], "durable": durable[name],
            "same_tokens_as_idle": tokens[name] == first, "tokens": load.batch * (load.prompt + load.generated - 1),
        }), flush=True)
    if ids:
        print(json.dumps({"dropped": _dropped(ids)}), flush=True)


def _store() -> Any:
    from schemas.reader import StoreReader

    return StoreReader(Path(os.environ["BENCH_STORE"]))


def _wait_durable(captures: list[str]) -> None:
    with _store() as reader:
        while any(reader.capture(capture).status in ("pending", "running") for capture in captures):
            time.sleep(0.005)


def _dropped(captures: list[str]) -> int:
    """Rows that are missing of all captures of the run."""
    with _store() as reader:
        return sum(m.rows for c in captures for entry in reader.manifest(c).rows for m in entry.missing)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
