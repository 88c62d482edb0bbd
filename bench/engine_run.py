"""One engine in a process of its own, which takes commands: ``python -m bench.engine_run ENGINE SHAPE LOADS FOLDER``.

Several such processes stand side by side and are asked in turns, so that all are measured in the same minutes. Each
command and each answer is a line of JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.configurations import CONFIGURATIONS
from bench.scenarios import DRAFTER, ENGINES, Engine
from bench.shapes import LOADS, SHAPES, Load, drafter_layers, make_model, prompts
from schemas.ids import new_ulid


def options(engine: Engine, shape: str, loads: list[Load], on_gpu: bool) -> dict[str, Any]:
    """What ``LLM`` gets besides the model."""
    longest = max(load.prompt + load.generated for load in loads)
    tokens = max(load.batch * (load.prompt + load.generated + 16) for load in loads)
    chosen: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": max(16, *(load.batch for load in loads))}
    if on_gpu:
        chosen["max_num_batched_tokens"] = 8192  # what a server has; several engines fit on one device
        # Fixed, not measured: engines that start side by side would take each other's memory for their own.
        chosen["kv_cache_memory_bytes"] = int(1.2 * tokens * SHAPES[shape].kv_bytes_a_token) + (1 << 28)
        chosen["gpu_memory_utilization"] = 0.1  # what must be free at the start; the cache is given in bytes
        chosen["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
    chosen |= CONFIGURATIONS[os.environ.get("BENCH_CONFIGURATION", "base")].options
    if engine.eager:
        chosen |= {"enforce_eager": True}
        chosen.pop("compilation_config", None)
    if engine.builtin:
        layers = extracted(engine, shape)
        chosen |= {
            "speculative_config": {"method": "extract_hidden_states", "num_speculative_tokens": 1,
                                   "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}},
            "kv_transfer_config": {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
                                   "kv_connector_extra_config": {"shared_storage_path": os.environ["BENCH_STORE"]}},
        }
        if on_gpu:  # hidden states are kept in a cache of their own
            chosen["kv_cache_memory_bytes"] += 3 * tokens * SHAPES[shape].hidden * len(layers) * 2 + (2 << 30)
    return chosen


def extracted(engine: Engine, shape: str) -> list[int]:
    """Layers as vLLM's extraction counts them: how many blocks have been added to the stream."""
    return [layer + 1 for layer in (drafter_layers(shape) if engine.drafter else range(SHAPES[shape].layers))]


def add_hooks(model: Any) -> None:
    """The plainest way: a hook a layer, each with a copy to the host."""
    kept: list[Any] = []

    def hook(_module: Any, _args: Any, result: Any) -> None:
        kept.append((result[0] + result[1]).cpu())
        if len(kept) > 64:
            kept.clear()

    for layer in model.model.layers:
        layer.register_forward_hook(hook)


class Run:
    """The engine and what it was asked so far."""

    def __init__(self, name: str, shape: str, loads: list[str], folder: Path) -> None:
        import torch
        from vllm import LLM

        self.engine, self.shape = ENGINES[name], shape
        self.on_gpu = torch.cuda.is_available()
        if self.engine.hooks:
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # apply_model sends a function
        self.llm: Any = LLM(str(make_model(shape, folder)), load_format="dummy", skip_tokenizer_init=True,
                            # Many processors multiply no bfloat16, and take four times as long with it.
                            dtype="bfloat16" if self.on_gpu else "float32", seed=0, enable_prefix_caching=False,
                            **options(self.engine, shape, [LOADS[load] for load in loads], self.on_gpu))
        if self.engine.hooks:
            self.llm.apply_model(add_hooks)
        self.store = Path(os.environ["BENCH_STORE"]) if self.engine.arm or self.engine.builtin else None
        self.bad: list[str] = []
        self.dropped: Counter[str] = Counter()  # rows that are missing, by scenario and reason

    def generate(self, scenario: str, load_name: str, logprobs: bool = False) -> dict[str, Any]:
        """One iteration: its seconds, the seconds until the last row was durable, a digest of its tokens."""
        from vllm import SamplingParams

        load, spec = LOADS[load_name], self.engine.scenarios[scenario]
        asked: Any = prompts(load, load_name)
        edit = {"edit": spec["edit"]} if spec is not None and "edit" in spec else None
        spec = None if edit else spec
        ids = [new_ulid() for _ in range(load.batch)] if spec is not None else []
        extra: list[dict[str, Any] | None] = [edit] * load.batch
        if spec is not None:
            layers = {"layers": drafter_layers(self.shape)} if spec.get("layers") == DRAFTER else {}
            extra = [{"capture": {**spec, **layers, "id": capture}} for capture in ids]
        elif self.engine.builtin and not self.engine.drafter:  # else it keeps rows of the prompt alone
            extra = [{"kv_transfer_params": {"include_output_tokens": True}}] * load.batch
        params = [SamplingParams(temperature=0, max_tokens=load.generated, ignore_eos=True, detokenize=False,
                                 logprobs=0 if logprobs else None, extra_args=one) for one in extra]
        if load.gathered:
            self.llm.sleep(level=0)  # it takes requests, and begins none
        begin = time.perf_counter()
        if load.gathered:
            self.llm.enqueue(asked, params, use_tqdm=False)
            self.llm.wake_up(tags=["scheduling"])
            outputs = self.llm.wait_for_completion(use_tqdm=False)
        else:
            outputs = self.llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        durable = None
        if self.engine.builtin:
            self._wait_written(scenario, outputs)
            durable = time.perf_counter() - begin
        if spec is not None and spec.get("sites") != []:
            self._wait_durable(ids)
            durable = time.perf_counter() - begin
            self._verify(scenario, ids, outputs)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        answer = {"seconds": seconds, "durable": durable, "memory": self._memory(),
                  "tokens": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()}
        if logprobs:
            answer["logprobs"] = [[next(iter(step.values())).logprob for step in output.outputs[0].logprobs]
                                  for output in outputs]
        return answer

    def _reader(self) -> Any:
        from schemas.read.reader import StoreReader

        assert self.store is not None
        return StoreReader(self.store)

    def _wait_durable(self, ids: list[str]) -> None:
        from schemas.errors import NotFoundError

        waiting = list(ids)
        with self._reader() as reader:
            while waiting:
                with contextlib.suppress(NotFoundError):
                    while waiting and reader.capture(waiting[-1]).status not in ("pending", "running"):
                        waiting.pop()
                time.sleep(0.002 if waiting else 0)

    def _wait_written(self, scenario: str, outputs: Any) -> None:
        """vLLM's connector holds a lock on each file until its threads have written it."""
        import fcntl

        from safetensors import safe_open

        for output in outputs:
            path = output.kv_transfer_params["hidden_states_path"]
            with open(f"{path}.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
            with safe_open(path, "np") as file:
                rows, layers, _ = file.get_slice("hidden_states").get_shape()
            generated = 0 if self.engine.drafter else len(output.outputs[0].token_ids) - 1
            expected = len(output.prompt_token_ids) + generated, len(extracted(self.engine, self.shape))
            if (rows, layers) != expected:
                self.bad.append(f"{scenario}: {rows} rows of {layers} layers, of {expected}")

    def _verify(self, scenario: str, ids: list[str], outputs: Any) -> None:
        """Everything that was asked is there or named as missing; the tokens beside the rows are the request's."""
        with self._reader() as reader:
            for capture, output in zip(ids, outputs, strict=True):
                manifest = reader.manifest(capture)
                lost = [part for entry in manifest.rows for part in entry.missing]
                missing = sum(part.rows for part in lost)
                captured = sum(entry.captured for entry in manifest.rows)
                expected = sum(entry.expected for entry in manifest.rows)
                for part in lost:
                    self.dropped[f"{scenario}, {part.reason}"] += part.rows
                if captured + missing != expected or not expected:
                    self.bad.append(f"{scenario}: {capture}: {captured} + {missing} of {expected}")
                entry = manifest.rows[-1]
                found = reader.slice(capture, entry.site, [entry.layer])
                whole = [*output.prompt_token_ids, *output.outputs[0].token_ids]
                if [whole[p] for p in found.positions.tolist()] != found.token_ids.tolist():
                    self.bad.append(f"{scenario}: {capture}: the rows' tokens are not the request's")

    def discard(self) -> None:
        """Throw sealed blocks, or vLLM's files, away, so that shared memory stays small. Nobody reads them again."""
        assert self.store is not None
        for block in (self.store / "blocks").glob("*.zarr"):
            shutil.rmtree(block, ignore_errors=True)
        for file in self.store.glob("*.safetensors*"):
            file.unlink()

    def _memory(self) -> dict[str, int]:
        """Bytes: of the device that are taken, of the processes of this engine on the host."""
        import psutil

        found = {}
        if self.on_gpu:
            import torch

            free, total = torch.cuda.mem_get_info()
            found["device"] = total - free
        own, found["host"] = psutil.Process(), 0
        for process in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):  # some end meanwhile, compilers say
                found["host"] += process.memory_full_info().pss  # what processes share (the ring) counts in shares
        return found


def main(name: str, shape: str, loads: list[str], folder: Path) -> None:
    """Start, say so, then answer every command until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    run = Run(name, shape, loads, folder)
    say({"ready": name})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "discard":
            run.discard()
            say({})
        else:
            say(run.generate(command["scenario"], command["load"], command.get("logprobs", False)))
    say({"dropped": dict(run.dropped), "bad": run.bad[:20]})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3].split(","), Path(sys.argv[4]))
